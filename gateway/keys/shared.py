"""Counters of several gateways in a Redis or Valkey server. Each step is one script, so that none sees half of another.

A key's hash has, for each limit, what was spent and when; its sorted set has the places with the time until which they
are held. Gateways renew their places, so that those of one that died come free. Times are the server's.
"""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from ...prompt import ConfigError
from .batches import Batches
from .counters import Amounts, Counters, Place, Taken
from .limits import Level

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("promptsluice.gateway")

_PREFIX = "promptsluice:limits:"
_HELD_S = 60.0
_RENEWED_S = 20.0
_CONNECTIONS = 4

# KEYS: hash, sorted set. ARGV: may it be refused, the place's id or "", the most places, seconds that it is held, then
# for each limit its name, most, period, 1 if it slides, the amount.
# Returns the index of the limit without room (0: none; -1: no place is free), how long to wait (-1: for ever), then for
# each limit what is spent and the seconds until it is not.
_ENTER = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local refusable, place, places, held = ARGV[1] == '1', ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local limits, short, wait, lives = {}, 0, 0, 0
for i = 5, #ARGV, 5 do
  local one = {name = ARGV[i], most = tonumber(ARGV[i + 1]), period = tonumber(ARGV[i + 2]),
               slides = ARGV[i + 3] == '1', amount = tonumber(ARGV[i + 4])}
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
elseif not refusable and place ~= '' then
  redis.call('ZREM', KEYS[2], place)
end
local answer = {tostring(short), tostring(wait)}
for _, one in ipairs(limits) do
  if short == 0 then
    one.spent = math.max(0, one.spent + one.amount)
    redis.call('HSET', KEYS[1], one.name, string.format('%.6f', one.spent),
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

# KEYS: sorted set. ARGV: seconds, then ids of places. Those that are there are held for so long from now.
_RENEW = """
local time = redis.call('TIME')
local till = time[1] + time[2] / 1000000 + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', till, ARGV[i]) end
return redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1])) + 1)
"""


class SharedCounters(Counters):
    """In the server that `client` talks to; `connect` makes one. `take` raises whatever the client raises."""

    def __init__(self, client: "Redis", *, held_s: float = _HELD_S, renewed_s: float = _RENEWED_S) -> None:
        self._client = client
        self._enter = Batches(client, _ENTER)
        self._renew = client.register_script(_RENEW)
        self._held_s, self._renewed_s = held_s, renewed_s
        self._places: dict[str, set[str]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        answer = self._entered(subject, amounts, place, refusable=True)
        try:
            short, wait, *told = [float(one) for one in await asyncio.shield(answer)]
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._unwanted, subject, amounts, place))
            raise
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
        return Taken(counters=self, levels=levels)

    def finish(self, subject: str, amounts: Amounts, place: Place | None = None) -> None:
        if place is not None:
            self._forget(subject, place)
        if amounts or place is not None:
            # What is lost here comes back by itself: places when they are not renewed, amounts with their period.
            self._entered(subject, amounts, place, refusable=False)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        await self._enter.close()
        await self._client.aclose()

    def _entered(
        self, subject: str, amounts: Amounts, place: Place | None, *, refusable: bool
    ) -> "asyncio.Future[list[bytes]]":
        arguments: list[str | float] = ["1" if refusable else "0"]
        arguments += [place.id, place.most, self._held_s] if place else ["", 0, 0]
        for limit, amount in amounts:
            arguments += [limit.name, limit.most, limit.period_s, int(limit.sliding), amount]
        return self._enter.run([_name(subject, "spent"), _name(subject, "places")], arguments)

    def _unwanted(
        self, subject: str, amounts: Amounts, place: Place | None, answer: "asyncio.Future[list[bytes]]"
    ) -> None:
        """Who asked has left before the answer came: what was taken is given back."""
        if answer.exception() is None and float(answer.result()[0]) == 0:
            self.finish(subject, [(limit, -amount) for limit, amount in amounts], place)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._renewed_s)
            for subject, places in [(subject, tuple(places)) for subject, places in self._places.items()]:
                try:
                    await self._renew(keys=[_name(subject, "places")], args=[self._held_s, *places])
                except Exception as error:  # noqa: BLE001 - the client's, the network's, the server's; the next round tries again
                    log.debug("places could not be renewed: %s", error)

    def _forget(self, subject: str, place: Place) -> None:
        places = self._places.get(subject, set())
        places.discard(place.id)
        if not places:
            self._places.pop(subject, None)


def connect(url: str, *, password: str | None, timeout_s: float) -> "Redis":
    """A client of the server at `url`; connects when first used. Raises ConfigError where the package redis is not
    installed or the URL is none of its kind.

    A connection that the server has closed meanwhile is opened again, once; all else is the caller's to judge.
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
