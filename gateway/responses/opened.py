"""Output items while they are streamed: each begins, grows and ends with the events that the SDKs count on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from .output import Item, call_item, message_item, reasoning_item, refusal_part, text_part

Event = dict[str, Any]
"""An event without its sequence number; `type` is its name."""


class OpenItem(ABC):
    """One item that is being written. `index` is its place in the output."""

    def __init__(self, item: Item, index: int) -> None:
        self.item = item
        self._index = index

    def begin(self) -> Iterator[Event]:
        yield self._of_item("added", {**self.item, "status": "in_progress"})

    def end(self, status: str) -> Iterator[Event]:
        """`status` is completed or incomplete."""
        self.item["status"] = status
        yield from self._finish()
        yield self._of_item("done", self.item)

    @abstractmethod
    def _finish(self) -> Iterator[Event]:
        """The events that say all of it at once, and enter it into the item."""

    def _of_item(self, name: str, item: Item) -> Event:
        return {"type": f"response.output_item.{name}", "output_index": self._index, "item": item}

    def _event(self, kind: str, /, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.item["id"], "output_index": self._index, **fields}


class OpenText(OpenItem):
    """A message with texts and refusals, or what was thought: parts one after the other, each of one kind."""

    _EVENTS: ClassVar = {
        "output_text": ("output_text", "text"),
        "refusal": ("refusal", "refusal"),
        "reasoning_text": ("reasoning_text", "text"),
    }

    def __init__(self, index: int, *, thought: bool = False) -> None:
        super().__init__(reasoning_item("") if thought else message_item([]), index)
        self._part: Item | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Item] = []

    def add(self, kind: str, text: str, *, logprobs: Sequence[Item] = ()) -> Iterator[Event]:
        """A piece of a part of this kind; a part of another kind ends before it."""
        if self._part is not None and self._part["type"] != kind:
            yield from self._finish()
        if self._part is None:
            self._part = refusal_part("") if kind == "refusal" else text_part("")
            if kind == "reasoning_text":
                self._part = {"type": kind, "text": ""}
            yield self._part_event("content_part.added", part=dict(self._part))
        self._pieces.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            told = {"logprobs": list(logprobs)} if kind == "output_text" else {}
            yield self._part_event(f"{self._EVENTS[kind][0]}.delta", delta=text, **told)

    def _finish(self) -> Iterator[Event]:
        part = self._part
        if part is None:
            return
        name, field = self._EVENTS[part["type"]]
        part[field] = "".join(self._pieces)
        told = {}
        if name == "output_text":
            part["logprobs"] = told["logprobs"] = self._logprobs
        yield self._part_event(f"{name}.done", **{field: part[field]}, **told)
        yield self._part_event("content_part.done", part=part)
        self.item["content"].append(part)
        self._part, self._pieces, self._logprobs = None, [], []

    def _part_event(self, name: str, /, **fields: Any) -> Event:
        return self._event(name, content_index=len(self.item["content"]), **fields)


class OpenCall(OpenItem):
    """A function call whose arguments are being written."""

    def __init__(self, index: int, *, call_id: str, name: str) -> None:
        super().__init__(call_item(call_id, name, ""), index)
        self._pieces: list[str] = []

    def add(self, arguments: str) -> Iterator[Event]:
        """A piece of the arguments."""
        if arguments:
            self._pieces.append(arguments)
            yield self._event("function_call_arguments.delta", delta=arguments)

    def _finish(self) -> Iterator[Event]:
        self.item["arguments"] = "".join(self._pieces)
        yield self._event("function_call_arguments.done", arguments=self.item["arguments"], name=self.item["name"])
