"""The padding of Markdown tables: spaces that line columns up, dashes that draw a line. A table renders as before."""

import re
from collections.abc import Iterator

from ..blocks import Line, LineKind, lines_of
from ..result import Rewrite, Span
from ..spans import without

_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*+\|?[ \t\r]*")
# What follows a pipe, unless the pipe is escaped, or stands before one, but for one space; dashes from the fourth on.
_PADDING = re.compile(r"(?<=\|)(?<!\\\|)[ \t]([ \t]++)|[ \t]([ \t]++)(?=\|)")
_DASHES = re.compile(r"(?<=---)-++")


def without_table_padding(text: str) -> Rewrite:
    """Leave it out. Only in tables whose second row is a line of dashes, and in no code. Idempotent."""
    if "|" not in text:
        return Rewrite.whole(text)
    holes = [hole for table in _tables(text) for line in table for hole in _holes(text, line)]
    return Rewrite.of_kept(without(len(text), holes))


def _tables(text: str) -> Iterator[list[Line]]:
    table: list[Line] = []
    for line in [*lines_of(text), Line(len(text), len(text), LineKind.BLANK)]:
        if line.kind is LineKind.TABLE:
            table.append(line)
            continue
        if len(table) > 1 and _RULE.fullmatch(text, table[1].start, table[1].end):
            yield table
        table = []


def _holes(text: str, line: Line) -> Iterator[Span]:
    spans = [match.span(match.lastindex or 0) for match in _PADDING.finditer(text, line.start, line.end)]
    if _RULE.fullmatch(text, line.start, line.end):
        spans += [match.span() for match in _DASHES.finditer(text, line.start, line.end)]
    yield from sorted(spans)
