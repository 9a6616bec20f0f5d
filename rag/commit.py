"""Writing: the lock that lets one writer in, and the commit that turns one generation into the next."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ..prompt import Conflict, UnknownCollection
from .files import Write, disk_error
from .generation import (
    MANIFEST,
    Manifest,
    Placed,
    StoredDocument,
    read_manifest,
    sweep,
    write_manifest,
    write_segment,
)
from .snapshot import Snapshot

log = logging.getLogger(__name__)

MAX_SEGMENTS = 16  # then all live documents are merged into one


@contextmanager
def writer_lock(folder: Path, *, wait_s: float) -> Iterator[None]:
    """Keep other writers out, of this process and of others. Conflict after `wait_s`. Dies with its holder."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        message = f"the collection {folder.name!r} is being changed by somebody else; try again later"
        raise Conflict(message, code="collection_busy") from None
    except OSError as error:
        raise disk_error(error, folder) from error
    try:
        yield
    finally:
        lock.release()


def commit(
    folder: Path,
    before: Snapshot,
    stored: Sequence[StoredDocument],
    *,
    digests: Mapping[str, str],
    gone: str | None = None,
    embedder: str | None = None,
    write: Write,
) -> Manifest:
    """Write the next generation: `before` with `stored` put in (by id) and `gone` taken out. The lock is held.

    `digests` are those of the stored documents, `embedder` the identity that made their vectors. On an error nothing
    has changed and nothing is left behind.
    """
    number = before.manifest.next_segment
    places = {id: placed for id, placed in before.manifest.documents.items() if id != gone}
    for doc in stored:
        places[doc.id] = Placed(segment=number, digest=digests[doc.id], chunks=len(doc.chunks))
    settings = before.manifest.settings
    if stored and embedder:
        settings = replace(settings, embedder=embedder, dim=stored[0].vectors.shape[1])
    if _merge_pays(before.manifest, places.values(), number):
        fresh = {doc.id: doc for doc in stored}
        stored = [fresh[id] if id in fresh else before.documents[id] for id in places]
        places = {id: replace(placed, segment=number) for id, placed in places.items()}
    live = {placed.segment for placed in places.values()}
    segments = {n: entry for n, entry in before.manifest.segments.items() if n in live}
    try:
        if stored:
            segments[number] = write_segment(folder, number, stored, write=write)
        manifest = Manifest(
            settings=settings,
            generation=before.manifest.generation + 1,
            next_segment=number + 1,
            segments=segments,
            documents=places,
        )
        write_manifest(folder, manifest, write=write)
    except OSError as error:
        if not (folder / MANIFEST).exists():
            raise UnknownCollection(
                f"the collection {folder.name!r} was deleted meanwhile", param="collection"
            ) from error
        sweep(folder, before.manifest)
        raise disk_error(error, folder) from error
    sweep(folder, manifest)
    return manifest


def sweep_if_idle(folder: Path) -> None:
    """Remove the litter of a killed writer, unless a writer is at work or the disk is read-only."""
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            sweep(folder, read_manifest(folder))
    except (Timeout, OSError) as error:
        log.debug("collection %s is not swept: %s", folder.name, error)


def _merge_pays(old: Manifest, places: Iterable[Placed], number: int) -> bool:
    """Whether the old segments are too many, or hold more dead chunks than live ones."""
    kept = [placed for placed in places if placed.segment != number]
    touched = {placed.segment for placed in kept}
    held = sum(old.segments[n].rows for n in touched)
    return len(touched) >= MAX_SEGMENTS or held > 2 * sum(placed.chunks for placed in kept)
