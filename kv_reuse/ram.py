"""The RAM tier: a byte-budgeted LRU of chunks. Evictions go to a callback, which may spill them to a slower tier."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..backend_engine.types import KVBlock
from .keys import ChunkKey
from .store import ChunkStore, Listed, StoredChunk, TierStats


class RamStore(ChunkStore):
    """Chunks in this process's memory, at most `budget` bytes of them, least recently used out first.

    `on_evict(key, chunk)` is called for each chunk that leaves for want of room, on the thread whose `put` needed it,
    after the chunk has left and outside the lock, so it may take its time. Nothing survives the process.
    `pinned`: in memory from which a GPU copies on its own; each tensor takes the next power of two of bytes there.
    """

    def __init__(
        self,
        budget: int,
        *,
        on_evict: Callable[[ChunkKey, StoredChunk], object] | None = None,
        pinned: bool = False,
    ) -> None:
        self._budget = budget
        self._pinned = pinned
        self._on_evict = on_evict
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
            return chunk

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        fits = self._size(chunk) <= self._budget
        held = replace(chunk, tier="ram", kv=self._held(chunk.kv)) if fits else None
        with self._lock:
            self._drop(key)
            if held is None:
                self._refused += 1
                return False
            self._chunks[key] = held
            self._bytes += self._size(held)
            evicted = self._make_room()
        if self._on_evict is not None:
            for old_key, old in evicted:
                self._on_evict(old_key, old)
        return True

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._chunks

    def delete(self, key: ChunkKey) -> int:
        with self._lock:
            return sum(self._drop(other) for other in list(self._chunks) if other.digest == key.digest)

    def catalogue(self) -> Iterator[Listed]:
        with self._lock:
            chunks = list(self._chunks.items())
        return (Listed(key.digest, lambda chunk=chunk: chunk.ids) for key, chunk in chunks)

    def stats(self) -> tuple[TierStats, ...]:
        with self._lock:
            return (
                TierStats(
                    tier="ram",
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

    def _drop(self, key: ChunkKey) -> bool:
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._bytes -= self._size(chunk)
        return True

    def _held(self, kv: KVBlock) -> KVBlock:
        return KVBlock(kv.k.pin_memory(), kv.v.pin_memory()) if self._pinned else kv

    def _size(self, chunk: StoredChunk) -> int:
        if not self._pinned:
            return chunk.nbytes
        tensors = sum(1 << (part.nbytes - 1).bit_length() for part in (chunk.kv.k, chunk.kv.v) if part.nbytes)
        return chunk.nbytes - chunk.kv.nbytes + tensors

    def _make_room(self) -> list[tuple[ChunkKey, StoredChunk]]:
        evicted = []
        while self._bytes > self._budget:
            key, chunk = self._chunks.popitem(last=False)
            self._bytes -= self._size(chunk)
            evicted.append((key, chunk))
        self._evictions += len(evicted)
        return evicted
