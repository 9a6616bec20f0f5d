"""Which stored chunks, or parts of them, stand in a prompt: by window digests, then verified token by token.

Every WIDTH-th window of a chunk is known, and all windows of a prompt are looked up, so that each common run of at
least SURE tokens is found at any offset on both sides. Holds token ids only, never KV, and bounds how many.
"""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .windows import WIDTH, Ids, seed_of, window_digests

SURE = 2 * WIDTH - 1
"""A common run of so many tokens holds a window that is known."""

_SAME = 4  # chunks that are known to have one window; more are boilerplate, which other windows tell apart


class Match(NamedTuple):
    """`chunk[offset : offset + length]` are the prompt's tokens `start .. start + length - 1`."""

    start: int
    length: int
    chunk: tuple[int, ...]
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class _Entry:
    """A chunk of one tenant, and the digests under which it is known."""

    __slots__ = ("digests", "ids", "salt")

    def __init__(self, ids: Ids, salt: str, digests: tuple[int, ...]) -> None:
        self.ids = ids
        self.salt = salt
        self.digests = digests


class ChunkIndex:
    """The chunks of all tenants by their windows, at most `most_tokens` tokens of them, least recently found out first.

    Digests are seeded by the salt, and a salt finds only its own chunks, in a time that
    does not depend on what others have. For any thread.
    """

    def __init__(self, *, most_tokens: int = 1 << 20) -> None:
        self._most = most_tokens
        self._entries: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()  # least recently found first
        self._windows: dict[int, tuple[tuple[_Entry, int], ...]] = {}  # newest last
        self._lock = threading.Lock()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def windows(self) -> int:
        """How many different windows are known."""
        return len(self._windows)

    def add(self, chunk: Sequence[int], *, salt: str) -> None:
        """Know a chunk from now on. One that is too short to be found everywhere, or longer than all there is room for,
        is passed over."""
        ids = np.array(chunk, dtype=np.int32)
        if not SURE <= len(ids) <= self._most:
            return
        digests = window_digests(ids, seed=seed_of(salt))
        offsets = [*range(0, len(digests) - 1, WIDTH), len(digests) - 1]
        places = dict(
            zip(digests[offsets[::-1]].tolist(), offsets[::-1], strict=True)
        )  # of equal windows the first one
        entry = _Entry(ids, salt, tuple(places))
        with self._lock:
            if (salt, ids.tobytes()) in self._entries:
                return
            self._entries[salt, ids.tobytes()] = entry
            self.tokens += len(ids)
            for digest, offset in places.items():
                known = self._windows.get(digest, ())
                self._windows[digest] = (*known[-_SAME + 1 :], (entry, offset))
            while self.tokens > self._most:
                self._drop(next(iter(self._entries)))

    def discard(self, chunk: Sequence[int], *, salt: str) -> None:
        """Know a chunk no more, if it was known."""
        key = salt, np.array(chunk, dtype=np.int32).tobytes()
        with self._lock:
            if key in self._entries:
                self._drop(key)

    def matches(self, ids: Ids, *, salt: str, least: int) -> list[Match]:
        """The runs of at least `least` tokens that a known chunk shares with the prompt, as long as they go.

        Ascending by their ends. They may overlap: what two chunks both have at their borders is in both runs.
        """
        digests = window_digests(ids, seed=seed_of(salt)).tolist()
        with self._lock:
            found = [run for run in self._runs(ids, digests, salt) if run.length >= least]
            for run in found:
                self._entries.move_to_end((salt, run.entry.ids.tobytes()))
        return [Match(run.start, run.length, tuple(run.entry.ids.tolist()), run.offset) for run in found]

    def _runs(self, ids: Ids, digests: list[int], salt: str) -> Iterator["_Run"]:
        """From left to right: where a window is known, the longest run around it; the search goes on behind its end."""
        windows = self._windows
        known = [at for at, digest in enumerate(digests) if digest in windows]
        next_, floor = 0, 0
        while next_ < len(known):
            at = known[next_]
            runs = [
                _run(ids, at, entry, offset, floor=floor)
                for entry, offset in windows[digests[at]]
                if entry.salt == salt
            ]
            best = max(runs, key=lambda run: (run.length, -run.offset), default=None)
            if best is None or best.stop < at + WIDTH:  # nothing but equal digests
                next_ += 1
                continue
            yield best
            next_, floor = bisect_left(known, best.stop, next_ + 1), best.start

    def _drop(self, key: tuple[str, bytes]) -> None:
        entry = self._entries.pop(key)
        self.tokens -= len(entry.ids)
        for digest in entry.digests:
            left = tuple(one for one in self._windows.get(digest, ()) if one[0] is not entry)
            if left:
                self._windows[digest] = left
            else:
                self._windows.pop(digest, None)


class _Run(NamedTuple):
    start: int
    length: int
    entry: _Entry
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def _run(ids: Ids, at: int, entry: _Entry, offset: int, *, floor: int) -> _Run:
    """The run of equal tokens around `ids[at]` and `entry.ids[offset]`, not beginning before `floor`."""
    back = min(at - floor, offset)
    before = _common(ids[at - back : at][::-1], entry.ids[offset - back : offset][::-1])
    return _Run(at - before, before + _common(ids[at:], entry.ids[offset:]), entry, offset - before)


def _common(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
