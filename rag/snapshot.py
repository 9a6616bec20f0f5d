"""A generation in memory: live chunks and a FAISS index over their vectors. Immutable; readers share it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .embedder import Vectors
from .files import damaged
from .generation import Manifest, StoredChunk, StoredDocument, paths_of, read_manifest, read_segment


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk with its place: number `number` of `document`."""

    document: StoredDocument
    number: int

    @property
    def chunk(self) -> StoredChunk:
        """The chunk itself."""
        return self.document.chunks[self.number]


class Snapshot:
    """`documents` are the live ones by id, in the manifest's order."""

    def __init__(self, manifest: Manifest, segments: Mapping[int, Mapping[str, StoredDocument]]) -> None:
        self.manifest = manifest
        self.segments = segments
        self.documents = {id: segments[placed.segment][id] for id, placed in manifest.documents.items()}

    @classmethod
    def load(cls, folder: Path, *, before: "Snapshot | None" = None) -> "Snapshot":
        """Read the present generation; segments that `before` has are taken from it.

        A writer may remove files between the reading of the manifest and of the segments: then there is a newer
        manifest, and reading starts anew. FileNotFoundError when the collection is gone.
        """
        while True:
            manifest = read_manifest(folder)
            try:
                return cls(manifest, _segments(folder, manifest, before))
            except FileNotFoundError as error:
                if read_manifest(folder).generation == manifest.generation:
                    raise damaged(Path(error.filename), "missing") from error

    @cached_property
    def rows(self) -> list[Row]:
        """All live chunks; their place in this list is their id in the index."""
        return [Row(doc, number) for doc in self.documents.values() for number in range(len(doc.chunks))]

    @cached_property
    def _index(self) -> Any:
        import faiss

        index: Any = faiss.IndexFlatIP(self.manifest.settings.dim)
        index.add(np.concatenate([document.vectors for document in self.documents.values()]))
        return index

    def nearest(self, query: Vectors, top_k: int) -> list[tuple[Row, float]]:
        """The rows with the largest inner product with `query` [dim], best first; equal ones in stored order."""
        if not self.rows:
            return []
        scores, found = self._index.search(query[None], min(top_k, len(self.rows)))
        ranked = sorted(zip(-scores[0], found[0], strict=True))
        return [(self.rows[i], float(-negative)) for negative, i in ranked]


def _segments(folder: Path, manifest: Manifest, before: Snapshot | None) -> dict[int, dict[str, StoredDocument]]:
    known = before.segments if before else {}
    loaded: dict[int, dict[str, StoredDocument]] = {}
    for number, entry in manifest.segments.items():
        unchanged = before is not None and before.manifest.segments.get(number) == entry
        documents = known[number].values() if unchanged else read_segment(folder, number, entry)
        loaded[number] = {document.id: document for document in documents}
    for id, placed in manifest.documents.items():
        if id not in loaded.get(placed.segment, {}):
            raise damaged(paths_of(folder, placed.segment)[0], f"document {id!r} is missing")
    return loaded
