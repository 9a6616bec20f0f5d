"""Cuts text that nobody has cut yet into chunks, at places that depend on what stands there and on nothing else.

So the same text is cut alike in every prompt, apart from where it meets other text. Works on token ids, with a table
that says behind which of them a text may be cut.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .windows import WIDTH, Ids, window_digests

NONE, LINE, BLANK, WALL = range(4)
"""What a token ends: nothing, a line, a paragraph; and control tokens, which are never inside a chunk."""

Breaks = NDArray[np.uint8]


def breaks_of(pieces: Iterable[bytes], *, walls: Iterable[int]) -> Breaks:
    """The table for a vocabulary: per id, by the bytes that it stands for, what it ends. uint8 [vocab].

    A line's end counts where nothing but white space follows it in the token. `walls` are the ids of control tokens.
    """
    table = np.array([_ends(piece) for piece in pieces], dtype=np.uint8)
    table[list(walls)] = WALL
    return table


def cut(ids: Ids, breaks: Breaks, *, least: int, most: int) -> list[tuple[int, int]]:
    """Spans (start, length) of the chunks of `ids`, each of `least` to `most` tokens, ascending and disjoint.

    A chunk ends with the first paragraph that makes it long enough; where none does, with a line, or else where a
    window's digest is least. What is left over is shorter than `least`, or a control token.
    """
    assert 0 < least <= most // 2, (least, most)
    spans: list[tuple[int, int]] = []
    kinds = _kinds(ids, breaks)
    walls = np.flatnonzero(kinds == WALL)
    for start, stop in zip([0, *(walls + 1)], [*walls, len(ids)], strict=True):
        start = int(start)
        while stop - start >= least:
            length = _length(ids[start:stop], kinds[start:stop], least, most)
            spans.append((start, length))
            start += length
    return spans


def _ends(piece: bytes) -> int:
    tail = piece[len(piece.rstrip()) :]
    lines = tail.count(b"\n")
    return NONE if lines == 0 else LINE if lines == 1 else BLANK


def _kinds(ids: Ids, breaks: Breaks) -> NDArray[np.uint8]:
    """What each token ends, two line ends in a row being a paragraph's."""
    known = ids < len(breaks)  # a model's vocabulary may be larger than its tokenizer's
    kinds = np.where(known, breaks[np.where(known, ids, 0)], NONE).astype(np.uint8)
    lines = kinds == LINE
    kinds[1:][lines[1:] & (lines[:-1] | (kinds[:-1] == BLANK))] = BLANK
    return kinds


def _length(ids: Ids, kinds: NDArray[np.uint8], least: int, most: int) -> int:
    """Of the chunk at the beginning; what would be left over behind it belongs to it, if there is room."""
    total = len(ids)
    within = kinds[least - 1 : most]
    for wanted in (BLANK, LINE):
        # A paragraph's first end makes a chunk as short as may be, a line's last one as long as may be.
        places = np.flatnonzero(within >= wanted)
        if len(places) and (wanted == BLANK or total > most):
            place = _behind(kinds, least + int(places[0 if wanted == BLANK else -1]), most)
            break
    else:
        place = total if total <= most else _least_digest(ids, least, most)
    return total if total - place < least and total <= most else place


def _behind(kinds: NDArray[np.uint8], place: int, most: int) -> int:
    """`place`, or behind the empty lines that go on there."""
    while place < min(len(kinds), most) and kinds[place] == BLANK:
        place += 1
    return place


def _least_digest(ids: Ids, least: int, most: int) -> int:
    """Winnowing (Schleimer, Wilkerson and Aiken 2003): of all places allowed the one before the least digest."""
    digests = window_digests(ids[least - 1 : most + WIDTH - 1], seed=0)
    return least + int(digests[: most - least + 1].argmin()) if len(digests) else most
