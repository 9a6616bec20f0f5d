"""Counters of several gateways in a Redis or Valkey server. Each step is one script, so that none sees half of another.

A key's hash has, for each limit, what was spent and when; its sorted set has the places with the time until which they
are held. Gateways renew their places, so that those of one that died come free. Times are the server's.

A step that was asked for on a connection that broke may have been done or not, so that each has an id, which another
set keeps for a while: done again, it does nothing. Corrections that cannot be made now are held and made later.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ...prompt import ConfigError
from .batches import Batches
from .counters import Amounts, Counters, Place, Taken
from .limits import Level, Limit

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("promptsluice.gateway")

_PREFIX = "promptsluice:limits:"
_HELD_S = 60.0
_RENEWED_S = 20.0
_CONNECTIONS = 4
_AGAIN_S = 2.0
_DOUBT_S = 300.0  # how long a step is tried again
_REMEMBERED_S = 600.0  # how long the server knows it, so that asking for it again does nothing: clearly longer
_HELD = 10_000
_AT_A_TIME = 256

# KEYS: hash, sorted set of places, sorted set of steps. ARGV: may it be refused, the place's id or "", the most places,
# seconds that it is held, the step's id, seconds that it is remembered, the id of the step that it undoes or "", the
# epoch in which what it gives back was taken or "", then for each limit its name, most, period, 1 if it slides, the
# amount.
# A hash has an epoch from when it is made until it is gone: in another one nothing is given back.
# What was done before, or undoes what was not done, takes nothing; what was undone before it was done will not be done.
# Returns the index of the limit without room (0: none; -1: no place is free), how long to wait (-1: for ever), the
# epoch, then for each limit what is spent and the seconds until it is not.
_ENTER = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local refusable, place, places, held = ARGV[1] == '1', ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local step, kept_s, undone, taken_in = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8]
local epoch = redis.call('HGET', KEYS[1], 'epoch') or step
local elsewhere = taken_in ~= '' and taken_in ~= epoch
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local void = redis.call('ZSCORE', KEYS[3], step)
if undone ~= '' and not redis.call('ZSCORE', KEYS[3], undone) then
  void = true
  redis.call('ZADD', KEYS[3], now + kept_s, undone)
end
if void then refusable = false end
local limits, short, wait, lives = {}, 0, 0, 0
for i = 9, #ARGV, 5 do
  local one = {name = ARGV[i], most = tonumber(ARGV[i + 1]), period = tonumber(ARGV[i + 2]),
               slides = ARGV[i + 3] == '1', amount = void and 0 or tonumber(ARGV[i + 4])}
  if elsewhere then one.amount = math.max(0, one.amount) end
  local kept = redis.call('HMGET', KEYS[1], one.name, one.name .. ':at')
  one.spent = tonumber(kept[1] or '0')
  local at = tonumber(kept[2] or '0')
  if at > now then -- the clock was set back
    at = now
    redis.call('HSET', KEYS[1], one.name .. ':at', string.format('%.6f', now))
  end
  if one.slides then
    one.spent = math.max(0, one.spent - (now - at) * one.most / one.period)
  elseif math.floor(now / one.period) ~= math.floor(at / one.period) then
    one.spent = 0
  end
  limits[#limits + 1] = one
  local wanted = math.max(1, one.amount)
  local over = one.spent + wanted - one.most
  if refusable and short == 0 and over > 0 then
    short = #limits
    if wanted > one.most then wait = -1
    elseif one.slides then wait = over * one.period / one.most
    else wait = one.period - now % one.period end
  end
end
if refusable and short == 0 and place ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= places then
    short, wait = -1, 1
  else
    redis.call('ZADD', KEYS[2], now + held, place)
    redis.call('EXPIRE', KEYS[2], math.ceil(held) + 1)
  end
elseif ARGV[1] == '0' and place ~= '' then
  redis.call('ZREM', KEYS[2], place)
end
if short == 0 then
  redis.call('ZADD', KEYS[3], now + kept_s, step)
  if redis.call('TTL', KEYS[3]) < kept_s then redis.call('EXPIRE', KEYS[3], math.ceil(kept_s) + 1) end
end
local answer = {tostring(short), tostring(wait), epoch}
for _, one in ipairs(limits) do
  if short == 0 then
    one.spent = math.max(0, one.spent + one.amount)
    redis.call('HSET', KEYS[1], 'epoch', epoch, one.name, string.format('%.6f', one.spent),
               one.name .. ':at', string.format('%.6f', now))
  end
  local reset = 0
  if one.slides then reset = one.spent * one.period / one.most
  elseif one.spent > 0 then reset = one.period - now % one.period end
  lives = math.max(lives, reset)
  answer[#answer + 1] = string.format('%.6f', one.spent)
  answer[#answer + 1] = string.format('%.6f', reset)
end
lives = math.ceil(lives) + 1
if short == 0 and #limits > 0 and redis.call('TTL', KEYS[1]) < lives then
  redis.call('EXPIRE', KEYS[1], lives)
end
return answer
"""

