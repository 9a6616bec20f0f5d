"""RAM over disk as one store, and the factory that turns two budgets and a folder into a store."""

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ..prompt.errors import ConfigError
from .disk import DiskStore
from .keys import ChunkKey
from .ram import RamStore
from .store import ChunkStore, EmptyStore, Listed, StoredChunk, TierStats


class TieredStore(ChunkStore):
    """New chunks go to RAM; what RAM evicts is spilled to disk; a disk hit is promoted to RAM and stays on disk.

    `flush` writes to disk what is only in RAM. A chunk that is on its way from one tier to the other may be missed. In
    the counters, a lookup that RAM misses and the disk answers is a miss of the one and a hit of the other.
    """

    def __init__(self, disk: ChunkStore, *, ram_budget: int, pinned: bool = False) -> None:
        self._ram = RamStore(ram_budget, on_evict=self._spill, pinned=pinned)
        self._disk = disk
        self._only_in_ram: set[ChunkKey] = set()
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> StoredChunk | None:
        chunk = self._ram.get(key)
        if chunk is None:
            chunk = self._disk.get(key)
            if chunk is not None:
                self._ram.put(key, chunk)
        return chunk

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        with self._lock:
            self._only_in_ram.add(key)
        return self._ram.put(key, chunk) or self._spill(key, chunk)

    def contains(self, key: ChunkKey) -> bool:
        return self._ram.contains(key) or self._disk.contains(key)

    def delete(self, key: ChunkKey) -> int:
        with self._lock:
            self._only_in_ram = {other for other in self._only_in_ram if other.digest != key.digest}
        return self._ram.delete(key) + self._disk.delete(key)

    def catalogue(self) -> Iterator[Listed]:
        return chain(self._ram.catalogue(), self._disk.catalogue())

    def stats(self) -> tuple[TierStats, ...]:
        return self._ram.stats() + self._disk.stats()

    def flush(self) -> None:
        with self._lock:
            keys = tuple(self._only_in_ram)
        for key in keys:
            chunk = self._ram.peek(key)
            if chunk is not None:  # else it is being spilled by the thread whose `put` evicted it
                self._spill(key, chunk)
        self._disk.flush()

    def _spill(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        with self._lock:
            self._only_in_ram.discard(key)
        return self._disk.put(key, chunk)


def open_store(*, ram: int = 0, disk: int = 0, path: Path | None = None, pinned: bool = False) -> ChunkStore:
    """The store for these byte budgets; 0 leaves a tier out, and both 0 is the empty store.

    `pinned` is for the RAM of machines whose models run on a GPU. Raises ConfigError where a disk budget has no
    `path`, a budget is negative, or the folder cannot be used.
    """
    for name, budget in (("ram", ram), ("disk", disk)):
        if budget < 0:
            raise ConfigError(f"kv_cache.{name} must not be negative, got {budget}")
    if disk and path is None:
        raise ConfigError("kv_cache.disk needs kv_cache.path, the folder of the chunk files")
    if disk and path is not None:
        folder = DiskStore(path, disk)
        return TieredStore(folder, ram_budget=ram, pinned=pinned) if ram else folder
    return RamStore(ram, pinned=pinned) if ram else EmptyStore()
