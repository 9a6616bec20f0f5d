"""Log-probabilities of texts under a model, in windows whose KV goes on into the next one. Knows requests, no engine.

What is carried is a text's first tokens and its last ones, as in Xiao et al. (2023), "Efficient Streaming Language
Models with Attention Sinks": without the first ones, on which models lay their idle attention, the rest says little.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .params import SamplingParams
from .types import GenerationRequest, KVBlock, Result, Reuse, ReusedSpan

SINKS = 4
_FIRST = 128  # rows of a text's first window, by which the speed is learned


class Encoding(NamedTuple):
    """A text's ids and, for each, the characters (start, end) that it stands for."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class Scores(NamedTuple):
    """Of one window of text number `text`: float64 [tokens, 3], of each its first character, the one behind its last,
    and the natural log of its probability (NaN where nothing was before it). All of the text before `end` is scored.
    """

    text: int
    tokens: NDArray[np.float64]
    end: int


@dataclass(slots=True)
class _Reading:
    """How far one text has been read: `at` tokens. `rows` are the ids of its newest window, `kv` their keys and values
    if it goes on.
    """

    number: int
    text: str
    encoding: Encoding
    at: int = 0
    rows: tuple[int, ...] = ()
    kv: KVBlock | None = None

    def left(self) -> int:
        return len(self.encoding.ids) - self.at


class TextScorer:
    """Scores texts by running windows through `run`, several in one call so that they share the engine's steps.

    A window has `rows` new tokens, after at most `carried` ones of the window before; a call runs about `rows` tokens.
    `room` is how many tokens a request may have. Equal texts give equal scores, whatever is scored beside them, within
    the engine's own rounding.
    """

    def __init__(
        self,
        run: Callable[[Sequence[GenerationRequest]], Sequence[Result]],
        encode: Callable[[str], Encoding],
        *,
        rows: int,
        room: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._encode, self._clock = run, encode, clock
        self._given = room // 4
        self._rows = max(1, min(rows, (room - self._given - SINKS) // 2))
        self._carried = max(1, self._rows // 2)

    def __call__(self, texts: Sequence[str], *, given: str = "", remaining: Callable[[], float]) -> Iterator[Scores]:
        """Windows in the order of the texts, each computed when it is asked for. `given` is read before each text.

        Ends early when the next window would take longer than `remaining()` seconds, judged by those before.
        """
        prefix = tuple(self._encode(given).ids[-self._given :]) if given else ()
        open_ = [_Reading(n, text, self._encode(text)) for n, text in enumerate(texts)]
        per_token = 0.0
        while open_ := [one for one in open_ if one.left()]:
            chosen = self._next(open_)
            fresh = sum(self._size(one) for one in chosen)
            if remaining() <= fresh * per_token:
                return
            began = self._clock()
            requests = [self._request(one, prefix) for one in chosen]
            results = self._run(requests)
            per_token = (self._clock() - began) / fresh
            for one, request, result in zip(chosen, requests, results, strict=True):
                yield self._taken(one, request, result)

    def _size(self, one: _Reading) -> int:
        return min(one.left(), self._rows if one.at else min(_FIRST, self._rows))

    def _next(self, open_: Sequence[_Reading]) -> list[_Reading]:
        """The texts whose next windows fill a call."""
        chosen: list[_Reading] = []
        total = 0
        for one in open_:
            total += self._size(one)
            if chosen and total > self._rows:
                break
            chosen.append(one)
        return chosen

    def _request(self, one: _Reading, prefix: tuple[int, ...]) -> GenerationRequest:
        """The next window. Of what is carried the last row runs again, for it tells of the first new token."""
        fresh = tuple(one.encoding.ids[one.at : one.at + self._size(one)])
        reuse: Reuse | None = None
        before = prefix
        if one.kv is not None:
            sinks = min(len(prefix) + SINKS, len(one.rows) - 1)
            tail = min(self._carried, len(one.rows) - sinks)
            before = one.rows[:sinks] + one.rows[len(one.rows) - tail :]
            first = len(one.rows) - tail
            spans = [ReusedSpan(0, _cut(one.kv, 0, sinks), 0), ReusedSpan(sinks, _cut(one.kv, first, -1), first)]
            reuse = Reuse(spans=tuple(span for span in spans if span.kv.tokens))
        return GenerationRequest(
            ids=(*before, *fresh),
            sampling=SamplingParams(max_tokens=0),
            reuse=reuse,
            prompt_logprobs=True,
            keep_kv=one.left() > len(fresh),
            prefix_cache=False,
            request_id="score",
        )

    def _taken(self, one: _Reading, request: GenerationRequest, result: Result) -> Scores:
        size = self._size(one)
        assert result.prompt_logprobs is not None, "the engine was asked for prompt_logprobs"
        told = torch.cat([torch.full((1,), torch.nan), result.prompt_logprobs])[-size:].double().numpy()
        offsets = np.asarray(one.encoding.offsets[one.at : one.at + size], dtype=np.float64).reshape(-1, 2)
        one.at += size
        one.rows, one.kv = tuple(request.ids), result.kv
        end = one.encoding.offsets[one.at][0] if one.left() else len(one.text)
        return Scores(one.number, np.column_stack((offsets, told)), end)


def _cut(kv: KVBlock, start: int, stop: int) -> KVBlock:
    return KVBlock(kv.k[:, start:stop], kv.v[:, start:stop])
