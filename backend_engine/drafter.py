"""One sequence's guesses at its next tokens, and how much they are worth: judged by every token that came."""

import numpy as np
from numpy.typing import NDArray

from .lookup import LONGEST, Found, Ids, Lookup

# How often guesses come true, by how many tokens agree with the earlier place: 3, 4 to 7, 8 to 15, 16 to 31, more.
# What a sequence shows is added to that as if it had shown it `_PRIOR_TRIES` times.
_PRIOR = np.array([0.3, 0.5, 0.7, 0.85, 0.95])
_PRIOR_TRIES = 4.0
# What was long ago counts less: half after about 30 guesses.
_FADE = 0.977


class Drafter:
    """One sequence's guesses: it judges them by every token, whether they were run or not.

    What it knows follows from the tokens alone, not from steps, batches or preemptions.
    """

    def __init__(self, prompt: Ids) -> None:
        self._lookup = Lookup()
        self._lookup.extend(prompt)
        self._known = len(prompt)
        self._found = self._lookup.find(prompt)
        self._hits = _PRIOR * _PRIOR_TRIES
        self._tries = np.full(len(_PRIOR), _PRIOR_TRIES)

    def observe(self, ids: Ids) -> None:
        """Take in the tokens that are new since the last call."""
        for length in range(self._known + 1, len(ids) + 1):
            self._take(ids[:length])
        self._known = len(ids)

    def _take(self, ids: Ids) -> None:
        self._lookup.extend(ids)
        found = self._found
        if found is not None:
            right, kind = bool(ids[found.place] == ids[-1]), _kind(found.agreed)
            self._hits[kind] = self._hits[kind] * _FADE + right
            self._tries[kind] = self._tries[kind] * _FADE + 1
            if right:
                self._found = Found(found.place + 1, found.agreed + 1)
                return
        self._found = self._lookup.find(ids)

    def chances(self, most: int) -> NDArray[np.float64]:
        """For each of up to `most` guesses, how likely it and all before it are right; descending."""
        if self._found is None or most < 1:
            return np.empty(0)
        kinds = [_kind(self._found.agreed + ahead) for ahead in range(most)]
        return (self._hits / self._tries)[kinds].cumprod()

    def draft(self, ids: Ids, count: int) -> Ids:
        """The next `count` guesses; a repetition that is shorter goes round."""
        assert self._found is not None and self._known == len(ids), (self._known, len(ids))
        return np.resize(ids[self._found.place :], count)


def _kind(agreed: int) -> int:
    return min(agreed, LONGEST).bit_length() - 2
