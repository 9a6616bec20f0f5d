"""Atoms: the units that token pruning keeps or drops. A word, a number, a single Chinese or Japanese character, a run
of punctuation, or a whole protected span; never part of a word, and never part of a character with its marks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from .blocks import Line, LineKind, lines_of
from .graphemes import end_of, parted, start_of
from .outline import TURN, Outline
from .result import Span
from .sentences import SPEAKER, heading_level

# Kana other than katakana, and Han; katakana runs are words.
_SINGLE = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u2e80-\u2fdf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_PUNCT = (
    r"!-/:-@\[-`{-~¡-©«-¬®-±´¶-¸»¿×÷\u2010-\u2029\u2030-\u205e\u2190-\u23ff\u2500-\u25ff"
    r"\u3001-\u3004\u3008-\u3030\u303d\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65،؛؟٪-٭۔।॥"
)
_LETTER = rf"[^\s{_PUNCT}{_SINGLE}]"
_ATOM = re.compile(
    rf"(?P<word>{_LETTER}++(?:[-'’._/@&:+]{_LETTER}++)*+)|[{_SINGLE}]"
    rf"|(?P<pair>[()\[\]{{}}（）【】]|\*\*)|(?P<punct>(?:(?![()\[\]{{}}（）【】]|\*\*)[{_PUNCT}])++)|\S"
)
# What is joined to a protected span is part of it: "mid-1990s" says something else than "1990s".
_JOINED_BEFORE = re.compile(rf"(?:{_LETTER}++[-'’/&+])++\Z")
_JOINED_AFTER = re.compile(rf"(?:[-'’/&+]{_LETTER}++)++")
_LONGEST_JOINED = 40
_IN_WORD = re.compile(rf"(?<={_LETTER}){_LETTER}")
_SENTENCE_END = re.compile("[.!?。！？؟۔।｡]")
_LIST_MARKER = re.compile(r"[ \t>]*(?:[-*+•]|\d{1,9}[.)、])(?=[ \t])|[ ]{0,3}>+")


class AtomKind(Enum):
    WORD = auto()
    PUNCT = auto()
    END = auto()
    """Punctuation that ends a sentence."""
    PAIR = auto()
    """A bracket or a mark of bold text, which makes sense only with its partner."""
    MARKER = auto()
    """A list bullet or number, or a quotation mark of Markdown, at the start of a line."""
    HEAD = auto()
    """A heading, or a speaker's name or other label, over other atoms: stays with any of them."""
    FIXED = auto()
    """Protected, or a heading of nothing: stays whatever the budget."""


@dataclass(frozen=True, slots=True)
class Atom:
    """`line` is the number of its line, `head` that of the heading or label right above it among the text's atoms."""

    start: int
    end: int
    kind: AtomKind
    line: int
    head: int | None = None

    @property
    def span(self) -> Span:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class _Whole:
    """A span that is one atom. `level` as in Outline; `free`: nothing in it is protected."""

    start: int
    end: int
    level: int
    free: bool


def atoms_of(text: str, *, protected: Sequence[Span]) -> list[Atom]:
    """All atoms of a text: ascending, disjoint, everything that is not white space. `protected` spans are one FIXED
    atom each, headings and labels one HEAD atom.
    """
    lines = lines_of(text)
    found = list(_numbered(_pieces(text, protected, lines), lines))
    heading = {atom.head for atom in found}
    return [
        replace(atom, kind=AtomKind.FIXED) if atom.kind is AtomKind.HEAD and i not in heading else atom
        for i, atom in enumerate(found)
    ]


def heads_over(atoms: Sequence[Atom], i: int) -> Iterator[int]:
    """The headings and labels that an atom stands under, nearest first."""
    head = atoms[i].head
    while head is not None:
        yield head
        head = atoms[head].head


