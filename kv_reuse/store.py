"""The contract of a chunk store, the record that it holds, its counters, and the store that keeps nothing."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..backend_engine.rounded_kv import Block
from .keys import ChunkKey


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk's token ids and its KV, in the memory of its tier, else on the CPU. Tensors are shared with every reader:
    nobody writes into them.

    `position` is the place of the first token that the keys are rotated for: the length of the anchor after which the
    chunk was computed, 0 for a chunk computed alone. `flops` is what computing it again would take, by which stores
    choose what to let go of; 0 where nobody knows. `tier` is filled in by the store that delivers the chunk ("device",
    "ram", "disk", "shared").
    """

    ids: tuple[int, ...]
    kv: Block
    position: int = 0
    tier: str = ""
    flops: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that a budget counts: keys, values, and four bytes a token id."""
        return self.kv.nbytes + 4 * len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters of one tier since it was opened; `entries` and `bytes` are what it holds now.

    `evictions` left for want of room, `corrupt` were found damaged or foreign and removed, `refused` were not stored
    (larger than the budget, disk full).
    """

    tier: str
    hits: int = 0
    misses: int = 0
    entries: int = 0
    bytes: int = 0
    budget: int = 0
    evictions: int = 0
    corrupt: int = 0
    refused: int = 0


class Listed(NamedTuple):
    """A chunk that a store has, under whatever anchors: its digest, and what reads its token ids (None: they cannot be
    read). The ids are not verified; a key that is made of them is (its digest is this one, or they are not the
    chunk's)."""

    digest: str
    read: Callable[[], tuple[int, ...] | None]


class ChunkStore(ABC):
    """Keeps the KV of chunks under their content keys.

    Every method may touch a disk: call them from worker threads, never from an event loop. All are safe to call from
    several threads at a time. A store is a cache, so it may forget anything at any time, and trouble with what it keeps
    (damage, a full disk, a file that vanished) is a miss or a refusal that is logged, never an exception. What it does
    deliver is exactly what was put under that key.
    """

    @abstractmethod
    def get(self, key: ChunkKey) -> StoredChunk | None:
        """The chunk, now the most recently used one, or None. Counts as a hit or a miss."""

    @abstractmethod
    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        """Keep the chunk as the most recently used one, evicting others as needed; False where it could not be kept.

        Those are evicted first that save the least for a byte and were not used for the longest time (recompute.py).

        The caller hands the tensors over and must not change them afterwards. They should own their memory: a view
        would hold its whole base alive beyond the budget.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether `get` would probably hit; reads no KV, changes neither order nor counters."""

    def at_hand(self, key: ChunkKey) -> bool:
        """Whether `get` would take no longer than a look into memory."""
        return False

    def delete(self, key: ChunkKey) -> int:
        """Forget the chunk under this and every other anchor; how many entries that were, over all tiers."""
        return self.delete_all([key.digest])[key.digest]

    @abstractmethod
    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        """Forget chunks by their keys' digests, under whatever anchors, in one pass; how many entries each had, over
        all tiers."""

    @abstractmethod
    def catalogue(self) -> Iterator[Listed]:
        """All chunks that are there, each at least once, in any order; reads no KV and changes no order or counter."""

    @abstractmethod
    def stats(self) -> tuple[TierStats, ...]:
        """Counters of each tier, fastest first."""

    @abstractmethod
    def flush(self) -> None:
        """Make what is held survive this process, as far as the store has a place for that."""


class EmptyStore(ChunkStore):
    """Keeps nothing: reuse is off, or a test wants only misses."""

    def get(self, key: ChunkKey) -> StoredChunk | None:
        return None

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        return False

    def contains(self, key: ChunkKey) -> bool:
        return False

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        return Counter()

    def catalogue(self) -> Iterator[Listed]:
        return iter(())

    def stats(self) -> tuple[TierStats, ...]:
        return ()

    def flush(self) -> None:
        return
