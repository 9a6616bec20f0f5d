"""Where a text was written shorter by this room: a mark and the lines that it speaks of stay, or go, together."""

import re
from collections.abc import Iterator

from ..result import Span
from .folds import COUNTS, LONGEST_BLOCK
from .tables import MARK
from .templates import COUNT

CLOSING = {"[": "]", "{": "}", "(": ")"}
"""How a table ends, by how it begins."""

_MARKS = re.compile(
    rf"(?P<fold>^{COUNTS.pattern}$)|(?P<lines>^{COUNT.pattern}$)|(?P<table>{MARK.pattern})", re.MULTILINE
)


def marked_spans(text: str) -> Iterator[Span]:
    """Folded lines with their counts, templates with their rows, and tables: whole lines, by their ends ascending."""
    done = 0
    endless: set[str] = set()
    for match in _MARKS.finditer(text):
        if match.start() < done:
            continue
        if match["fold"]:
            start = _lines_above(text, match.start(), int(match["size"] or 1))
            yield start, match.end()
        elif match["lines"]:
            done = _lines_below(text, match.end(), int(match["count"]))
            yield match.start(), done
        elif (closing := CLOSING[match[0][0]]) not in endless:
            end = text.find(f"\n{closing}", match.end())
            if end < 0:
                endless.add(closing)
                continue
            line_end = text.find("\n", end + 1)
            done = end + 2
            yield text.rfind("\n", 0, match.start()) + 1, len(text) if line_end < 0 else line_end


def _lines_above(text: str, at: int, count: int) -> int:
    """Where the block of so many lines begins that ends right before `at`, a line's start."""
    for _ in range(min(count, LONGEST_BLOCK)):
        at = text.rfind("\n", 0, max(0, at - 1)) + 1
    return at


def _lines_below(text: str, at: int, count: int) -> int:
    """The end of the last of so many lines behind `at`, a line's end; the text's end where there are fewer."""
    for _ in range(count):
        at = text.find("\n", at + 1)
        if at < 0:
            return len(text)
    return at
