"""Atoms: the units that token pruning keeps or drops. A word, a number, a single Chinese or Japanese character, a run
of punctuation, or a whole protected span; never part of a word, and never part of a character with its marks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .blocks import Line, LineKind, lines_of
from .result import Span
from .sentences import SPEAKER

_MARKS = "\u3099\u309a\ufe00-\ufe0f\U000e0100-\U000e01ef"
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
    rf"(?P<word>{_LETTER}++(?:[-'’._/@&:+]{_LETTER}++)*+)|(?P<single>[{_SINGLE}][{_MARKS}]*+)"
    rf"|(?P<pair>[()\[\]{{}}（）【】]|\*\*)|(?P<punct>(?:(?![()\[\]{{}}（）【】]|\*\*)[{_PUNCT}])++)|\S"
)
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
    FIXED = auto()
    """Protected, a heading, or a speaker's name or other label: stays whatever the budget."""


@dataclass(frozen=True, slots=True)
class Atom:
    start: int
    end: int
    kind: AtomKind
    line: int

    @property
    def span(self) -> Span:
        return self.start, self.end


def atoms_of(text: str, *, protected: Sequence[Span]) -> list[Atom]:
    """All atoms of a text: ascending, disjoint, everything that is not white space. `protected` spans (and headings)
    are one FIXED atom each.
    """
    lines = lines_of(text)
    markers = {
        match.end() - len(match[0].lstrip(" \t")): match.end()
        for line in lines
        if line.kind in (LineKind.LIST, LineKind.QUOTE) and (match := _LIST_MARKER.match(text, line.start, line.end))
    }
    fixed = _with_labels(text, protected, lines)
    found: list[Atom] = []
    at = line = 0
    edges = [*fixed, (len(text), len(text))]
    for start, end in edges:
        for atom in _free(text, at, start, markers):
            while line + 1 < len(lines) and lines[line + 1].start <= atom[0]:
                line += 1
            found.append(Atom(atom[0], atom[1], atom[2], line))
        if start < end:
            while line + 1 < len(lines) and lines[line + 1].start <= start:
                line += 1
            found.append(Atom(start, end, AtomKind.FIXED, line))
        at = end
    return found


def _with_labels(text: str, protected: Sequence[Span], lines: Sequence[Line]) -> list[Span]:
    """Protected spans without white space at their ends, headings and labels, as ascending disjoint spans."""
    wanted = list(protected)
    for line in lines:
        if line.kind is LineKind.HEADING:
            wanted.append((line.start, line.end))
        elif line.kind in (LineKind.TEXT, LineKind.LIST):
            marker = _LIST_MARKER.match(text, line.start, line.end)
            start = marker.end() if marker else line.start
            label = SPEAKER.match(text, start + _blank(text, start, line.end), line.end)
            wanted += [label.span()] if label else []
    spans: list[Span] = []
    for start, end in sorted(wanted):
        body = text[start:end]
        low, high = start + len(body) - len(body.lstrip()), start + len(body.rstrip())
        if spans and low < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        elif low < high:
            spans.append((low, high))
    return spans


def _blank(text: str, start: int, end: int) -> int:
    body = text[start:end]
    return len(body) - len(body.lstrip())


def _free(text: str, start: int, end: int, markers: dict[int, int]) -> Iterator[tuple[int, int, AtomKind]]:
    """The atoms between two protected spans."""
    at = start
    while at < end and (match := _ATOM.search(text, at, end)):
        low, high = match.span()
        if low in markers and markers[low] <= end:
            high, kind = markers[low], AtomKind.MARKER
        elif match.lastgroup == "punct":
            kind = AtomKind.END if _SENTENCE_END.search(match[0]) else AtomKind.PUNCT
        else:
            kind = AtomKind.PAIR if match.lastgroup == "pair" else AtomKind.WORD
        yield low, high, kind
        at = high
