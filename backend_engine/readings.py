"""What an engine tells of itself for monitoring: how its requests' times are distributed, beside its counters.

Written by the engine's thread for every token, so it must be cheap; read from any thread, so it only ever grows.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from .types import FinishReason

if TYPE_CHECKING:
    from .sequence import Sequence
    from .stats import EngineStats

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Distribution:
    """A histogram of seconds with upper `bounds`."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> tuple[int, ...]:
        """How many were at most each bound, and how many there are."""
        return tuple(accumulate(tuple(self._counts)))


@dataclass(slots=True)
class Latencies:
    """Times of all requests since the start, in seconds, and how they ended."""

    first_token: Distribution = field(default_factory=lambda: Distribution(_LONG))
    inter_token: Distribution = field(default_factory=lambda: Distribution(_SHORT))
    queue: Distribution = field(default_factory=lambda: Distribution(_LONG))
    whole: Distribution = field(default_factory=lambda: Distribution(_LONG))
    ended: Counter[FinishReason] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of requests whose prompt has been computed

    def token(self, sequence: "Sequence") -> None:
        """A request got a token."""
        now = time.monotonic()
        if sequence.last_token is not None:
            self.inter_token.add(now - sequence.last_token)
        else:
            self._prefilled(sequence)
            self.first_token.add(now - sequence.submitted)
        sequence.last_token = now

    def end(self, sequence: "Sequence", reason: FinishReason) -> None:
        """A request has ended, and not by a failure."""
        self.ended[reason] += 1
        if reason != "abort":
            if not sequence.generates:
                self._prefilled(sequence)
            self.whole.add(time.monotonic() - sequence.submitted)

    def _prefilled(self, sequence: "Sequence") -> None:
        self.prompt_tokens += sequence.prompt
        if sequence.admitted is not None:
            self.queue.add(sequence.admitted - sequence.submitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """`kv_usage` is the share of the pool that requests hold, 0 to 1; what only the prefix tree holds is free."""

    stats: "EngineStats"
    latencies: Latencies
    kv_usage: float
