"""The edge: pure ASGI around the whole application. Limits bodies while they are read, names requests, watches for
clients that leave, and turns whatever goes wrong into an OpenAI error object. Knows nothing of chat.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from ..prompt import (
    BadRequest,
    ConfigError,
    Conflict,
    ModelUnavailable,
    PayloadTooLarge,
    PromptsluiceError,
    StorageFull,
)
from .errors import on_the_wire
from .keys.ticket import Ticket
from .logs import log_failure
from .metrics import Metrics
from .observed import Observing, ended, entered
from .tracing import Traces

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Admit = Callable[[Scope], "Awaitable[Ticket | None]"]

WHOLE = "promptsluice.whole"
"""Among a scope's extensions: the body has arrived already."""
LEAVING = "promptsluice.leaving"
"""Among a scope's extensions: the set of what is called when the client's connection is lost."""
log = logging.getLogger("promptsluice.gateway")

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_SWALLOWED = 4
_REFUSED_S = 5.0


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Edge:
    """Wraps an ASGI application. A request body may have `max_body_bytes`, and `body_timeout_s` to arrive.

    `admit` is asked before a body is read, and raises for whom it does not let in. `traces` is asked at each request:
    there are none before the application has started.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        metrics: Metrics,
        admit: Admit,
        traces: Callable[[], Traces | None] = lambda: None,
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._metrics = metrics
        self._admit = admit
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        began, traces = time.perf_counter(), self._traces()
        headers = {} if traces is None else decoded(scope)
        self._metrics.in_flight.inc()
        with Observing(exchange.request_id, method=scope["method"], headers=headers, traces=traces) as observed:
            try:
                await self._serve(exchange, scope, receive)
            finally:
                self._metrics.in_flight.dec()
                route, seconds = getattr(scope.get("route"), "path", "other"), time.perf_counter() - began
                self._metrics.http(route, scope["method"], exchange.status, seconds)
                ended(observed, method=scope["method"], route=route, status=exchange.status, seconds=seconds)

    async def _serve(self, exchange: "_Exchange", scope: Scope, receive: Receive) -> None:
        try:
            exchange.ticket = await self._admit(scope)
        except Exception as error:  # noqa: BLE001 - as in `_answer`
            await self._turned_away(exchange, scope, receive, _own(error, exchange.request_id))
            return
        try:
            await self._let_in(exchange, scope, receive)
        finally:
            if exchange.ticket is not None:
                exchange.ticket.close()

    async def _turned_away(
        self, exchange: "_Exchange", scope: Scope, receive: Receive, error: PromptsluiceError
    ) -> None:
        """Say why. A client that does not ask before it sends its body (`Expect`) only listens when it has sent it: so
        that is let by, within bounds, and nothing of it is kept.
        """
        swallowed = False
        if b"expect" not in dict(scope["headers"]):
            try:
                async with asyncio.timeout(_REFUSED_S):
                    swallowed = await self._swallow(receive)
            except TimeoutError:
                pass
            except ClientGone:
                return
        await exchange.fail(error, close=not swallowed)

    async def _swallow(self, receive: Receive) -> bool:
        """Whether the body has ended."""
        size, more = 0, True
        while more and size <= self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        return not more

    async def _let_in(self, exchange: "_Exchange", scope: Scope, receive: Receive) -> None:
        try:
            if WHOLE in scope.get("extensions", ()):  # so that no timer needs to watch
                body = await self._read_body(scope, receive)
            else:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await self._read_body(scope, receive)
        except TimeoutError:
            late = BadRequest("the request body did not arrive in time", code="request_timeout")
            await exchange.fail(late, close=True)
            return
        except ClientGone:
            return
        except PromptsluiceError as error:
            await exchange.fail(error, close=True)
            return
        work = asyncio.current_task()
        assert work is not None

        def leave() -> None:
            if not exchange.complete:
                exchange.left = True
                work.cancel()

        try:
            with _Watched(scope, receive, leave) as after:
                await self._answer(exchange, scope, _replayed(body, after))
        except asyncio.CancelledError:
            if not exchange.left:
                raise
            work.uncancel()

    async def _answer(self, exchange: "_Exchange", scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - the seam where a bug becomes an answer
            # Once a response has begun there is nothing to say any more: the server cuts the unfinished response off.
            own = _own(error, exchange.request_id)
            if not exchange.started:
                await exchange.fail(own)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise BadRequest("compressed request bodies are not supported; send the body without content-encoding")
        declared = headers.get(b"content-length", b"")
        too_large = declared.isdigit() and int(declared) > self._max_body
        pieces: list[bytes] = []
        size = 0
        more = True
        while more and size <= self._max_body * _SWALLOWED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            too_large = too_large or size > self._max_body
            # What is too large is still read, within bounds: a client that is cut off while it sends never sees the
            # error.
            if not too_large:
                pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        if too_large:
            raise PayloadTooLarge(f"the request body is larger than {self._max_body} bytes")
        return b"".join(pieces)


class _Exchange:
    """One request and its response: the id, what has been sent so far, and the way to send an error."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._path = scope["path"]
        self.request_id = _request_id(scope)
        self.status = 499
        self.started = False
        self.complete = False
        self.left = False
        self.ticket: Ticket | None = None
        scope.setdefault("state", {})["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = self._headers(message.get("headers", ()))
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    def _headers(self, given: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """With the request's id, and our limits instead of those of who was asked for the answer."""
        own = [(b"x-request-id", self.request_id.encode())]
        left = {} if self.ticket is None else self.ticket.headers()
        if not left:
            return [*given, *own]
        own += [(name.encode(), value.encode()) for name, value in left.items()]
        return [header for header in given if header[0].decode("latin-1").lower() not in left] + own

    async def fail(self, error: PromptsluiceError, *, close: bool = False) -> None:
        entered(error=error.code or error.type)
        status, body, more = on_the_wire(self._path, error.status, error.to_wire(), request_id=self.request_id)
        headers = {**error_headers(error), **more, **({"connection": "close"} if close else {})}
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})


