"""HTTP/1.1 to upstreams on sockets of its own: connections that are kept, answers that are read as they come.

General clients build a request and a response of many objects, in many layers; a gateway pays for each of them with
every request. Cookies are never kept, redirects never followed. Errors are httpx's. No proxies: see `sending.py`.
"""

import asyncio
import socket
import ssl
import time
from asyncio.staggered import staggered_race
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import httpx

from .connection import Connection
from .sending import IDLE_S, Reply, Sender, Times
from .unpacking import unpacker

_NEXT_S = 0.25  # seconds that an address has to answer before the next one is tried, too


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
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
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
        self, connection: Connection, target: _Target, head: bytes, body: bytes, times: Times, asked_at: float
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

    def ended(self, target: _Target, connection: Connection) -> None:
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

    def _kept(self, target: _Target) -> Connection | None:
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

    async def _opened(self, target: _Target, timeout_s: float | None) -> Connection:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connected(target)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("not connected in time") from error
        except (OSError, UnicodeError) as error:  # of TLS, too; of a name that is none
            raise httpx.ConnectError("not connected") from error

    async def _connected(self, target: _Target) -> Connection:
        """To the first of the host's addresses that answers; each gets a moment before the next one is tried, too."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))

        async def to(address: str) -> Connection:
            tls, name = (self._context(), target.host) if target.tls else (None, None)
            made = await loop.create_connection(Connection, address, target.port, ssl=tls, server_hostname=name)
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
    def __init__(self, sender: SocketSender, target: _Target, connection: Connection, asked_at: float) -> None:
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
