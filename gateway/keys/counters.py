"""The contract of what counts for the limits, and the counters of one process."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .limits import Level, Limit

Amounts = Sequence[tuple[Limit, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of at most `most` requests of a key that are served at a time. `id` is like no other's."""

    id: str
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What came of taking. `counters` have to be told how it ends.

    `short`: the limit without room, for which `wait_s` is how long (None: for ever). `crowded`: no place was free.
    `epoch` is to be named when something of it is given back: counters that were emptied since have nothing of it.
    """

    counters: "Counters"
    levels: tuple[Level, ...]
    short: Limit | None = None
    crowded: bool = False
    wait_s: float | None = None
    epoch: str = ""

    @property
    def ok(self) -> bool:
        return self.short is None and not self.crowded


class Counters(ABC):
    """Counts what subjects (API keys, by name) have spent and how many of their requests are served now."""

    @abstractmethod
    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        """Enter all amounts and the place, or nothing at all.

        An amount of 0 takes nothing, yet something has to be left of its limit.
        """

    @abstractmethod
    def finish(self, subject: str, amounts: Amounts, place: Place | None = None, *, epoch: str = "") -> None:
        """Correct what was taken by signed amounts, and leave the place. Returns at once."""

    async def close(self) -> None:  # noqa: B027 - nothing to let go of is fine
        """Let go of everything; called once."""


class MemoryCounters(Counters):
    """Of this process. `clock` gives seconds since 1970."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spent: dict[tuple[str, str], tuple[float, float]] = {}
        self._places: dict[str, set[str]] = {}

    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        now = self._clock()
        spent = [self._now(subject, limit, now) for limit, _ in amounts]
        levels = tuple(_level(limit, used, now) for (limit, _), used in zip(amounts, spent, strict=True))
        for (limit, amount), used in zip(amounts, spent, strict=True):
            wait = limit.wait_s(used, max(1, amount), now)
            if wait != 0:
                return Taken(counters=self, levels=levels, short=limit, wait_s=wait)
        if place is not None and len(self._places.get(subject, ())) >= place.most:
            return Taken(counters=self, levels=levels, crowded=True, wait_s=1.0)
        if place is not None:
            self._places.setdefault(subject, set()).add(place.id)
        return Taken(counters=self, levels=self._enter(subject, amounts, now))

    def finish(self, subject: str, amounts: Amounts, place: Place | None = None, *, epoch: str = "") -> None:
        self._enter(subject, amounts, self._clock())
        if place is not None:
            places = self._places.get(subject, set())
            places.discard(place.id)
            if not places:
                self._places.pop(subject, None)

    def _now(self, subject: str, limit: Limit, now: float) -> float:
        spent, at = self._spent.get((subject, limit.name), (0.0, now))
        if at > now:  # the clock was set back; what was spent comes back from now on
            self._spent[subject, limit.name] = spent, now
        return limit.spent_now(spent, min(at, now), now)

    def _enter(self, subject: str, amounts: Amounts, now: float) -> tuple[Level, ...]:
        levels: list[Level] = []
        for limit, amount in amounts:
            spent = max(0.0, self._now(subject, limit, now) + amount)
            self._spent[subject, limit.name] = spent, now
            levels.append(_level(limit, spent, now))
        return tuple(levels)


def _level(limit: Limit, spent: float, now: float) -> Level:
    return Level(limit=limit, spent=spent, reset_s=limit.reset_s(spent, now))
