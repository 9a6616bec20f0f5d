"""What blending loses, by collection: running estimates with intervals, and what follows where a bound is not met.

Samples are what checking.py measured. Only names of collections and figures are kept, never content.
"""

import json
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple, Self

from .files import write_whole

log = logging.getLogger(__name__)

LADDER = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
"""The ratios that are chosen among, here and by the controller."""

VERSION = 1
OTHERS = "(others)"
_MOST_NAMES = 64  # collections that are told apart; more would make the metrics' labels unbounded
_WINDOW = 64
_LEAST = 8  # samples before anything follows from them
_RELAXED = 24  # before less is recomputed again
_CLEARLY, _AGAIN = 0.5, 0.8  # of the bound: what is below it allows a lower ratio, what was off is on again
_CONFIDENCE = 0.95


class Bounds(NamedTuple):
    """A policy's: the share of blended requests that is checked, the mean KL in nats that is allowed, and the least
    share of greedy tokens that are full prefill's."""

    sample: float
    max_kl: float
    min_agreement: float


class Sample(NamedTuple):
    """One check: the ratio, KL(full prefill || blend) of the next token in nats, the share of equal greedy tokens."""

    ratio: float
    kl: float
    agreement: float


class Interval(NamedTuple):
    """A mean and its 95 % t-interval; of one sample, anything."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, -math.inf, math.inf)
        half = _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


@dataclass(slots=True, kw_only=True)
class Standing:
    """A collection's: at least the share `least` is recomputed; `off`: it is not blended, but still checked.

    `samples` were measured since the last change. `checked` counts all, `dropped` those that found no idle time.
    """

    least: float = 0.0
    off: bool = False
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    checked: int = 0
    dropped: int = 0

    @property
    def kl(self) -> Interval | None:
        return Interval.of([one.kl for one in self.samples]) if self.samples else None

    @property
    def agreement(self) -> Interval | None:
        return Interval.of([one.agreement for one in self.samples]) if self.samples else None


class Gate:
    """Standings of one model, by collection, kept in `path` (None: in memory only). For any thread.

    A file that cannot be read is logged and begun anew; one that cannot be written is logged.
    """

    def __init__(self, path: Path | None = None, *, seed: int | None = None) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._standings = {} if path is None else load_standings(path)

    def least(self, collection: str) -> float | None:
        """The share of rows that is recomputed at least; None where blending is off."""
        with self._lock:
            standing = self._standings.get(self._name(collection))
            return 0.0 if standing is None else None if standing.off else standing.least

    def sampled(self, bounds: Bounds) -> bool:
        """Whether to check this request."""
        return self._random.random() < bounds.sample

    def record(self, collection: str, sample: Sample, bounds: Bounds) -> None:
        """Take a check in, and what follows from it; writes the file."""
        with self._lock:
            standing = self._standing(collection)
            standing.checked += 1
            standing.samples.append(sample)
            _judge(standing, bounds)
            content = self._content()
        self._save(content)

    def dropped(self, collection: str) -> None:
        """A check found no idle time."""
        with self._lock:
            self._standing(collection).dropped += 1

    def standings(self) -> dict[str, Standing]:
        """Copies, by collection; "" is what clients sent themselves."""
        with self._lock:
            return {name: _copied(standing) for name, standing in self._standings.items()}

    def _standing(self, collection: str) -> Standing:
        return self._standings.setdefault(self._name(collection), Standing())

    def _name(self, collection: str) -> str:
        known = collection in self._standings or len(self._standings) < _MOST_NAMES
        return collection if known else OTHERS

    def _content(self) -> str:
        content = {name: {**asdict(one), "samples": list(one.samples)} for name, one in self._standings.items()}
        return json.dumps({"version": VERSION, "collections": content})

    def _save(self, content: str) -> None:
        """Without the lock: nobody who asks for a ratio waits for a disk. `record` is called by one thread."""
        if self._path is None:
            return
        try:
            write_whole(self._path, content)
        except OSError as error:
            log.warning("the blends' standings were not written to %s: %s", self._path, error.strerror)


def gate_file(folder: Path, fingerprint: str) -> Path:
    """Where a model's standings lie, beside its chunks. `fingerprint` is the chunks': what is lost depends on how they
    are kept."""
    model, dash, kind = fingerprint.partition("-")
    return folder / f"blends-{model[:16]}{dash}{kind}.json"


def load_standings(path: Path) -> dict[str, Standing]:
    """By collection; empty where there is no file, or none that can be read, which is logged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        return {name: _standing_of(fields) for name, fields in data["collections"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.warning("the blends' standings in %s are not used: %s", path, error)
        return {}


def _standing_of(fields: dict[str, Any]) -> Standing:
    samples = deque((Sample(*map(float, one)) for one in fields["samples"]), maxlen=_WINDOW)
    counts = {name: int(fields[name]) for name in ("checked", "dropped")}
    least = float(fields["least"])
    if not 0.0 <= least <= LADDER[-1] or min(counts.values()) < 0:  # every blend would be refused, or never judged
        raise ValueError(f"a least ratio of {least}, {counts}")
    if not all(map(math.isfinite, chain.from_iterable(samples))):
        raise ValueError("a sample that is no number")
    return Standing(least=least, off=bool(fields["off"]), samples=samples, **counts)


def _copied(standing: Standing) -> Standing:
    return Standing(
        least=standing.least,
        off=standing.off,
        samples=standing.samples.copy(),
        checked=standing.checked,
        dropped=standing.dropped,
    )


def _judge(standing: Standing, bounds: Bounds) -> None:
    """Every eighth sample: a ratio higher where a bound is certainly not met, then off; back where all is well."""
    count = len(standing.samples)
    if count < _LEAST or standing.checked % _LEAST:
        return
    kl, agreement = standing.kl, standing.agreement
    assert kl is not None and agreement is not None, count
    if standing.off:
        if kl.high < _AGAIN * bounds.max_kl and agreement.low >= bounds.min_agreement:
            _change(standing, least=LADDER[-1], off=False)
    elif kl.low > bounds.max_kl or agreement.high < bounds.min_agreement:
        served = max(standing.least, min(one.ratio for one in standing.samples))
        higher = next((ratio for ratio in LADDER if ratio > served), None)
        _change(standing, least=standing.least if higher is None else higher, off=higher is None)
    elif standing.least and count >= _RELAXED:
        lower = max((ratio for ratio in LADDER if ratio < standing.least), default=0.0)
        if kl.high < _CLEARLY * bounds.max_kl and agreement.low >= bounds.min_agreement:
            _change(standing, least=lower, off=False)


def _change(standing: Standing, *, least: float, off: bool) -> None:
    standing.least, standing.off = least, off
    standing.samples.clear()


def _t_quantile(freedom: int) -> float:
    """Student's t by the expansion of its quantiles in the normal one's (Abramowitz and Stegun 26.7.5).

    Within 1 % from three degrees of freedom on.
    """
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
