"""Shared counters that may be out of reach: what then happens is the policy file's to say, and everybody is told."""

import logging
import time
from collections.abc import Callable
from typing import Literal

from ...prompt import Overloaded
from .counters import Amounts, Counters, MemoryCounters, Place, Taken
from .key_metrics import KeyMetrics

log = logging.getLogger("promptsluice.gateway")


class GuardedCounters(Counters):
    """`fail` open: while `shared` fails, this process counts by itself. Closed: Overloaded.

    After a failure the server is not asked for `pause_s` seconds, so that it costs one timeout in that time and not one
    a request.
    """

    def __init__(
        self,
        shared: Counters,
        *,
        fail: Literal["open", "closed"],
        metrics: KeyMetrics,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._fail = fail
        self._metrics = metrics
        self._pause_s = pause_s
        self._clock = clock
        self._own = MemoryCounters()
        self._asleep_until = float("-inf")
        self._down = False

    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        if self._clock() >= self._asleep_until:
            try:
                taken = await self._shared.take(subject, amounts, place)
            except Exception as error:  # noqa: BLE001 - the client's, the network's and the server's own
                self._asleep_until = self._clock() + self._pause_s
                self._failed(error)
            else:
                self._answered()
                return taken
        if self._fail == "closed":
            message = "limits cannot be counted now, and without that no request is let in"
            raise Overloaded(message, retry_after=self._pause_s)
        return await self._own.take(subject, amounts, place)

    def finish(self, subject: str, amounts: Amounts, place: Place | None = None, *, epoch: str = "") -> None:
        raise AssertionError("what was taken is finished with the counters that it was taken from")

    async def close(self) -> None:
        await self._shared.close()

    def _failed(self, error: Exception) -> None:
        self._metrics.counters_failed()
        what = "each gateway counts by itself" if self._fail == "open" else "requests with limits are refused"
        if not self._down:
            log.warning("the server that counts limits cannot be asked (%s); %s", type(error).__name__, what)
        self._down = True

    def _answered(self) -> None:
        if self._down:
            log.warning("the server that counts limits answers again")
        self._down = False
        self._metrics.counters_answer()
