"""A request over its backend and the backend's fallbacks, each asked once at most, while nothing has been sent."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from ..prompt import PromptsluiceError
from .backends.base import ATTEMPTS_HEADER, Answer, Asked, Backend, Frame, Stream
from .edge import log
from .house import Sluice
from .stream import FIRST_FRAME_S, abandon, next_frame

# Of these the fault lies with the one who was asked: somebody else may do better. A request that is wrong stays wrong.
_OTHERS_MAY = frozenset({408, 429, 500, 502, 503, 504})

C = TypeVar("C", bound=Asked)
Ask = Callable[[Backend, C], Awaitable[Answer | Stream]]
Able = Callable[[Backend], bool]


def anyone(backend: Backend) -> bool:
    """Chats and texts can be asked of all backends."""
    return True


async def complete(sluice: Sluice, call: C, *, backend: str, ask: Ask[C], able: Able = anyone) -> Answer | Stream:
    """The first answer of the chain that stands; else the last one's error. `call.report.backend` is who gave it.

    `ask` is how a backend is asked for it; fallbacks that are not `able` to answer are passed over.
    """
    first, *others = _chain(sluice, call, backend)
    chain, asked = [first, *(one for one in others if able(sluice.backends[one[0]]))], 0
    for (name, model), following in zip(chain, [*chain[1:], None], strict=True):
        call.report.backend = name
        try:
            began = time.perf_counter()
            reply = await ask(sluice.backends[name], call if call.model == model else replace(call, model=model))
            if isinstance(reply, Stream) and reply.asked_at is None:
                reply = replace(reply, asked_at=began)
            if following is not None and isinstance(reply, Stream):
                reply = await opened(reply)
        except PromptsluiceError as error:
            asked += _attempts(error.headers)
            _count(error.headers, asked, chain)
            if following is None or error.status not in _OTHERS_MAY:
                raise
            why = error.message
        else:
            asked += _attempts(reply.headers)
            if following is None or isinstance(reply, Stream) or reply.status not in _OTHERS_MAY:
                if len(chain) == 1:
                    return reply  # which has told already how often it was asked for
                headers = dict(reply.headers)
                _count(headers, asked, chain)
                return replace(reply, headers=headers)
            why = f"status {reply.status}"
        log.warning("request %s goes from %s to %s: %s", call.request_id, name, following[0], why)
        sluice.metrics.fell_back(name, to=following[0])
    raise AssertionError("the last of the chain returns or raises")


def _chain(sluice: Sluice, call: Asked, backend: str) -> list[tuple[str, str]]:
    """Who is asked, with the model's name there."""
    spec = sluice.policy_set.backends.get(backend)
    others = () if spec is None else spec.fallbacks
    return [(backend, call.model), *((other.backend, other.model or call.model) for other in others)]


async def opened(stream: Stream) -> Stream:
    """The stream with its first frame waited for, as long as the status line waits; raises what came instead of it.

    An engine with a full queue, or an upstream that breaks off at once, says so only then.
    """
    first = asyncio.create_task(next_frame(stream.frames))
    try:
        await asyncio.wait({first}, timeout=FIRST_FRAME_S)
        if first.done():
            first.result()
    except BaseException as error:
        await abandon(first, stream.frames)
        if isinstance(error, PromptsluiceError) and ATTEMPTS_HEADER in stream.headers:
            error.headers.setdefault(ATTEMPTS_HEADER, stream.headers[ATTEMPTS_HEADER])
        raise
    frames = _resumed(first, stream.frames)
    await anext(frames)  # closing a generator that has not begun would run none of its lines
    return replace(stream, frames=frames)


async def _resumed(
    first: "asyncio.Task[Frame | None]", frames: AsyncGenerator[Frame, None]
) -> AsyncGenerator[Frame, None]:
    try:
        yield Frame(data=b"")
        item = await first
        while item is not None:
            yield item
            item = await next_frame(frames)
    finally:
        await abandon(first, frames)


def _attempts(headers: Mapping[str, str]) -> int:
    return int(headers.get(ATTEMPTS_HEADER, "1"))


def _count(headers: dict[str, str], asked: int, chain: list[tuple[str, str]]) -> None:
    if len(chain) > 1 or ATTEMPTS_HEADER in headers:
        headers[ATTEMPTS_HEADER] = str(asked)
