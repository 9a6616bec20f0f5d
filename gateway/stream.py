"""A stream as an HTTP response: frames, keepalives, errors as frames; the end mark only after a whole answer."""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..prompt import PromptsluiceError
from .backends.base import Frame
from .edge import internal_error, log, log_failure
from .observed import entered
from .wire import DONE, KEEPALIVE, dumps, frame

KEEPALIVE_S = 15.0
# How long the status line waits for the first frame: until then an error can still be an HTTP status.
FIRST_FRAME_S = 5.0


class EventStream(Response):
    """Sends frames as server-sent events. Make one with `begun`, which lets errors before the first frame pass."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[Frame, None],
        first: "asyncio.Task[Frame | None]",
        *,
        headers: Mapping[str, str],
        request_id: str,
        end: bytes = DONE,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._first = first
        self._request_id = request_id
        self._end = end
        self._keepalive_s = keepalive_s
        self._sent_at = 0.0
        self._waiting: list[bytes] = []

    @classmethod
    async def begun(
        cls, frames: AsyncGenerator[Frame, None], *, headers: Mapping[str, str], request_id: str, end: bytes = DONE
    ) -> "EventStream":
        """Wait for the first frame, though not for ever; PromptsluiceError when there is an error instead of it.

        `end` is sent after a whole answer.
        """
        first = asyncio.create_task(next_frame(frames))
        try:
            await asyncio.wait({first}, timeout=FIRST_FRAME_S)
            if first.done():
                first.result()
        except BaseException:
            await abandon(first, frames)
            raise
        return cls(frames, first, headers=headers, request_id=request_id, end=end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keeper: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            keeper = asyncio.create_task(self._keep_alive(send))
            whole = await self._send_frames(send)
            keeper.cancel()
            await send({"type": "http.response.body", "body": self._end if whole else b""})
        finally:
            if keeper is not None:
                keeper.cancel()
            await abandon(self._first, self._frames)

    async def _send_frames(self, send: Send) -> bool:
        """Send every frame; False when the answer broke off, which its last frame then says."""
        try:
            item = await self._first
            while item is not None:
                if item.data:
                    self._waiting.append(frame(item.data, event=item.event))
                if not item.more or item.failed:
                    await self._write(send)
                if item.failed:
                    return False
                item = await next_frame(self._frames)
        except PromptsluiceError as error:
            log.warning("request %s broke off: %s", self._request_id, error.message)
            entered(error=error.code or error.type)
            self._waiting.append(frame(dumps(error.to_wire())))
            await self._write(send)
            return False
        except Exception as error:  # noqa: BLE001 - the seam where a bug becomes a frame
            log_failure(error, request_id=self._request_id)
            entered(error="internal")
            self._waiting.append(frame(dumps(internal_error(self._request_id).to_wire())))
            await self._write(send)
            return False
        await self._write(send)
        return True

    async def _write(self, send: Send) -> None:
        """Whatever frames are there, in one write."""
        if self._waiting:
            self._sent_at = asyncio.get_running_loop().time()
            body = b"".join(self._waiting)
            self._waiting.clear()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """Whole comments between whole events, so that proxies on the way do not take silence for death."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(max(0.01, self._sent_at + self._keepalive_s - loop.time()))
            if loop.time() - self._sent_at >= self._keepalive_s:
                self._sent_at = loop.time()
                await send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})


async def next_frame(frames: AsyncGenerator[Frame, None]) -> Frame | None:
    """None at their end."""
    return await anext(frames, None)


async def abandon(first: "asyncio.Task[Frame | None]", frames: AsyncGenerator[Frame, None]) -> None:
    """Stop waiting and close the frames, which ends the work behind them."""
    first.cancel()
    await asyncio.wait({first})
    if not first.cancelled():
        first.exception()  # looked at, so that asyncio does not complain of it later
    await frames.aclose()
