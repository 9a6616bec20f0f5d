"""Frames of Anthropic's streams: made of a backend's chat chunks, or read from an upstream that speaks them itself."""

import json
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ...prompt import PromptsluiceError, UpstreamError, Usage
from ..backends.base import Frame, Stream, size_of
from ..edge import internal_error, log, log_failure
from ..wire import dumps, loads
from .events import Event, EventWriter
from .form import as_error_body, error_object, usage_of

_PIECES = ("text", "thinking", "partial_json")


def as_message_stream(stream: Stream, *, input_tokens: int, stops: Collection[str]) -> Stream:
    """The same stream in Anthropic's form."""
    writer = EventWriter(input_tokens=input_tokens, stops=stops)
    return replace(stream, frames=_frames(stream.frames, writer))


async def _frames(chunks: AsyncGenerator[Frame, None], writer: EventWriter) -> AsyncGenerator[Frame, None]:
    usage: Usage | None = None
    async with aclosing(chunks):
        async for item in chunks:
            usage = item.usage or usage
            if item.failed:
                yield Frame(data=as_error_body(500, item.data), event="error", failed=True)
                return
            content = item.content
            for event in writer.read(_parsed(item.data)):
                yield _framed(event, content=content)
                content = 0
            if content:
                yield Frame(data=b"", content=content)  # what is no part of the answer here, yet was written
    for event in writer.end():
        yield replace(_framed(event), usage=usage if event["type"] == "message_delta" else None)


async def with_last_words(frames: AsyncGenerator[Frame, None], *, request_id: str) -> AsyncGenerator[Frame, None]:
    """The same frames; what fails after the first of them is told by an event, which is the last one."""
    begun = False
    try:
        async with aclosing(frames):
            async for item in frames:
                begun = begun or bool(item.data)
                yield item
    except PromptsluiceError as error:
        if not begun:
            raise
        log.warning("request %s broke off: %s", request_id, error.message)
        yield _failure(error, request_id)
    except Exception as error:  # the seam where a bug becomes an event
        if not begun:
            raise
        log_failure(error, request_id=request_id)
        yield _failure(internal_error(request_id), request_id)


def _parsed(data: bytes) -> Mapping[str, Any]:
    try:
        return loads(data) if data else {}
    except ValueError as error:
        raise UpstreamError("the backend sent a chunk with a number out of range") from error


def _framed(event: Event, *, content: int = 0) -> Frame:
    return Frame(data=dumps(event), event=event["type"], content=content)


def _failure(error: PromptsluiceError, request_id: str) -> Frame:
    data = dumps(error_object(error.status, error.message, request_id=request_id))
    return Frame(data=data, event="error", failed=True)


class MessageStreamReader:
    """Reads the data of an upstream's own events, which pass as the bytes that they are. `over` after the last one.

    `hidden` blanks a key out of what an error says.
    """

    def __init__(self, *, backend: str, hidden: Callable[[bytes], bytes]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._usage: dict[str, Any] = {}
        self.over = False

    def run(self, piece: bytes, at: int) -> tuple[int, Frame | None]:
        """Events of this form are all read."""
        return at, None

    def read(self, data: bytes) -> Iterator[Frame]:
        """The frame to send for one event. UpstreamError for data that is no event."""
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"backend {self._backend!r} sent an event that is broken JSON") from error
        kind = event.get("type") if isinstance(event, dict) else None
        if not isinstance(kind, str) or not kind.isidentifier():
            raise UpstreamError(f"backend {self._backend!r} sent an event without a type")
        self.over = kind in ("message_stop", "error")
        message = event.get("message")
        for told in (message.get("usage") if isinstance(message, dict) else None, event.get("usage")):
            if isinstance(told, dict):  # what comes later replaces what was said before
                self._usage |= {name: value for name, value in told.items() if value is not None}
        usage = usage_of(self._usage) if kind == "message_stop" else None
        data = self._hidden(data) if kind == "error" else data
        yield Frame(data=data, event=kind, content=_said_in(event), failed=kind == "error", usage=usage)

    def end(self) -> Iterator[Frame]:
        """The stream's end: fine only after the last event."""
        if not self.over:
            raise UpstreamError(f"backend {self._backend!r} ended its stream before the answer was finished")
        return iter(())


def _said_in(event: Mapping[str, Any]) -> int:
    """About how many bytes of text an event brings."""
    if event["type"] != "content_block_delta":
        return 0
    delta = event.get("delta")
    told = delta if isinstance(delta, dict) else {}
    return max(1, sum(size_of(text) for name in _PIECES if isinstance(text := told.get(name), str)))
