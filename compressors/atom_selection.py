"""The choice among the free atoms of a pool: those worth most that fit the budget beside what must stay."""

import itertools
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from .budget import filled, most_that_fit
from .candidate import Candidate
from .context import CompressionContext
from .pool import Place, Pool

# After the best that fit, so many of the next are tried in the room that is left.
_FILLERS = 16
# While less than this share of what is asked stays, the search goes on behind what was too large, so often in all.
_NEAR, _SEARCHES = 0.97, 8


class AtomSelection:
    """Goes through one order: what was judged, best first, then what would stay along with none of it, such as marks
    without a word and conjunctions without two. Where words do not fill the budget, these do.
    """

    def __init__(self, pool: Pool, context: CompressionContext) -> None:
        self._pool, self._context = pool, context
        judged = _best_first(pool.candidates)
        self._order = [*judged, *pool.left_out(judged)]
        self._judged = len(judged)

    def within(self, target: float) -> list[Place]:
        """Atoms with which at most `target` tokens stay, unless more must; about as many where there is no time to
        count.
        """
        if self._context.expired():
            chosen = list(range(self._guess(0, len(self._order), self._room(target))))
        else:
            chosen = self._searched([], 0, self._judged, target)
            if not chosen or not (self._context.expired() or _near(self._size(chosen), target)):
                chosen = self._searched(chosen, self._judged, len(self._order), target)
        return [self._order[k] for k in chosen]

    def _searched(self, chosen: list[int], at: int, end: int, target: float) -> list[int]:
        """`chosen` and what of the order from `at` to `end` still fits, first come first served."""
        context = self._context
        held = self._size(chosen) if chosen else 0  # what was there before this search, in tokens
        room = (target - held) / self._pool.per_char if chosen else self._room(target)
        for _ in range(_SEARCHES):
            fit = most_that_fit(
                end - at,
                size_of=partial(self._more, chosen, at, held),
                target=target - held,
                guess=self._guess(at, end, room),
                expired=context.expired,
            )
            if held and context.expired():  # what the search last guessed may be too much
                break
            chosen = [*chosen, *range(at, at + fit)]
            at = min(end, at + fit + 1)  # this one was too large
            chosen = filled(
                chosen, range(at, min(end, at + _FILLERS)), size_of=self._size, target=target, expired=context.expired
            )
            at = min(end, at + _FILLERS)
            if at == end or context.expired():
                break
            held = self._size(chosen)
            if _near(held, target):
                break
            room = (target - held) / self._pool.per_char
        return chosen

    def _size(self, chosen: Sequence[int]) -> int:
        """Tokens with these of the order."""
        return self._pool.size([self._order[k] for k in chosen])

    def _more(self, chosen: Sequence[int], at: int, held: int, count: int) -> int:
        """Tokens beyond `held` with `count` of the order from `at` on beside what is chosen."""
        return self._size([*chosen, *range(at, at + count)]) - held

    def _guess(self, at: int, end: int, room: float) -> int:
        """About how many of the order from `at` to `end` go into so many characters."""
        return sum(1 for spent in itertools.accumulate(self._lengths[at:end]) if spent <= room)

    def _room(self, target: float) -> float:
        """About how many characters that makes beside what must stay."""
        return target / self._pool.per_char - self._pool.forced_length

    @cached_property
    def _lengths(self) -> list[int]:
        """Of the order, in characters."""
        return [self._pool.length(place) for place in self._order]


def _best_first(candidates: Sequence[Candidate]) -> list[Place]:
    """The atoms that were judged, by worth, then by place."""
    places = [(n, i) for n, one in enumerate(candidates) for i, _ in one.free]
    worth = np.array([value for one in candidates for _, value in one.free])
    return [places[k] for k in np.argsort(-worth, kind="stable")]


def _near(size: int, target: float) -> bool:
    """Whether too little is left to be worth another search."""
    return size >= _NEAR * target or size + 1 > target
