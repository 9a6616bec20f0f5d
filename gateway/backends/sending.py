"""How requests get to upstreams: the interface, and httpx's client behind it for where a proxy lies on the way."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, cast
from urllib.request import getproxies

import httpx

IDLE_S = 4.0
"""Seconds that a connection waits for its next request: servers on uvicorn, such as vLLM, close theirs after five, and
a request that meets that moment is lost."""
Times = Mapping[str, float | None]
"""Seconds by phase: connect, read, write, pool. What is missing or None has no end."""


class Reply(ABC):
    """An answer that has begun. `headers` have lower-case names; what came several times is joined by commas.

    `asked_at` is the reading of time.perf_counter when the request had its place in the pool, where that is known.

    Its taker must `aclose` it, which ends the answer wherever it is; a connection that has been read to its end serves
    again.
    """

    def __init__(self, *, status: int, headers: Mapping[str, str], asked_at: float | None = None) -> None:
        self.status, self.headers, self.asked_at = status, headers, asked_at

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether all of the body has arrived; False where that is not known."""

    @abstractmethod
    async def read(self) -> bytes:
        """The next bytes of the unpacked body as they come, b"" at its end. Raises httpx's errors."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closing again does nothing."""


class Sender(ABC):
    """Sends requests. One that is cancelled leaves nothing behind."""

    @abstractmethod
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
        """The answer once it has begun. `begun` is called when the request goes out, as far as that is known. Raises
        httpx's errors.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections that wait for requests."""


def sender_to_upstreams(*, max_connections: int) -> Sender:
    """HTTP/1.1 with a pool. The variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY hold, as in httpx."""
    from .http1 import SocketSender

    if getproxies().keys() & {"http", "https", "all"}:
        return HttpxSender(ProxiedTransport(max_connections=max_connections))
    return SocketSender(max_connections=max_connections)


class HttpxSender(Sender):
    """Any of httpx's transports."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

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
        try:
            coded = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        except UnicodeEncodeError:  # which would show what it is about: a key, maybe
            raise httpx.LocalProtocolError("the value of a header is not Latin-1") from None
        begun()  # its connection may still be waited for
        request = httpx.Request(method, url, content=body, headers=coded, extensions={"timeout": times})
        return _HttpxReply(await self._transport.handle_async_request(request))

    async def aclose(self) -> None:
        await self._transport.aclose()


class _HttpxReply(Reply):
    def __init__(self, response: httpx.Response) -> None:
        super().__init__(status=response.status_code, headers=dict(response.headers))
        self._response = response
        self._pieces = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())

    @property
    def over(self) -> bool:
        return False

    async def read(self) -> bytes:
        async for piece in self._pieces:
            if piece:
                return piece
        return b""

    async def aclose(self) -> None:
        await self._pieces.aclose()
        await self._response.aclose()


class ProxiedTransport(httpx.AsyncBaseTransport):
    """httpx's client with what the environment says of proxies, as a transport."""

    def __init__(self, *, max_connections: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=IDLE_S
        )
        self._client = httpx.AsyncClient(limits=limits, follow_redirects=False, transport=transport)
        self._ending: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response once it has begun; its body is the caller's to read and to close. Raises httpx's errors.

        A connection whose opening is cancelled would be lost to httpx: never closed, and never given back to its pool.
        So a request that is on its way to a connection gets it, within the timeouts for that, and is cancelled then.
        """
        opening = _Opening()
        request.extensions["trace"] = opening.trace
        sending = asyncio.create_task(self._client.send(request, stream=True))
        try:
            await asyncio.wait({sending})
        except asyncio.CancelledError:
            end = asyncio.create_task(_end(sending, opening))
            self._ending.add(end)
            end.add_done_callback(self._ending.discard)
            raise
        return sending.result()

    async def aclose(self) -> None:
        await self._client.aclose()


class _Opening:
    """When a request has its connection, as httpcore's events tell; before that it waits for one, or opens one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def trace(self, name: str, info: Any) -> None:
        """Takes the event `name`: those of opening begin with `connection.`, those of the request with its protocol."""
        if not name.startswith("connection."):
            self.over.set()


async def _end(sending: "asyncio.Task[httpx.Response]", opening: _Opening) -> None:
    """Cancel a request for which nobody waits any more."""
    opened = asyncio.create_task(opening.over.wait())
    await asyncio.wait({sending, opened}, return_when=asyncio.FIRST_COMPLETED)
    opened.cancel()
    sending.cancel()
    await asyncio.wait({sending})
    if not sending.cancelled() and sending.exception() is None:
        await sending.result().aclose()
