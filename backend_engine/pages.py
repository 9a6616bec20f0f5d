"""Who owns which page of the KV pool: reference counts on the host. It never touches the KV itself.

A page is free exactly if its count is 0. Sequences and the prefix tree each hold one reference on a page that they use.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]

_ROOMY = 256  # pages of a run in which there is room for more than one sequence that grows


class PageAllocator:
    """Hands out pages, consecutive ones where it can: attention reads a consecutive run without gathering it."""

    def __init__(self, pages: int) -> None:
        assert pages > 0, pages
        self.pages = pages
        self.free = pages
        self.references = 0  # on all pages together
        self._refs = np.zeros(pages, dtype=np.int32)
        self._roomy = 0, 0  # what is free of the run behind what was placed last: to be known without a search

    def refs(self, pages: Pages) -> Pages:
        """Reference counts of `pages`."""
        return self._refs[pages]

    def alloc(self, count: int, *, after: int = -1) -> Pages:
        """Take `count` free pages, each with one reference. The caller has checked that `free >= count`.

        `after` is the page that the new ones continue; they follow it directly if those are free. Otherwise they begin
        in the longest free run, or what the last search left of it where that is roomy, in its middle where that leaves
        room, so that sequences side by side can grow in place.
        """
        assert 0 <= count <= self.free, (count, self.free)
        if count == 0:
            return np.empty(0, dtype=np.int32)
        follow = np.arange(after + 1, after + 1 + count, dtype=np.int32)
        if after < 0 or after + count >= self.pages or self._refs[follow].any():
            follow = self._place(count)
        elif self._roomy[0] <= after + count and after + 1 < self._roomy[1]:  # whoever was placed last grows into it
            self._roomy = min(after + count + 1, self._roomy[1]), self._roomy[1]
        self._refs[follow] = 1
        self.free -= count
        self.references += count
        return follow

    def ref(self, pages: Pages) -> None:
        """Add a reference to each of `pages` (distinct, all in use)."""
        assert (self._refs[pages] > 0).all(), pages
        self._refs[pages] += 1
        self.references += len(pages)

    def unref(self, pages: Pages) -> None:
        """Drop a reference from each of `pages` (distinct); those that reach 0 are free."""
        assert (self._refs[pages] > 0).all(), pages
        self._refs[pages] -= 1
        self.references -= len(pages)
        self.free += int(np.count_nonzero(self._refs[pages] == 0))

    def _place(self, count: int) -> Pages:
        start, stop = self._roomy
        if stop - start < _ROOMY + 2 * count:
            starts, lengths = self._free_runs()
            longest = int(lengths.argmax())
            start, stop = int(starts[longest]), int(starts[longest] + lengths[longest])
            if stop - start < count:
                runs = sorted(zip(lengths.tolist(), starts.tolist(), strict=True), key=lambda run: -run[0])
                pieces = [np.arange(first, first + length, dtype=np.int32) for length, first in runs]
                self._roomy = 0, 0
                return np.sort(np.concatenate(pieces)[:count])
        # The page before the run may belong to a sequence that grows into it; at the pool's start there is none.
        first = start if start == 0 else start + min((stop - start) // 2, stop - start - count)
        self._roomy = first + count, stop
        return np.arange(first, first + count, dtype=np.int32)

    def _free_runs(self) -> tuple[Pages, Pages]:
        """Where runs of free pages start, and how many pages they have; takes time with the size of the pool."""
        free = np.flatnonzero(self._refs == 0).astype(np.int32)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(free) != 1) + 1))
        return free[starts], np.diff(np.append(starts, len(free))).astype(np.int32)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert (self._refs >= 0).all()
        assert self.free == int(np.count_nonzero(self._refs == 0)), self.free
        assert self.references == int(self._refs.sum()), self.references
        assert not self._refs[slice(*self._roomy)].any(), self._roomy
