"""From the engine's deltas to frames: shared by every backend that makes text itself."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ...backend_engine.types import Delta
from ...prompt import Usage
from ..tools.pieces import CallArguments, CallBegun, NewReader, Part, PlainReader, Reader, Said
from ..wire import Choice
from .base import Answer, Frame, size_of
from .choices import Describe, Piece


class Writer(Protocol):
    """The JSON of one completion, whole or as chunks. What is told of tokens comes as objects, as chats have them."""

    def begin(self, index: int = 0, *, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes:
        """The first chunk of a choice, with what is told of its prompt; empty where none is needed."""
        ...

    def content(self, text: str, *, index: int = 0, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes: ...

    def finish(self, reason: str, *, index: int = 0, stop: str | None = None) -> bytes:
        """The last chunk of a choice; `stop` is the stop string that ended it."""
        ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], *, usage: Usage) -> bytes: ...


Told = Sequence[Mapping[str, Any]] | None
"""What is told of tokens; None where nothing was asked for."""


@dataclass(frozen=True, slots=True)
class ToolReading:
    """What finds the tool calls in a choice's text, and what writes a piece of one, given the choice's index."""

    reader: NewReader
    write: Callable[[CallBegun | CallArguments, int, Told], bytes]


async def as_frames(
    pieces: AsyncGenerator[Piece, None],
    *,
    writer: Writer,
    usage: Callable[[], Usage],
    include_usage: bool,
    choices: int = 1,
    describe: Describe | None = None,
    tools: ToolReading | None = None,
) -> AsyncGenerator[Frame, None]:
    """For each choice beginning, contents and finish, and the usage frame where it was asked for, last.

    `usage` is read after the last delta. `describe` where log-probabilities were asked for. `tools` where tool
    calls are looked for. Closing the frames closes the deltas.
    """
    began: set[int] = set()
    ended: set[int] = set()
    readers: defaultdict[int, Reader] = defaultdict(tools.reader if tools else PlainReader)
    async with aclosing(pieces):
        async for index, delta in pieces:
            if index not in began:
                began.add(index)
                told = None if describe is None else describe(delta.prompt_logprobs)
                yield Frame(data=writer.begin(index, logprobs=told))
            told = None if describe is None else describe(delta.logprobs)
            for part in _read(readers[index], delta) or ([Said("")] if told else []):
                yield Frame(data=_written(writer, tools, part, index, told), content=size_of(_text(part)))
                told = None if describe is None else []  # it is told once
            if delta.finish_reason is not None:
                ended.add(index)
                reason = _reason(readers[index], delta.finish_reason)
                yield Frame(data=writer.finish(reason, index=index, stop=delta.stop))
    for index in range(choices):
        if index not in began:
            yield Frame(data=writer.begin(index))
        if index not in ended:
            yield Frame(data=writer.finish("stop", index=index))
    total = usage()
    yield Frame(data=writer.usage(total) if include_usage else b"", usage=total)


async def as_answer(
    pieces: AsyncGenerator[Piece, None],
    *,
    writer: Writer,
    usage: Callable[[], Usage],
    choices: int = 1,
    describe: Describe | None = None,
    tools: ToolReading | None = None,
) -> Answer:
    """The same as one body."""
    gathered = [_Gathered(tools.reader() if tools else PlainReader()) for _ in range(choices)]
    async with aclosing(pieces):
        async for index, delta in pieces:
            gathered[index].add(delta, describe)
    total = usage()
    listed = [
        Choice(
            text="".join(one.texts),
            reason=_reason(one.reader, one.reason),
            stop=one.stop,
            calls=[call.to_wire() for call in one.calls],
            logprobs=None if describe is None else one.logprobs,
            prompt_logprobs=None if describe is None else one.prompt_logprobs,
        )
        for one in gathered
    ]
    return Answer(body=writer.whole(listed, usage=total), usage=total)


class _Gathered:
    """What one choice has come to."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.texts: list[str] = []
        self.calls: list[_Call] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] = []
        self.reason = "stop"
        self.stop: str | None = None

    def add(self, delta: Delta, describe: Describe | None) -> None:
        for part in _read(self.reader, delta):
            if isinstance(part, Said):
                self.texts.append(part.text)
            elif isinstance(part, CallBegun):
                self.calls.append(_Call(part))
            else:
                self.calls[part.index].arguments.append(part.text)
        self.reason, self.stop = delta.finish_reason or self.reason, delta.stop
        if describe is not None:
            self.logprobs += describe(delta.logprobs)
            self.prompt_logprobs += describe(delta.prompt_logprobs)


class _Call:
    """A tool call that is being written."""

    def __init__(self, begun: CallBegun) -> None:
        self._begun = begun
        self.arguments: list[str] = []

    def to_wire(self) -> Mapping[str, Any]:
        function = {"name": self._begun.name, "arguments": "".join(self.arguments)}
        return {"id": self._begun.id, "type": "function", "function": function}


def _read(reader: Reader, delta: Delta) -> list[Part]:
    """The parts of a delta, and at the text's end what was held back."""
    parts = list(reader.feed(delta.text))
    return parts if delta.finish_reason is None else [*parts, *reader.finish()]


def _written(writer: Writer, tools: ToolReading | None, part: Part, index: int, told: Told) -> bytes:
    if isinstance(part, Said):
        return writer.content(part.text, index=index, logprobs=told)
    assert tools is not None, f"{part} was read where no calls are looked for"
    return tools.write(part, index, told)


def _text(part: Part) -> str:
    return part.name if isinstance(part, CallBegun) else part.text


def _reason(reader: Reader, reason: str) -> str:
    """An answer that ends with calls waits for their outputs."""
    return "tool_calls" if reader.calls and reason == "stop" else reason
