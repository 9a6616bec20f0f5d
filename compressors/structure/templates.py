"""Lines that differ in their numbers alone, as logs have them: the words once, the numbers in rows. Nothing is lost.

    12:00:01 GET /items/17 took 12 ms
    12:00:01 GET /items/18 took 9 ms
    12:00:02 GET /items/19 took 31 ms

becomes

    [3 lines: 12:00:{} GET /items/{} took {} ms]
    01,17,12
    01,18,9
    02,19,31

A number is any word with a digit in it (`8f3a`, `0x1f`, `12ms`), as written. `expanded` gives back the text. A text
that holds such a head already stays as it is.
"""

import re
from collections.abc import Iterator, Sequence

from ..result import Piece, Rewrite

COUNT = re.compile(r"\[(?P<count>\d{1,9}) lines: (?P<words>[^\n]*)\]")
"""The line that gives the words; as many rows follow it as it says."""

_HEAD = re.compile(rf"^{COUNT.pattern}$", re.MULTILINE)
_NUMBER = re.compile(r"[^\W_]*\d[^\W_]*")
_FEWEST_LINES = 3
_LONGEST_LINE = 2000
_WORTH = 60


def has_templates(text: str) -> bool:
    """Whether a line of the text is a head, or looks like one."""
    return _HEAD.search(text) is not None


def templated(text: str) -> Rewrite:
    """Write runs of lines that have the same words as one line and rows of numbers, where that saves characters."""
    if "\n" not in text or has_templates(text):
        return Rewrite.whole(text)
    pieces: list[Piece] = []
    done = 0
    for start, lines in _runs(text):
        block = _block(lines)
        size = sum(map(len, lines)) + len(lines) - 1
        if block is not None and len(block) + _WORTH <= size:
            pieces += [(done, start), block]
            done = start + size
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _runs(text: str) -> Iterator[tuple[int, list[str]]]:
    """(start, lines) of runs of lines with the same words."""
    run: list[str] = []
    words: list[str] | None = None
    start = at = 0
    for line in text.split("\n"):
        own = _NUMBER.split(line) if len(line) <= _LONGEST_LINE else None
        if own is None or own != words:
            if len(run) >= _FEWEST_LINES:
                yield start, run
            run, words, start = [], own, at
        run.append(line)
        at += len(line) + 1
    if len(run) >= _FEWEST_LINES:
        yield start, run


def _block(lines: Sequence[str]) -> str | None:
    """The head and the rows; None for lines without different numbers, or whose words could be mistaken."""
    words = _NUMBER.split(lines[0])
    rows = [_NUMBER.findall(line) for line in lines]
    differs = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
    if not any(differs) or any("{}" in word or "\r" in word for word in words):
        return None
    fixed = ["{}" if differ else number for number, differ in zip(rows[0], differs, strict=True)]
    template = "".join([part for pair in zip(words, [*fixed, ""], strict=True) for part in pair])
    shown = [",".join([number for number, differ in zip(row, differs, strict=True) if differ]) for row in rows]
    return "\n".join([f"[{len(lines)} lines: {template}]", *shown])


def expanded(text: str) -> str:
    """The text with its lines again; what only looks like a head stays."""
    lines = text.split("\n")
    out: list[str] = []
    at = 0
    while at < len(lines):
        made = _expanded_block(lines, at)
        out += made or [lines[at]]
        at += 1 + len(made or ())
    return "\n".join(out)


def _expanded_block(lines: Sequence[str], at: int) -> list[str] | None:
    match = COUNT.fullmatch(lines[at])
    if match is None:
        return None
    words = match["words"].split("{}")
    rows = [line.split(",") for line in lines[at + 1 : at + 1 + int(match["count"])]]
    if len(rows) < int(match["count"]) or len(words) < 2 or any(len(row) != len(words) - 1 for row in rows):
        return None
    return ["".join([part for pair in zip(words, [*row, ""], strict=True) for part in pair]) for row in rows]
