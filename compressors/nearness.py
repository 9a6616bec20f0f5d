"""How near the sentences of some texts are to a question, by the words that they share. No model, some milliseconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lexical import Words
from .result import Span
from .sentences import Unit, units_of

# What a sentence has of its paragraph's best score, and of that of the sentence before it, which it may go on from.
_OF_PARAGRAPH, _OF_BEFORE = 0.3, 0.3
# With so much of what is asked in it a sentence is near; most questions about other texts find less. Below it nearness
# falls steeply, for a small share of it already outweighs whatever the words themselves say. Where no other word of the
# question stands in the texts, a word that stands in one sentence leaves 1 of six, 0.46 of seven, 0.05 of eight, 0.002
# of ten; a word that stands in several is worth less.
_TELLS, _STEEP = 0.15, 16


@dataclass(frozen=True, slots=True)
class Nearness:
    """Of one text: where its sentences start, ascending, and how near each is, from 0 to 1 [sentences]."""

    starts: Sequence[int]
    scores: NDArray[np.float64]

    def of(self, starts: Sequence[int]) -> NDArray[np.float64]:
        """Of what begins at these characters; 0 before the first sentence, and where nothing is known."""
        found = np.searchsorted(self.starts, starts, side="right")
        return np.concatenate([[0.0], self.scores])[found]


def nearness(
    texts: Sequence[str], question: str, *, whole: Sequence[Sequence[Span]], expired: Callable[[], bool]
) -> list[Nearness]:
    """The nearest sentence of all texts has 1, or less where no sentence has 0.15 of what is asked (`Words.told`): next
    to nothing for a word that stands in one sentence and is one of nine or more, which may be shared by chance. All
    have 0 where no word is shared, or none but stop words. No sentence ends inside a span of `whole`. What was not read
    when the time had expired has 0.
    """
    units = [units_of(text, whole=spans) if question else [] for text, spans in zip(texts, whole, strict=True)]
    words = Words(
        (text[unit.start : unit.end] for text, own in zip(texts, units, strict=True) for unit in own), expired=expired
    )
    scores = np.zeros(sum(map(len, units)))
    known = words.bm25(question, stop_words=False)
    scores[: len(known)] = known
    found: list[Nearness] = []
    at = 0
    for text, own in zip(texts, units, strict=True):
        found.append(Nearness([unit.start for unit in own], _spread(text, own, scores[at : at + len(own)])))
        at += len(own)
    most = max((float(one.scores.max()) for one in found if len(one.scores)), default=0.0)
    if most <= 0:
        return found
    tells = min(1.0, float(words.told(question).max()) / _TELLS) ** _STEEP
    return [Nearness(one.starts, one.scores * (tells / most)) for one in found]


def _spread(text: str, units: Sequence[Unit], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores with what sentences have of those around them."""
    spread = scores.copy()
    spread[1:] += _OF_BEFORE * scores[:-1]
    first = 0
    for last in range(1, len(units) + 1):
        if last == len(units) or text.count("\n", units[last - 1].end, units[last].start) > 1:
            spread[first:last] += _OF_PARAGRAPH * scores[first:last].max()
            first = last
    return spread
