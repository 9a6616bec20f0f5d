"""White space that means nothing in prose: spaces at line ends, runs of blank lines, JSON layout. Only ever leaves out.

Left alone: everything in or beside verbatim lines (see blocks.py), indentation, spaces inside a line, table rows, and
two spaces at the end of a line of text, which are a line break in Markdown.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator

from .blocks import AS_IT_IS, Line, LineKind, lines_of
from .jsonscan import dense_spans, documents
from .result import Piece, Rewrite, Span
from .spans import without
from .structure.tables import MARK, table_of

_FENCE = re.compile("```|~~~")
_ENDS_LINE = re.compile(r"[ \t\r]*(?:\n|\Z)")
_NEXT_LINE = re.compile(r"[ \t\r]*+\n[ \t]*+")
_SMALLEST_DOCUMENT = 40


def without_blank_space(text: str) -> Rewrite:
    """Leave out spaces at line ends and all but one of consecutive blank lines. Idempotent."""
    lines = lines_of(text)
    holes: list[Span] = []
    for i, line in enumerate(lines):
        above = lines[i - 1] if i else None
        below = lines[i + 1] if i + 1 < len(lines) else None
        if line.kind is LineKind.BLANK:
            holes += _blank_holes(text, line, above, below)
        elif below is not None and not _frozen(text, line):
            holes += _end_holes(text, line, below)
    return Rewrite.of_kept(without(len(text), holes))


def _frozen(text: str, line: Line | None) -> bool:
    """Whether a line must be left as it is: verbatim, a table row, or indented so far that it may be code."""
    if line is None or line.kind is LineKind.BLANK:
        return False
    deep = text.startswith(("    ", "\t"), line.start)
    return deep or line.kind in (*AS_IT_IS, LineKind.TABLE)


def _blank_holes(text: str, line: Line, above: Line | None, below: Line | None) -> list[Span]:
    """What to leave out of a run of blank lines. The last line of a text is not ended yet, so it is left alone."""
    if below is None or _frozen(text, above) or _frozen(text, below):
        return []
    # The run with the line feed that ends it: keep one line feed, drop all else.
    start, end = line.start, line.end + 1
    kept = text.rfind("\n", start, end)
    crlf = kept > start and text[kept - 1] == "\r"
    return [(start, kept - 1 if crlf else kept)]


def _end_holes(text: str, line: Line, below: Line) -> list[Span]:
    body = text[line.start : line.end].removesuffix("\r")
    bare = body.rstrip(" \t")
    breaks = body[len(bare) :].startswith("  ") and below.kind is not LineKind.BLANK
    keep = 2 if breaks and line.kind in (LineKind.TEXT, LineKind.LIST, LineKind.QUOTE) else 0
    start, end = line.start + len(bare) + keep, line.start + len(body)
    return [(start, end)] if start < end else []


def without_json_layout(text: str, *, tables: bool = False) -> Rewrite:
    """Leave out the white space between the tokens of JSON documents; with `tables`, write those of like objects as
    tables (see structure/tables.py). Idempotent.

    Only documents that take whole lines, begin at most three columns in, and stand in no fence.
    """
    tables = tables and MARK.search(text) is None
    pieces: list[Piece] = []
    done = 0
    for group in _on_following_lines(text, _whole_line_documents(text)):
        table = table_of([text[start:end] for start, end in group]) if tables else None
        if table is not None:
            pieces += [(done, group[0][0]), table]
            done = group[-1][1]
            continue
        for start, end in group:
            if end - start >= _SMALLEST_DOCUMENT:
                table = table_of([text[start:end]]) if tables else None
                pieces += [(done, start), *([table] if table else dense_spans(text, start, end))]
                done = end
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _whole_line_documents(text: str) -> Iterator[Span]:
    fenced = [line.start for line in lines_of(text) if line.kind is LineKind.FENCED] if _FENCE.search(text) else []
    for start, end in documents(text):
        line = text.rfind("\n", 0, start) + 1
        alone = start - line < 4 and not text[line:start].strip() and _ENDS_LINE.match(text, end)
        if alone and not _among(line, fenced):
            yield start, end


def _on_following_lines(text: str, places: Iterator[Span]) -> Iterator[list[Span]]:
    """The places in groups of which each begins on the line behind the one before."""
    group: list[Span] = []
    for start, end in places:
        if group and not _NEXT_LINE.fullmatch(text, group[-1][1], start):
            yield group
            group = []
        group.append((start, end))
    if group:
        yield group


def _among(value: int, ascending: list[int]) -> bool:
    at = bisect_left(ascending, value)
    return at < len(ascending) and ascending[at] == value
