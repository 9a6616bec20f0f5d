"""The diff compressor: unified diffs with fewer unchanged lines around the changes. Headers and changed lines stay."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...prompt import Kind
from ..base import Task, TextCompressor
from ..context import CompressionContext
from ..options import kinds, option, whole
from ..result import Piece, Rewrite

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@[^\n]*\n", re.MULTILINE)
_LEFT_OUT = "[{count} unchanged lines]\n"
# One or two lines are shorter than what would stand for them.
_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Diff(TextCompressor):
    """`context`: unchanged lines that stay above and below each change. Such a diff can be read, but not applied."""

    name = "diff"
    lossless = False

    kinds: frozenset[Kind] = option(frozenset({Kind.DOCUMENT, Kind.TOOL_RESULT}), kinds)
    context: int = option(1, whole(least=0))

    def applies(self, text: str) -> bool:
        return _HUNK.search(text) is not None

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        return with_less_context(task.text, context=self.context)


def with_less_context(text: str, *, context: int) -> Rewrite:
    """Leave unchanged lines out of all hunks. Idempotent: a hunk that has lost lines is none any more."""
    pieces: list[Piece] = []
    done = 0
    for hunk in _HUNK.finditer(text):
        if hunk.start() < done:
            continue
        lines = list(_lines(text, hunk.end(), old=int(hunk[1] or 1), new=int(hunk[2] or 1)))
        for first, last in _far(lines, text, context):
            pieces += [(done, lines[first]), _LEFT_OUT.format(count=last - first)]
            done = lines[last] if last < len(lines) else len(text)
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _lines(text: str, at: int, *, old: int, new: int) -> Iterator[int]:
    """Where the hunk's lines begin, and where its last one ends; nothing where they are not as many as it says."""
    starts = [at]
    while old > 0 or new > 0:
        mark = text[at : at + 1]
        end = text.find("\n", at)
        if mark not in (" ", "+", "-", "\\") or end < 0:
            return
        old -= mark in " -"
        new -= mark in " +"
        at = end + 1
        starts.append(at)
    yield from starts if not old and not new else ()


def _far(lines: list[int], text: str, context: int) -> Iterator[tuple[int, int]]:
    """Runs (first, last) of unchanged lines that are farther than `context` from any changed one."""
    marks = [text[start] for start in lines[:-1]]
    changed = [i for i, mark in enumerate(marks) if mark != " "]
    edges = [-context - 1, *changed, len(marks) + context]
    for above, below in itertools.pairwise(edges):
        first, last = above + 1 + context, below - context
        if last - first >= _FEWEST:
            yield first, last
