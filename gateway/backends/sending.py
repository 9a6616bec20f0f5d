"""Requests over httpx that may be cancelled at any moment.

A connection whose opening is cancelled would be lost to httpx: never closed, and never given back to its pool. So a
request that is on its way to a connection gets it, within the timeouts for that, and is cancelled then.
"""

import asyncio
from typing import Any

import httpx


class Sender:
    """Sends on one client."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._ending: set[asyncio.Task[None]] = set()

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The response once it has begun; its body is the caller's to read and to close. Raises httpx's errors."""
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
