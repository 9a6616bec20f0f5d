"""One request's account: what it has taken of its key's limits, until it ends and pays for what it used."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from ...policies.schema import ApiKeySpec, LimitsSpec
from ...prompt import PromptsluiceError, RateLimited, TokensLimited, Usage
from .counters import Amounts, Counters, Place, Taken
from .key_metrics import KeyMetrics
from .limits import Level, Limit, limits_of
from .rate_headers import anthropic_headers, duration, rate_headers

ANONYMOUS = "anonymous"
_NO_RETRY_S = 60.0  # SDKs do not wait longer than that, but ask again at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reserved:
    """Tokens that were taken of a key's limits at a time, in seconds since 1970, before they are used."""

    name: str
    taken: Taken
    tokens: int
    at: float

    def settle(self, used: int) -> None:
        """Take what more was used, or give the rest back, as far as it has not come back by itself."""
        now, more = time.time(), used - self.tokens
        limits = [level.limit for level in self.taken.levels]
        back = [max(more, -limit.standing(self.tokens, self.at, now)) for limit in limits]
        if any(back):
            self.taken.counters.finish(self.name, list(zip(limits, back, strict=True)), epoch=self.taken.epoch)


@dataclass(slots=True)
class Spent:
    """The tokens that a model used which was asked on the side."""

    tokens: int = 0


