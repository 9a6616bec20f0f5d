"""HTTP/1.1 to upstreams on sockets of its own: connections that are kept, answers that are read as they come.

General clients build a request and a response of many objects, in many layers; a gateway pays for each of them with
every request. Cookies are never kept, redirects never followed. Errors are httpx's. No proxies: see `sending.py`.
"""

import asyncio
import select
import socket
import ssl
import time
from asyncio.staggered import staggered_race
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple, cast

import httptools
import httpx

from .sending import IDLE_S, Reply, Sender, Times
from .unpacking import unpacker

_HEAD_LIMIT = 64 << 10  # bytes of an answer's head, and of what comes between two pieces of its body, or behind them
_FIELDS = 256  # of an answer's head
_HELD = 256 << 10  # bytes of a body that nobody has read yet; beyond it the server has to wait
_NEXT_S = 0.25  # seconds that an address has to answer before the next one is tried, too
_PIECE = 64 << 10  # bytes of a request that are handed to the socket at a time


class _Target(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str
    named: str
    """As the field Host has it."""


@lru_cache(256)
def _target(url: str) -> _Target:
    """Servers and paths are few; reading a URL is slow."""
    read = httpx.URL(url)
    tls = read.scheme == "https"
    named = read.netloc.decode("ascii")
    return _Target(
        read.raw_host.decode("ascii"), read.port or (443 if tls else 80), tls, read.raw_path.decode("ascii"), named
    )


class SocketSender(Sender):
    """At most `max_connections` requests at a time, and as many connections that wait for the next one, to all servers
    together; one that served nobody for `keepalive_s` is closed.

    A request that is cancelled cuts its connection, in whatever state it is.
    """

    def __init__(self, *, max_connections: int, keepalive_s: float = IDLE_S) -> None:
        self._most = max_connections
        self._places = asyncio.Semaphore(max_connections)
        self._keepalive_s = keepalive_s
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, int, bool], list[_Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes,
        times: Times,
        begun: Callable[[], None] = lambda: None,
    ) -> Reply:
        target = _target(url)
        head = _head(method, target, headers, len(body))
        await self._place(times.get("pool"))
        asked_at = time.perf_counter()
        try:
            kept = self._kept(target)
            if kept is not None:
                begun()
                try:
                    return await self._asked(kept, target, head, body, times, asked_at)
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    # Its server closed it at that very moment, as it seems. What may not be asked twice is for others
                    # to decide.
                    if method != "GET" or kept.heard:
                        raise
            opened = await self._opened(target, times.get("connect"))
            begun()
            return await self._asked(opened, target, head, body, times, asked_at)
        except BaseException:
            self._places.release()
            raise

    async def _asked(
        self, connection: "_Connection", target: _Target, head: bytes, body: bytes, times: Times, asked_at: float
    ) -> "_SocketReply":
        try:
            await connection.ask(head, body, times)
            return _SocketReply(self, target, connection, asked_at)
        except BaseException:
            connection.cut()
            raise

    async def aclose(self) -> None:
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for kept in self._idle.values():
            for connection in kept:
                connection.cut()
        self._idle.clear()

    def ended(self, target: _Target, connection: "_Connection") -> None:
        """A request is over: its place is free, and the connection serves again if it can."""
        self._places.release()
        if self._closed or not connection.reusable:
            connection.cut()
            return
        if sum(map(len, self._idle.values())) >= self._most:
            self._cut_oldest()
        self._idle.setdefault(target[:3], []).append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._keepalive_s, self._sweep_out)

    def _cut_oldest(self) -> None:
        key = min(self._idle, key=lambda one: self._idle[one][0].idle_since)
        self._idle[key].pop(0).cut()
        if not self._idle[key]:
            del self._idle[key]

    async def _place(self, timeout_s: float | None) -> None:
        if not self._places.locked():
            await self._places.acquire()  # without a wait, which no timer needs to watch
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("no free connection") from error

    def _kept(self, target: _Target) -> "_Connection | None":
        """The one that was used last: the others grow old and are closed."""
        kept = self._idle.get(target[:3], [])
        found = None
        while kept and found is None:
            connection = kept.pop()
            if connection.reusable and connection.idle_s < self._keepalive_s and connection.silent:
                found = connection
            else:
                connection.cut()
        if not kept:
            self._idle.pop(target[:3], None)
        return found

    async def _opened(self, target: _Target, timeout_s: float | None) -> "_Connection":
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connected(target)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("not connected in time") from error
        except (OSError, UnicodeError) as error:  # of TLS, too; of a name that is none
            raise httpx.ConnectError("not connected") from error

    async def _connected(self, target: _Target) -> "_Connection":
        """To the first of the host's addresses that answers; each gets a moment before the next one is tried, too."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))

        async def to(address: str) -> _Connection:
            tls, name = (self._context(), target.host) if target.tls else (None, None)
            made = await loop.create_connection(_Connection, address, target.port, ssl=tls, server_hostname=name)
            return made[1]

        if len(addresses) == 1:
            return await to(addresses[0])
        connection, _, errors = await staggered_race([partial(to, address) for address in addresses], _NEXT_S)
        if connection is None:
            raise next((error for error in errors if error is not None), OSError("no address"))
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = httpx.create_ssl_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def _sweep_out(self) -> None:
        self._sweep = None
        for key, kept in list(self._idle.items()):
            old = [one for one in kept if not one.reusable or one.idle_s >= self._keepalive_s]
            for one in old:
                kept.remove(one)
                one.cut()
            if not kept:
                del self._idle[key]
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._keepalive_s, self._sweep_out)


class _SocketReply(Reply):
    def __init__(self, sender: SocketSender, target: _Target, connection: "_Connection", asked_at: float) -> None:
        super().__init__(status=connection.status, headers=connection.headers, asked_at=asked_at)
        self._sender, self._target, self._connection = sender, target, connection
        encoding = connection.headers.get("content-encoding")
        self._unpack = None if encoding is None else unpacker(encoding)
        self._closed = False

    @property
    def over(self) -> bool:
        return self._connection.over

    async def read(self) -> bytes:
        if self._closed:
            raise httpx.StreamClosed
        if self._unpack is None:
            return await self._connection.read()
        if self._unpack.more:
            await asyncio.sleep(0)  # a bomb takes its turns like others
        while not (unpacked := self._unpack.take()):
            piece = await self._connection.read()
            if not piece:
                self._unpack.end()
                break
            self._unpack.feed(piece)
        return unpacked

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._sender.ended(self._target, self._connection)


class _Connection(asyncio.Protocol):
    """One connection with one request at a time: `ask`, then `read` until `over`.

    One timer watches a whole request; that something came is only noted.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        # Servers written by hand end lines by LF alone, which RFC 9112 lets clients take (2.2), and some pad sizes of
        # chunks by spaces. Neither changes where an answer ends.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._held = self._seen = self._fields = self._told = 0
        self._asked = self._begun = self._keep = self._paused = self._full = self._lost = False
        self._large = False
        self._read_s: float | None = None
        self._heard_at = 0.0
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.over = False

    @property
    def reusable(self) -> bool:
        """Whether the last answer is read and the server goes on listening."""
        if self._lost or self._transport.is_closing():
            return False
        return self.over and self._keep and self._error is None and not self._pieces

    @property
    def silent(self) -> bool:
        """Whether nothing has come that the loop has not seen yet: words that nobody asked for, or the end."""
        waiting = select.poll()
        waiting.register(self._transport.get_extra_info("socket"), select.POLLIN)  # or POLLHUP, POLLERR
        return not waiting.poll(0)

    @property
    def heard(self) -> bool:
        """Whether anything has come since the last request."""
        return self._seen > 0 or self._begun

    @property
    def idle_s(self) -> float:
        return self._loop.time() - self.idle_since

    async def ask(self, head: bytes, body: bytes, times: Times) -> None:
        """Send a request and wait until its answer begins. Raises httpx's errors."""
        self.over = self._begun = False
        self._asked, self._read_s = True, times.get("read")
        self._seen = self._fields = self._told = 0
        self._large = len(body) >= _PIECE
        if self._lost or self._transport.is_closing():
            raise httpx.ReadError("the connection broke before the request")
        if not self._large:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            await self._write(body, times.get("write"))
        self._heard_at = self._loop.time()
        if self._read_s is not None:
            self._timer = self._loop.call_later(self._read_s, self._look)
        while not self._begun:
            if self._error is not None:
                raise self._error
            await self._something()

    async def read(self) -> bytes:
        """Bytes of the body as they come, b"" at its end. Raises httpx's errors."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                return b""
            await self._something()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._held = 0
        if self._full:
            self._full = False
            self._transport.resume_reading()
        return data

    def cut(self) -> None:
        self._unwatch()
        self._lost = True
        self._transport.abort()

    async def _write(self, body: bytes, timeout_s: float | None) -> None:
        """Piece by piece, so that each has its time; a server that answers before it has everything is heard."""
        for at in range(0, len(body), _PIECE):
            self._transport.write(body[at : at + _PIECE])
            if not self._paused:
                continue
            try:
                async with asyncio.timeout(timeout_s):
                    while self._paused and not self._begun and self._error is None:
                        await self._something()
            except TimeoutError as error:
                raise httpx.WriteTimeout("not written in time") from error
            if self._begun or self._error is not None:
                self._keep = False
                return

    async def _something(self) -> None:
        """Wait until the server has said something, or taken something, or is gone."""
        self._heard_at = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """The timer's turn: late is who is waited for, and was not heard for too long."""
        assert self._read_s is not None
        left = self._read_s if self._waiter is None else self._heard_at + self._read_s - self._loop.time()
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._timer = None
            self._fail(httpx.ReadTimeout("no answer in time"))

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, error: Exception) -> None:
        """What has come before is still read."""
        if self._error is None and not self.over:
            self._error = error
        self._keep = False
        self._unwatch()
        self._transport.abort()
        self._wake()

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked or self.over:  # nobody asked for this: whatever it is, it answers no later request
            self.cut()
            return
        self._heard_at = self._loop.time()
        self._seen += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            failed = httpx.RemoteProtocolError("the body broke off" if self._begun else "no answer in HTTP")
            failed.__cause__ = error
            self._fail(failed)
            return
        if self._seen > _HEAD_LIMIT and not self.over:
            where = "trailers or a chunk's head" if self._begun else "the head"
            self._fail(httpx.RemoteProtocolError(f"{where} of an answer: too long"))
            return
        if self._held > _HELD and not self._full and not self.over:
            self._full = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._asked and not self.over:
            if exc is None and self._begun and not self._delimited:
                self._end()
            elif exc is None:
                why = "the body broke off" if self._begun else "no answer in HTTP"
                self._error = self._error or httpx.RemoteProtocolError(why)
            elif self._error is None:
                self._error = httpx.ReadError("the connection broke")
                self._error.__cause__ = exc
        self._unwatch()
        self._wake()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    # httptools' calls

    def on_message_begin(self) -> None:
        if self.over:
            raise ValueError("a second answer to one request")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:  # trailers, which nobody here needs: what was told of the answer holds
            return
        self._fields += 1
        self._told += len(name) + len(value)
        if self._told > _HEAD_LIMIT or self._fields > _FIELDS:
            raise ValueError("the head of an answer is too long")
        key, told = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self.headers.get(key)
        self.headers[key] = told if known is None else f"{known}, {told}"

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:  # others only say that the answer is still to come
            self._begun, self._seen = True, 0
            self._keep = self._parser.should_keep_alive()

    @property
    def _delimited(self) -> bool:
        """Whether the body tells where it ends; else the connection's end is its end."""
        return "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()

    def on_body(self, data: bytes) -> None:
        if not self._begun:
            raise ValueError("a body before the answer")
        self._seen = 0
        self._pieces.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        if self._begun:
            self._end()

    def _end(self) -> None:
        self.over, self._asked = True, False
        self.idle_since = self._loop.time()
        # What is left of a request would be sent before the next one; who refuses a large one may have left some of it
        # unread, and read it as the next one.
        if self._transport.get_write_buffer_size() or (self._large and self.status >= 400):
            self._keep = False
        self._unwatch()


def _head(method: str, target: _Target, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.named}"]
    for name, value in headers.items():
        if "\n" in value or "\r" in value or "\0" in value:
            raise httpx.LocalProtocolError(f"the value of the header {name} has a control character")
        lines.append(f"{name}: {value}")
    lines.append(f"content-length: {length}\r\n\r\n" if length or method != "GET" else "\r\n")
    try:
        return "\r\n".join(lines).encode("latin-1")
    except UnicodeEncodeError:  # which would show what it is about: a key, maybe
        raise httpx.LocalProtocolError("the value of a header is not Latin-1") from None
