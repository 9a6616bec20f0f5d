"""A stream of chat chunks as the events of Anthropic's API: one content block after the other, opened and closed."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...prompt import UpstreamError, Usage
from ..backends.base import estimated_tokens
from ..backends.upstream import read_usage
from ..wire import dumps
from .answer import call_id, read_input, text_of
from .form import ending, message_id, usage_object

Event = dict[str, Any]


@dataclass(slots=True)
class _Call:
    """A call that is being made: its arguments so far, and how many characters of them were sent."""

    id: str
    name: str
    given: str = ""
    sent: int = 0
    closed: bool = False

    @property
    def whole(self) -> bool:
        return self.given.rstrip().endswith("}") and read_input(self.given) is not None


@dataclass(slots=True)
class EventWriter:
    """Turns the chunks of one chat completion into events. A block can only begin when the one before it has ended:
    where a server makes several calls by turns, all but the first are held back.

    `input_tokens` is what the prompt is thought to have until the end tells.
    """

    input_tokens: int
    stops: Collection[str] = ()
    begun: bool = False
    _index: int = 0
    _open: _Call | Literal["text"] | None = None
    _calls: list[_Call] = field(default_factory=list)
    _at: dict[int, _Call] = field(default_factory=dict)
    _reason: Any = None
    _told: Any = None
    _usage: Usage | None = None
    _written: int = 0

    def read(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The events that one chunk brings. UpstreamError for one that is no chat chunk."""
        self._usage = read_usage(chunk.get("usage")) or self._usage
        if not self.begun:
            self.begun = True
            yield from self._begin(str(chunk.get("model") or ""))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                raise UpstreamError("the backend sent a chunk with a choice that is no object")
            if choice.get("index", 0) == 0:
                delta = choice.get("delta")
                yield from self._delta(delta if isinstance(delta, dict) else {})
                self._reason = choice.get("finish_reason") or self._reason
                self._told = choice.get("stop_reason") or self._told

    def end(self) -> Iterator[Event]:
        """After the last chunk."""
        yield from self._close()
        for call in self._calls:
            if not call.closed:
                yield from self._show(call)
                yield from self._close()
        usage = self._usage or Usage(prompt_tokens=self.input_tokens, completion_tokens=self._written)
        delta = ending(self._reason, self._told, self.stops, called=bool(self._calls))
        yield {"type": "message_delta", "delta": delta, "usage": usage_object(usage)}
        yield {"type": "message_stop"}

    def _begin(self, model: str) -> Iterator[Event]:
        usage = usage_object(Usage(prompt_tokens=self.input_tokens))
        head = {"id": message_id(), "type": "message", "role": "assistant", "model": model, "content": []}
        yield {"type": "message_start", "message": {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}}
        yield {"type": "ping"}

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        text = text_of(delta.get("content")) + text_of(delta.get("refusal"))
        if text:
            self._written += estimated_tokens(text)
            if self._open != "text":
                yield from self._close()
                self._open = "text"
                yield self._started({"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": text})
        calls, legacy = delta.get("tool_calls"), delta.get("function_call")
        for piece in [*(calls if isinstance(calls, list) else ()), *([{"function": legacy}] if legacy else ())]:
            yield from self._called(piece)

    def _called(self, piece: Any) -> Iterator[Event]:
        """A piece of a call: shown where its block is open or may begin."""
        if not isinstance(piece, dict) or not isinstance(piece.get("function") or {}, dict):
            raise UpstreamError("the backend sent a tool call that is no object")
        call, arguments = self._call_of(piece), (piece.get("function") or {}).get("arguments")
        more = arguments if isinstance(arguments, str) else dumps(arguments).decode() if arguments else ""
        self._written += estimated_tokens(more)
        call.given += more
        if call.closed:
            if more.strip():
                raise UpstreamError("the backend came back to a tool call that had ended")
        elif call.name and (call is self._open or not isinstance(self._open, _Call) or self._open.whole):
            yield from self._show(call)

    def _call_of(self, piece: Mapping[str, Any]) -> _Call:
        """The call that a piece belongs to. Some servers give all calls the same index, but another id to each."""
        index, function = piece.get("index"), piece.get("function") or {}
        index, name = index if isinstance(index, int) else 0, str(function.get("name") or "")
        call = self._at.get(index)
        if call is None or (name and piece.get("id") not in (None, "", call.id)):
            call = self._at[index] = _Call(id=call_id(piece), name="")
            self._calls.append(call)
        call.name = call.name or name
        return call

    def _show(self, call: _Call) -> Iterator[Event]:
        """Send what is new of a call, in its block."""
        if self._open is not call:
            yield from self._close()
            self._open = call
            yield self._started({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.sent < len(call.given):
            piece, call.sent = call.given[call.sent :], len(call.given)
            yield self._piece({"type": "input_json_delta", "partial_json": piece})

    def _started(self, block: Event) -> Event:
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _piece(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, _Call):
            self._open.closed = True
        yield {"type": "content_block_stop", "index": self._index}
        self._open, self._index = None, self._index + 1
