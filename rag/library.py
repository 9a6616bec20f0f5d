"""Collections: the folder that holds them. Names are checked, making and deleting is atomic. Blocking throughout."""

import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..backend_engine.hub.progress import size_of
from ..prompt import BadRequest, Conflict, PromptsluiceError, UnknownCollection
from .chunking import MIN_TOKENS
from .collection import Collection, OnChunks
from .commit import writer_lock
from .embedder import Embedder
from .files import Write, disk_error, write_durably
from .generation import MANIFEST, Manifest, Settings, read_manifest, write_manifest

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
MAX_CHUNK_TOKENS = 4096
LOCK_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionInfo:
    """A collection at a glance. `bytes` is what it takes on disk."""

    name: str
    documents: int
    chunks: int
    bytes: int
    generation: int
    settings: Settings


class Collections:
    """All collections below `root`, which is made on first use. Threads and processes may share it.

    `count_tokens` limits the chunks; use the chat model's tokenizer. For the hooks and `write` see Collection.
    """

    def __init__(
        self,
        root: Path,
        *,
        embedder: Embedder,
        count_tokens: Callable[[str], int],
        on_chunks: OnChunks | None = None,
        on_gone: OnChunks | None = None,
        write: Write = write_durably,
    ) -> None:
        self.root = root
        self._embedder = embedder
        self._count = count_tokens
        self._on_chunks = on_chunks
        self._on_gone = on_gone
        self._write = write
        self._open: dict[str, Collection] = {}
        self._lock = threading.Lock()

    def create(self, name: str, *, max_tokens: int = 256, overlap: int = 0) -> Collection:
        """Make an empty collection. BadRequest for an odd name or setting, Conflict when there is one of this name."""
        folder = self._folder(name)
        if not MIN_TOKENS <= max_tokens <= MAX_CHUNK_TOKENS:
            raise BadRequest(
                f"max_tokens must be {MIN_TOKENS} to {MAX_CHUNK_TOKENS}, not {max_tokens}", param="max_tokens"
            )
        if not 0 <= overlap <= max_tokens // 2:
            raise BadRequest(
                f"overlap must be 0 to {max_tokens // 2} (half of max_tokens), not {overlap}", param="overlap"
            )
        self._make(folder, Manifest(settings=Settings(max_tokens=max_tokens, overlap=overlap)))
        return self.get(name)

    def get(self, name: str) -> Collection:
        """The collection of this name; UnknownCollection when there is none."""
        folder = self._folder(name)
        with self._lock:
            if name not in self._open or not (folder / MANIFEST).exists():
                self._open[name] = Collection(
                    folder,
                    embedder=self._embedder,
                    count_tokens=self._count,
                    on_chunks=self._on_chunks,
                    on_gone=self._on_gone,
                    write=self._write,
                )
            return self._open[name]

    def list(self) -> list[CollectionInfo]:
        """All collections, sorted by name; a damaged manifest is an error that names it."""
        found = sorted(path.parent for path in self.root.glob(f"*/{MANIFEST}") if _NAME.fullmatch(path.parent.name))
        return [info for folder in found if (info := self._info(folder)) is not None]

    def delete(self, name: str) -> None:
        """Delete a collection with all its files. It is gone at once, whatever happens during the clean-up."""
        folder = self._folder(name)
        pieces = self._pieces(name)
        with self._lock:
            self._open.pop(name, None)
            if not (folder / MANIFEST).exists():
                raise UnknownCollection(f"there is no collection {name!r}", param="collection")
            with self._aside(folder) as aside:
                folder.rename(aside / name)
        if self._on_gone is not None and pieces:
            try:
                self._on_gone(name, pieces)
            except Exception:
                log.exception("collection %s: the hook for its chunks failed; the collection is deleted", name)

    def _pieces(self, name: str) -> Sequence[str]:
        """What will be gone; nothing where nobody asks, or where the collection is too damaged to be read."""
        if self._on_gone is None:
            return []
        try:
            return self.get(name).pieces()
        except PromptsluiceError as error:
            log.warning("collection %s is deleted unread: %s", name, error.message)
            return []

    def _make(self, folder: Path, manifest: Manifest) -> None:
        """Build the folder aside and rename it into place, so that none is ever seen half-made.

        Who is still writing to a deleted collection of this name has to notice that before there is a new one.
        """
        self._refuse_second(folder)
        with writer_lock(folder, wait_s=LOCK_WAIT_S), self._aside(folder) as aside:
            self._refuse_second(folder)
            building = aside / folder.name
            building.mkdir()
            write_manifest(building, manifest, write=self._write)
            building.rename(folder)

    @staticmethod
    def _refuse_second(folder: Path) -> None:
        if (folder / MANIFEST).exists():
            raise Conflict(f"there is a collection {folder.name!r} already", param="name", code="collection_exists")

    @contextmanager
    def _aside(self, folder: Path) -> Iterator[Path]:
        """A folder beside the collections, one user at a time; afterwards it is gone, with what killed ones left."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".lock", timeout=LOCK_WAIT_S):
                for litter in self.root.glob(".aside-*"):
                    shutil.rmtree(litter, ignore_errors=True)
                aside = Path(tempfile.mkdtemp(prefix=".aside-", dir=self.root))
                try:
                    yield aside
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
        except Timeout:
            raise Conflict("somebody else is making or deleting a collection; try again later") from None
        except OSError as error:
            raise disk_error(error, folder) from error

    def _folder(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"{name!r} cannot name a collection: 1 to 64 of letters, digits, '.', '_', '-', no sign first",
                param="name",
            )
        return self.root / name

    @staticmethod
    def _info(folder: Path) -> CollectionInfo | None:
        """None for a collection that is just being deleted."""
        try:
            manifest = read_manifest(folder)
        except FileNotFoundError:
            return None
        return CollectionInfo(
            name=folder.name,
            documents=len(manifest.documents),
            chunks=sum(placed.chunks for placed in manifest.documents.values()),
            bytes=size_of(folder),
            generation=manifest.generation,
            settings=manifest.settings,
        )
