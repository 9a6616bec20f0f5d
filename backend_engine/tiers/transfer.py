"""Copies of pages between the pool and host memory, and who waits for them. It knows pages, not what is in them."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from ..pages import Pages
from ..pool import KVPool
from .base import Loads
from .empty import NO_LOADS
from .streams import Mark, SideStream


class _Loading:
    """See base.Loads. `begun` are the marks of each load, one a layer."""

    def __init__(self, begun: list[list[Mark]]) -> None:
        self._begun = begun

    def wait(self, layer: int) -> None:
        for marks in self._begun:
            marks[layer].hold()

    def begin(self) -> None:
        return  # they were begun when they were asked for

    def settle(self) -> None:
        for marks in self._begun:
            marks[-1].hold()


class Transfers:
    """Between `pool` and `host`, a second pool in (pinned) host memory, on one side stream and so in one order.

    A page of the pool may be written to again when the engine's stream has been held for its last save; a page of
    `host` may be touched by the CPU when `drained` has returned.
    """

    def __init__(self, pool: KVPool, host: KVPool, stream: SideStream) -> None:
        assert pool.data.shape[3:] == host.data.shape[3:] and pool.page_size == host.page_size, (pool, host)
        self._pool = pool
        self._host = host
        self._stream = stream
        self._saves: list[Mark] = []  # those that the engine's stream has not been held for
        self._before = 0  # how many are no longer in the list
        self._last_save = np.zeros(pool.pages, dtype=np.int64)  # of each page: its number, from 1
        self._begun: list[list[Mark]] = []
        self._newest: Mark = stream.mark()

    def save(self, pages: Pages, host_pages: Pages) -> None:
        """Copy pages of the pool to pages of the host."""
        self._stream.follow()  # their KV may just be being computed
        for layer in range(self._pool.data.shape[0]):
            self._stream.run(self._copy(layer, self._pool, pages, self._host, host_pages))
        self._newest = self._stream.mark()
        self._saves.append(self._newest)
        self._last_save[pages] = self._before + len(self._saves)

    def claim(self, pages: Pages) -> None:
        """Hold the engine's stream until what was in `pages` is saved."""
        newest = int(self._last_save[pages].max(initial=0)) - self._before
        if newest > 0:
            self._saves[newest - 1].hold()
            del self._saves[:newest]  # those before are reached earlier
            self._before += newest

    def load(self, host_pages: Pages, pages: Pages) -> None:
        """Copy pages of the host to pages of the pool, layer after layer."""
        self._stream.follow()  # a step that still runs may use the pages, on behalf of whoever had them before
        marks = []
        for layer in range(self._pool.data.shape[0]):
            self._stream.run(self._copy(layer, self._host, host_pages, self._pool, pages))
            marks.append(self._stream.mark())
        self._newest = marks[-1]
        self._begun.append(marks)

    def loads(self) -> Loads:
        begun, self._begun = self._begun, []
        return _Loading(begun) if begun else NO_LOADS

    def newest(self) -> Mark:
        """Everything that was begun so far."""
        return self._newest

    def _copy(self, layer: int, source: KVPool, pages: Pages, target: KVPool, to: Pages) -> Callable[[], None]:
        """Keys and values by themselves, run by run: each such piece is contiguous, so a card copies it on its own."""

        def work() -> None:
            size = source.page_size
            for first, there, count in _runs(pages, to):
                for half in (0, 1):
                    piece = source.data[layer, half, first * size : (first + count) * size]
                    target.data[layer, half, there * size : (there + count) * size].copy_(piece, non_blocking=True)

        return work


def _runs(pages: Pages, to: Pages) -> Iterator[tuple[int, int, int]]:
    """(first page, first target, count) of the runs that are consecutive on both sides."""
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(to) != 1)) + 1
    borders = [0, *breaks.tolist(), len(pages)]
    for start, stop in pairwise(borders):
        if stop > start:
            yield int(pages[start]), int(to[start]), stop - start
