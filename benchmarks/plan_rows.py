"""What plan.py measures of each request, and what an earlier part of a run has in its file. Used by plan.py."""

import argparse
import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from kept_rows import complete_rows, not_ours
from plan_requests import taken


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request under one way: seconds until the answer was there and until the gateway was idle again."""

    request: int
    kind: str
    way: str
    seconds: float
    idle_s: float
    overhead_ms: float
    tokens_in: int
    tokens_out: int
    cached: int
    reused: int
    recomputed: int
    steps: dict[str, float]  # milliseconds by name
    setting: str = ""  # rows of others are not comparable


def setting_of(options: argparse.Namespace) -> str:
    """What all ways have in common."""
    held = options.dtype if options.quantize == "none" else f"{options.dtype} and {options.quantize}"
    return f"{options.model} in {held}, answers of {options.tokens} tokens, prompts of size {options.size:g}"


def earlier_rows(options: argparse.Namespace) -> list[Row]:
    """What an earlier part has measured of the requests. SystemExit where it was under other ways or settings, and
    where the file is damaged or of something else.
    """
    path, ways, setting = options.rows, set(options.ways), setting_of(options)
    # A request of which a part that was killed has some ways was asked again: the later rows count.
    found = (_row(value, path, number) for number, value in enumerate(complete_rows(path), 1))
    rows = list({(row.request, row.way): row for row in found}.values())
    if others := {row.setting for row in rows if row.setting != setting}:
        raise SystemExit(
            f"{path} has rows of {'; '.join(sorted(others))}, not of {setting}: name another file for --rows"
        )
    if not ways >= {row.way for row in rows}:
        raise SystemExit(f"{path} has other ways than {', '.join(options.ways)}: name another file for --rows")
    times = Counter(row.request for row in rows)
    kinds = {
        row.request: row.kind for row in rows if times[row.request] == len(ways) and row.request < options.requests
    }
    numbers = sorted(kinds)
    wanted = {numbers[at] for at in taken([kinds[number] for number in numbers], options.each)}
    return [row for row in rows if row.request in wanted]


def _row(value: Any, path: Path, number: int) -> Row:
    """A line of the file."""
    try:
        row = Row(**value)
    except TypeError:
        raise not_ours(path, number) from None
    for field in dataclasses.fields(Row):
        kind: Any = int | float if field.type is float else get_origin(field.type) or field.type
        if not isinstance(getattr(row, field.name), kind):
            raise not_ours(path, number)
    if row.seconds <= 0:
        raise not_ours(path, number)
    return row
