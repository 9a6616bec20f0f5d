"""From documents to what is stored: chunks and their vectors. Nothing is written here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .chunking import Chunker
from .document import Document
from .embedder import Embedder
from .generation import Settings, StoredChunk, StoredDocument
from .render import piece_of

Unembedded = tuple[str, Mapping[str, Any], tuple[StoredChunk, ...]]


def prepared(
    documents: Sequence[Document], settings: Settings, *, count: Callable[[str], int], embedder: Embedder
) -> list[StoredDocument]:
    """Chunk and embed. Tokens are counted as the chunk will stand in a prompt."""
    chunker = Chunker(
        count=lambda text: count(piece_of(text)), max_tokens=settings.max_tokens, overlap=settings.overlap
    )
    return embedded([(doc.id, doc.metadata, _chunks(chunker, doc)) for doc in documents], embedder=embedder)


def embedded(documents: Sequence[Unembedded], *, embedder: Embedder) -> list[StoredDocument]:
    """Add the vectors: of the text under its headings, which often name what the text only calls "it"."""
    texts = ["\n".join([*chunk.headings, chunk.text]) for *_, chunks in documents for chunk in chunks]
    vectors = embedder.embed(texts)
    stored, first = [], 0
    for id, metadata, chunks in documents:
        part = vectors[first : first + len(chunks)]
        stored.append(StoredDocument(id=id, metadata=metadata, chunks=chunks, vectors=part))
        first += len(chunks)
    return stored


def _chunks(chunker: Chunker, document: Document) -> tuple[StoredChunk, ...]:
    return tuple(
        StoredChunk(text=chunk.text, headings=chunk.headings, start=chunk.start, end=chunk.end)
        for chunk in chunker.chunks(document.text, markdown=document.is_markdown)
        if chunk.text.strip()
    )
