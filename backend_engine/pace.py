"""How many prefill rows may run beside decodes, so that running streams do not stall: controlled by measured steps.

A step that also prefills shall take about `stall` times as long as one with the same number of decodes alone. No model
of the machine is assumed: what a step took beside that aim moves the number of rows, and every `_RENEWED` such steps
one without prefills runs, to see what the decodes take by now. Without decodes nobody is stalled, and a step is full.
"""

from collections import deque
from statistics import median_low

_RENEWED = 64
_KEPT = 5
_FASTEST_GROWTH, _FASTEST_FALL = 1.25, 0.5


class Pace:
    """`least` and `most` bound the prefill rows of a step. Without `stall` they are always `most`."""

    def __init__(self, *, stall: float | None, least: int, most: int) -> None:
        self._stall = stall
        self._least = min(least, most)
        self._most = most
        self._rows = float(self._least)
        self._alone: dict[int, deque[float]] = {}  # seconds of the last steps without prefills, by number of decodes
        self._mixed: dict[int, int] = {}  # steps with prefills since the last one without

    def rows(self, decodes: int) -> int:
        """The prefill rows of a step with `decodes`; 0 where these have to be measured alone first."""
        if self._stall is None or decodes == 0:
            return self._most
        return 0 if self.asks(decodes) else int(self._rows)

    def asks(self, decodes: int) -> bool:
        """Whether the next step with `decodes` has to show what they take alone."""
        if self._stall is None or decodes == 0:
            return False
        return len(self._alone.get(decodes, ())) < 2 or self._mixed.get(decodes, 0) >= _RENEWED

    def ran(self, *, decodes: int, rows: int, seconds: float) -> None:
        """Learn from a step of `decodes`, one row each, and `rows` of prefills."""
        if self._stall is None or decodes == 0:
            return
        if rows == 0:
            self._alone.setdefault(decodes, deque(maxlen=_KEPT)).append(seconds)
            self._mixed[decodes] = 0
            return
        self._mixed[decodes] = self._mixed.get(decodes, 0) + 1
        alone = self._alone.get(decodes)
        if alone is None or seconds <= 0:
            return
        change = (self._stall * median_low(alone) / seconds) ** 0.5
        if change < 1 or rows >= 0.75 * int(self._rows):  # a step that was not full says nothing about larger ones
            grown = self._rows * max(_FASTEST_FALL, min(_FASTEST_GROWTH, change))
            self._rows = max(float(self._least), min(float(self._most), grown))
