"""Collection: documents in, hits out. Several readers, one writer at a time, across threads and processes.

Everything here blocks (disk, embedding); call it from a worker thread.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..prompt import BadRequest, Conflict, NotFound, UnknownCollection
from .commit import commit, sweep_if_idle, writer_lock
from .document import Document, check
from .embedder import Embedder
from .files import Write, write_durably
from .generation import MANIFEST, Manifest, Settings, StoredDocument
from .prepare import embedded, prepared
from .render import piece_of
from .snapshot import Snapshot

log = logging.getLogger(__name__)

MAX_TOP_K = 1000
OnChunks = Callable[[str, Sequence[str]], None]
"""A collection's name, and chunks of it as they stand in prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that was found. `score` is the cosine of the angle between question and chunk; `text` is the document's
    `[start:end]`; `headings` are the titles above it; `metadata` is the document's."""

    chunk_id: str
    document_id: str
    text: str
    score: float
    metadata: Mapping[str, Any]
    headings: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What a change did, in documents; `chunks` were embedded. `generation` is the state that holds it."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    deleted: int = 0
    chunks: int = 0
    generation: int = 0


class Collection:
    """Made by Collections. `on_chunks` is called after each commit, in the calling thread, with the new chunks,
    `on_gone` with those that no document has any more; if one fails, that is logged and the commit stands.

    `write` puts bytes durably into a file, or raises OSError; another one than the default is for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        embedder: Embedder,
        count_tokens: Callable[[str], int],
        on_chunks: OnChunks | None = None,
        on_gone: OnChunks | None = None,
        write: Write = write_durably,
        lock_wait_s: float = 60.0,
    ) -> None:
        self.name = folder.name
        self.folder = folder
        self._embedder = embedder
        self._count = count_tokens
        self._on_chunks = on_chunks
        self._on_gone = on_gone
        self._write = write
        self._lock_wait_s = lock_wait_s
        self._refreshing = threading.Lock()
        self._held: tuple[object, Snapshot] | None = None
        self.snapshot()
        sweep_if_idle(folder)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """How the collection chunks and embeds."""
        return self.snapshot().manifest.settings

    def document_ids(self) -> list[str]:
        """Ids of all documents, sorted."""
        return sorted(self.snapshot().documents)

    def pieces(self) -> list[str]:
        """All chunks as they stand in prompts, for computing their KV ahead."""
        return [piece_of(row.chunk.text) for row in self.snapshot().rows]

    def search(self, query: str, *, top_k: int = 4) -> list[Hit]:
        """The `top_k` chunks nearest to the question, best first. BadRequest for an empty query or an odd `top_k`."""
        _check_query(query, top_k)
        snapshot = self.snapshot()
        if not snapshot.rows:
            return []
        self._check_embedder(snapshot.manifest)
        vector = self._embedder.embed_queries([query])[0]
        return [
            Hit(
                chunk_id=f"{row.document.id}#{row.number}",
                document_id=row.document.id,
                text=row.chunk.text,
                score=score,
                metadata=row.document.metadata,
                headings=row.chunk.headings,
                start=row.chunk.start,
                end=row.chunk.end,
            )
            for row, score in snapshot.nearest(vector, top_k)
        ]

    def snapshot(self) -> Snapshot:
        """The present generation, read again only if another one was committed. UnknownCollection when it is gone."""
        with self._refreshing:
            try:
                stat = os.stat(self.folder / MANIFEST)
                mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if self._held is None or self._held[0] != mark:
                    self._held = mark, Snapshot.load(self.folder, before=self._held[1] if self._held else None)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise UnknownCollection(f"there is no collection {self.name!r}", param="collection") from error
            return self._held[1]

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, documents: Iterable[Document]) -> IngestReport:
        """Add documents, replacing those whose ids are there; unchanged ones are skipped. All of them or none.

        BadRequest names the document that cannot be stored; Conflict when another writer is busy or the embedder has
        changed; StorageFull when the disk is full. Then nothing has changed.
        """
        batch = list(documents)
        check(batch)
        with self._writing() as before:
            self._check_embedder(before.manifest)
            placed = before.manifest.documents
            fresh = [doc for doc in batch if doc.id not in placed or placed[doc.id].digest != doc.digest]
            if not fresh:
                return IngestReport(unchanged=len(batch), generation=before.manifest.generation)
            stored = prepared(fresh, before.manifest.settings, count=self._count, embedder=self._embedder)
            manifest = self._commit(before, stored, digests={doc.id: doc.digest for doc in fresh})
        self._tell(self._on_chunks, lambda: _pieces(stored))
        self._mourn([before.documents[doc.id] for doc in fresh if doc.id in placed])
        replaced = sum(doc.id in placed for doc in fresh)
        return IngestReport(
            added=len(fresh) - replaced,
            replaced=replaced,
            unchanged=len(batch) - len(fresh),
            chunks=sum(len(doc.chunks) for doc in stored),
            generation=manifest.generation,
        )

    def replace(self, document: Document) -> IngestReport:
        """Like `add` for one document that must be there; NotFound otherwise."""
        self._require(document.id, self.snapshot())
        return self.add([document])

    def delete(self, document_id: str) -> IngestReport:
        """Take a document out; NotFound when it is not there."""
        with self._writing() as before:
            self._require(document_id, before)
            manifest = self._commit(before, [], digests={}, gone=document_id)
        self._mourn([before.documents[document_id]])
        return IngestReport(deleted=1, generation=manifest.generation)

    def reembed(self) -> IngestReport:
        """Embed every chunk anew with the present embedder, in one commit: the way out after it has changed."""
        with self._writing() as before:
            old = list(before.documents.values())
            stored = embedded([(doc.id, doc.metadata, doc.chunks) for doc in old], embedder=self._embedder)
            digests = {id: placed.digest for id, placed in before.manifest.documents.items()}
            manifest = self._commit(before, stored, digests=digests)
        chunks = sum(len(doc.chunks) for doc in stored)
        return IngestReport(replaced=len(old), chunks=chunks, generation=manifest.generation)

    @contextmanager
    def _writing(self) -> Iterator[Snapshot]:
        """The writer's lock, and the generation that it starts from."""
        self.snapshot()  # names a missing collection before a lock file is made for it
        with writer_lock(self.folder, wait_s=self._lock_wait_s):
            yield self.snapshot()

    def _commit(
        self,
        before: Snapshot,
        stored: Sequence[StoredDocument],
        *,
        digests: Mapping[str, str],
        gone: str | None = None,
    ) -> Manifest:
        identity = self._embedder.identity if stored else None
        return commit(self.folder, before, stored, digests=digests, gone=gone, embedder=identity, write=self._write)

    def _mourn(self, documents: Sequence[StoredDocument]) -> None:
        """Tell which chunks of documents that were replaced or deleted are in no other one."""

        def gone() -> list[str]:
            left = set(self.pieces())
            return [piece for piece in dict.fromkeys(_pieces(documents)) if piece not in left]

        if documents:
            self._tell(self._on_gone, gone)

    def _tell(self, hook: OnChunks | None, pieces: Callable[[], Sequence[str]]) -> None:
        if hook is None:
            return
        try:
            if told := pieces():
                hook(self.name, told)
        except Exception:
            log.exception("collection %s: a hook for changed chunks failed; the change itself stands", self.name)

    def _check_embedder(self, manifest: Manifest) -> None:
        if manifest.documents and manifest.settings.embedder != self._embedder.identity:
            raise Conflict(
                f"the collection {self.name!r} was embedded by {manifest.settings.embedder}, the embedder now is "
                f"{self._embedder.identity}; run: promptsluice collections reembed {self.name}",
                code="embedder_changed",
            )

    def _require(self, document_id: str, snapshot: Snapshot) -> None:
        if document_id not in snapshot.documents:
            raise NotFound(f"collection {self.name!r} has no document {document_id!r}", code="document_not_found")


def _pieces(documents: Iterable[StoredDocument]) -> list[str]:
    return [piece_of(chunk.text) for doc in documents for chunk in doc.chunks]


def _check_query(query: str, top_k: int) -> None:
    if not query.strip():
        raise BadRequest("query must not be empty", param="query")
    if any("\ud800" <= char <= "\udfff" for char in query):
        raise BadRequest("query has a lone surrogate", param="query")
    if isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise BadRequest(f"top_k must be between 1 and {MAX_TOP_K}, not {top_k}", param="top_k")
