"""Log-probabilities of texts under a model, in windows whose KV goes on into the next one. Knows requests, no engine.

What is carried is a text's first tokens and its last ones, as in Xiao et al. (2023), "Efficient Streaming Language
Models with Attention Sinks": without the first ones, on which models lay their idle attention, the rest says little.
"""

import math
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
_FIRST = 128  # rows of the first call, by which the speed is learned
_NEAR = 64  # tokens right before one that is wanted are read for it; farther ones of which none is wanted are not


Span = tuple[int, int]


class Encoding(NamedTuple):
    """A text's ids and, for each, the characters (start, end) that it stands for."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class Scores(NamedTuple):
    """Of one window of text number `text`: float64 [tokens, 3], of each that is wanted its first character, the one
    behind its last, and the natural log of its probability (NaN where nothing was before it). All of the text before
    `end` is scored.
    """

    text: int
    tokens: NDArray[np.float64]
    end: int


@dataclass(slots=True)
class _Reading:
    """How far one text has been read: `at` tokens, up to `stop` in this window. `wanted` says which tokens are.

    `rows` are the ids of what its newest request ran on, `kv` their keys and values if it goes on.
    """

    number: int
    text: str
    encoding: Encoding
    wanted: NDArray[np.bool_]
    at: int = 0
    stop: int = 0
    rows: tuple[int, ...] = ()
    kv: KVBlock | None = None

    def left(self) -> int:
        return len(self.encoding.ids) - self.at


class TextScorer:
    """Scores texts by running windows through `run`, several in one call so that they share the engine's steps.

    A window has `rows` new tokens, after at most `carried` ones of the window before; a call runs about `rows` tokens.
    `room` is how many tokens a request may have. Equal texts give equal scores, whatever is scored beside them and
    however little time there is, within the engine's own rounding.
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

    def __call__(
        self,
        texts: Sequence[str],
        *,
        wanted: Sequence[Sequence[Span]] | None = None,
        given: str = "",
        remaining: Callable[[], float],
    ) -> Iterator[Scores]:
        """Windows in the order of the texts, each computed when it is asked for. `given` is read before each text.

        `wanted` are spans of each text, ascending and disjoint, whose tokens are scored; None for all. Ends early when
        the next window would take longer than `remaining()` seconds, judged by those before.
        """
        prefix = tuple(self._encode(given).ids[-self._given :]) if given else ()
        open_ = [self._opened(n, text, None if wanted is None else wanted[n]) for n, text in enumerate(texts)]
        for one in open_:
            if one.text and not one.left():
                yield Scores(one.number, np.zeros((0, 3)), len(one.text))
        per_token = 0.0
        while open_ := [one for one in open_ if one.left()]:
            left = remaining()
            # Where time is short and nothing is known of the speed, a small piece of a window tells it.
            most = _FIRST if not per_token and left < math.inf else self._rows
            chosen = self._next(open_, most)
            fresh = sum(self._size(one, most) for one in chosen)
            if left <= fresh * per_token:
                return
            began = self._clock()
            requests = [self._request(one, prefix, most) for one in chosen]
            results = self._run(requests)
            per_token = (self._clock() - began) / fresh
            for one, request, result in zip(chosen, requests, results, strict=True):
                yield self._taken(one, request, result, most)

    def _opened(self, number: int, text: str, spans: Sequence[Span] | None) -> _Reading:
        """What is to be read of a text: tokens that are wanted, and those shortly before them."""
        encoding = self._encode(text)
        size = len(encoding.ids)
        if spans is None:
            return _Reading(number, text, encoding, np.ones(size, dtype=bool))
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        wanted = _within(offsets, spans)
        places = np.append(np.flatnonzero(wanted), size + _NEAR)
        here = np.arange(size)
        read = np.flatnonzero(places[np.searchsorted(places, here)] - here < _NEAR)
        ids = np.asarray(encoding.ids, dtype=np.int64)[read].tolist()
        return _Reading(number, text, Encoding(ids, offsets[read].tolist()), wanted[read])

    def _size(self, one: _Reading, most: int) -> int:
        return min(one.left(), (one.stop - one.at) or self._rows, most)

    def _next(self, open_: Sequence[_Reading], most: int) -> list[_Reading]:
        """The texts whose next windows, or pieces of up to `most` tokens of these, fill a call."""
        chosen: list[_Reading] = []
        total = 0
        for one in open_:
            total += self._size(one, most)
            if chosen and total > most:
                break
            chosen.append(one)
        return chosen

    def _request(self, one: _Reading, prefix: tuple[int, ...], most: int) -> GenerationRequest:
        """The next window, or the next piece of one, behind all of the piece before.

        Of what is carried the last row runs again, for it tells of the first new token.
        """
        size = self._size(one, most)
        fresh = tuple(one.encoding.ids[one.at : one.at + size])
        reuse: Reuse | None = None
        before = prefix
        if one.kv is not None:
            sinks = min(len(prefix) + SINKS, len(one.rows) - 1)
            rest = len(one.rows) - sinks
            tail = rest if one.at < one.stop else min(self._carried, rest)
            before = one.rows[:sinks] + one.rows[len(one.rows) - tail :]
            first = len(one.rows) - tail
            spans = [ReusedSpan(0, one.kv.part(0, sinks), 0), ReusedSpan(sinks, one.kv.part(first, -1), first)]
            reuse = Reuse(spans=tuple(span for span in spans if span.kv.tokens))
        wanted = np.flatnonzero(one.wanted[one.at : one.at + size]) + len(before)
        return GenerationRequest(
            ids=(*before, *fresh),
            sampling=SamplingParams(max_tokens=0),
            reuse=reuse,
            prompt_logprobs=True,
            scored=wanted.tolist(),
            keep_kv=one.left() > len(fresh),
            prefix_cache=False,
            request_id="score",
        )

    def _taken(self, one: _Reading, request: GenerationRequest, result: Result, most: int) -> Scores:
        size = self._size(one, most)
        assert result.prompt_logprobs is not None, "the engine was asked for prompt_logprobs"
        told = torch.cat([torch.full((1,), torch.nan), result.prompt_logprobs])[-size:].double().numpy()
        offsets = np.asarray(one.encoding.offsets[one.at : one.at + size], dtype=np.float64).reshape(-1, 2)
        wanted = one.wanted[one.at : one.at + size]
        if one.at == one.stop:
            one.stop = min(one.at + self._rows, len(one.encoding.ids))
        one.at += size
        one.rows, one.kv = tuple(request.ids), result.kv
        end = one.encoding.offsets[one.at][0] if one.left() else len(one.text)
        return Scores(one.number, np.column_stack((offsets, told))[wanted], end)


def _within(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens [tokens, (start, end)] have their last character in one of the spans, ascending and disjoint."""
    if not spans:
        return np.zeros(len(offsets), dtype=bool)
    starts, ends = np.array(spans, dtype=np.int64).T
    last = np.maximum(offsets[:, 0], offsets[:, 1] - 1)
    index = np.searchsorted(starts, last, side="right") - 1
    return (index >= 0) & (last < ends[index])