def _pieces(text: str, protected: Sequence[Span], lines: Sequence[Line]) -> Iterator[tuple[int, int, AtomKind, int]]:
    """Of each atom its span, its kind and its level in the outline."""
    markers = {
        match.end() - len(match[0].lstrip(" \t")): match.end()
        for line in lines
        if line.kind in (LineKind.LIST, LineKind.QUOTE) and (match := _LIST_MARKER.match(text, line.start, line.end))
    }
    at = 0
    for one in _wholes(text, protected, lines):
        for start, end, kind in _free(text, at, one.start, markers):
            yield start, end, kind, 0
        yield one.start, one.end, AtomKind.HEAD if one.level and one.free else AtomKind.FIXED, one.level
        at = one.end
    for start, end, kind in _free(text, at, len(text), markers):
        yield start, end, kind, 0


def _numbered(pieces: Iterator[tuple[int, int, AtomKind, int]], lines: Sequence[Line]) -> Iterator[Atom]:
    """Atoms with their lines and with what they stand under."""
    outline = Outline()
    line = 0
    for i, (start, end, kind, level) in enumerate(pieces):
        while line + 1 < len(lines) and lines[line + 1].start <= start:
            line += 1
        yield Atom(start, end, kind, line, outline.above(i, level=level))


def _wholes(text: str, protected: Sequence[Span], lines: Sequence[Line]) -> list[_Whole]:
    """Protected spans without white space at their ends, headings and labels, ascending and disjoint."""
    wanted = [_Whole(*_with_joined(text, span), 0, free=False) for span in protected]
    for line in lines:
        if line.kind is LineKind.HEADING:
            wanted.append(_Whole(line.start, line.end, heading_level(text[line.start : line.end]), free=True))
        elif line.kind in (LineKind.TEXT, LineKind.LIST):
            marker = _LIST_MARKER.match(text, line.start, line.end)
            start = marker.end() if marker else line.start
            label = SPEAKER.match(text, start + _blank(text, start, line.end), line.end)
            wanted += [_Whole(*label.span(), TURN, free=True)] if label else []
    found: list[_Whole] = []
    for one in sorted(wanted, key=lambda one: (one.start, one.end)):
        body = text[one.start : one.end]
        low = start_of(text, one.start + len(body) - len(body.lstrip()))
        high = end_of(text, one.start + len(body.rstrip()))
        if found and low < found[-1].end:
            last = found[-1]
            found[-1] = _Whole(last.start, max(high, last.end), last.level or one.level, last.free and one.free)
        elif low < high:
            found.append(_Whole(low, high, one.level, one.free))
    return found


def _with_joined(text: str, span: Span) -> Span:
    """With what is joined to it, unless that is too long to see where it begins or ends."""
    start, end = span
    before = _JOINED_BEFORE.search(text, max(0, start - _LONGEST_JOINED), start)
    after = _JOINED_AFTER.match(text, end, end + _LONGEST_JOINED)
    low, high = before.start() if before else start, after.end() if after else end
    return start if _cuts(text, low) else low, end if _cuts(text, high) else high


def _cuts(text: str, at: int) -> bool:
    """Whether a border there would part a word, or a character from its marks."""
    return _IN_WORD.match(text, at) is not None or parted(text, at)


def _blank(text: str, start: int, end: int) -> int:
    body = text[start:end]
    return len(body) - len(body.lstrip())


def _free(text: str, start: int, end: int, markers: dict[int, int]) -> Iterator[tuple[int, int, AtomKind]]:
    """The atoms between two protected spans."""
    at = start
    while at < end and (match := _ATOM.search(text, at, end)):
        low, high = start_of(text, match.start()), end_of(text, match.end())
        if low in markers and markers[low] <= end:
            high, kind = end_of(text, markers[low]), AtomKind.MARKER
        elif match.lastgroup == "punct":
            kind = AtomKind.END if _SENTENCE_END.search(match[0]) else AtomKind.PUNCT
        else:
            kind = AtomKind.PAIR if match.lastgroup == "pair" else AtomKind.WORD
        yield low, high, kind
        at = high
