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

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
KEEPALIVE_S = 15.0
# How long the status line waits for the first frame: until then an error can still be an HTTP status.
FIRST_FRAME_S = 5.0


class EventStream(Response):
    """Sends frames as server-sent events, and `end` after a whole answer.

    The head goes out with the first frame, or after `first_frame_s`: what goes wrong before that is raised, as
    PromptsluiceError or as the bug that it is. One timer watches over the head and over silence.
    """

    def __init__(
        self,
        frames: AsyncGenerator[Frame, None],
        *,
        headers: Mapping[str, str],
        request_id: str,
        end: bytes = DONE,
        keepalive_s: float = KEEPALIVE_S,
        first_frame_s: float = FIRST_FRAME_S,
    ) -> None:
        # Not by Starlette's own making, which would read the headers of a body that is known.
        self.status_code, self.background = 200, None
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers += _HEADERS
        self._frames = frames
        self._request_id = request_id
        self._end = end
        self._keepalive_s = keepalive_s
        self._first_frame_s = first_frame_s
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._sent_at = 0.0
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sign: asyncio.Task[None] | None = None
        self._wrong: BaseException | None = None
        self._work: asyncio.Task[object] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._work = asyncio.current_task()
        self._timer = self._loop.call_later(self._first_frame_s, self._silent, send)
        try:
            whole = await self._send_frames(send)
            if whole:
                self._waiting.append(self._end)
            await self._write(send, last=True)
        except asyncio.CancelledError:
            if self._wrong is None or self._work is None:
                raise
            self._work.uncancel()
            raise self._wrong from None
        finally:
            self._timer.cancel()
            if self._sign is not None:
                self._sign.cancel()
            await self._frames.aclose()

    async def _send_frames(self, send: Send) -> bool:
        """Send every frame; False when the answer broke off, which its last frame then says."""
        try:
            async for item in self._frames:
                if item.data:
                    self._waiting.append(item.data if item.framed else frame(item.data, event=item.event))
                if item.failed:
                    return False
                if not item.more:
                    await self._write(send)
        except PromptsluiceError as error:
            if not self._begun and not self._waiting:
                raise
            log.warning("request %s broke off: %s", self._request_id, error.message)
            entered(error=error.code or error.type)
            self._waiting.append(frame(dumps(error.to_wire())))
            return False
        except Exception as error:  # the seam where a bug becomes a frame
            if not self._begun and not self._waiting:
                raise
            log_failure(error, request_id=self._request_id)
            entered(error="internal")
            self._waiting.append(frame(dumps(internal_error(self._request_id).to_wire())))
            return False
        return True

    async def _write(self, send: Send, *, last: bool = False) -> None:
        """Whatever frames are there, in one write, after what the timer has begun to say."""
        if not (self._waiting or last):
            return
        if self._sign is not None:
            await self._sign
        body = b"".join(self._waiting)
        self._waiting.clear()
        await self._say(send, body, last=last)

    async def _say(self, send: Send, body: bytes, *, last: bool = False) -> None:
        self._sent_at = self._loop.time()
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    def _silent(self, send: Send) -> None:
        """The timer's turn: the head, where nothing has been sent; whole comments between whole events where nothing
        was for long, so that proxies on the way do not take silence for death.
        """
        left = self._sent_at + self._keepalive_s - self._loop.time() if self._begun else 0.0
        if left <= 0:
            left = self._keepalive_s
            if self._sign is None or self._sign.done():  # else the client does not even take the one before
                self._sign = asyncio.create_task(self._say(send, KEEPALIVE if self._begun else b""))
                self._sign.add_done_callback(self._said)
        self._timer = self._loop.call_later(max(0.01, left), self._silent, send)

    def _said(self, sign: asyncio.Task[None]) -> None:
        """What went wrong beside the request goes wrong in it: nothing more can be sent."""
        if not sign.cancelled() and (wrong := sign.exception()) is not None and self._work is not None:
            self._wrong = wrong
            self._work.cancel()


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
