"""Sums over time slots: requests, tokens, milliseconds and the distribution of times to the first token."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from ...prompt import Report

OUTCOMES = ("ok", "failed", "refused", "cancelled")
_TOKENS = ("tokens_in", "tokens_out", "retrieved", "pruned", "cached", "loaded", "reused", "recomputed")
_FIELDS = (*OUTCOMES, *_TOKENS, "completion", "saved_ms", "overhead_ms", "hit", "miss")
_PLACES = {name: place for place, name in enumerate(_FIELDS)}
_OWN_SIZE = 8  # of a history without slots, in sums
_LEAST_S, _STEP = 1e-4, math.log(1.1)  # bins of times; a quantile is read to within 5 %
_FINE, _COARSE = (15, 240), (360, 240)  # seconds of a slot, slots: an hour, a day
_DAY_S = 86_400


class Share(NamedTuple):
    """What one request adds: to which fields how much, and the bin of its time to the first token."""

    values: tuple[tuple[int, float], ...]
    bin: int | None

    @classmethod
    def of(
        cls, report: Report, *, outcome: str, completion: int = 0, ttft_s: float | None = None, again: str = ""
    ) -> Self:
        """`again` says whether an answer was there already (`hit`, `miss`), where answers are kept."""
        named: list[tuple[str, float]] = [
            (outcome, 1),
            *((name, getattr(report, name)) for name in _TOKENS),
            ("completion", completion),
            ("saved_ms", sum(step.saved_ms or 0.0 for step in report.steps)),
            ("overhead_ms", report.overhead_ms),
        ]
        if again:
            named.append((again, 1))
        values = tuple((_PLACES[name], value) for name, value in named if value > 0)
        return cls(values, None if ttft_s is None else _bin(ttft_s))


class Sums:
    """What some requests came to together; `sums["pruned"]` is a field's."""

    __slots__ = ("_ttft", "_values")

    def __init__(self) -> None:
        self._values: list[float] = [0] * len(_FIELDS)
        self._ttft = Counter[int]()

    def __getitem__(self, name: str) -> float:
        return self._values[_PLACES[name]]

    @property
    def requests(self) -> int:
        """However they ended."""
        return int(sum(self[outcome] for outcome in OUTCOMES))

    def add(self, share: Share) -> None:
        """Count one request."""
        for place, value in share.values:
            self._values[place] += value
        if share.bin is not None:
            self._ttft[share.bin] += 1

    def join(self, other: "Sums") -> None:
        """Add another's to these."""
        self._values = [own + more for own, more in zip(self._values, other._values, strict=True)]
        self._ttft.update(other._ttft)

    def quantile(self, share: float) -> float | None:
        """Seconds to the first token that the share of streamed answers met; None where there was none."""
        wanted, seen = share * self._ttft.total(), 0
        for place, count in sorted(self._ttft.items()):
            seen += count
            if seen >= wanted:
                return _LEAST_S * math.exp((place + 0.5) * _STEP)
        return None

    def to_wire(self) -> dict[str, Any]:
        """As JSON; times in milliseconds."""
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        ttft = {name: None if (found := self.quantile(at)) is None else 1000 * found for name, at in shares.items()}
        fields = dict(zip(_FIELDS, self._values, strict=True))
        return {"requests": self.requests, **fields, "ttft_ms": {**ttft, "count": self._ttft.total()}}


class Series:
    """Sums by time slot and policy, of the last `slots` slots of `slot_s` seconds."""

    def __init__(self, slot_s: int, slots: int) -> None:
        self.slot_s, self._slots = slot_s, slots
        self._sums: OrderedDict[tuple[int, str], Sums] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sums)

    def at(self, now: float, policy: str) -> Sums:
        """Those to count in now; what is too old is let go."""
        slot = int(now // self.slot_s)
        found = self._sums.get((slot, policy))
        if found is None:
            found = self._sums[slot, policy] = Sums()
            while next(iter(self._sums))[0] <= slot - self._slots:
                self._sums.popitem(last=False)
        return found

    def since(self, start: float) -> Iterable[tuple[int, str, Sums]]:
        """Slots, policies and sums from a time on, given as seconds at which the slots begin."""
        return [(s * self.slot_s, policy, one) for (s, policy), one in self._sums.items() if s * self.slot_s >= start]


class History:
    """One tenant's, or everybody's: the last hour finely, the last day coarsely, and all since the start."""

    def __init__(self) -> None:
        self._fine, self._coarse = Series(*_FINE), Series(*_COARSE)
        self._all: dict[str, Sums] = {}

    def __len__(self) -> int:
        return _OWN_SIZE + len(self._fine) + len(self._coarse)

    def add(self, now: float, policy: str, share: Share) -> None:
        """Count one request that ended now."""
        for sums in (self._fine.at(now, policy), self._coarse.at(now, policy), self._all.setdefault(policy, Sums())):
            sums.add(share)

    def policies(self, now: float, window_s: int) -> Mapping[str, Sums]:
        """By policy, over the last so many seconds; 0 is since the start."""
        if not window_s:
            return {policy: joined([sums]) for policy, sums in self._all.items()}
        found: dict[str, list[Sums]] = {}
        for _, policy, sums in self._series(window_s).since(now - window_s):
            found.setdefault(policy, []).append(sums)
        return {policy: joined(several) for policy, several in found.items()}

    def slots(self, now: float, window_s: int) -> tuple[int, list[tuple[int, Sums]]]:
        """Seconds of a slot; and of each up to now, empty ones too, when it begins and its sums. 0 is the last day."""
        window_s = window_s or _DAY_S
        series = self._series(window_s)
        width = max(series.slot_s, window_s // 60 // series.slot_s * series.slot_s)
        last = int(now // width) * width
        found = {at: Sums() for at in range(last - (window_s // width - 1) * width, last + 1, width)}
        for began, _, sums in series.since(min(found)):
            found[began // width * width].join(sums)
        return width, list(found.items())

    def _series(self, window_s: int) -> Series:
        return self._fine if window_s <= math.prod(_FINE) else self._coarse


def joined(parts: Iterable[Sums]) -> Sums:
    """All of them together."""
    whole = Sums()
    for one in parts:
        whole.join(one)
    return whole


def _bin(seconds: float) -> int:
    return max(0, int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _STEP))
