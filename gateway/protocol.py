"""HTTP on a socket: uvicorn's protocol, with an end to clients that are slow on purpose.

uvicorn waits for the head of a request, and for a client to take what it is sent, as long as the connection lives.
Bodies have their own time, at the edge.
"""

from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections.abc import Callable
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .edge import LEAVING, WHOLE

_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_AHEAD = 4  # requests that a connection may have sent ahead while it is still read


class _Corked:
    """What uvicorn writes a connection's answers to: a head goes out together with what follows in the same turn of the
    loop. Nothing goes out on a connection that is lost.
    """

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            self._held += data
            self.flush()
        elif data:
            self._held = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class BoundedProtocol(HttpToolsProtocol):
    """`head_s` for the head of a request to arrive, which may have `head_bytes`; `stalled_s` for a client that takes
    nothing of what it is sent. The keep-alive time between requests is uvicorn's.

    When the server shuts down, a connection that has asked for nothing yet has `late_s` to do so: its request may be on
    the way already.

    A client that leaves is noticed only while its connection is read: so it is while a request is answered, unless the
    client has sent much more than that request. An upgrade is never made: such a request is answered as any other.
    """

    head_s: float = 30.0
    head_bytes: int = 64 << 10
    stalled_s: float = 120.0
    late_s: float = 1.0

    _waiting: TimerHandle | None = None
    _stalled: TimerHandle | None = None
    _last: TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    _in_head = True
    _seen = 0

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._corked = _Corked(transport, self.loop)
        self._leaving = set[Callable[[], None]]()
        self._waiting = self.loop.call_later(self.head_s, self._give_up, _LATE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._taken()
        if self._last is not None:
            self._last.cancel()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:  # uvicorn tells the last request only
            self._answered.disconnected = True
            self._answered.message_event.set()
        for leave in list(self._leaving):
            leave()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._seen += len(data)
        super().data_received(data)
        if self._waiting is None and (self.cycle is None or self.cycle.response_complete):  # there is more to come
            self._waiting = self.loop.call_later(self.head_s, self._give_up, _LATE)
        if self._in_head and self._seen > self.head_bytes:
            self._give_up(_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._seen = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope.setdefault("extensions", {}))[LEAVING] = self._leaving
        self.cycle.transport = cast("Transport", self._corked)
        if self._last is not None:
            self._last.cancel()
            self.cycle.keep_alive = False
        self._read_on()

    def on_message_complete(self) -> None:
        self.scope.setdefault("extensions", {})[WHOLE] = {}
        super().on_message_complete()
        self._read_on()

    def shutdown(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self._last = self.loop.call_later(self.late_s, self.transport.close)
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        self._corked.flush()
        super().on_response_complete()
        if self._in_head and self._waiting is None:  # the next one has begun meanwhile
            self._waiting = self.loop.call_later(self.head_s, self._give_up, _LATE)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        pass  # what a client asks for is no fault of the server's, whose log it would fill

    def _read_on(self) -> None:
        """uvicorn stops reading at a body beyond 64 KiB until it is taken, and at a request that waits for its turn."""
        if len(self.pipeline) < _AHEAD:
            self.flow.resume_reading()

    def _give_up(self, said: bytes) -> None:
        """Only where no request is being answered on the connection, may something be said that is no answer to it."""
        self._stop_waiting()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(said)
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _taken(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
