"""Blended prompts under keys of their own: which of them the prefix tree may have, for requests that go on from them.

What is computed behind reused spans is not the KV that its tokens have in a full prefill, so plain tokens must never
find it. It lies in the same tree under *marked* ids: each is a token's id with a mark above it that no plain id has. A
mark is made of the whole prompt and of how it was blended: the repaired rows were chosen for this prompt's question, so
that only what begins with all of it may go on from it. Host only.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from .tiers.keys import PageKeys
from .types import Blending

_REMEMBERED = 1 << 14
_ALIKE = 16  # prompts with the same whole pages, which differ in their ends or in how they were blended; newest first
_MARK_BITS = 30

Ids = NDArray[np.int64]
Marks = tuple[tuple[int, int], ...]
"""Ascending (first token, mark): the mark of all tokens from there on, up to the next one."""


@dataclass(frozen=True, slots=True)
class KeptBlend:
    """A blended prompt: `tokens` of it in whole pages, and the ids `rest` behind them."""

    tokens: int
    rest: tuple[int, ...]
    blending: Blending
    marks: Marks

    @property
    def exact(self) -> int:
        """How many leading tokens are as in a full prefill, and lie under their plain ids."""
        return self.marks[0][0]

    def begins(self, ids: Ids) -> bool:
        """Whether a prompt with the same whole pages begins with all of it."""
        return tuple(ids[self.tokens : self.tokens + len(self.rest)].tolist()) == self.rest


class KeptBlends:
    """Knows kept blends by their prompts, longest unused first out. For any thread.

    It does not know what of them is still in the tree: whoever looks there sees.
    """

    def __init__(self, *, page_size: int, most: int = _REMEMBERED) -> None:
        self.page_size = page_size
        self._most = most
        self._naming = PageKeys(fingerprint="", layout=(), dtype="", page_size=page_size)
        self._kept: OrderedDict[bytes, tuple[KeptBlend, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def digests(self, ids: Ids, *, namespace: str) -> list[bytes]:
        """One for each whole page: of all tokens up to its end."""
        return self._naming.extend(self._naming.start(namespace), ids)

    def find(self, ids: Ids, digests: list[bytes], wanted: Blending) -> KeptBlend | None:
        """The longest prompt that `ids` begin with and that was blended at least as well."""
        with self._lock:
            for digest in reversed(digests) if self._kept else ():
                for kept in self._kept.get(digest, ()):
                    if kept.blending.serves(wanted) and kept.begins(ids):
                        self._kept.move_to_end(digest)
                        return kept
        return None

    def add(
        self, ids: Ids, digests: list[bytes], blending: Blending, *, start: int, behind: KeptBlend | None
    ) -> KeptBlend | None:
        """A prompt was blended from the token `start` on, `behind` a kept one that it began with; `digests` are of its
        whole pages without its last token, which is computed again when it comes again.

        None if it has no whole page that is blended.
        """
        first, tokens = start // self.page_size * self.page_size, len(digests) * self.page_size
        if tokens <= first:
            return None
        before = () if behind is None else tuple(one for one in behind.marks if one[0] < first)
        rest = tuple(ids[tokens:].tolist())
        kept = KeptBlend(tokens, rest, blending, (*before, (first, _mark(digests[-1], rest, blending))))
        with self._lock:
            others = (one for one in self._kept.pop(digests[-1], ()) if (one.rest, one.blending) != (rest, blending))
            self._kept[digests[-1]] = (kept, *others)[:_ALIKE]
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return kept


def marked(ids: Ids, marks: Marks) -> Ids:
    """The tree's keys of a prompt's ids; without marks these are the ids themselves."""
    if not marks:
        return ids
    keys = ids.copy()
    for (start, mark), stop in zip(marks, [*(start for start, _ in marks[1:]), len(ids)], strict=True):
        keys[start:stop] |= mark << 32
    return keys


def _mark(digest: bytes, rest: tuple[int, ...], blending: Blending) -> int:
    """Never 0. That two are equal does no harm: the tokens, and what stands before them, are compared as well."""
    made = blake2b(repr((rest, tuple(blending))).encode(), key=digest, digest_size=8).digest()
    return 1 + (int.from_bytes(made, "little") & ((1 << _MARK_BITS) - 1))
