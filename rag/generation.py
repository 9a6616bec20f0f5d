"""A collection's state on disk: one manifest that names immutable segment files. Each commit is a new generation.

    manifest.json     digest line, then JSON: settings, segments with digests, and where each document lies
    00000007.json     a segment's documents and chunks        00000007.npy   their vectors, float32 [rows, dim]

Replacing the manifest is the commit. Files that it does not name are litter of a killed commit or of an older
generation; the next writer removes them.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .embedder import Vectors
from .files import Write, damaged, digest_of

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Fixed when the collection is made, but for the embedder's identity and dimension ("" and 0 before the first)."""

    max_tokens: int
    overlap: int
    embedder: str = ""
    dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFile:
    """Digests of the two files of a segment, and its number of rows."""

    rows: int
    chunks_digest: str
    vectors_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a document lies: its segment, and the digest that tells whether it has changed."""

    segment: int
    digest: str
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole state, apart from the contents of the segments."""

    settings: Settings
    generation: int = 0
    next_segment: int = 1
    segments: Mapping[int, SegmentFile] = field(default_factory=dict)
    documents: Mapping[str, Placed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk as it lies on disk: its text and place in the document."""

    text: str
    headings: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document's chunks and metadata, with its vectors, float32 [chunks, dim]."""

    id: str
    metadata: Mapping[str, Any]
    chunks: tuple[StoredChunk, ...]
    vectors: Vectors


def write_manifest(folder: Path, manifest: Manifest, *, write: Write) -> None:
    """The commit."""
    payload = json.dumps({"format": FORMAT, **asdict(manifest)}, ensure_ascii=False).encode()
    write(folder / MANIFEST, digest_of(payload).encode() + b"\n" + payload)


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError when there is none, and our error, naming the file, when it is damaged."""
    path = folder / MANIFEST
    digest, _, payload = path.read_bytes().partition(b"\n")
    if digest_of(payload).encode() != digest:
        raise damaged(path, "wrong digest")
    data = json.loads(payload)
    if data.pop("format") != FORMAT:
        raise damaged(path, "written by another version of promptsluice")
    return Manifest(
        settings=Settings(**data.pop("settings")),
        segments={int(number): SegmentFile(**entry) for number, entry in data.pop("segments").items()},
        documents={id: Placed(**entry) for id, entry in data.pop("documents").items()},
        **data,
    )


def write_segment(folder: Path, number: int, documents: Sequence[StoredDocument], *, write: Write) -> SegmentFile:
    """Write both files of a new segment; at least one document."""
    texts = [
        {"id": document.id, "metadata": document.metadata, "chunks": [asdict(chunk) for chunk in document.chunks]}
        for document in documents
    ]
    chunks = json.dumps(texts, ensure_ascii=False).encode()
    buffer = io.BytesIO()
    stacked = np.concatenate([document.vectors for document in documents])
    np.save(buffer, stacked, allow_pickle=False)
    vectors = buffer.getvalue()
    for path, data in zip(paths_of(folder, number), (chunks, vectors), strict=True):
        write(path, data)
    return SegmentFile(rows=len(stacked), chunks_digest=digest_of(chunks), vectors_digest=digest_of(vectors))


def read_segment(folder: Path, number: int, expected: SegmentFile) -> list[StoredDocument]:
    """All documents of a segment, the dead ones too. FileNotFoundError, or our error naming the damaged file."""
    chunks_path, vectors_path = paths_of(folder, number)
    chunks, vectors = chunks_path.read_bytes(), vectors_path.read_bytes()
    for path, data, digest in (
        (chunks_path, chunks, expected.chunks_digest),
        (vectors_path, vectors, expected.vectors_digest),
    ):
        if digest_of(data) != digest:
            raise damaged(path, "wrong digest")
    rows: Vectors = np.load(io.BytesIO(vectors), allow_pickle=False)
    documents, first = [], 0
    for entry in json.loads(chunks):
        stored = tuple(
            StoredChunk(text=c["text"], headings=tuple(c["headings"]), start=c["start"], end=c["end"])
            for c in entry["chunks"]
        )
        part = rows[first : first + len(stored)]
        documents.append(StoredDocument(id=entry["id"], metadata=entry["metadata"], chunks=stored, vectors=part))
        first += len(stored)
    return documents


def paths_of(folder: Path, number: int) -> tuple[Path, Path]:
    """A segment's chunk file and vector file."""
    return folder / f"{number:08d}.json", folder / f"{number:08d}.npy"


def sweep(folder: Path, manifest: Manifest) -> None:
    """Remove what the manifest does not name. Only for whoever holds the writer's lock."""
    named = {path.name for number in manifest.segments for path in paths_of(folder, number)} | {MANIFEST}
    for path in folder.iterdir():
        if path.name not in named and path.suffix in (".json", ".npy", ".tmp"):
            path.unlink(missing_ok=True)
