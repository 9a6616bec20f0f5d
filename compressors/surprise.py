"""How surprising each part of a long text is to a language model, by windows, within a deadline. Knows scores, not
models.

The method is that of Li et al. (2023), "Compressing Context to Enhance Inference Efficiency of Large Language Models":
what a model foresees can be left out. Each window is scored after a stretch of the text before it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .context import CompressionContext, Score
from .result import Span

_FIRST, _WINDOW, _BEFORE = 600, 4000, 400
# What the first token of a text is worth, which nothing foretold, in nats.
_UNFORETOLD = 8.0


def surprise_of(
    text: str, spans: Sequence[Span], *, score: Score, context: CompressionContext
) -> tuple[NDArray[np.float64], int]:
    """Surprise in nats of each span (ascending, disjoint) and how many characters of the text were scored in time.

    A span's surprise is the sum over its tokens; a token belongs to the span in which its last character lies.
    """
    starts = np.array([span[0] for span in spans], dtype=np.int64)
    total = np.zeros(len(spans))
    at, size, speed = 0, _FIRST, 0.0
    while at < len(text):
        end = _border(text, at, at + size)
        before = max(0, at - _BEFORE)
        if context.remaining() <= (end - before) * speed:
            break
        began = context.clock()
        tokens = np.array(score(text[before:end]), dtype=np.float64).reshape(-1, 3)
        if not at and len(spans) and len(tokens) and tokens[0, 0] > spans[0][0]:
            total[0] += _UNFORETOLD  # the scorer left out the first token
        _credit(total, starts, tokens, before=before, fresh=at)
        speed = (context.clock() - began) / (end - before)
        at, size = end, _WINDOW
    return total, at


def _credit(
    total: NDArray[np.float64], starts: NDArray[np.int64], tokens: NDArray[np.float64], *, before: int, fresh: int
) -> None:
    """Add the surprise of `tokens` `[tokens, (start, end, logprob)]`, offsets from `before`, to the spans' totals; only
    those that end at `fresh` or later, the others were counted with the window above.
    """
    last = before + np.maximum(tokens[:, 0], tokens[:, 1] - 1).astype(np.int64)
    nats = np.where(np.isfinite(tokens[:, 2]), -tokens[:, 2], _UNFORETOLD)
    index = np.searchsorted(starts, last, side="right") - 1
    ours = (last >= fresh) & (index >= 0)
    np.add.at(total, index[ours], nats[ours])


def _border(text: str, start: int, end: int) -> int:
    """Where to end a window: at a line or a space in its last quarter, where there is one."""
    if end >= len(text):
        return len(text)
    quarter = end - (end - start) // 4
    for mark in ("\n", " "):
        found = text.rfind(mark, quarter, end)
        if found >= 0:
            return found + 1
    return end
