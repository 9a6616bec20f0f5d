"""The choice among judged units: the best that fit the budget beside what must stay, and no fewer than the floor."""

import itertools
import math
from collections.abc import Sequence

from .base import LossyOptions
from .budget import most_that_fit
from .context import CompressionContext
from .relevance import Judged
from .result import FAILED_NOTE, LATE_NOTE
from .units import Choice, Units

# After the prefix that fits, so many of the next best are tried in the room that is left.
_FILLERS = 12
# While less than this share of the target is met, what did not fit is left out and the rest ordered anew: so often at
# most. Nearer than that, whole sentences rarely come.
_NEAR, _SEARCHES = 0.9, 8
# When time is up, this far from what was asked is near enough, and so often at most what stays is counted.
_ROUGHLY, _COUNTS = 0.05, 3
_CUT = f"{LATE_NOTE}: the choice was cut short"


class Selection:
    """Of the units of one message. `redundancy` as in `Extractive`."""

    def __init__(
        self, units: Units, judged: Judged, options: LossyOptions, context: CompressionContext, *, redundancy: float
    ) -> None:
        self._units, self._judged, self._context = units, judged, context
        self._redundancy = redundancy
        self._target, self._floor = options.target(units.tokens), options.floor(units.tokens)
        ceiling = options.ceiling_tokens
        self._most = float(units.tokens if ceiling is None or ceiling < self._floor else ceiling)
        self._forced = _forced(units, judged)
        # Seconds: what is chosen in haste is counted about twice here, and once more by who measures what came of it.
        self._reserve = 0.0 if context.deadline is None else 3.0 * units.counting(self._target, context.clock)

    @property
    def least(self) -> list[bool]:
        """What stays whatever the budget, [units]."""
        return self._units.with_headings(self._forced)

    def within_target(self) -> Choice:
        """What must stay and the best that fit the target beside it. While that is much less than the target, what did
        not fit is left out and the next best are ordered anew. Where time ends first, the rest by relevance, and a
        note.
        """
        units, target = self._units, self._target
        chosen: list[int] = []
        keep, held = self._forced, 0
        spent = self._estimate_of_forced()
        free = units.free(keep)
        for _ in range(_SEARCHES):
            order = self._best_first(free, keep, room=1.3 * target - spent)
            fitted, tried = self._fitted(chosen, order, held=held)
            if self._late():
                return self._in_haste(keep, order, free, held=held)
            chosen = fitted
            keep = units.with_headings(self._forced, chosen)
            held = spent = units.size(keep)
            room = target - held
            if held >= _NEAR * target or room < 1:
                break
            free = [i for i in free if not keep[i] and i != tried and units.fits(i, room)]
            if not free:
                break
        return Choice(keep)

    def with_floor(self, choice: Choice) -> Choice:
        """With the next best units while fewer tokens stay than the floor says, within a ceiling that is above it."""
        units, keep, floor, most = self._units, choice.keep, self._floor, self._most
        size = units.size(keep) if floor else 0
        free = units.free(keep) if size < floor else []
        if not free:
            return choice
        for _ in range(_SEARCHES):
            free = [i for i in free if not keep[i] and units.fits(i, most - size)]
            if size >= floor or not free:
                break
            if self._late():
                hasty = self._in_haste(keep, [], free, held=size)
                return Choice(hasty.keep, choice.note or hasty.note)
            best = self._best_first(free, keep, room=0.0)[0]
            wider = units.with_headings(keep, [best])
            fresh = units.size(wider)
            if fresh <= most:
                keep, size = wider, fresh
            free.remove(best)
        least = f"at least {math.ceil(floor)} of {units.tokens} tokens were to stay"
        said = f"{least}, whole sentences make it {size}" if size >= floor else f"{least}, {size} do"
        return Choice(keep, "; ".join(filter(None, (choice.note, said))))

    def _in_haste(self, keep: Sequence[bool], order: Sequence[int], free: Sequence[int], *, held: int) -> Choice:
        """With what of `order`, then of the rest of `free` by relevance, comes near the target by estimates, which few
        counts correct; all units where nothing else keeps the floor. `held` tokens stay without, if that is known.
        """
        units, floor = self._units, self._floor
        low = max(floor, (1.0 - _ROUGHLY) * self._target)
        high = max(self._target, min(self._most, (1.0 + _ROUGHLY) * floor))
        rest = sorted(set(free).difference(order), key=lambda i: (-self._judged.relevance[i], i))
        keep = units.with_headings(keep)
        seen = [(held, keep)] if held else []
        ratio = 1.0
        for _ in range(_COUNTS):
            wider, estimate = self._filled(keep, [*order, *rest], room=(low + high) / 2 / ratio)
            if estimate > high and not seen:  # what must stay
                return Choice(keep, _CUT)
            size = units.size(wider)
            if (size, wider) in seen:
                break
            seen.append((size, wider))
            if low <= size <= high:
                break
            ratio = max(size, 1) / estimate
        enough = [one for one in seen if one[0] >= floor]
        if not enough:
            return Choice([True] * len(units), f"{LATE_NOTE}; {FAILED_NOTE}")
        return Choice(max((one for one in enough if one[0] <= high), default=min(enough))[1], _CUT)

    def _filled(self, keep: Sequence[bool], order: Sequence[int], *, room: float) -> tuple[list[bool], float]:
        """`keep` with those of `order`, and their headings, that fit the room by estimates; and what all that makes."""
        units, wider = self._units, list(keep)
        estimate = sum(units.estimate(i) for i, stays in enumerate(keep) if stays)
        for i in order:
            fresh = [one for one in (i, *units.over(i)) if not wider[one]]
            more = sum(map(units.estimate, fresh))
            if estimate + more <= room:
                estimate += more
                for one in fresh:
                    wider[one] = True
        return wider, estimate

    def _best_first(self, free: Sequence[int], keep: Sequence[bool], *, room: float) -> list[int]:
        """`free`, the best beside what is kept first, as far as the room goes by estimates."""

        def enough(i: int) -> bool:
            nonlocal room
            room -= self._units.estimate(i)
            return room < 0 or self._late()

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
            expired=self._late,
        )
        more = order[:fit]
        for i in order[fit + 1 : fit + 1 + _FILLERS]:
            if self._late():
                break
            room = target - size(more)
            if units.estimate(i) <= room and size([*more, i]) <= target:
                more = [*more, i]
        return [*chosen, *more], order[fit] if fit < len(order) else None

    def _late(self) -> bool:
        """Whether no more time is left than it takes to measure what stays."""
        return self._context.remaining() <= self._reserve

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
