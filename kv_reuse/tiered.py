"""Fast tiers over slow ones as one store, and the factory that turns budgets into a store."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ..prompt.errors import ConfigError
from .disk import DiskStore
from .forgotten import Forgotten
from .keys import ChunkKey
from .places import Host, OnDevice, Pinned, Place
from .ram import RamStore
from .store import ChunkStore, EmptyStore, Listed, StoredChunk, TierStats

_DELETED = 1 << 12  # chunks that are remembered for as long as reading one from a slow tier may take
_LONG_AGO = 0.0


class TieredStore(ChunkStore):
    """New chunks go to memory; what it evicts is spilled to the tiers below, unless they had it and have it no more; a
    hit there is promoted and stays there.

    `flush` writes to the tiers below what is only in memory. A chunk that is on its way from one tier to the other may
    be missed. In the counters, a lookup that memory misses and a tier below answers is a miss of the one and a hit of
    the other. `tier` and `place` are as in RamStore.
    """

    def __init__(
        self,
        below: ChunkStore,
        *,
        ram_budget: int,
        tier: str = "ram",
        place: Place | None = None,
    ) -> None:
        self._memory = RamStore(ram_budget, tier=tier, place=place or Host(), on_evict=self._evicted)
        self._below = below
        self._only_here: set[ChunkKey] = set()
        self._since: dict[ChunkKey, float] = {}  # when what is in memory came
        self._deleted = Forgotten(most=_DELETED)
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> StoredChunk | None:
        chunk = self._memory.get(key)
        if chunk is not None:
            return chunk
        moment = self._deleted.now
        chunk = self._below.get(key)
        if chunk is None:
            return None
        with self._lock:
            self._since[key] = moment
        if not self._memory.put(key, chunk, unless=lambda: self._deleted.since(key.digest, moment)):
            self._came(key)
            return chunk
        placed = self._memory.peek(key)
        return replace(placed, tier=chunk.tier) if placed is not None else chunk

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        new = not self._below.contains(key)
        with self._lock:
            if new:
                self._only_here.add(key)
            self._since[key] = self._deleted.now
        return self._memory.put(key, chunk) or self._evicted(key, chunk)

    def contains(self, key: ChunkKey) -> bool:
        return self._memory.contains(key) or self._below.contains(key)

    def at_hand(self, key: ChunkKey) -> bool:
        return self._memory.at_hand(key)

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        wanted = frozenset(digests)
        with self._lock:
            self._only_here = {key for key in self._only_here if key.digest not in wanted}
            self._since = {key: came for key, came in self._since.items() if key.digest not in wanted}
        self._deleted.add(wanted)  # whoever is taking one below takes it out there again
        below = self._below.delete_all(wanted)
        self._deleted.add(wanted)  # whoever has just read one there does not take it to memory
        return below + self._memory.delete_all(wanted)

    def catalogue(self) -> Iterator[Listed]:
        return chain(self._memory.catalogue(), self._below.catalogue())

    def stats(self) -> tuple[TierStats, ...]:
        return self._memory.stats() + self._below.stats()

    def flush(self) -> None:
        with self._lock:
            keys = tuple(self._only_here)
        for key in keys:
            chunk = self._memory.peek(key)
            if chunk is not None:  # else it is being spilled by the thread whose `put` evicted it
                with self._lock:
                    came = self._since.get(key, _LONG_AGO)
                self._spill(key, chunk, came)
        self._below.flush()

    def _evicted(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        came = self._came(key)
        with self._lock:
            new = key in self._only_here
        # What a tier below had and has no more was not worth its room there, or another process has deleted it.
        return (new or self._below.contains(key)) and self._spill(key, chunk, came)

    def _came(self, key: ChunkKey) -> float:
        """When what has left memory had come there; of what was deleted since, long ago."""
        with self._lock:
            return self._since.pop(key, _LONG_AGO)

    def _spill(self, key: ChunkKey, chunk: StoredChunk, came: float) -> bool:
        with self._lock:
            self._only_here.discard(key)
        kept = self._below.put(key, chunk)
        if not self._deleted.since(key.digest, came):
            return kept
        self._below.delete(key)  # which was asked for before it was there
        return False


class BackedStore(ChunkStore):
    """A store with a second one behind it, which gets all that is put and is asked for what the first one misses."""

    def __init__(self, first: ChunkStore, second: ChunkStore) -> None:
        self._first = first
        self._second = second
        self._deleted = Forgotten(most=_DELETED)

    def get(self, key: ChunkKey) -> StoredChunk | None:
        chunk = self._first.get(key)
        if chunk is None:
            moment = self._deleted.now
            chunk = self._second.get(key)
            if chunk is not None:
                self._first.put(key, chunk)
                if self._deleted.since(key.digest, moment):
                    self._first.delete(key)
        return chunk

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        kept = self._second.put(key, chunk)  # first, for it must see the tensors where they are now
        return self._first.put(key, chunk) or kept

    def contains(self, key: ChunkKey) -> bool:
        return self._first.contains(key) or self._second.contains(key)

    def at_hand(self, key: ChunkKey) -> bool:
        return self._first.at_hand(key)

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        wanted = frozenset(digests)
        second = self._second.delete_all(wanted)
        self._deleted.add(wanted)  # whoever has just read one there takes it out of the first one again
        return second + self._first.delete_all(wanted)

    def catalogue(self) -> Iterator[Listed]:
        return chain(self._first.catalogue(), self._second.catalogue())

    def stats(self) -> tuple[TierStats, ...]:
        return self._first.stats() + self._second.stats()

    def flush(self) -> None:
        self._first.flush()
        self._second.flush()


def open_store(
    *,
    ram: int = 0,
    disk: int = 0,
    path: Path | None = None,
    device: int = 0,
    on: str = "cpu",
    shared: ChunkStore | None = None,
) -> ChunkStore:
    """The store for these byte budgets; 0 leaves a tier out, and without any it is the empty store.

    `on` is the device of the model: a GPU has a tier of its own (`device` bytes), and copies from page-locked RAM.
    `shared` is the tier that other gateways share, behind all others.
    Raises ConfigError where a disk budget has no `path`, a budget is negative, or the folder cannot be used.
    """
    for name, budget in (("ram", ram), ("disk", disk), ("device", device)):
        if budget < 0:
            raise ConfigError(f"kv_cache.{name} must not be negative, got {budget}")
    if disk and path is None:
        raise ConfigError("kv_cache.disk needs kv_cache.path, the folder of the chunk files")
    store: ChunkStore = DiskStore(path, disk) if disk and path is not None else EmptyStore()
    on_card = on != "cpu"
    if ram:
        place = Pinned() if on_card else Host()
        store = TieredStore(store, ram_budget=ram, place=place) if disk else RamStore(ram, place=place)
    if device and on_card:
        store = TieredStore(store, ram_budget=device, tier="device", place=OnDevice(on))
    return store if shared is None else BackedStore(store, shared)
