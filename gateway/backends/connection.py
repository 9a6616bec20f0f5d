"""One HTTP/1.1 connection to an upstream: a request goes out, its answer is read as it comes. Errors are httpx's."""

import asyncio
import select
from typing import cast

import httptools
import httpx

from .sending import Times

_HEAD_LIMIT = 64 << 10  # bytes of an answer's head, and of what comes between two pieces of its body, or behind them
_FIELDS = 256  # of an answer's head
_HELD = 256 << 10  # bytes of a body that nobody has read yet; beyond it the server has to wait
_PIECE = 64 << 10  # bytes of a request that are handed to the socket at a time


class Connection(asyncio.Protocol):
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
