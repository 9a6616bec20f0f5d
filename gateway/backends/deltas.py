"""From the engine's deltas to frames: shared by every backend that makes text itself."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...backend_engine.types import Delta
from ...prompt import Usage
from ..wire import Choice
from .base import Answer, Frame
from .choices import Describe, Piece


class Writer(Protocol):
    """The JSON of one completion, whole or as chunks. What is told of tokens comes as objects, as chats have them."""

    def begin(self, index: int = 0, *, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes:
        """The first chunk of a choice, with what is told of its prompt; empty where none is needed."""
        ...

    def content(self, text: str, *, index: int = 0, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes: ...

    def finish(self, reason: str, *, index: int = 0) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Choice], *, usage: Usage) -> bytes: ...


async def as_frames(
    pieces: AsyncGenerator[Piece, None],
    *,
    writer: Writer,
    usage: Callable[[], Usage],
    include_usage: bool,
    choices: int = 1,
    describe: Describe | None = None,
) -> AsyncGenerator[Frame, None]:
    """For each choice beginning, contents and finish, and the usage frame where it was asked for, last.

    `usage` is read after the last delta. `describe` where log-probabilities were asked for. Closing the frames closes
    the deltas.
    """
    began: set[int] = set()
    ended: set[int] = set()
    async with aclosing(pieces):
        async for index, delta in pieces:
            if index not in began:
                began.add(index)
                told = None if describe is None else describe(delta.prompt_logprobs)
                yield Frame(data=writer.begin(index, logprobs=told))
            if delta.text or delta.logprobs:
                told = None if describe is None else describe(delta.logprobs)
                yield Frame(data=writer.content(delta.text, index=index, logprobs=told), content=True)
            if delta.finish_reason is not None:
                ended.add(index)
                yield Frame(data=writer.finish(delta.finish_reason, index=index))
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
) -> Answer:
    """The same as one body."""
    gathered = [_Gathered() for _ in range(choices)]
    async with aclosing(pieces):
        async for index, delta in pieces:
            gathered[index].add(delta, describe)
    total = usage()
    listed = [
        Choice(
            text="".join(one.texts),
            reason=one.reason,
            logprobs=None if describe is None else one.logprobs,
            prompt_logprobs=None if describe is None else one.prompt_logprobs,
        )
        for one in gathered
    ]
    return Answer(body=writer.whole(listed, usage=total), usage=total)


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reason: str = "stop"

    def add(self, delta: Delta, describe: Describe | None) -> None:
        self.texts.append(delta.text)
        self.reason = delta.finish_reason or self.reason
        if describe is not None:
            self.logprobs += describe(delta.logprobs)
            self.prompt_logprobs += describe(delta.prompt_logprobs)
