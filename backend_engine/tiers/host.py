"""The host memory tier: a byte-budgeted LRU of pages in a second pool. The engine's thread and the disk's share it.

A page belongs to the index (its key is known), to a thread that is reading or filling it, or to nobody. Reference
counts say so, as in the KV pool itself.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..pages import PageAllocator, Pages
from ..pool import KVPool
from .streams import Mark
from .transfer import Transfers

_NO_PAGES: Pages = np.empty(0, dtype=np.int32)


class HostTier:
    """Pages by key in `memory`, least recently used out first, unless a thread is busy with them."""

    def __init__(self, memory: KVPool, transfers: Transfers) -> None:
        self.pages = memory.pages
        self.saved = self.loaded = self.evicted = 0
        self._transfers = transfers
        self._allocator = PageAllocator(memory.pages)
        self._known: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def put(self, keys: Sequence[bytes], pages: Pages) -> list[bytes]:
        """Save those of the pool's `pages` that are not here, as far as there is room; returns the keys of those."""
        with self._lock:
            fresh = [number for number, key in enumerate(keys) if key not in self._known]
            self._touch(keys)
            host_pages = self._take(len(fresh))
            fresh = fresh[: len(host_pages)]
            if fresh:
                self._transfers.save(pages[fresh], host_pages)
            added = [keys[number] for number in fresh]
            self._add(added, host_pages)
            self.saved += len(added)
        return added

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are here; they count as just used."""
        with self._lock:
            count = self._leading(keys)
            self._touch(keys[:count])
        return count

    def load(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Bring the leading keys that are here into the pool's `pages`; returns how many those are."""
        with self._lock:
            count = self._leading(keys)
            if count:
                self._transfers.load(np.array([self._known[key] for key in keys[:count]]), pages[:count])
            self._touch(keys[:count])
            self.loaded += count
        return count

    def reserve(self, count: int) -> tuple[Pages, Mark]:
        """Up to `count` pages for the caller to fill, once the mark is reached, and to `add` or `release`."""
        with self._lock:
            return self._take(count), self._transfers.newest()

    def add(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Make filled pages known, the last keys as the least recently used."""
        with self._lock:
            new = [number for number, key in enumerate(keys) if key not in self._known]
            double = np.setdiff1d(np.arange(len(pages)), new)
            self._allocator.unref(pages[double])
            self._add([keys[number] for number in new], pages[new])

    def borrow(self, keys: Sequence[bytes]) -> tuple[list[bytes], Pages, Mark]:
        """Those keys that are here, and their pages, which stay as they are from the mark on until `release`."""
        with self._lock:
            here = [key for key in keys if key in self._known]
            pages = np.array([self._known[key] for key in here], dtype=np.int32)
            self._allocator.ref(pages)
            return here, pages, self._transfers.newest()

    def release(self, pages: Pages) -> None:
        """Give reserved or borrowed pages back."""
        with self._lock:
            self._allocator.unref(pages)

    def check(self) -> None:
        """Assert the invariants, while no thread is busy; for tests."""
        with self._lock:
            self._allocator.check()
            known = np.array(list(self._known.values()), dtype=np.int32)
            assert len(np.unique(known)) == len(known) and (self._allocator.refs(known) == 1).all()
            assert self._allocator.free + len(known) == self.pages

    def _leading(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._known), len(keys))

    def _touch(self, keys: Sequence[bytes]) -> None:
        """What follows is of no use without what comes before it, so it goes first."""
        for key in reversed(keys):
            if key in self._known:
                self._known.move_to_end(key)

    def _add(self, keys: Sequence[bytes], pages: Pages) -> None:
        for key, page in zip(reversed(keys), reversed(pages.tolist()), strict=True):
            self._known[key] = page

    def _take(self, count: int) -> Pages:
        """Up to `count` pages, for which others are forgotten; those in use by a thread cannot go."""
        skipped = []
        while self._allocator.free < count and self._known:
            key, page = self._known.popitem(last=False)
            if self._allocator.refs(np.array([page]))[0] > 1:
                skipped.append((key, page))
                continue
            self._allocator.unref(np.array([page]))
            self.evicted += 1
        for key, page in reversed(skipped):
            self._known[key] = page
            self._known.move_to_end(key, last=False)
        count = min(count, self._allocator.free)
        return self._allocator.alloc(count) if count else _NO_PAGES
