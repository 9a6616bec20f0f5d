"""What a compressor may use of its surroundings: a token count, an embedder, a scorer, a clock. Callables only, so that
this room knows neither an engine nor torch.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .result import Span

Count = Callable[[str], int]
"""Tokens of a text in the backend's tokenizer; special-token look-alikes count as plain text."""

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts to vectors `[texts, dim]` float32; need not be normalized."""


class Score(Protocol):
    """What a language model thinks of texts, token by token."""

    def __call__(
        self,
        texts: Sequence[str],
        *,
        wanted: Sequence[Sequence[Span]] | None = None,
        given: str = "",
        remaining: Callable[[], float],
    ) -> Iterator[tuple[int, NDArray[np.float64], int]]:
        """Windows of the texts' tokens, each computed when it is asked for; those of one text in their order.

        A window is (number of the text, `[tokens, 3]`, end): of each token its first character, the one behind its
        last, and the natural logarithm of its probability, given all before it and, before the text, `given`. What
        nothing was before has no score (NaN), but is there. The text is judged before `end`, wholly when that is its
        length. Ends early when the next window would not be ready within `remaining()` seconds. `wanted` are spans of
        each text, ascending and disjoint: tokens whose last character is in none of them may be left out, and may not
        be read where they are far before all that is wanted.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a model answered. `whole`: it ended by itself and was not cut off."""

    text: str
    whole: bool


class Generate(Protocol):
    """Asks a model of a named backend and waits for the answer. Nothing is done to such a request by any policy."""

    def __call__(
        self, messages: Sequence[Mapping[str, str]], *, backend: str, model: str, max_tokens: int, timeout_s: float
    ) -> Generated:
        """Greedy, at most `max_tokens`. TimeoutError after `timeout_s` seconds; raises what keeps it from an answer."""
        ...


class Memory(Protocol):
    """Keeps texts by key, for one tenant, as long as it likes."""

    def get(self, key: str) -> str | None: ...

    def put(self, key: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionContext:
    """Handed to `Compressor.compress` for one request.

    `question` is what the user asks now. `deadline` is a reading of `clock` (seconds, monotonic) after which nothing
    more may be begun; None for no limit. `only` names the segments that may be touched (a plan's choice); None for all.
    `embed`, `score` and `generate` may block; they are called from the thread that compresses. `memory` keeps what was
    expensive to make.
    """

    count: Count
    question: str = ""
    embed: Embed | None = None
    score: Score | None = None
    generate: Generate | None = None
    memory: Memory | None = None
    deadline: float | None = None
    only: frozenset[int] | None = None
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Seconds until the deadline, never negative; infinite without one."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - self.clock())

    def expired(self) -> bool:
        return self.remaining() <= 0.0
