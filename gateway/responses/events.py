"""The stream of a response: chat chunks in, the Responses API's events out, in its order and numbered."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from ...prompt import PromptsluiceError, UpstreamError
from ..backends.base import Frame
from ..edge import internal_error, log, log_failure
from ..wire import dumps, loads
from .opened import Event, OpenCall, OpenItem, OpenText
from .output import Item, ResponseObject, arguments_of, logprobs_of, new_id, usage_of
from .translate import rename_fields

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
Finished = Callable[[list[Item], bytes], None]
"""Told the output and the response object of a response that has ended well, before the client is."""


class EventWriter:
    """Turns the chunks of one chat completion into events. The chat has one choice."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._items: list[Item] = []
        self._open: OpenItem | None = None
        self._call: int | None = None
        self._calls: set[int] = set()
        self._finish_reason: str | None = None

    @property
    def output(self) -> list[Item]:
        return self._items

    def begin(self) -> Iterator[Event]:
        """Before anything else."""
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response.to_wire(())}

    def read(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """What one chunk brings. UpstreamError for one that is no chat chunk."""
        self._note(chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                raise UpstreamError("the backend sent a chunk with a choice that is no object")
            if choice.get("index", 0) == 0:
                delta = choice.get("delta")
                yield from self._delta(delta if isinstance(delta, dict) else {}, choice.get("logprobs"))
                self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def end(self) -> Iterator[Event]:
        """After the last chunk: close what is open. The last event, which has the whole response, is `last`'s."""
        self._response.finished(self._finish_reason)
        if self._open is None and not self._items:
            yield from self._text("output_text", "", ())
        yield from self._close("incomplete" if self._response.reason else "completed")

    def last(self) -> Event:
        """The event after which nothing comes."""
        return {"type": f"response.{self._response.status}", "response": self._response.to_wire(self._items)}

    def fail(self, error: PromptsluiceError) -> Event:
        """The last event of a response that broke off; what there is of it so far goes with it."""
        if self._open is not None:
            for _ in self._close("incomplete"):
                pass
        code = _ERROR_CODES.get(error.status, "server_error")
        self._response.status = "failed"
        self._response.error = {"code": code, "message": error.message, "type": error.type, "param": error.param}
        return self.last()

    def _note(self, chunk: Mapping[str, Any]) -> None:
        told = self._response
        told.model = chunk["model"] if isinstance(chunk.get("model"), str) else told.model
        told.usage = usage_of(chunk.get("usage")) or told.usage
        told.report = chunk.get("promptsluice", told.report)

    def _delta(self, delta: Mapping[str, Any], logprobs: Any) -> Iterator[Event]:
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield from self._text("reasoning_text", thought, ())
        told = logprobs_of(logprobs)
        content, refusal = delta.get("content"), delta.get("refusal")
        content = content if isinstance(content, str) else ""
        if content or told:
            yield from self._text("output_text", content, told)
        if isinstance(refusal, str) and refusal:
            yield from self._text("refusal", refusal, ())
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            yield from self._called(call)

    def _text(self, kind: str, text: str, logprobs: list[Item] | tuple[()]) -> Iterator[Event]:
        thought = kind == "reasoning_text"
        if not isinstance(self._open, OpenText) or (self._open.item["type"] == "reasoning") != thought:
            yield from self._close()
            self._open = OpenText(len(self._items), thought=thought)
            yield from self._open.begin()
        yield from self._open.add(kind, text, logprobs=logprobs)

    def _called(self, call: Any) -> Iterator[Event]:
        """A piece of a tool call; the first of each index has its id and its name."""
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise UpstreamError("the backend sent a tool call that is no function call")
        index, function = call.get("index", 0), call["function"]
        if not isinstance(index, int):
            raise UpstreamError("the backend sent a tool call whose index is no number")
        if not isinstance(self._open, OpenCall) or self._call != index:
            if index in self._calls:
                raise UpstreamError("the backend went on with a tool call that another one had followed")
            yield from self._close()
            self._calls.add(index)
            self._call = index
            self._open = OpenCall(
                len(self._items),
                call_id=str(call.get("id") or new_id("call")),
                name=str(function.get("name") or ""),
            )
            yield from self._open.begin()
        yield from self._open.add(arguments_of(function))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._items.append(self._open.item)
            self._open = None


async def as_events(
    frames: AsyncGenerator[Frame, None], response: ResponseObject, *, finished: Finished, request_id: str
) -> AsyncGenerator[Frame, None]:
    """The events of a response as frames.

    What fails before the chat's first frame is raised, so that it can be an HTTP status; later it is the event
    `response.failed`.
    """
    writer, number = EventWriter(response), 0

    def numbered(event: Event, *, failed: bool = False) -> Frame:
        nonlocal number
        data = dumps({**event, "sequence_number": number})
        number += 1
        return Frame(data=data, event=event["type"], failed=failed)

    async with aclosing(frames):
        try:
            item = await anext(frames, None)
        except PromptsluiceError as error:
            rename_fields(error)
            raise
        for event in writer.begin():
            yield numbered(event)
        try:
            while item is not None:
                for event in writer.read(_chunk(item)):
                    yield numbered(event)
                item = await anext(frames, None)
            for event in writer.end():
                yield numbered(event)
        except PromptsluiceError as error:
            log.warning("request %s broke off: %s", request_id, error.message)
            yield numbered(writer.fail(error), failed=True)
            return
        except Exception as error:  # noqa: BLE001 - the seam where a bug becomes an event
            log_failure(error, request_id=request_id)
            yield numbered(writer.fail(internal_error(request_id)), failed=True)
            return
        last = writer.last()
        finished(writer.output, dumps(last["response"]))
        yield numbered(last)


def _chunk(item: Frame) -> Mapping[str, Any]:
    """The JSON of a chat frame; what a failed one says is raised."""
    try:
        chunk = loads(item.data) if item.data else {}
    except ValueError as error:
        raise UpstreamError("the backend sent a chunk with a number out of range") from error
    if item.failed:
        told = chunk["error"]
        raise UpstreamError(str(told.get("message")), param=told.get("param"), code=told.get("code"))
    return chunk
