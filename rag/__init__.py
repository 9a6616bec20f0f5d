"""Retrieval: documents in, relevant chunks out. Everything blocks; callers run it in worker threads. Loads lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chunking import Chunk, Chunker
    from .collection import Collection, Hit, IngestReport
    from .document import Document, documents_in
    from .embedder import Embedder, SentenceEmbedder
    from .library import CollectionInfo, Collections
    from .render import into_prompt, piece_of, render_block, within_budget

_LAZY = {
    "Chunk": ".chunking",
    "Chunker": ".chunking",
    "Collection": ".collection",
    "CollectionInfo": ".library",
    "Collections": ".library",
    "Document": ".document",
    "Embedder": ".embedder",
    "Hit": ".collection",
    "IngestReport": ".collection",
    "SentenceEmbedder": ".embedder",
    "documents_in": ".document",
    "into_prompt": ".render",
    "piece_of": ".render",
    "render_block": ".render",
    "within_budget": ".render",
}

__all__ = [
    "Chunk",
    "Chunker",
    "Collection",
    "CollectionInfo",
    "Collections",
    "Document",
    "Embedder",
    "Hit",
    "IngestReport",
    "SentenceEmbedder",
    "documents_in",
    "into_prompt",
    "piece_of",
    "render_block",
    "within_budget",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
