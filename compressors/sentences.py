"""Cutting a text into the units that sentence selection keeps or drops: sentences, list items, headings, tables, code.

Knows Latin, Chinese, Japanese, Arabic and Devanagari sentence ends. Languages that end sentences by a space alone
(Thai) are cut by lines and length only.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import AS_IT_IS, Line, LineKind, lines_of
from .outline import TURN
from .rebuild import is_cjk
from .result import Span

_END = re.compile(
    r"""
      (?<![。！？｡!?])[。！？｡!?]++[…]*+[”’」』）)】》"'\]]*+(?=[^\x00-\x7f])  # Chinese and Japanese: no space
    | [。！？｡][”’」』）)】》"'\]]*
    | (?<![.!?‽…؟۔।॥])(?:[.!?‽…؟۔।॥]++[”’"'»)\]*_`]*+)(?=\s)
    """,
    re.VERBOSE,
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[“\"])(?:[A-Z]|[A-Za-z]\.[A-Za-z]|[A-Z]\.[A-Z]\.[A-Z]|mr|mrs|ms|dr|prof|sr|jr|st|vs|cf|fig|eq|sec|ch|no|nos|vol|pp"
    r"|ed|eds|al|approx|dept|gen|gov|sen|rep|capt|lt|col|e\.g|i\.e|a\.k\.a|viz|bzw|ca|nr|z\.b|d\.h|u\.a|mme|mlle|av|sra?|pág|núm)"
    r"\.$",
    re.IGNORECASE,
)
_RECORD = re.compile(r"[^\n]{1,60}?:\s|\[|\(?\d|[-*+•>|#]|</?\w")
SPEAKER = re.compile(r"[^\W\d_a-z][^\s:：]{0,20}(?:[ ][^\s:：]{1,20}){0,4}[:：](?=\s+\S)")
"""A speaker's name, or another short label with a capital, before what is said."""
_CLAUSE = re.compile(r"[;:；：]\s*|[，、،]\s*|,\s+|\s+")
_LONGEST = 1000
_WRAPPED = 60


@dataclass(frozen=True, slots=True)
class Unit:
    """Characters `start` to `end`, without the white space around.

    `level` is 1 to 6 for a heading, TURN for the speaker's name before a turn of speech, else 0.
    """

    start: int
    end: int
    level: int = 0

    @property
    def span(self) -> Span:
        return self.start, self.end


def units_of(text: str, *, whole: Sequence[Span] = ()) -> list[Unit]:
    """The units of a text: ascending, disjoint, all that is not white space.

    No border lies inside a span of `whole`.
    """
    units: list[Unit] = []
    for start, end, kind in groups_of(text, lines_of(text)):
        if kind is LineKind.HEADING:
            units += _stripped(text, start, end, level=heading_level(text[start:end]))
        elif kind in (LineKind.TEXT, LineKind.QUOTE):
            speaker = SPEAKER.match(text, start, end)
            begin = speaker.end() if speaker else start
            units += _stripped(text, start, begin, level=TURN) if speaker else ()
            for low, high in _sentences(text, begin, end):
                units += _stripped(text, low, high)
        else:
            units += _stripped(text, start, end)
    return list(_unbroken(units, whole))


def heading_level(line: str) -> int:
    """1 to 6, by the marks before it."""
    hashes = line.lstrip()
    return min(6, len(hashes) - len(hashes.lstrip("#")))


def groups_of(text: str, lines: Sequence[Line]) -> Iterator[tuple[int, int, LineKind]]:
    """Neighbouring lines that belong together: paragraphs, list items with what continues them, tables, code."""
    at = 0
    while at < len(lines):
        first = lines[at]
        end = at + 1
        if first.kind is LineKind.LIST:
            while end < len(lines) and lines[end].kind is LineKind.TEXT and text[lines[end].start] in " \t":
                end += 1
        elif first.kind not in (LineKind.HEADING, LineKind.RULE, LineKind.BLANK):
            as_it_is = first.kind in AS_IT_IS
            while (
                end < len(lines)
                and (lines[end].kind in AS_IT_IS if as_it_is else lines[end].kind is first.kind)
                and (first.kind is not LineKind.TEXT or _continues(text, lines[end - 1], lines[end]))
            ):
                end += 1
        if first.kind is not LineKind.BLANK:
            yield first.start, lines[end - 1].end, LineKind.TEXT if first.kind is LineKind.TEXT else first.kind
        at = end


def _continues(text: str, above: Line, line: Line) -> bool:
    """Whether a line of text goes on with the sentence above it: wrapped prose, not a record a line."""
    if _RECORD.match(text, line.start, line.end):
        return False
    body = text[above.start : above.end].rstrip()
    start = text[line.start : line.end].lstrip()[:1]
    return start.islower() or (
        above.end - above.start >= _WRAPPED and not body.endswith((".", "!", "?", ":", "。", "："))
    )


def _sentences(text: str, start: int, end: int) -> Iterator[Span]:
    at = start
    for match in _END.finditer(text, start, end):
        if _ends(text, match, at, end):
            yield from _not_too_long(text, at, match.end())
            at = match.end()
    if at < end:
        yield from _not_too_long(text, at, end)


def _ends(text: str, match: re.Match[str], start: int, end: int) -> bool:
    """Whether a mark that may end a sentence does: not after an abbreviation, not before a small letter."""
    mark = match[0]
    if mark[0] in "。！？｡؟۔।॥":
        return True
    follow = text[match.end() : min(end, match.end() + 20)].lstrip()[:1]
    if follow.islower() or not follow:
        return False
    head = text[max(start, match.start() - 16) : match.start() + 1]
    if not (mark.startswith(".") and len(mark) == 1 and _ABBREVIATION.search(head)):
        return True
    return head[-3:-1].lower() == "no" and not follow.isdigit()


def _not_too_long(text: str, start: int, end: int) -> Iterator[Span]:
    """Cut what has no sentence ends at clauses, else at spaces, so that one endless line can be chosen from."""
    while end - start > _LONGEST:
        borders = [match.end() for match in _CLAUSE.finditer(text, start + _LONGEST // 2, start + _LONGEST)]
        marks = [border for border in borders if text[border - 2 : border].rstrip()[-1:] in (*";:,；：，、،",)]
        border = (marks or borders or [_way_out(text, start + _LONGEST, end)])[-1]
        yield start, border
        start = border
    yield start, end


def _way_out(text: str, at: int, end: int) -> int:
    """The first place from `at` on where no word is cut: between two Chinese or Japanese characters, or at a space."""
    if is_cjk(text[at - 1]) and is_cjk(text[at]):
        return at
    match = _CLAUSE.search(text, at, end)
    return match.end() if match else end


def _stripped(text: str, start: int, end: int, *, level: int = 0) -> Iterator[Unit]:
    body = text[start:end]
    low = start + len(body) - len(body.lstrip())
    high = start + len(body.rstrip())
    if low < high:
        yield Unit(low, high, level)


def _unbroken(units: list[Unit], whole: Sequence[Span]) -> Iterator[Unit]:
    """Join units between which a border would cut a span of `whole`."""
    starts = [span[0] for span in whole]
    held: Unit | None = None
    for unit in units:
        if held is not None:
            at = bisect_right(starts, held.end - 1) - 1
            if at >= 0 and whole[at][1] > held.end and whole[at][0] < held.end:
                held = Unit(held.start, unit.end)
                continue
            yield held
        held = unit
    if held is not None:
        yield held
