"""A chat completion in its other framing: a whole one as chunks, chunks as a whole one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .backends.base import Frame
from .wire import dumps

_OWN = ("choices", "usage", "object")


def chunks_of(completion: Mapping[str, Any], *, include_usage: bool) -> Iterator[Frame]:
    """The frames of a stream that says the same: for each choice who speaks, what is said, and the end."""
    head = {name: value for name, value in completion.items() if name not in _OWN}
    head["object"] = "chat.completion.chunk"
    for choice in completion["choices"]:
        rest = {name: value for name, value in choice.items() if name not in ("message", "logprobs", "finish_reason")}
        said = {name: value for name, value in choice["message"].items() if value is not None}
        first = {"role": said.pop("role", "assistant"), "content": ""}
        deltas = [first, *({name: value} for name, value in _deltas(said))]
        for place, delta in enumerate(deltas):
            told = choice.get("logprobs") if place == 1 else None
            one = {"index": choice["index"], "delta": delta, "logprobs": told, "finish_reason": None}
            yield Frame(data=dumps({**head, "choices": [one]}), content=place > 0)
        last = {**rest, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield Frame(data=dumps({**head, "choices": [last]}))
    if include_usage and completion.get("usage") is not None:
        yield Frame(data=dumps({**head, "choices": [], "usage": completion["usage"]}))


def _deltas(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What was said, piece by piece; calls carry their places."""
    for name, value in said.items():
        if name == "tool_calls":
            yield name, [{"index": place, **call} for place, call in enumerate(value)]
        elif value not in ("", []):
            yield name, value


@dataclass(slots=True)
class _Said:
    """One choice so far."""

    message: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def add(self, choice: Mapping[str, Any]) -> bool:
        """False for what cannot be put together again."""
        self.rest |= {
            name: value
            for name, value in choice.items()
            if name not in ("index", "delta", "logprobs") and value is not None
        }
        for name, listed in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(listed or ())
        delta = dict(choice.get("delta") or {})
        calls = delta.pop("tool_calls", None) or ()
        _join(self.message, delta)
        return all(self._called(call) for call in calls)

    def _called(self, piece: Mapping[str, Any]) -> bool:
        piece = dict(piece)
        call = self.calls.setdefault(piece.pop("index", 0), {})
        if call.get("id") and piece.get("id") not in (None, "", call["id"]):
            return False  # another call at the same place
        function = piece.pop("function", None) or {}
        name = function.pop("name", None) if isinstance(function, dict) else None
        call.update({key: value for key, value in piece.items() if value is not None})
        _join(call.setdefault("function", {}), function)
        if name:
            call["function"]["name"] = name
        return True

    def whole(self, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **self.message}
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        if self.calls or message.get("refusal"):
            message["content"] = message["content"] or None
        return {"index": index, "message": message, "logprobs": self.logprobs or None, **self.rest}


@dataclass(slots=True)
class Gathering:
    """Takes the frames of a stream and makes the whole completion of them."""

    _head: dict[str, Any] = field(default_factory=dict)
    _said: dict[int, _Said] = field(default_factory=dict)
    _usage: Any = None
    _good: bool = True

    def add(self, frame: Frame) -> None:
        """One more frame."""
        if frame.usage is not None:
            self._usage = frame.usage.to_wire()
        if not frame.data or not self._good:
            return
        try:
            self._good = not frame.failed and self._added(json.loads(frame.data))
        except (LookupError, TypeError, AttributeError, ValueError):
            self._good = False  # a chunk in a form of its own: it went to the client as it came, but is not kept

    def whole(self) -> bytes | None:
        """The completion, if all of its choices have ended and nothing was odd."""
        ended = self._said and all(said.rest.get("finish_reason") for said in self._said.values())
        if not self._good or not ended:
            return None
        usage = {} if self._usage is None else {"usage": self._usage}
        try:
            choices = [said.whole(index) for index, said in sorted(self._said.items())]
            return dumps({**self._head, "object": "chat.completion", "choices": choices, **usage})
        except (TypeError, ValueError):
            return None  # places that are no numbers, or numbers that are no JSON

    def _added(self, chunk: Mapping[str, Any]) -> bool:
        self._head = self._head or {name: value for name, value in chunk.items() if name not in _OWN}
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        return all(self._said.setdefault(one["index"], _Said()).add(one) for one in chunk["choices"])


def _join(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Texts go on where they were, lists grow, anything else is replaced."""
    for name, value in more.items():
        if value is None:
            into.setdefault(name, None)
        elif name != "role" and isinstance(value, str) and isinstance(into.get(name), str):
            into[name] += value
        elif isinstance(value, list) and isinstance(into.get(name), list):
            into[name] = [*into[name], *value]
        else:
            into[name] = value
