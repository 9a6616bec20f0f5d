"""From the engine's deltas to chat frames: shared by every backend that makes text itself."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ...backend_engine.types import Delta
from ...prompt import Usage
from ..wire import ChatWriter
from .base import Answer, Frame


async def as_frames(
    deltas: AsyncGenerator[Delta, None], *, writer: ChatWriter, usage: Callable[[], Usage], include_usage: bool
) -> AsyncGenerator[Frame, None]:
    """Role, contents, finish, and the usage frame where it was asked for. `usage` is read after the last delta.

    Closing the frames closes the deltas.
    """
    began = False
    reason = "stop"
    async with aclosing(deltas):
        async for delta in deltas:
            if not began:
                began = True
                yield Frame(data=writer.role())
            if delta.text:
                yield Frame(data=writer.content(delta.text), content=True)
            reason = delta.finish_reason or reason
    if not began:
        yield Frame(data=writer.role())
    yield Frame(data=writer.finish(reason))
    total = usage()
    yield Frame(data=writer.usage(total) if include_usage else b"", usage=total)


async def as_answer(deltas: AsyncGenerator[Delta, None], *, writer: ChatWriter, usage: Callable[[], Usage]) -> Answer:
    """The same as one body."""
    texts: list[str] = []
    reason = "stop"
    async with aclosing(deltas):
        async for delta in deltas:
            texts.append(delta.text)
            reason = delta.finish_reason or reason
    total = usage()
    return Answer(body=writer.whole("".join(texts), reason=reason, usage=total), usage=total)
