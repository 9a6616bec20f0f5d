"""Log lines written shorter: repeats folded with counts, then lines that differ in their numbers as rows."""

import re
from collections.abc import Callable

from ..result import Piece, Rewrite
from ..spans import union, without
from .folds import folded, has_folds
from .marks import marked_spans
from .templates import has_templates, templated

_DIFF = re.compile(r"^(?:@@ -\d|diff --git )", re.MULTILINE)


def shortened_lines(text: str, *, folds: bool, templates: bool) -> Rewrite:
    """Both, each where it saves characters; nothing in tables. What was shortened already stays as it is, and so does a
    text with a diff, which could not be applied any more.

    `templates.expanded(folds.unfolded(...))` gives back the text.
    """
    if "\n" not in text or has_folds(text) or has_templates(text) or _DIFF.search(text):
        return Rewrite.whole(text)
    rewrite = _outside(text, folded) if folds else Rewrite.whole(text)
    return rewrite.then(_outside(rewrite.text(text), templated)) if templates else rewrite


def _outside(text: str, step: Callable[[str], Rewrite]) -> Rewrite:
    """Take the step with each run of lines that no mark speaks of."""
    # With the line feeds around them, so that what lies between begins and ends as lines do.
    closed = union((max(0, start - 1), min(len(text), end + 1)) for start, end in marked_spans(text))
    pieces: list[Piece] = []
    done = 0
    for start, end in without(len(text), closed):
        pieces.append((done, start))
        pieces += [_moved(piece, start) for piece in step(text[start:end]).pieces]
        done = end
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _moved(piece: Piece, by: int) -> Piece:
    return piece if isinstance(piece, str) else (piece[0] + by, piece[1] + by)