@dataclass(slots=True)
class Ticket:
    """Opened at the door, before the body is read; closed when the response has ended, whatever ended it.

    Tokens are reserved once they can be estimated, and settled by what was used; what nobody settles is given back.
    What models use that are asked on the side is charged apart, even after the ticket was closed. It is taken out of
    the request's own reservation first, which may have all that the limits leave.
    """

    key: ApiKeySpec | None
    limits: LimitsSpec
    counters: Counters
    metrics: KeyMetrics
    anthropic: bool = False
    _place: Place | None = None
    _served: bool = False
    _requests: Taken | None = None
    _tokens: _Reserved | None = None
    _used: int = 0
    _lent: int = 0  # of the reservation: to models that are asked on the side now
    _aside: int = 0  # of the reservation: used by those that were
    _levels: dict[str, Level] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the key: the subject whose limits these are."""
        return self.key.name if self.key else ANONYMOUS

    @property
    def counts_tokens(self) -> bool:
        """Whether there is anything to reserve."""
        return self.limits.tokens_per_minute is not None or self.limits.tokens_per_day is not None

    async def open(self, *, spends: bool) -> None:
        """Take one request and, where their number is bounded, a place. RateLimited where there is none.

        `spends`: it will use tokens, of which something must be left.
        """
        limits = limits_of(self.limits)
        amounts = [(limit, 1) for limit in limits if limit.what == "requests"]
        amounts += [(limit, 0) for limit in limits if limit.what == "tokens" and spends]
        most = self.limits.concurrent
        place = None if most is None else Place(id=uuid.uuid4().hex, most=most)
        if amounts or place is not None:
            self._requests = self._checked(await self.counters.take(self.name, amounts, place), amounts)
            self._place = place
        self._served = True
        self.metrics.at_the_door(self.name, "admitted")
        self.metrics.began(self.name)

    async def reserve(self, *, prompt: int, output: int) -> None:
        """Take the tokens of a prompt and, as far as the limit is that large, of the longest answer. TokensLimited."""
        if self._tokens is None:
            self._tokens = await self._reserved(self._wanted(prompt, output), at_the_door=True)

    @asynccontextmanager
    async def aside(self, *, prompt: int, output: int) -> AsyncIterator[Spent]:
        """While a model is asked on the side: its tokens are reserved, and charged when it has ended, however it ends.

        TokensLimited where there is no room for them.
        """
        wanted, spent = self._wanted(prompt, output), Spent()
        with self._lending(wanted) as lent:
            if self._tokens is not None and lent == wanted:
                beside = replace(self._tokens, tokens=0)
            else:
                beside = await self._reserved(wanted - lent)
            try:
                yield spent
            finally:
                self.metrics.charged(self.name, spent.tokens)
                # What was lent has been given back if the ticket was closed meanwhile.
                own = min(lent, spent.tokens) if self._served else 0
                self._aside += own
                if beside is not None:
                    beside.settle(spent.tokens - own)

    @contextmanager
    def _lending(self, wanted: int) -> Iterator[int]:
        """As many of so many tokens as the request's own reservation has room for."""
        free = 0 if self._tokens is None or not self._served else self._tokens.tokens - self._lent - self._aside
        lent = min(wanted, free)
        self._lent += lent
        try:
            yield lent
        finally:
            self._lent -= lent

    async def _reserved(self, wanted: int, *, at_the_door: bool = False) -> _Reserved | None:
        if not self.counts_tokens:
            return None
        amounts = [(limit, wanted) for limit in self._token_limits]
        taken = self._checked(await self.counters.take(self.name, amounts), amounts, at_the_door=at_the_door)
        return _Reserved(name=self.name, taken=taken, tokens=wanted, at=time.time())

    @property
    def _token_limits(self) -> list[Limit]:
        return [limit for limit in limits_of(self.limits) if limit.what == "tokens"]

    def _wanted(self, prompt: int, output: int) -> int:
        """Of the longest answer as much as the limits have beside the prompt."""
        least = min((limit.most for limit in self._token_limits), default=0)
        return prompt if prompt > least else min(prompt + output, least)

    def settle(self, usage: Usage | None, *, estimate: int) -> None:
        """Say what was used; `estimate` counts where the backend does not tell."""
        self._used = estimate if usage is None else usage.prompt_tokens + usage.completion_tokens

    def close(self) -> None:
        """Pay for what was used, give the rest back, leave the place. Closing again does nothing."""
        if not self._served:
            return
        self._served = False
        self.metrics.ended(self.name)
        self.metrics.charged(self.name, self._used)
        if self._tokens is not None:
            self._tokens.settle(self._used + self._aside)
        if self._place is not None and self._requests is not None:
            self._requests.counters.finish(self.name, (), self._place)

    def headers(self) -> dict[str, str]:
        """What is left, as response headers."""
        levels = self._levels.values()
        return {**rate_headers(levels), **(anthropic_headers(levels) if self.anthropic else {})}

    def _checked(self, taken: Taken, amounts: Amounts, *, at_the_door: bool = True) -> Taken:
        self._levels |= {level.limit.name: level for level in taken.levels}
        if taken.ok:
            return taken
        if at_the_door:
            self.metrics.at_the_door(self.name, "concurrent" if taken.short is None else taken.short.name)
        error = self._crowded() if taken.short is None else _short(self.name, taken, amounts, taken.short)
        error.headers.update(self.headers())
        raise error

    def _crowded(self) -> PromptsluiceError:
        most = self.limits.concurrent
        message = f"API key {self.name!r} may have {most} requests served at a time, and has; try again when one ends"
        return RateLimited(message, retry_after=1.0)


def _short(name: str, taken: Taken, amounts: Sequence[tuple[Limit, int]], limit: Limit) -> RateLimited:
    """In OpenAI's words: the limit, what is used of it, what was asked for, and when to come again."""
    level = next(level for level in taken.levels if level.limit == limit)
    wanted = next(amount for other, amount in amounts if other == limit)
    kind, period = TokensLimited if limit.what == "tokens" else RateLimited, limit.name.rpartition("_")[2]
    head = f"rate limit reached for API key {name!r} on {limit.what} per {period}"
    figures = f"limit {limit.most}, used {round(level.spent)}, requested {max(1, wanted)}"
    if taken.wait_s is None:
        error = kind(f"{head}: {figures}; a request of that size is never let in", retry_after=None)
    else:
        error = kind(f"{head}: {figures}; try again in {duration(taken.wait_s)}", retry_after=taken.wait_s)
    if taken.wait_s is None or taken.wait_s > _NO_RETRY_S:
        error.headers["x-should-retry"] = "false"
    return error
