"""The servers of one upstream backend: which of them is asked next, and which are left alone for a while. No I/O here.

A server that fails several times in a row is not asked for some seconds; then one request in that time may try it, and
the first that succeeds ends this (a circuit breaker).

A server that says when to come back is left alone until then, where others can answer.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b

from ...policies.schema import BreakerSpec, UpstreamServer
from ...prompt import Overloaded

_LONGEST_REST_S = 60.0  # what a server may ask for, so that a slip of it costs no day


class Server:
    """One server's standing."""

    def __init__(self, spec: UpstreamServer, breaker: BreakerSpec, *, clock: Callable[[], float]) -> None:
        self.base_url = spec.base_url
        self.weight = spec.weight
        self.requests = 0
        self.failures = 0
        self._breaker = breaker
        self._clock = clock
        self._in_a_row = 0
        self._closed_until = -math.inf  # by the breaker
        self._resting_until = -math.inf  # by its own word

    @property
    def open(self) -> bool:
        """Whether the breaker keeps requests away."""
        return self._tripped and self._clock() < self._closed_until

    @property
    def resting(self) -> bool:
        """Whether the server has said that it wants to be left alone."""
        return self._clock() < self._resting_until

    @property
    def opens_in(self) -> float:
        """Seconds until it may be tried again."""
        return max(0.0, self._closed_until - self._clock())

    @property
    def _tripped(self) -> bool:
        return 0 < self._breaker.failures <= self._in_a_row

    def asked(self) -> None:
        """A request is on its way. Behind one that tries a server that failed, nobody else does for a while."""
        self.requests += 1
        self._wait()

    def succeeded(self, *, rest_s: float = 0.0) -> None:
        """It answered, and not with a failure of its own. `rest_s`: how long it wants to be left alone."""
        self._in_a_row = 0
        self._resting_until = self._clock() + min(rest_s, _LONGEST_REST_S)

    def failed(self) -> None:
        """It could not be reached, was late, or answered 502, 503 or 504."""
        self.failures += 1
        self._in_a_row += 1
        self._wait()

    def _wait(self) -> None:
        if self._tripped:
            self._closed_until = self._clock() + self._breaker.cooldown


class Servers:
    """Chooses among the servers of one backend."""

    def __init__(
        self,
        specs: Collection[UpstreamServer],
        *,
        breaker: BreakerSpec,
        by_prefix: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = [Server(spec, breaker, clock=clock) for spec in specs]
        self._alone = self._servers[0] if len(self._servers) == 1 else None
        self._by_prefix = by_prefix
        self._credit = [0.0] * len(self._servers)

    def next(self, *, key: bytes = b"", tried: Collection[Server] = ()) -> Server:
        """Who is asked now: somebody who was not `tried` in vain, if there is one. `key` stands for the prefix.

        Overloaded when the breakers of all are open.
        """
        if self._alone is not None and not self._alone.open:
            return self._alone
        fit = [server for server in self._servers if not server.open]
        if not fit:
            wait = min(server.opens_in for server in self._servers)
            raise Overloaded("no server of this backend answers at present", retry_after=wait)
        for better in (lambda one: one not in tried and not one.resting, lambda one: one not in tried):
            preferred = [server for server in fit if better(server)]
            if preferred:
                fit = preferred
                break
        return max(fit, key=lambda one: _affinity(one, key)) if self._by_prefix and key else self._in_turn(fit)

    def any(self) -> bool:
        """Whether somebody can be asked."""
        return any(not server.open for server in self._servers)

    def others(self, tried: Collection[Server]) -> bool:
        """Whether there is somebody who can be asked and was not."""
        return any(server not in tried and not server.open and not server.resting for server in self._servers)

    def stats(self) -> Mapping[str, float]:
        """Gauges by name, for each server by its place in the file."""
        return {
            f"server_{place}_{name}": value
            for place, server in enumerate(self._servers)
            for name, value in (
                ("available", float(not server.open and not server.resting)),
                ("open", float(server.open)),
                ("requests", float(server.requests)),
                ("failures", float(server.failures)),
            )
        }

    def _in_turn(self, fit: list[Server]) -> Server:
        """By weight, evenly spread (smooth weighted round robin)."""
        best = -1
        for place, server in enumerate(self._servers):
            if server in fit:
                self._credit[place] += server.weight
                best = place if best < 0 or self._credit[place] > self._credit[best] else best
        self._credit[best] -= sum(server.weight for server in fit)
        return self._servers[best]


def _affinity(server: Server, key: bytes) -> float:
    """Weighted rendezvous hashing: a server that goes or comes moves only its own share of the keys.

    (Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998; weights by -w / ln h.)
    """
    digest = blake2b(key + b"\0" + server.base_url.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 1) / (2**64 + 2)
    return -server.weight / math.log(share)
