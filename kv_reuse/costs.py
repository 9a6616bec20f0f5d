"""What work costs on this machine: lines through what was measured, kept up to date by what runs. Host only."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

_RECENT = 64
_PINNED_WEIGHT = 0.2  # what was measured at the start gives the shape where newer measurements leave it open
_HUBER = 0.25  # a relative error beyond this counts linearly: one stalled step moves little
_ROUNDS = 3
_REFITTED = 8  # observations until costs are fitted again: that takes some milliseconds

Vector = NDArray[np.float64]


class Fit:
    """Seconds as a sum of named quantities times their costs, none of which is negative.

    Fitted to what was pinned and to the last `_RECENT` observations by least squares of the relative error, reweighted
    as Huber proposes (Robust Estimation of a Location Parameter, 1964). Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._pinned: list[tuple[Mapping[str, float], float]] = []
        self._recent: deque[tuple[Mapping[str, float], float]] = deque(maxlen=_RECENT)
        self._costs: dict[str, float] = {}
        self._unfitted = 0
        self._lock = threading.Lock()

    def pin(self, quantities: Mapping[str, float], seconds: float) -> None:
        """Remember a measurement for ever, with a low weight."""
        with self._lock:
            self._pinned.append((dict(quantities), seconds))
            self._unfitted = _REFITTED

    def add(self, quantities: Mapping[str, float], seconds: float) -> None:
        """Learn from something that ran. What took no time says nothing."""
        if seconds > 0:
            with self._lock:
                self._recent.append((dict(quantities), seconds))
                self._unfitted += _REFITTED if len(self._recent) < _REFITTED else 1

    def seconds(self, quantities: Mapping[str, float]) -> float | None:
        """The prediction; None while nothing was measured. A quantity that was never seen costs nothing."""
        costs = self.costs()
        return sum(costs.get(name, 0.0) * value for name, value in quantities.items()) if costs else None

    def costs(self) -> Mapping[str, float]:
        """Seconds for one of each quantity; empty while nothing was measured."""
        with self._lock:
            if self._unfitted >= _REFITTED:
                self._costs, self._unfitted = self._fitted(), 0
            return self._costs

    def _fitted(self) -> dict[str, float]:
        seen = [*self._pinned, *self._recent]
        names = sorted(set(chain.from_iterable(quantities for quantities, _ in seen)))
        if not names:
            return {}
        matrix = np.array([[quantities.get(name, 0.0) for name in names] for quantities, _ in seen])
        target = np.array([seconds for _, seconds in seen])
        matrix /= target[:, None]
        base = np.array([_PINNED_WEIGHT] * len(self._pinned) + [1.0] * len(self._recent))
        weights = base
        solution = np.zeros(len(names))
        for _ in range(_ROUNDS):
            solution = _non_negative(matrix * np.sqrt(weights)[:, None], np.sqrt(weights))
            errors = np.abs(matrix @ solution - 1.0)
            weights = base * np.minimum(1.0, _HUBER / np.maximum(errors, 1e-12))
        return dict(zip(names, solution.tolist(), strict=True))


def _non_negative(matrix: Vector, target: Vector) -> Vector:
    """The x >= 0 with the least |matrix x - target|: the best of the plain solutions over all sets of columns.

    There are five columns at most, one for each kind of work.
    """
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for columns in _subsets(range(matrix.shape[1])):
        chosen = matrix[:, list(columns)]
        scale = np.maximum(np.linalg.norm(chosen, axis=0), 1e-300)
        found = np.linalg.lstsq(chosen / scale, target, rcond=1e-9)[0] / scale
        error = chosen @ found - target
        if (found >= 0).all() and float(error @ error) < least:
            best, least = np.zeros(matrix.shape[1]), float(error @ error)
            best[list(columns)] = found
    return best


def _subsets(columns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(columns) + 1):
        yield from combinations(columns, count)
