"""The last requests, bounded by count and bytes for each tenant and by bytes over all; and their sums over time."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from ...policies.schema import RecordsSpec
from ...prompt import NotFound, Usage
from .record import CACHE_HEADER, Record
from .series import History, Share, Sums, joined

_MOST_SUMS = 20_000  # by slot and policy over all tenants; about 10 MB


class Records:
    """For any thread. `clock` is in seconds since the epoch. In all questions a `tenant` of None means everybody's."""

    def __init__(self, spec: RecordsSpec, *, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Record] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, Record]] = {}
        self._bytes = Counter[str]()
        self._total = 0
        self._everybody = History()
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._sums = 0  # in them
        self.started = clock()

    @property
    def wanted(self) -> bool:
        """Whether single requests are kept; sums always are."""
        return self._spec.count > 0

    def finished(self, record: Record, *, usage: Usage | None = None) -> None:
        """Keep the record of a request that has ended. Takes microseconds."""
        assert record.outcome, record
        record.usage = usage
        record.measure()
        now = self._clock()
        with self._lock:
            self._count(record, now)
            if self.wanted:
                self._keep(record)

    def page(self, tenant: str | None, *, limit: int, before: str | None = None) -> list[dict[str, Any]]:
        """Lines of the last requests, the latest first; those older than the record `before`, where that is there."""
        with self._lock:
            kept = self._kept if tenant is None else self._by_tenant.get(tenant, {})
            latest = reversed(kept.values())
            if before is not None and before in kept:
                for record in latest:
                    if record.id == before:
                        break
            found = list(islice(latest, limit))
        return [record.summary() for record in found]

    def get(self, tenant: str | None, record_id: str) -> Record:
        """One record; NotFound where it is gone, or another tenant's."""
        with self._lock:
            record = self._kept.get(record_id)
        if record is None or tenant not in (None, record.tenant):
            raise NotFound("this request is not kept (any more)", code="record_not_found")
        return record

    def held(self, tenant: str | None) -> tuple[int, int]:
        """How many records there are, and about how many bytes they take."""
        with self._lock:
            if tenant is None:
                return len(self._kept), self._total
            return len(self._by_tenant.get(tenant, ())), self._bytes[tenant]

    def sums(self, tenant: str | None, *, window_s: int) -> tuple[Mapping[str, Sums], int, list[tuple[int, Sums]]]:
        """By policy; then the seconds of a slot; then when each slot up to now begins, and its sums."""
        now = self._clock()
        with self._lock:
            history = self._everybody if tenant is None else self._histories.get(tenant, History())
            return history.policies(now, window_s), *history.slots(now, window_s)

    def since_start(self) -> Sums:
        """Everybody's, of all policies."""
        with self._lock:
            return joined(self._everybody.policies(0, 0).values())

    def _count(self, record: Record, now: float) -> None:
        report, usage, again = record.report, record.usage, record.headers.get(CACHE_HEADER, "")
        completion = usage.completion_tokens if usage else 0
        share = Share.of(report, outcome=record.outcome, completion=completion, ttft_s=record.ttft_s, again=again)
        own = self._history(record.tenant)
        before = len(own)
        self._everybody.add(now, report.policy, share)
        own.add(now, report.policy, share)
        self._sums += len(own) - before
        while self._sums > _MOST_SUMS and len(self._histories) > 1:
            self._sums -= len(self._histories.popitem(last=False)[1])

    def _history(self, tenant: str) -> History:
        found = self._histories.get(tenant)
        if found is None:
            found = self._histories[tenant] = History()
            self._sums += len(found)
        self._histories.move_to_end(tenant)
        return found

    def _keep(self, record: Record) -> None:
        spec, tenant = self._spec, record.tenant
        if record.nbytes > min(spec.bytes, spec.total):
            record.outline = None
            record.measure()
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        self._kept[record.id] = own[record.id] = record
        self._bytes[tenant] += record.nbytes
        self._total += record.nbytes
        while len(own) > spec.count or self._bytes[tenant] > spec.bytes:
            self._drop(next(iter(own.values())))
        while self._total > spec.total:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, record: Record) -> None:
        own = self._by_tenant[record.tenant]
        del self._kept[record.id], own[record.id]
        self._bytes[record.tenant] -= record.nbytes
        self._total -= record.nbytes
        if not own:
            del self._by_tenant[record.tenant], self._bytes[record.tenant]