def error_headers(error: PromptsluiceError) -> Mapping[str, str]:
    """The error's own headers; where the same request would only fail again, SDKs are told not to retry."""
    hopeless = isinstance(error, ConfigError | Conflict | ModelUnavailable | StorageFull)
    return {"x-should-retry": "false", **error.headers} if hopeless else error.headers


def _own(error: Exception, request_id: str) -> PromptsluiceError:
    """The error itself; of a bug, which is logged, what a client learns of it."""
    if isinstance(error, PromptsluiceError):
        return error
    log_failure(error, request_id=request_id)
    return internal_error(request_id)


def internal_error(request_id: str) -> PromptsluiceError:
    """What a client learns of a bug: where to look it up, nothing else."""
    return PromptsluiceError(f"internal error; request id {request_id}", code="internal")


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _SANE_ID.fullmatch(given) else f"req_{random.getrandbits(128):032x}"


def decoded(scope: Scope) -> dict[str, str]:
    """The request's headers by their lower-case names; of several of one name the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


class _Watched:
    """Calls `leave` when the client leaves; some servers report that after every complete response, too. Within it
    there is a receive channel on which nothing comes but that.
    """

    def __init__(self, scope: Scope, receive: Receive, leave: Callable[[], None]) -> None:
        self._receive, self._leave = receive, leave
        self._leaving: set[Callable[[], None]] | None = scope.get("extensions", {}).get(LEAVING)
        self._gone: asyncio.Task[None] | None = None

    def __enter__(self) -> Receive:
        if self._leaving is not None:
            self._leaving.add(self._leave)
            return self._receive
        self._gone = asyncio.create_task(self._watch())
        return self._after

    def __exit__(self, *exc: object) -> None:
        if self._leaving is not None:
            self._leaving.discard(self._leave)
        if self._gone is not None:
            self._gone.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    async def _after(self) -> Message:
        assert self._gone is not None
        await asyncio.wait({self._gone})
        return {"type": "http.disconnect"}


def _replayed(body: bytes, after: Receive) -> Receive:
    """A receive channel that gives the body once and then what comes after it."""
    pending = [body]

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await after()

    return receive
