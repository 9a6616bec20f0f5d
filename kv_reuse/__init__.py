"""Chunk KV reuse: keys, stores, re-positioning, row selectors, and the planner of reused spans. Loads lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .anchors import Anchors
    from .blend import MODES, ReusePlan, Reuser, SpanHit
    from .catalogue import Catalogue
    from .cuts import breaks_of
    from .disk import DiskStore
    from .finding import Finder
    from .index import ChunkIndex, Match
    from .keys import ChunkKey, KeySpace
    from .ram import RamStore
    from .reposition import repositioned
    from .selectors import AUTO, ChunkHeads, KVDeviation, QueryAttention, Repair, make_repair, selector_names
    from .shared import SharedStore, connect
    from .store import ChunkStore, EmptyStore, Listed, StoredChunk, TierStats
    from .tiered import BackedStore, TieredStore, open_store
    from .warm import Prefiller, Warmer, WarmReport

_LAZY = {
    "AUTO": ".selectors",
    "Anchors": ".anchors",
    "BackedStore": ".tiered",
    "Catalogue": ".catalogue",
    "ChunkHeads": ".selectors",
    "ChunkIndex": ".index",
    "ChunkKey": ".keys",
    "ChunkStore": ".store",
    "DiskStore": ".disk",
    "EmptyStore": ".store",
    "Finder": ".finding",
    "KVDeviation": ".selectors",
    "KeySpace": ".keys",
    "Listed": ".store",
    "MODES": ".blend",
    "Match": ".index",
    "Prefiller": ".warm",
    "QueryAttention": ".selectors",
    "RamStore": ".ram",
    "Repair": ".selectors",
    "ReusePlan": ".blend",
    "Reuser": ".blend",
    "SharedStore": ".shared",
    "SpanHit": ".blend",
    "StoredChunk": ".store",
    "TierStats": ".store",
    "TieredStore": ".tiered",
    "WarmReport": ".warm",
    "Warmer": ".warm",
    "breaks_of": ".cuts",
    "connect": ".shared",
    "make_repair": ".selectors",
    "open_store": ".tiered",
    "repositioned": ".reposition",
    "selector_names": ".selectors",
}

__all__ = [
    "AUTO",
    "MODES",
    "Anchors",
    "BackedStore",
    "Catalogue",
    "ChunkHeads",
    "ChunkIndex",
    "ChunkKey",
    "ChunkStore",
    "DiskStore",
    "EmptyStore",
    "Finder",
    "KVDeviation",
    "KeySpace",
    "Listed",
    "Match",
    "Prefiller",
    "QueryAttention",
    "RamStore",
    "Repair",
    "ReusePlan",
    "Reuser",
    "SharedStore",
    "SpanHit",
    "StoredChunk",
    "TierStats",
    "TieredStore",
    "WarmReport",
    "Warmer",
    "breaks_of",
    "connect",
    "make_repair",
    "open_store",
    "repositioned",
    "selector_names",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
