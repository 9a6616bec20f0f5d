"""Where the newest tokens of a sequence have stood before: an index of its 3-grams, kept up to date token by token.

The idea of prompt lookup decoding (Saxena 2023): what follows an earlier occurrence is a guess at what comes next. The
index is that of LZ77: equal 3-grams form a chain, newest first, so that neither a token nor a search costs more in a
long text than in a short one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

GRAM = 3  # tokens that must agree at least
LONGEST = 32  # tokens that are compared at most
CHAIN = 16  # occurrences that are compared at most
_BITS = 21  # of an id: three of them are one int64


@dataclass(frozen=True, slots=True)
class Found:
    """`place` follows an earlier occurrence of the last `agreed` tokens (at most LONGEST are counted)."""

    place: int
    agreed: int


class Lookup:
    """The 3-grams of a growing sequence. Every method takes its tokens, `ids`, of which only the end may be new."""

    def __init__(self) -> None:
        self._known = 0
        self._latest: dict[int, int] = {}  # a 3-gram -> the place after its latest occurrence
        self._earlier: list[int] = []  # a place -> the one after the occurrence before of the 3-gram that ends there

    def extend(self, ids: Ids) -> None:
        """Take in the tokens that are new since the last call."""
        new = len(ids) - self._known
        if new > 1:
            self._take_many(ids)
        elif new == 1:
            self._take(ids.item(-1) | ids.item(-2) << _BITS | ids.item(-3) << 2 * _BITS if len(ids) >= GRAM else -1)
        self._known = len(ids)

    def find(self, ids: Ids) -> Found | None:
        """The earlier occurrence that agrees longest with the end of `ids`; of several, the latest."""
        assert self._known == len(ids), (self._known, len(ids))
        if len(ids) < GRAM:
            return None
        best, candidate = None, self._earlier[-1]
        for _ in range(CHAIN):
            if candidate < 0:
                break
            agreed = _agreement(ids, candidate)
            if best is None or agreed > best.agreed:
                best = Found(candidate, agreed)
            if agreed == LONGEST:
                break
            candidate = self._earlier[candidate - 1]
        return best

    def _take(self, gram: int) -> None:
        place = len(self._earlier) + 1
        self._earlier.append(self._latest.get(gram, -1) if gram >= 0 else -1)
        if gram >= 0:
            self._latest[gram] = place

    def _take_many(self, ids: Ids) -> None:
        """A prompt: the chains within it are found by sorting."""
        first = max(0, self._known - GRAM + 1)
        tail = ids[first:]
        assert tail.min() >= 0 and tail.max() < 1 << _BITS, "an id has too many bits"
        grams = tail[:-2] << 2 * _BITS | tail[1:-1] << _BITS | tail[2:]
        self._earlier += [-1] * (len(ids) - self._known - len(grams))  # the first two tokens end no 3-gram
        order = grams.argsort(kind="stable")
        same = grams[order[1:]] == grams[order[:-1]]
        places = np.arange(len(ids) - len(grams) + 1, len(ids) + 1)
        earlier = np.full(len(grams), -1)
        earlier[order[1:][same]] = places[order[:-1][same]]
        for at in np.flatnonzero(earlier < 0).tolist() if self._latest else ():
            earlier[at] = self._latest.get(grams.item(at), -1)
        self._earlier += earlier.tolist()
        self._latest.update(zip(grams.tolist(), places.tolist(), strict=True))


def _agreement(ids: Ids, place: int) -> int:
    """How many tokens before `place` equal those at the end, up to LONGEST."""
    size = min(place, LONGEST)
    different = np.flatnonzero(ids[place - size : place] != ids[len(ids) - size :])
    return size - 1 - int(different[-1]) if len(different) else size
