"""The line structure of a text: Markdown's blocks, and lines that must be left exactly as they are.

Errs towards VERBATIM: program code without a fence, grep output, diffs, stack traces, numbered listings, CSV, shell
sessions and settings look like prose to nobody who has to copy from them. One pass of one regular expression over the
lines.
"""

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum, auto

from .structure.marks import marked_spans


class LineKind(Enum):
    BLANK = auto()
    TEXT = auto()
    HEADING = auto()
    LIST = auto()
    QUOTE = auto()
    TABLE = auto()
    RULE = auto()
    VERBATIM = auto()
    FENCED = auto()


AS_IT_IS = frozenset({LineKind.VERBATIM, LineKind.FENCED})
"""Kinds of lines that only a copy can stand for."""


@dataclass(frozen=True, slots=True)
class Line:
    """Characters `start` to `end` of the text, without the line feed. A run of blank lines is one BLANK."""

    start: int
    end: int
    kind: LineKind


REFERENCE = r"\[repeat: the same \d+ characters as earlier, from “[^\n]*”\]"
"""The line that stands for a repeated block (see repeats.py)."""

_LINE = re.compile(
    rf"""^(?:
        (?P<blank>[ \t\r]*$(?:\n[ \t\r]*$)*+)
      | (?P<fence>[ \t>]*+(?:`{{3,}}|~{{3,}}))
      | (?P<reference>{REFERENCE}[ \t\r]*$)
      | (?P<diff>diff[ ]--git[ ]|@@[ ]-\d|(?:\+\+\+|---)[ ]\S+\r?$|(?:\+\+\+|---)[ ][ab]/|index[ ][0-9a-f]{{7,}}\.\.)
      | (?P<trace>Traceback[ ]\(most[ ]recent|[ \t]+File[ ]"[^"\n]+",[ ]line[ ]\d|[ \t]+at[ ]\S+[ ]?\(|Caused[ ]by:
            |goroutine[ ]\d|panic:[ ]|[ \t]*\.\.\.[ ]\d+[ ]more)
      | (?P<grep>(?=[^\s:]{{0,200}}[./])[^\s:]{{1,200}}?[:-]\d{{1,7}}[:-]|--\r?$)
      | (?P<numbered>[ ]*\d{{1,7}}(?:\t|→|[ ]?\|[ ]|:(?!\d)|-(?!\d)))
      | (?P<shell>(?:\$|>>>|\.\.\.|PS>)[ ]\S)
      | (?P<heading>[ ]{{0,3}}\#{{1,6}}[ \t])
      | (?P<rule>[ ]{{0,3}}(?:-{{3,}}|\*{{3,}}|_{{3,}}|={{3,}})[ \t\r]*$)
      | (?P<table>[ \t]*\|[^\n]*\|[ \t\r]*$|[ \t]*:?-{{3,}}:?[ \t]*\|[-|: \t\r]*$)
      | (?P<list>[ \t]*+(?:[-*+•]|\d{{1,9}}[.)、])[ \t]+\S)
      | (?P<quote>[ ]{{0,3}}>)
      | (?P<indent>(?:[ ]{{4}}|\t))
    )?+[^\n]*""",
    re.VERBOSE | re.MULTILINE,
)
_CODE_LINE = re.compile(
    r"""
        [;{\[(][ \t\r]*$
      | (?:^|[^a-z{\n]|\S\{)[a-z]*\}[ \t\r]*$  # but not a remark such as {laughter}
      | ^[ \t]*[)\]}]+[,;]?[ \t\r]*$
      | ^[ \t]*(?://|\#!|/\*|\*/|<!--|@[A-Za-z_.]+(?:\(|\r?$))
      | ^[ \t]*(?:async[ ])?(?:def|class|func|fn|function|interface|struct|enum|impl)[ ]+\w+[^.!?]*[:{(]
      | ^[ \t]*(?:from[ ]\S+[ ]import[ ]|import[ ][\w.*{"']+(?:[ ]as[ ]\w+)?\r?$)
      | ^[ \t]*(?:\#include|using[ ]\w|package[ ][\w.]+;?\r?$)
      | ^[ \t]*(?:if|elif|for|while|with|try|except|else|switch|case)\b[^.!?]*[:{]\r?$
      | ^[ \t]*(?:return|raise|yield|throw|await|let|const|var|public|private|static|export)\b[ ][^.!?\n]*[=()\[\]{};'"]
      | ^[ \t]*(?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|FROM|WHERE)[ ]
      | ^[ \t]*[\w.\[\]"'$-]+[ ]?(?:[-+*/|&]?=|:=)[ ]?\S
      | ^[ \t]*[\w.]+\([^\n]*\)[ \t\r]*$
      | =>|->|::|&&|\|\|
    """,
    re.VERBOSE,
)
# What separates the columns of a listing, and in how many places at least: prose has commas, too.
_SEPARATORS = (("\t", 1), ("|", 1), (";", 2), (",", 2))
_ROWS = 4
_SETTING = re.compile(r"^[ \t]*(?:- )?[a-z][\w.-]*:(?:[ ]\S.*)?\r?$")
_SIMPLE = {
    "blank": LineKind.BLANK,
    "reference": LineKind.VERBATIM,
    "trace": LineKind.VERBATIM,
    "grep": LineKind.VERBATIM,
    "shell": LineKind.VERBATIM,
    "heading": LineKind.HEADING,
    "rule": LineKind.RULE,
    "table": LineKind.TABLE,
    "list": LineKind.LIST,
    "quote": LineKind.QUOTE,
}


