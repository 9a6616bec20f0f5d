"""What the rows of plan.py say: a table for each class, ratios with their intervals, and a verdict. Used by plan.py."""

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from plan_requests import SHARES
from plan_rows import Row
from plan_ways import OFF, PLANNER, PLANNERS
from rich.table import Table

_ROUNDS = 2000
_MARGIN = 1.02  # of `off`: more, in any class, is too much
_FEWEST = 5  # requests of a class that a verdict is made of


def tables(rows: Sequence[Row], ways: Sequence[str]) -> list[Table]:
    """One for each class, and one for all."""
    kinds = [kind for kind in SHARES if any(row.kind == kind for row in rows)]
    return [_table(kind, [row for row in rows if kind in (row.kind, "all")], ways) for kind in (*kinds, "all")]


def _table(kind: str, rows: Sequence[Row], ways: Sequence[str]) -> Table:
    base = {row.request: row.seconds for row in rows if row.way == OFF}
    table = Table(title=f"{kind}: {len({row.request for row in rows})} requests")
    table.add_column("way")
    for name in (
        "total s",
        "to off",
        "median of ratios",
        "p50 ms",
        "p95 ms",
        "idle work s",
        "tokens in",
        "sent",
        "cached",
        "reused",
        "recomputed",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for way in ways:
        own = [row for row in rows if row.way == way]
        seconds = sorted(row.seconds for row in own)
        ratios = [row.seconds / base[row.request] for row in own if row.request in base]
        total = sum(seconds)
        counts = (sum(getattr(row, name) for row in own) for name in ("tokens_in", "tokens_out", "cached"))
        reused, again = sum(row.reused for row in own), sum(row.recomputed for row in own)
        table.add_row(
            way,
            f"{total:.1f}",
            str(ratio(rows, way)) if base else "",
            f"{statistics.median(ratios):.3f}" if ratios else "",
            f"{1000 * statistics.median(seconds):.0f}",
            f"{1000 * seconds[max(0, -(-len(seconds) * 95 // 100) - 1)]:.0f}",
            f"{sum(row.idle_s for row in own):.1f}",
            *map(str, counts),
            str(reused),
            str(again),
        )
    return table


class Ratio(NamedTuple):
    """The seconds of a way by those of `off`, and the borders of the 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.low == self.high else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(rows: Sequence[Row], way: str, kind: str = "") -> Ratio:
    """Of sums over the requests of one class or all, by the bootstrap (Efron 1979) over requests."""
    off = {row.request: row.seconds for row in rows if row.way == OFF and kind in ("", row.kind)}
    own = {row.request: row.seconds for row in rows if row.way == way and row.request in off}
    pairs = np.array([(own[request], off[request]) for request in sorted(own)])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (_ROUNDS, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    value, base = pairs.sum(axis=0)
    return Ratio(float(value / base), float(low), float(high))


def verdict(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """For each planner: whether it is at most 2 % worse than `off` in each class, and which way is best over all, or
    that there are too few requests of a class. The one that repairs stored KV is held against all ways but those that
    do not."""
    total = functools.partial(_total, rows)
    counts = Counter(row.kind for row in rows if row.way == OFF)
    few = [f"{kind} ({counts[kind]})" for kind in SHARES if 0 < counts[kind] < _FEWEST]
    said: list[str] = []
    for planner in (way for way in PLANNERS if {OFF, way} <= set(ways)):
        whole = f"{planner} takes {ratio(rows, planner)} of off over all"
        if few:
            said.append(f"{whole}; too few requests for a verdict, {_FEWEST} of a class at least: {', '.join(few)}")
            continue
        ratios = {kind: ratio(rows, planner, kind) for kind in SHARES if total(OFF, kind)}
        rivals = [way for way in ways if planner == PLANNER or way not in (PLANNER, "reuse")]
        best, worst = min(rivals, key=total), max(ratios, key=lambda kind: ratios[kind])
        held = "at most" if ratios[worst].value <= _MARGIN else "MORE than"
        surely = all(one.high <= _MARGIN for one in ratios.values())
        said.append(
            f"{whole} and is {held} 2 % worse in each class "
            f"(worst: {worst}, {ratios[worst]}; {'all' if surely else 'NOT all'} intervals are below {_MARGIN}); "
            f"best of {', '.join(rivals)}: {best} ({total(best) / total(OFF):.3f})"
        )
    return "\n".join(said) or f"no verdict without {OFF} and a planner"


def _total(rows: Sequence[Row], way: str, kind: str = "") -> float:
    """Seconds of a way, over one class or all."""
    return sum(row.seconds for row in rows if row.way == way and kind in ("", row.kind))