# KEYS: sorted set. ARGV: seconds, then ids of places. They are held for so long from now, also those that came free
# because nobody could renew them.
_RENEW = """
local time = redis.call('TIME')
local till = time[1] + time[2] / 1000000 + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], till, ARGV[i]) end
return redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1])) + 1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something to be entered at most once. `undoes`: only if that step was done. `epoch`: what it gives back was taken
    then. `at`: when it was made, by
    time.time; `made` the same by time.monotonic, which nobody sets.
    """

    subject: str
    amounts: Amounts
    place: Place | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    undoes: str = ""
    epoch: str = ""
    at: float = field(default_factory=time.time)
    made: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.made

    def later(self, now: float) -> "Step":
        """The same at another time: what has come back by itself is neither given back again nor taken."""

        def left(limit: Limit, amount: int) -> int:
            standing = limit.standing(abs(amount), self.at, now)
            return standing if amount > 0 else -standing

        return replace(self, amounts=[(limit, left(limit, amount)) for limit, amount in self.amounts])


class SharedCounters(Counters):
    """In the server that `client` talks to; `connect` makes one. `take` raises whatever the client raises.

    Corrections that fail are tried again every `again_s` seconds, the last `_HELD` of them, and none for longer than
    `_DOUBT_S`.
    """

    def __init__(
        self, client: "Redis", *, held_s: float = _HELD_S, renewed_s: float = _RENEWED_S, again_s: float = _AGAIN_S
    ) -> None:
        self._client = client
        self._enter = Batches(client, _ENTER)
        self._renewals = Batches(client, _RENEW)
        self._held_s, self._renewed_s, self._again_s = held_s, renewed_s, again_s
        self._places: dict[str, set[str]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._owed: deque[Step] = deque()
        self._paying: asyncio.Task[None] | None = None
        self._closing = False

    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        step = Step(subject=subject, amounts=amounts, place=place)
        try:
            answer = await asyncio.shield(self._entered(step, refusable=True))
        except BaseException:  # who asked has left, or nobody knows what became of it
            back = [(limit, -amount) for limit, amount in amounts]
            self._correct(Step(subject=subject, amounts=back, place=place, undoes=step.id))
            raise
        short, wait, epoch = float(answer[0]), float(answer[1]), answer[2].decode()
        told = [float(one) for one in answer[3:]]
        levels = tuple(_levels(amounts, told))
        if short > 0:
            limit = amounts[int(short) - 1][0]
            return Taken(counters=self, levels=levels, short=limit, wait_s=None if wait < 0 else wait)
        if short < 0:
            return Taken(counters=self, levels=levels, crowded=True, wait_s=wait)
        if place is not None:
            self._places.setdefault(subject, set()).add(place.id)
            if self._renewing is None:
                self._renewing = asyncio.create_task(self._keep_renewing())
        return Taken(counters=self, levels=levels, epoch=epoch)

    def finish(self, subject: str, amounts: Amounts, place: Place | None = None, *, epoch: str = "") -> None:
        if place is not None:
            self._forget(subject, place)
        if amounts or place is not None:
            self._correct(Step(subject=subject, amounts=amounts, place=place, epoch=epoch))

    async def close(self) -> None:
        self._closing = True
        for task in (self._renewing, self._paying):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._renewals.close()
        await self._enter.close()
        await asyncio.sleep(0)  # what was answered now is looked at
        await self._pay()
        await self._client.aclose()

    def _entered(self, step: Step, *, refusable: bool) -> "asyncio.Future[list[bytes]]":
        arguments: list[str | float] = ["1" if refusable else "0"]
        arguments += [step.place.id, step.place.most, self._held_s] if step.place else ["", 0, 0]
        arguments += [step.id, _REMEMBERED_S, step.undoes, step.epoch]
        for limit, amount in step.amounts:
            arguments += [limit.name, limit.most, limit.period_s, int(limit.sliding), amount]
        return self._enter.run([_name(step.subject, what) for what in ("spent", "places", "steps")], arguments)

    def _correct(self, step: Step) -> None:
        """Now, or after those that are held."""
        if self._owed:
            self._hold(step)
        else:
            self._entered(step, refusable=False).add_done_callback(partial(self._corrected, step))

    def _corrected(self, step: Step, answer: "asyncio.Future[list[bytes]]") -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._hold(step)

    def _hold(self, step: Step) -> None:
        if len(self._owed) >= _HELD:
            self._owed.popleft()
        self._owed.append(step)
        if not self._closing and (self._paying is None or self._paying.done()):
            self._paying = asyncio.create_task(self._keep_paying())

    async def _keep_paying(self) -> None:
        while self._owed:
            await asyncio.sleep(self._again_s)
            await self._pay()

    async def _pay(self) -> None:
        """Make the corrections that are held, until one of them fails again. Too old ones are dropped: whether they
        were made after all is known no more.
        """
        while self._owed:
            some = [self._owed.popleft() for _ in range(min(_AT_A_TIME, len(self._owed)))]
            some = [step for step in some if step.age_s < _DOUBT_S]
            asked = [self._entered(step.later(step.at + step.age_s), refusable=False) for step in some]
            made = await asyncio.gather(*asked, return_exceptions=True)
            failed = [step for step, one in zip(some, made, strict=True) if isinstance(one, BaseException)]
            self._owed.extendleft(reversed(failed))
            if failed:
                return

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renewed_s)
            held = {subject: tuple(places) for subject, places in self._places.items()}
            asked = [
                self._renewals.run([_name(subject, "places")], [self._held_s, *places])
                for subject, places in held.items()
            ]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, Exception):  # the next round tries again
                    log.debug("places could not be renewed: %s", answer)
            # The server may have heard that a place was left before it held it for longer.
            for subject, places in held.items():
                for id_ in set(places) - self._places.get(subject, set()):
                    self._correct(Step(subject=subject, amounts=(), place=Place(id=id_, most=0)))

    def _forget(self, subject: str, place: Place) -> None:
        places = self._places.get(subject, set())
        places.discard(place.id)
        if not places:
            self._places.pop(subject, None)


def connect(url: str, *, password: str | None, timeout_s: float) -> "Redis":
    """A client of the server at `url`; connects when first used. Raises ConfigError where the package redis is not
    installed or the URL is none of its kind.

    A connection that the server has closed meanwhile is opened again, once, and then a step may be asked for twice; all
    else is the caller's to judge.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import ConnectionError as Lost
    except ImportError as error:
        raise ConfigError("server.counters needs the package redis; install promptsluice[shared]") from error
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            timeout=timeout_s,
            max_connections=_CONNECTIONS,
            retry=Retry(NoBackoff(), 1, supported_errors=(Lost,)),
        )
    except ValueError as error:
        raise ConfigError(f"server.counters.url cannot be used: {error}") from error
    return Redis.from_pool(pool)


def _levels(amounts: Amounts, told: list[float]) -> list[Level]:
    pairs = zip(told[::2], told[1::2], strict=True)
    return [
        Level(limit=limit, spent=spent, reset_s=reset)
        for (limit, _), (spent, reset) in zip(amounts, pairs, strict=True)
    ]


def _name(subject: str, what: str) -> str:
    """With braces, so that a cluster keeps both keys of a subject on one server."""
    return f"{_PREFIX}{{{subject}}}:{what}"