def lines_of(text: str) -> list[Line]:
    """All lines in order; joined with line feeds they are the text."""
    lines: list[Line] = []
    marks: list[str | None] = []
    for match in _LINE.finditer(text):
        if lines and match.start() <= lines[-1].end:
            continue  # the empty match right behind a run of blank lines
        lines.append(Line(match.start(), match.end(), _SIMPLE.get(match.lastgroup or "", LineKind.TEXT)))
        marks.append(match.lastgroup)
    for pass_ in (_fences, _marked, _regions, _numbered, _indented, _paragraphs):
        pass_(text, lines, marks)
    return lines


def _mark(lines: list[Line], start: int, end: int, kind: LineKind = LineKind.VERBATIM) -> None:
    for i in range(start, end):
        if lines[i].kind is not LineKind.FENCED:
            lines[i] = replace(lines[i], kind=kind)


def _fences(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Fenced blocks, fence lines included; one that never closes runs to the end."""
    opened: tuple[int, str] | None = None
    for i, line in enumerate(lines):
        if marks[i] != "fence":
            continue
        fence = text[line.start : line.end].lstrip(" \t>").rstrip()
        if opened is None:
            opened = i, fence[0] * (len(fence) - len(fence.lstrip(fence[0])))
        elif fence.startswith(opened[1]) and not fence.strip(fence[0]):
            _mark(lines, opened[0], i + 1, LineKind.FENCED)
            opened = None
    if opened is not None:
        _mark(lines, opened[0], len(lines), LineKind.FENCED)


def _marked(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Tables, folds and templates that a text was written as (see structure/)."""
    starts = [line.start for line in lines]
    for start, end in marked_spans(text):
        _mark(lines, bisect_left(starts, start), bisect_left(starts, end))


def _regions(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Diffs and Python tracebacks: from their first line to the last that belongs to them."""
    i = 0
    while i < len(lines):
        start, mark = i, marks[i]
        i += 1
        if mark not in ("diff", "trace"):
            continue
        inside = " +-\\@" if mark == "diff" else " \t"
        while i < len(lines) and (marks[i] == mark or text[lines[i].start : lines[i].start + 1] in tuple(inside)):
            i += 1
        if mark == "trace" and i < len(lines) and lines[i].kind is LineKind.TEXT:
            i += 1  # the line that names the exception
        _mark(lines, start, i)


def _numbered(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Listings whose every line has its number; one such line alone proves nothing."""
    for i in range(1, len(lines)):
        if marks[i] == "numbered" and marks[i - 1] == "numbered":
            _mark(lines, i - 1, i + 1)


def _indented(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Indented code: four columns in, after a blank line or at the start, and not inside a list."""
    in_list = False
    above: LineKind | None = None
    for i, line in enumerate(lines):
        if line.kind is LineKind.BLANK:
            above = above if above in AS_IT_IS else LineKind.BLANK
            continue
        deep = text[line.start : line.start + 1] == "\t" or text.startswith("    ", line.start)
        if deep and not in_list and above in (None, LineKind.BLANK, *AS_IT_IS):
            _mark(lines, i, i + 1)
        elif not deep:
            in_list = line.kind is LineKind.LIST
        above = lines[i].kind


def _paragraphs(text: str, lines: list[Line], marks: list[str | None]) -> None:
    """Runs of text lines of which at least half look like program code, three like settings, or all like rows of one
    listing, are verbatim.
    """
    start = 0
    for i in range(len(lines) + 1):
        if i < len(lines) and lines[i].kind in (LineKind.TEXT, LineKind.LIST):
            continue
        block = [text[line.start : line.end] for line in lines[start:i]]
        if block and (_is_code(block) or _is_listing(block)):
            _mark(lines, start, i)
        start = i + 1


def _is_code(block: list[str]) -> bool:
    # Prose lines may be long; what makes a line code is near its ends or in its first words.
    code = sum(1 for line in block if (_CODE_LINE.search(line) if len(line) < 400 else _dense(line)))
    if code and 2 * code >= len(block):
        return True
    settings = sum(1 for line in block if len(line) < 400 and _SETTING.match(line))
    return settings >= 3 and 4 * settings >= 3 * len(block)


def _is_listing(block: list[str]) -> bool:
    """Whether lines have the same number of columns, as in CSV; of four, one may stray (a comma within quotes)."""
    if len(block) < _ROWS:
        return False
    for separator, least in _SEPARATORS:
        (columns, rows), *_ = Counter(line.count(separator) for line in block).most_common(1)
        if columns >= least and 4 * rows >= 3 * len(block):
            return True
    return False


def _dense(line: str) -> bool:
    """Whether a long line has as many brackets and operators as minified code."""
    return sum(map(line.count, "{}();=")) > len(line) / 16
