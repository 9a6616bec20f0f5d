"""What stands under which heading or label, in texts of any length; and what it costs that these stay with it."""

import math
from collections.abc import Sequence

TURN = 7
"""The level of a speaker's name, or another label, below the six of headings."""


class Outline:
    """The headings that are open while a text's units are seen in order."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}

    def above(self, unit: int, *, level: int) -> int | None:
        """The heading or label right above the unit with this number, which is one itself where `level` is not 0.

        A turn of speech ends with the next label or heading, not with its paragraph: without its own label what comes
        later would seem to be said by whoever is named before.
        """
        if level:
            self._open = {other: at for other, at in self._open.items() if other < level}
        above = self._open[max(self._open)] if self._open else None
        if level:
            self._open[level] = unit
        return above


def worth_with_heading(worth: Sequence[float], size: int) -> list[float]:
    """What units under one heading are worth where the first of them that stays brings the heading along, which is as
    long as `size` units: the best of them share its cost, as many as make the most of it.
    """
    order = sorted(range(len(worth)), key=lambda i: -worth[i])
    best, most, total = 0, -math.inf, 0.0
    for count, i in enumerate(order, 1):
        total += worth[i]
        if total / (size + count) > most:
            best, most = count, total / (size + count)
    shared = list(worth)
    for i in order[:best]:
        shared[i] = most
    return shared
