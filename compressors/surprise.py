"""How surprising each part of some texts is to a language model, within a deadline. Knows scores, not models.

What a model foresees can be left out: Li et al. (2023), "Compressing Context to Enhance Inference Efficiency of Large
Language Models" (arXiv:2310.06201).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .context import Score
from .result import Span

# What a token is worth that nothing foretold, in nats.
_UNFORETOLD = 8.0


@dataclass(slots=True)
class Surprise:
    """One text's tokens `[tokens, 3]` (see Score), window by window, and how much of the text has been judged."""

    windows: list[NDArray[np.float64]] = field(default_factory=list)
    end: int = 0

    def of(self, spans: Sequence[Span]) -> NDArray[np.float64]:
        """Surprise in nats of each span (ascending, disjoint), the sum over its tokens. A token belongs to the span in
        which its last character lies.
        """
        total = np.zeros(len(spans))
        if not spans or not self.windows:
            return total
        tokens = np.concatenate(self.windows)
        starts, ends = np.array(spans, dtype=np.int64).T
        last = np.maximum(tokens[:, 0], tokens[:, 1] - 1).astype(np.int64)
        nats = np.where(np.isfinite(tokens[:, 2]), -tokens[:, 2], _UNFORETOLD)
        index = np.searchsorted(starts, last, side="right") - 1
        inside = (index >= 0) & (last < ends[index])
        np.add.at(total, index[inside], nats[inside])
        return total


def surprise_of(
    texts: Sequence[str],
    *,
    score: Score,
    remaining: Callable[[], float],
    wanted: Sequence[Sequence[Span]] | None = None,
    given: str = "",
) -> list[Surprise]:
    """The surprise of each text, or of its `wanted` spans, as far as there is time: the first texts first."""
    found = [Surprise() for _ in texts]
    for number, tokens, end in score(texts, wanted=wanted, given=given, remaining=remaining):
        found[number].windows.append(np.asarray(tokens, dtype=np.float64).reshape(-1, 3))
        found[number].end = end
        if remaining() <= 0.0:
            break
    return found
