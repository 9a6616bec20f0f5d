"""How requests get to upstreams: over aiohttp, or over httpx's own transport where a proxy lies on the way."""

import asyncio
from typing import Any
from urllib.request import getproxies

import httpx

from .aio import AioTransport


def transport_to_upstreams(*, max_connections: int) -> httpx.AsyncBaseTransport:
    """HTTP/1.1 with a pool. The variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY hold, as in httpx."""
    if getproxies().keys() & {"http", "https", "all"}:
        return ProxiedTransport(max_connections=max_connections)
    return AioTransport(max_connections=max_connections)


class ProxiedTransport(httpx.AsyncBaseTransport):
    """httpx's client with what the environment says of proxies, as a transport."""

    def __init__(self, *, max_connections: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=30.0
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
