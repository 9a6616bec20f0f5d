"""Several choices of one request: their seeds, their deltas as one stream, what is told of their tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from ...backend_engine.types import Delta, TokenLogprobs
from ..wire import LOWEST_LOGPROB

Piece = tuple[int, Delta]
"""A delta and the choice that it belongs to."""


def choice_seed(seed: int | None, index: int) -> int | None:
    """Each choice has a seed of its own, which the request's seed determines. The first has the request's."""
    if seed is None or index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


async def merged(choices: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Piece, None]:
    """The deltas of all choices as they come. What one raises ends them all; closing closes them all."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, deltas, arrived)) for index, deltas in enumerate(choices)]
    try:
        left = len(pumps)
        while left:
            index, delta = await arrived.get()
            if delta is not None:
                yield index, delta
            else:
                left -= 1
                await pumps[index]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, deltas: AsyncGenerator[Delta, None], arrived: "asyncio.Queue[tuple[int, Delta | None]]"
) -> None:
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                arrived.put_nowait((index, delta))
    finally:
        arrived.put_nowait((index, None))


Describe = Callable[[Sequence[TokenLogprobs]], Sequence[Mapping[str, Any]]]
"""From what the engine tells of tokens to the API's objects."""


def described(token_bytes: Mapping[int, bytes] | Any) -> Describe:
    """With the tokens' texts and bytes. A token that is no whole characters shows its bytes as `\\xe2`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes[token]
        text = raw.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}

    def describe(told: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in told
        ]

    return describe
