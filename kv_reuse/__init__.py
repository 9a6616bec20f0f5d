"""Chunk KV reuse: keys, stores, re-positioning, row selectors, and the planner of reused spans. Loads lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .anchors import Anchors
    from .blend import MODES, ReusePlan, Reuser, SpanHit
    from .disk import DiskStore
    from .keys import ChunkKey, KeySpace
    from .ram import RamStore
    from .reposition import repositioned
    from .selectors import AUTO, ChunkHeads, KVDeviation, QueryAttention, Repair, make_repair, selector_names
    from .store import ChunkStore, EmptyStore, StoredChunk, TierStats
    from .tiered import TieredStore, open_store
    from .warm import Prefiller, Warmer, WarmReport

_LAZY = {
    "AUTO": ".selectors",
    "MODES": ".blend",
    "Anchors": ".anchors",
    "ChunkHeads": ".selectors",
    "ChunkKey": ".keys",
    "ChunkStore": ".store",
    "DiskStore": ".disk",
    "EmptyStore": ".store",
    "KVDeviation": ".selectors",
    "KeySpace": ".keys",
    "Prefiller": ".warm",
    "QueryAttention": ".selectors",
    "RamStore": ".ram",
    "Repair": ".selectors",
    "ReusePlan": ".blend",
    "Reuser": ".blend",
    "SpanHit": ".blend",
    "StoredChunk": ".store",
    "TierStats": ".store",
    "TieredStore": ".tiered",
    "WarmReport": ".warm",
    "Warmer": ".warm",
    "make_repair": ".selectors",
    "open_store": ".tiered",
    "repositioned": ".reposition",
    "selector_names": ".selectors",
}

__all__ = [
    "AUTO",
    "MODES",
    "Anchors",
    "ChunkHeads",
    "ChunkKey",
    "ChunkStore",
    "DiskStore",
    "EmptyStore",
    "KVDeviation",
    "KeySpace",
    "Prefiller",
    "QueryAttention",
    "RamStore",
    "Repair",
    "ReusePlan",
    "Reuser",
    "SpanHit",
    "StoredChunk",
    "TierStats",
    "TieredStore",
    "WarmReport",
    "Warmer",
    "make_repair",
    "open_store",
    "repositioned",
    "selector_names",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
