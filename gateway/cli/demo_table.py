"""The demo's figures: one row a question and policy, medians a policy, as a terminal table and as JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LEAST_ANSWER = 12  # characters
_UNSEEN_WIDTH = 140  # columns where the output is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answered question.

    Tokens: `tokens_in` as the client sent it, `tokens_out` as the model got it; `cached` came from the prefix cache,
    `reused` from stored chunks, of which `recomputed` were repaired; `pruned` were cut. `ttft_ms` is measured by the
    client, from sending to the first piece of the answer.
    """

    policy: str
    question: str
    answer: str
    tokens_in: int
    tokens_out: int
    cached: int
    reused: int
    recomputed: int
    pruned: int
    ttft_ms: float
    total_ms: float


_COLUMNS: tuple[tuple[str, Callable[[Asked], float]], ...] = (
    ("in", lambda row: row.tokens_in),
    ("out", lambda row: row.tokens_out),
    ("cached", lambda row: row.cached),
    ("reused", lambda row: row.reused),
    ("recomp.", lambda row: row.recomputed),
    ("pruned", lambda row: row.pruned),
    ("TTFT ms", lambda row: row.ttft_ms),
)


def show(rows: Sequence[Asked], console: Console) -> None:
    """Print the questions, all rows with as much of an answer as fits on the line, and the medians."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_UNSEEN_WIDTH)
    for number, question in enumerate(_questions(rows), start=1):
        console.print(f"{number:2}. {question}", markup=False, highlight=False)
    taken = console.measure(answers_table(rows, answer_width=0), options=console.options.update(width=1000)).maximum
    console.print(answers_table(rows, answer_width=max(_LEAST_ANSWER, console.width - taken)))
    console.print(summary_table(rows))


def answers_table(rows: Sequence[Asked], *, answer_width: int) -> Table:
    """Every question under every policy, grouped by question; answers are cut at `answer_width` characters."""
    table = _table("#", "policy", *(name for name, _ in _COLUMNS), "answer" if answer_width else "")
    for number, question in enumerate(_questions(rows), start=1):
        group = [row for row in rows if row.question == question]
        for row in group:
            shown = str(number) if row is group[0] else ""
            answer = Text(shortened(row.answer, answer_width))
            table.add_row(shown, row.policy, *_figures(row), answer, end_section=row is group[-1])
    return table


def summary_table(rows: Sequence[Asked]) -> Table:
    """Medians of each policy."""
    table = _table("median", *(name for name, _ in _COLUMNS), "questions")
    for policy, figures in medians(rows).items():
        count = sum(row.policy == policy for row in rows)
        table.add_row(policy, *(f"{value:.0f}" for value in figures.values()), str(count))
    return table


def medians(rows: Iterable[Asked]) -> dict[str, dict[str, float]]:
    """Policy to the median of each column, policies in the order in which they were asked."""
    grouped: dict[str, list[Asked]] = {}
    for row in rows:
        grouped.setdefault(row.policy, []).append(row)
    return {
        policy: {name: median(read(row) for row in group) for name, read in _COLUMNS}
        for policy, group in grouped.items()
    }


def as_json(rows: Sequence[Asked], *, about: dict[str, Any]) -> dict[str, Any]:
    """All figures with the medians; `about` says what was run."""
    return {"about": about, "medians": medians(rows), "answers": [asdict(row) for row in rows]}


def _questions(rows: Sequence[Asked]) -> list[str]:
    return list(dict.fromkeys(row.question for row in rows))


def _figures(row: Asked) -> list[str]:
    return [f"{read(row):.0f}" for _, read in _COLUMNS]


def shortened(answer: str, width: int) -> str:
    """The beginning of an answer on one line of at most `width` characters."""
    line = " ".join(answer.split())
    return line if len(line) <= width else line[: max(0, width - 1)].rstrip() + "…" * (width > 0)


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
    for name in columns:
        words = name in ("policy", "median", "answer", "")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table
