"""What one backend and the compressors in front of it took lately: costs that keep up with the machine.

Starts from the defaults (or what the backend measured of itself) and replaces a line once there is enough to fit one.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .costs import CostModel, Line, Measurement

_KEPT = 48  # of each kind of work: a fit looks at all pairs of them
_ENOUGH = 5  # one run may have loaded a model first, and then half of all pairs of four would be wrong
_SPREAD = 2.0  # the largest prompt seen by the smallest; below that a wait before the first token looks like prefill
_ENOUGH_PROMPTS = 8
_FORGOTTEN_S = 900.0  # a method that once looked too dear would never be tried, and so never measured, again
_LEARNED = 0.1  # the least weight of one step in what a method leaves
_BELIEVED = 2  # steps that the first guess counts as: a method that takes half of what it promises soon shows it


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float
    measured: Measurement


class Ledger:
    """Of one backend. `base` are the costs before anything was measured. Safe to use from several threads.

    `clock` gives monotonic seconds.
    """

    def __init__(self, base: CostModel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._clock = clock
        self._seen: defaultdict[str, deque[_Seen]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._missed: dict[str, tuple[float, int, float]] = {}  # how often, and when it was last seen
        self._rates: dict[str, tuple[float, int, float]] = {}  # likewise, of methods without a target
        self._told: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._stale = True
        self._costs = base
        self._fitted_at = 0.0
        self._lock = threading.Lock()

    def ran(self, what: str, *, tokens: int, ms: float, predicted_ms: float | None = None) -> None:
        """A compressor, "retrieve", or the way to the first token ("prefill", of the tokens that no cache had)."""
        if tokens <= 0 or ms <= 0:
            return
        with self._lock:
            self._seen[what].append(_Seen(self._clock(), Measurement(what, tokens, ms)))
            self._stale = True
            if predicted_ms is not None:
                predicted, real = self._told[what]
                self._told[what] = (predicted + predicted_ms, real + ms)

    def left(self, method: str, *, expected: float | None, real: float) -> None:
        """A compressor left the share `real` of its tokens where `expected` was predicted before any learning; None for
        one without a target, of which the share itself is learned.
        """
        with self._lock:
            if expected is None:
                self._learn(self._rates, method, real, first=self._base.expected_rate(method))
            else:
                missed = (real - expected) / (1.0 - expected) if expected < 1.0 else 0.0
                self._learn(self._missed, method, missed, first=0.0)
            self._stale = True

    def _learn(self, known: dict[str, tuple[float, int, float]], method: str, seen: float, *, first: float) -> None:
        before, times, _ = known.get(method, (first, 0, 0.0))
        weight = max(_LEARNED, 1.0 / (_BELIEVED + times + 1))
        now = before + weight * (min(1.0, max(0.0, seen)) - before)
        known[method] = now, times + 1, self._clock()

    def costs(self) -> CostModel:
        """The present costs; equal while nothing new was seen or forgotten."""
        now = self._clock()
        with self._lock:
            if self._stale or now - self._fitted_at > _FORGOTTEN_S / 4:
                self._forget(now)
                self._costs, self._stale, self._fitted_at = self._fitted(), False, now
            return self._costs

    def accuracy(self) -> Mapping[str, tuple[float, float]]:
        """By kind of work the milliseconds that were predicted, and those that it took."""
        with self._lock:
            return dict(self._told)

    def _forget(self, now: float) -> None:
        for seen in self._seen.values():
            while seen and now - seen[0].at > _FORGOTTEN_S:
                seen.popleft()
        for known in (self._missed, self._rates):
            for what in [what for what, one in known.items() if now - one[2] > _FORGOTTEN_S]:
                del known[what]

    def _fitted(self) -> CostModel:
        enough = [one.measured for what, seen in self._seen.items() if _says_enough(what, seen) for one in seen]
        return replace(
            self._base.calibrate(enough),
            missed={what: missed for what, (missed, _, _) in self._missed.items()},
            rates={**self._base.rates, **{what: rate for what, (rate, _, _) in self._rates.items()}},
        )


def _says_enough(what: str, seen: deque[_Seen]) -> bool:
    if what != "prefill":
        return len(seen) >= _ENOUGH
    sizes = [one.measured.tokens for one in seen]
    return len(sizes) >= _ENOUGH_PROMPTS and max(sizes) >= _SPREAD * min(sizes)


def measured_prefill(costs: CostModel, line: Line | None) -> CostModel:
    """The costs with the prefill that a backend measured of itself, where it did."""
    return costs if line is None else replace(costs, prefill=line)
