"""Which beginnings of prompts were blended before, and how often.

A blended prompt is found again as a whole, not by another one that only begins as it does: for other questions about
the same documents a full prefill would serve all later ones from the prefix tree. controller.py weighs that by what is
remembered here.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from .keys import ids_to_bytes
from .windows import seed_of

BLOCK = 32
"""Beginnings are told apart in steps of so many tokens."""

_REMEMBERED = 1 << 14  # beginnings; they end with the process

Marks = tuple[bytes, ...]
"""A digest of the first BLOCK tokens, of the first 2 * BLOCK, and so on."""


class Sight(NamedTuple):
    """The first `tokens` of a prompt were the first of `times` earlier ones."""

    tokens: int
    times: int


class Beginnings:
    """Digests of prompts' beginnings with counts, at most `most` of them, longest unseen first out. For any thread."""

    def __init__(self, *, most: int = _REMEMBERED) -> None:
        self._most = most
        self._times: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._times)

    def sights(self, marks: Marks) -> list[Sight]:
        """For each number of times the longest beginning that was seen as often; ascending by tokens."""
        longest: dict[int, int] = {}
        with self._lock:
            for blocks, mark in enumerate(marks, 1):
                times = self._times.get(mark, 0)
                if not times:
                    break
                longest[times] = blocks * BLOCK
        return sorted(Sight(tokens, times) for times, tokens in longest.items())

    def add(self, marks: Marks) -> None:
        """A prompt was blended. Its ends are forgotten before its beginning."""
        with self._lock:
            for mark in reversed(marks):
                self._times[mark] = self._times.pop(mark, 0) + 1
            while len(self._times) > self._most:
                self._times.popitem(last=False)

    def forget(self, marks: Marks) -> None:
        """A prompt was prefilled in full. The tree may let go of it: what comes then is counted anew."""
        with self._lock:
            for mark in marks:
                self._times.pop(mark, None)


def marks_of(ids: Sequence[int], *, tenant: str) -> Marks:
    """What `Beginnings` knows a prompt by: what is equal for one tenant is not for another."""
    chain = hashlib.blake2b(key=seed_of(tenant).to_bytes(8, "little"), digest_size=16)
    marks = []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        chain.update(ids_to_bytes(ids[start : start + BLOCK]))
        marks.append(chain.digest())
    return tuple(marks)
