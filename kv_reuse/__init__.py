"""Chunk KV reuse: keys, stores, re-positioning, row selectors, and the planner of reused spans. Loads lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blend import MODES, ReusePlan, Reuser, WarmReport
    from .disk import DiskStore
    from .keys import ChunkKey, KeySpace
    from .ram import RamStore
    from .reposition import repositioned
    from .selectors import KVDeviation, make_selector, selector_names
    from .store import ChunkStore, EmptyStore, StoredChunk, TierStats
    from .tiered import TieredStore, open_store

_LAZY = {
    "MODES": ".blend",
    "ChunkKey": ".keys",
    "ChunkStore": ".store",
    "DiskStore": ".disk",
    "EmptyStore": ".store",
    "KVDeviation": ".selectors",
    "KeySpace": ".keys",
    "RamStore": ".ram",
    "ReusePlan": ".blend",
    "Reuser": ".blend",
    "StoredChunk": ".store",
    "TierStats": ".store",
    "TieredStore": ".tiered",
    "WarmReport": ".blend",
    "make_selector": ".selectors",
    "open_store": ".tiered",
    "repositioned": ".reposition",
    "selector_names": ".selectors",
}

__all__ = [
    "MODES",
    "ChunkKey",
    "ChunkStore",
    "DiskStore",
    "EmptyStore",
    "KVDeviation",
    "KeySpace",
    "RamStore",
    "ReusePlan",
    "Reuser",
    "StoredChunk",
    "TierStats",
    "TieredStore",
    "WarmReport",
    "make_selector",
    "open_store",
    "repositioned",
    "selector_names",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
