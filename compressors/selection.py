"""The choice among judged units: the best that fit the budget beside what must stay, and no fewer than the floor."""

import itertools
import math
from collections.abc import Sequence

from .base import LossyOptions
from .budget import most_that_fit
from .context import CompressionContext
from .relevance import Judged
from .units import Choice, Units

# After the prefix that fits, so many of the next best are tried in the room that is left.
_FILLERS = 12
# While less than this share of the target is met, what did not fit is left out and the rest ordered anew: so often at
# most. Nearer than that, whole sentences rarely come.
_NEAR, _SEARCHES = 0.9, 8


class Selection:
    """Of the units of one message. `redundancy` as in `Extractive`."""

    def __init__(
        self, units: Units, judged: Judged, options: LossyOptions, context: CompressionContext, *, redundancy: float
    ) -> None:
        self._units, self._judged, self._options, self._context = units, judged, options, context
        self._redundancy = redundancy
        self._target = options.target(units.tokens)
        self._forced = _forced(units, judged)

    @property
    def least(self) -> list[bool]:
        """What stays whatever the budget, [units]."""
        return self._units.with_headings(self._forced)

    def within_target(self) -> list[bool]:
        """What must stay and the best that fit the target beside it, [units]. While that is much less than the target,
        what did not fit is left out and the next best are ordered anew.
        """
        units, target = self._units, self._target
        chosen: list[int] = []
        keep, held = self._forced, 0
        spent = self._estimate_of_forced()
        free = units.free(keep)
        for _ in range(_SEARCHES):
            order = self._best_first(free, keep, room=1.3 * target - spent)
            fitted, tried = self._fitted(chosen, order, held=held)
            if held and self._context.expired():  # what the search last guessed may be too much
                break
            chosen = fitted
            keep = units.with_headings(self._forced, chosen)
            if self._context.expired():
                break
            held = spent = units.size(keep)
            room = target - held
            if held >= _NEAR * target or room < 1:
                break
            free = [i for i in free if not keep[i] and i != tried and units.fits(i, room)]
            if not free:
                break
        return keep

    def with_floor(self, choice: Choice) -> Choice:
        """With the next best units while fewer tokens stay than the floor says, within a ceiling that is above it."""
        units, keep = self._units, choice.keep
        floor, ceiling = self._options.floor(units.tokens), self._options.ceiling_tokens
        most = float(units.tokens if ceiling is None or ceiling < floor else ceiling)
        size = units.size(keep)
        free = units.free(keep) if size < floor else []
        if not free:
            return choice
        for _ in range(_SEARCHES):
            free = [i for i in free if not keep[i] and units.fits(i, most - size)]
            if size >= floor or not free or self._context.expired():
                break
            best = self._best_first(free, keep, room=0.0)[0]
            wider = units.with_headings(keep, [best])
            fresh = units.size(wider)
            if fresh <= most:
                keep, size = wider, fresh
            free.remove(best)
        least = f"at least {math.ceil(floor)} of {units.tokens} tokens were to stay"
        said = f"{least}, whole sentences make it {size}" if size >= floor else f"{least}, {size} do"
        return Choice(keep, "; ".join(filter(None, (choice.note, said))))

    def _best_first(self, free: Sequence[int], keep: Sequence[bool], *, room: float) -> list[int]:
        """`free`, the best beside what is kept first, as far as the room goes by estimates."""

        def enough(i: int) -> bool:
            nonlocal room
            room -= self._units.estimate(i)
            return room < 0 or self._context.expired()

        return self._judged.best_first(free, keep, redundancy=self._redundancy, enough=enough)

    def _fitted(self, chosen: list[int], order: list[int], *, held: int) -> tuple[list[int], int | None]:
        """`chosen`, the longest prefix of `order` that fits the target beside these and the forced units, and later
        ones that still fit; and the first that did not. `held` tokens there are without `order`.
        """
        units, target = self._units, self._target

        def size(more: Sequence[int]) -> int:
            return units.size(units.with_headings(self._forced, [*chosen, *more]))

        room = target - (held or self._estimate_of_forced())
        fit = most_that_fit(
            len(order),
            size_of=lambda k: size(order[:k]) - held,
            target=target - held,
            guess=sum(1 for spent in itertools.accumulate(map(units.estimate, order)) if spent <= room),
            expired=self._context.expired,
        )
        more = order[:fit]
        for i in order[fit + 1 : fit + 1 + _FILLERS]:
            if self._context.expired():
                break
            room = target - size(more)
            if units.estimate(i) <= room and size([*more, i]) <= target:
                more = [*more, i]
        return [*chosen, *more], order[fit] if fit < len(order) else None

    def _estimate_of_forced(self) -> float:
        return sum(self._units.estimate(i) for i, must in enumerate(self._forced) if must)


def _forced(units: Units, judged: Judged) -> list[bool]:
    """Units that stay whatever the budget: protected text, what was not judged, and the best of each segment."""
    forced = [must or i >= judged.seen for i, must in enumerate(units.must)]
    for numbers in units.segments:
        if numbers and not any(forced[i] for i in numbers):
            best = max(numbers, key=lambda i: (i not in units.heads, judged.relevance[i], -i))
            forced[best] = True
    return forced
