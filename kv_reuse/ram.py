"""The tiers in memory, the host's or a device's: chunks within a byte budget.

Evictions go to a callback, which may spill them to a slower tier.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count, islice

from .keys import ChunkKey
from .places import Host, Place
from .recompute import LOOKED_AT, Candidate, first_to_go
from .store import ChunkStore, Listed, StoredChunk, TierStats

log = logging.getLogger(__name__)

_HOST = Host()


class RamStore(ChunkStore):
    """Chunks in this process's memory, at most `budget` bytes of them; what saves least and was not used for long goes.

    `place` is the memory that they are kept in (places.py), and counts their bytes.

    `on_evict(key, chunk)` is called for each chunk that leaves for want of room, on the thread whose `put` needed it,
    after the chunk has left and outside the lock, so it may take its time. Nothing survives the process.
    """

    def __init__(
        self,
        budget: int,
        *,
        tier: str = "ram",
        place: Place = _HOST,
        on_evict: Callable[[ChunkKey, StoredChunk], object] | None = None,
    ) -> None:
        self._budget = budget
        self._tier = tier
        self._place = place
        self._on_evict = on_evict
        self._used: dict[ChunkKey, int] = {}  # when, counted in uses
        self._clock = count(1)
        self._chunks: OrderedDict[ChunkKey, StoredChunk] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._evictions = self._refused = 0

    def get(self, key: ChunkKey) -> StoredChunk | None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._misses += 1
                return None
            self._hits += 1
            self._chunks.move_to_end(key)
            self._used[key] = next(self._clock)
            return chunk

    def put(self, key: ChunkKey, chunk: StoredChunk, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """As of any store; not where `unless` says so, at a moment at which nobody else puts, deletes or gets."""
        held = self._held(chunk)
        with self._lock:
            if unless():
                return False
            self._drop(key)
            if held is None:
                self._refused += 1
                return False
            self._chunks[key] = held
            self._used[key] = next(self._clock)
            self._bytes += self._size(held)
            evicted = self._make_room()
        if self._on_evict is not None:
            for old_key, old in evicted:
                self._on_evict(old_key, old)
        return True

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._chunks

    def at_hand(self, key: ChunkKey) -> bool:
        return self.contains(key)

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        wanted = frozenset(digests)
        with self._lock:
            found = [key for key in self._chunks if key.digest in wanted]
            for key in found:
                self._drop(key)
        return Counter(key.digest for key in found)

    def catalogue(self) -> Iterator[Listed]:
        with self._lock:
            chunks = list(self._chunks.items())
        return (Listed(key.digest, lambda chunk=chunk: chunk.ids) for key, chunk in chunks)

    def stats(self) -> tuple[TierStats, ...]:
        with self._lock:
            return (
                TierStats(
                    tier=self._tier,
                    hits=self._hits,
                    misses=self._misses,
                    entries=len(self._chunks),
                    bytes=self._bytes,
                    budget=self._budget,
                    evictions=self._evictions,
                    refused=self._refused,
                ),
            )

    def flush(self) -> None:
        return  # memory survives nothing

    def peek(self, key: ChunkKey) -> StoredChunk | None:
        """The chunk without counting or touching it: for a tier above that moves chunks about."""
        with self._lock:
            return self._chunks.get(key)

    def _held(self, chunk: StoredChunk) -> StoredChunk | None:
        """The chunk in this memory, if there is room; a device may have less of it than the budget says."""
        if self._size(chunk) > self._budget:
            return None
        try:
            return replace(chunk, kv=self._place.held(chunk.kv), tier=self._tier)
        except (MemoryError, RuntimeError) as error:  # torch's, for want of device memory or of memory to pin
            log.warning("a chunk of %d tokens was not kept in the tier %s: %s", len(chunk.ids), self._tier, error)
            return None

    def _drop(self, key: ChunkKey) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._bytes -= self._size(chunk)
        del self._used[key]
        return True

    def _size(self, chunk: StoredChunk) -> int:
        return chunk.nbytes - chunk.kv.nbytes + self._place.nbytes(chunk.kv)

    def _make_room(self) -> list[tuple[ChunkKey, StoredChunk]]:
        evicted, now = [], next(self._clock)
        while self._bytes > self._budget:
            oldest = islice(self._chunks.items(), min(LOOKED_AT, len(self._chunks) - 1))  # not the one just put
            key = first_to_go(
                (key, Candidate(now - self._used[key], chunk.flops, self._size(chunk))) for key, chunk in oldest
            )
            evicted.append((key, self._chunks[key]))
            self._drop(key)
        self._evictions += len(evicted)
        return evicted
