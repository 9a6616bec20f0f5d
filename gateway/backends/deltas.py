"""From the engine's deltas to chat frames: shared by every backend that makes text itself."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...backend_engine.types import Delta
from ...prompt import Usage
from ..wire import ChatWriter, Choice
from .base import Answer, Frame
from .choices import Describe, Piece


async def as_frames(
    pieces: AsyncGenerator[Piece, None],
    *,
    writer: ChatWriter,
    usage: Callable[[], Usage],
    include_usage: bool,
    choices: int = 1,
    describe: Describe | None = None,
) -> AsyncGenerator[Frame, None]:
    """For each choice role, contents and finish, and the usage frame where it was asked for, last.

    `usage` is read after the last delta. `describe` where log-probabilities were asked for. Closing the frames closes
    the deltas.
    """
    began: set[int] = set()
    ended: set[int] = set()
    async with aclosing(pieces):
        async for index, delta in pieces:
            if index not in began:
                began.add(index)
                yield Frame(data=writer.role(index))
            if delta.text or delta.logprobs:
                told = None if describe is None else describe(delta.logprobs)
                yield Frame(data=writer.content(delta.text, index=index, logprobs=told), content=True)
            if delta.finish_reason is not None:
                ended.add(index)
                yield Frame(data=writer.finish(delta.finish_reason, index=index))
    for index in range(choices):
        if index not in began:
            yield Frame(data=writer.role(index))
        if index not in ended:
            yield Frame(data=writer.finish("stop", index=index))
    total = usage()
    yield Frame(data=writer.usage(total) if include_usage else b"", usage=total)


async def as_answer(
    pieces: AsyncGenerator[Piece, None],
    *,
    writer: ChatWriter,
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
        Choice(text="".join(one.texts), reason=one.reason, logprobs=None if describe is None else one.logprobs)
        for one in gathered
    ]
    return Answer(body=writer.whole(listed, usage=total), usage=total)


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str = "stop"

    def add(self, delta: Delta, describe: Describe | None) -> None:
        self.texts.append(delta.text)
        self.reason = delta.finish_reason or self.reason
        if describe is not None:
            self.logprobs += describe(delta.logprobs)
