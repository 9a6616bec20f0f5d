"""Lines that repeat right behind themselves, folded with a count: log lines, stack frames of a recursion, retries.

A block of one to eight lines that stands several times in a row stays once, and behind it stands
`[the line above 41 more times]` or `[the 2 lines above 41 more times]`. `unfolded` gives back the text. Texts that
hold such a line already stay as they are, so that no count can be mistaken; folding twice is folding once.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..result import Piece, Rewrite

COUNTS = re.compile(r"\[the (?:line|(?P<size>\d{1,2}) lines) above (?P<more>\d{1,9}) more times?\]")
"""The line that stands for the copies."""
LONGEST_BLOCK = 8
"""Lines in a block, at most."""

_MARK = re.compile(rf"^{COUNTS.pattern}$", re.MULTILINE)
# Characters that folding must save: the mark's own, and so many more.
_WORTH = 40


def has_folds(text: str) -> bool:
    """Whether a line of the text is a count, or looks like one."""
    return _MARK.search(text) is not None


def folded(text: str) -> Rewrite:
    """Fold what repeats, where that saves characters."""
    if "\n" not in text or has_folds(text):
        return Rewrite.whole(text)
    lines = text.split("\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    pieces: list[Piece] = []
    done = 0
    for first, size, copies in _repeats(lines):
        kept, end = int(starts[first + size]), int(starts[first + size * copies])
        mark = _mark(size, copies - 1)
        if end - kept < len(mark) + _WORTH:
            continue
        # The last copy's own line feed stays: it may be the text's end, which has none.
        pieces += [(done, kept), mark]
        done = end - 1
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _mark(size: int, more: int) -> str:
    what = "line" if size == 1 else f"{size} lines"
    return f"[the {what} above {more} more time{'s' if more > 1 else ''}]"


def _repeats(lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """(first line, lines in the block, copies in a row), ascending and disjoint; the shorter block where two begin."""
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(line, len(numbers)) for line in lines], dtype=np.int64)
    found = [
        (start, size, length // size + 1)
        for size in range(1, min(LONGEST_BLOCK, len(lines) // 2) + 1)
        for start, length in _runs(ids[size:] == ids[:-size])
        if length >= size
    ]
    done = 0
    for start, size, copies in sorted(found):
        late = max(0, done - start)
        copies -= -(-late // size)
        start += -(-late // size) * size
        if copies > 1:
            yield start, size, copies
            done = start + size * copies


def _runs(equal: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(start, length) of the runs of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start, end - start


def unfolded(text: str) -> str:
    """The text with its copies again."""
    lines: list[str] = []
    for line in text.split("\n"):
        match = COUNTS.fullmatch(line)
        size = int(match["size"] or 1) if match else 0
        if match and 0 < size <= len(lines):
            lines += lines[-size:] * int(match["more"])
        else:
            lines.append(line)
    return "\n".join(lines)
