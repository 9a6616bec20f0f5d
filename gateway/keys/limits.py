"""A limit and its arithmetic: how much of it is spent now, and when there will be room again. Times in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...policies.schema import LimitsSpec

MINUTE_S = 60.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `most` in a period. `sliding`: what was spent comes back evenly over the period (a token bucket); else
    all of it does when the next period begins, counted from 1970 in UTC.
    """

    name: str
    what: Literal["requests", "tokens"]
    most: int
    period_s: float
    sliding: bool

    def spent_now(self, spent: float, at: float, now: float) -> float:
        """What is left of `spent`, which was written down at the time `at`, not after `now`."""
        if self.sliding:
            return max(0.0, spent - (now - at) * self.most / self.period_s)
        return spent if now // self.period_s == at // self.period_s else 0.0

    def standing(self, reserved: int, at: float, now: float) -> int:
        """How much of what was taken at the time `at` still counts now: no more than that can be given back."""
        return int(self.spent_now(reserved, min(at, now), now))

    def reset_s(self, spent: float, now: float) -> float:
        """Until all of it is there again."""
        if self.sliding:
            return spent * self.period_s / self.most
        return self.period_s - now % self.period_s if spent else 0.0

    def wait_s(self, spent: float, amount: int, now: float) -> float | None:
        """Until there is room for `amount`; 0 where there is, None where there never will be."""
        over = spent + amount - self.most
        if over <= 0:
            return 0.0
        if amount > self.most:
            return None
        return over * self.period_s / self.most if self.sliding else self.period_s - now % self.period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How far a limit is used."""

    limit: Limit
    spent: float
    reset_s: float

    @property
    def remaining(self) -> int:
        return max(0, int(self.limit.most - self.spent + 1e-6))


def limits_of(spec: LimitsSpec) -> tuple[Limit, ...]:
    """The limits by time that a specification has."""
    found: Mapping[str, tuple[int | None, Literal["requests", "tokens"], float]] = {
        "requests_per_minute": (spec.requests_per_minute, "requests", MINUTE_S),
        "tokens_per_minute": (spec.tokens_per_minute, "tokens", MINUTE_S),
        "requests_per_day": (spec.requests_per_day, "requests", DAY_S),
        "tokens_per_day": (spec.tokens_per_day, "tokens", DAY_S),
    }
    return tuple(
        Limit(name=name, what=what, most=most, period_s=period, sliding=period == MINUTE_S)
        for name, (most, what, period) in found.items()
        if most is not None
    )
