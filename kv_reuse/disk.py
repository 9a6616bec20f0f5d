"""The disk tier: one safetensors file a chunk in a folder that several processes may share.

The folder itself is the only state: file names are keys, modification times the last uses, sizes the use of the budget.
So a restart needs no index, and other processes' files count. There are no lock files; every race ends in a miss.
"""

import logging
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..prompt.errors import ConfigError
from .chunkfile import DamagedChunk, decode, encode, read_flops, read_ids
from .keys import ChunkKey
from .recompute import LOOKED_AT, Candidate, first_to_go
from .store import ChunkStore, Listed, StoredChunk, TierStats

log = logging.getLogger(__name__)

_REMEMBERED = 1 << 16
# The chunks of format 1 have no anchor in their names: they are never read, but count until they are evicted.
_NAME = re.compile(r"[0-9a-f]{64}(-([0-9a-f]{64}|bare))?\.safetensors")
_DIGITS = 64  # of a name, which begins with the chunk's digest
_STALE_SECONDS = 3600  # a temporary file this old was left by a process that died while writing


class _Entry(NamedTuple):
    """A chunk file; sorts by age, oldest first."""

    mtime_ns: int
    path: Path
    size: int


def _write(handle: BinaryIO, data: bytes) -> None:
    handle.write(data)


def _read(path: Path) -> Tensor:
    """The whole file, uint8 [bytes]. Of one that is being cut short meanwhile, the rest is anything."""
    with path.open("rb", buffering=0) as handle:
        data = torch.empty(os.fstat(handle.fileno()).st_size, dtype=torch.uint8)
        rest = data.numpy().data
        while rest and (count := handle.readinto(rest)):
            rest = rest[count:]
    return data


def _ids_in(path: Path) -> tuple[int, ...] | None:
    """None for what is gone, unreadable or damaged: whoever wants its KV will find out, and say so."""
    try:
        with path.open("rb") as handle:
            return read_ids(handle)
    except (OSError, DamagedChunk):
        return None


def _flops_in(path: Path) -> float:
    """What computing a file's chunk again takes; 0 for what is of no use any more."""
    try:
        with path.open("rb") as handle:
            return read_flops(handle)
    except (OSError, DamagedChunk):
        return 0.0


class DiskStore(ChunkStore):
    """Chunk files under `root`, at most `budget` bytes of them; what saves least and was not used for long goes first.

    A file is written beside its place, synced, then renamed, so a reader sees all of it or nothing. One that is damaged
    or is not what its name says is logged, removed and a miss. When a write fails (full disk, no permission) the chunk
    is not kept, the half file is removed, and the log says so. Two processes that write at the same time may together
    pass the budget by the files in flight; the next write corrects it.
    `write` puts the bytes into the open temporary file: a seam for tests and for throttled disks.
    """

    def __init__(self, root: Path, budget: int, *, write: Callable[[BinaryIO, bytes], object] = _write) -> None:
        self._root = root
        self._budget = budget
        self._write = write
        self._lock = threading.Lock()
        self._flops: dict[str, float] = {}  # by file name, as far as they were compared
        self._in_flight = 0  # bytes of files that this process is writing
        self._hits = self._misses = self._evictions = self._corrupt = self._refused = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            entries = self._scan()
        except OSError as exc:
            raise ConfigError(f"the chunk KV folder {root} cannot be used: {exc.strerror}") from exc
        # A clock that was set back must not make new files look older than what is here.
        self._last_stamp = max((entry.mtime_ns for entry in entries), default=0)

    def get(self, key: ChunkKey) -> StoredChunk | None:
        path = self._path(key)
        try:
            chunk = decode(_read(path), key=key)
        except FileNotFoundError:
            return self._missed()
        except OSError as exc:
            log.warning("chunk file %s cannot be read (%s)", path, exc.strerror)
            return self._missed()
        except DamagedChunk as exc:
            log.warning("chunk file %s is damaged and was removed: %s", path, exc)
            self._remove(path)
            return self._missed(corrupt=1)
        self._touch(path)
        with self._lock:
            self._hits += 1
        return replace(chunk, tier="disk")

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        path = self._path(key)
        if os.path.isfile(path):  # same key, same content
            self._touch(path)
            return True
        data = encode(key, chunk)
        try:
            stored = self._reserve(len(data))
            if stored:
                try:
                    self._write_whole(path, data)
                finally:
                    self._release(len(data))
        except OSError as exc:
            log.warning("chunk of %d tokens was not stored in %s: %s", key.tokens, self._root, exc.strerror)
            stored = False
        if not stored:
            with self._lock:
                self._refused += 1
        return stored

    def contains(self, key: ChunkKey) -> bool:
        return os.path.isfile(self._path(key))  # where pathlib's raises, in a folder without permission, this says no

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        wanted, gone = frozenset(digests), Counter[str]()
        for entry in self._entries():
            digest = entry.path.name[:_DIGITS]
            if digest in wanted:
                gone[digest] += self._remove(entry.path)
        return gone

    def catalogue(self) -> Iterator[Listed]:
        for entry in self._entries():
            yield Listed(entry.path.name[:_DIGITS], lambda path=entry.path: _ids_in(path))

    def stats(self) -> tuple[TierStats, ...]:
        """Scans the folder, so that `entries` and `bytes` include what other processes wrote."""
        entries = self._entries()
        with self._lock:
            return (
                TierStats(
                    tier="disk",
                    hits=self._hits,
                    misses=self._misses,
                    entries=len(entries),
                    bytes=sum(entry.size for entry in entries),
                    budget=self._budget,
                    evictions=self._evictions,
                    corrupt=self._corrupt,
                    refused=self._refused,
                ),
            )

    def flush(self) -> None:
        return  # `put` syncs

    def _path(self, key: ChunkKey) -> Path:
        return self._root / f"{key.name}.safetensors"

    def _missed(self, *, corrupt: int = 0) -> None:
        with self._lock:
            self._misses += 1
            self._corrupt += corrupt

    def _reserve(self, size: int) -> bool:
        """Evict until `size` more bytes fit and claim them; False, with nothing evicted, where they never could."""
        with self._lock:
            if self._in_flight + size > self._budget:
                return False
            entries = sorted(self._scan())
            excess = sum(entry.size for entry in entries) + self._in_flight + size - self._budget
            now = max(time.time_ns(), self._last_stamp)
            while entries and excess > 0:
                entry = first_to_go((entry, self._candidate(entry, now)) for entry in entries[:LOOKED_AT])
                entries.remove(entry)
                self._remove(entry.path)
                self._evictions += 1
                excess -= entry.size
            self._in_flight += size
            return True

    def _candidate(self, entry: _Entry, now: int) -> Candidate:
        name = entry.path.name
        if name not in self._flops:
            if len(self._flops) >= _REMEMBERED:
                self._flops.clear()
            self._flops[name] = _flops_in(entry.path)
        return Candidate(now - entry.mtime_ns, self._flops[name], entry.size)

    def _release(self, size: int) -> None:
        with self._lock:
            self._in_flight -= size

    def _write_whole(self, path: Path, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._root, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as handle:
                self._write(handle, data)
                handle.flush()
                os.fsync(handle.fileno())
            self._touch(Path(temporary))
            os.replace(temporary, path)
        except BaseException:
            self._remove(Path(temporary))
            raise

    def _touch(self, path: Path) -> None:
        # File systems stamp with a clock of milliseconds; our own strictly growing stamp keeps the order exact.
        with self._lock:
            self._last_stamp = stamp = max(self._last_stamp + 1, time.time_ns())
        try:
            os.utime(path, ns=(stamp, stamp))
        except OSError as exc:
            log.debug("chunk file %s keeps its age (%s)", path, exc.strerror)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False  # another process was faster
        except OSError as exc:
            log.warning("chunk file %s cannot be removed (%s)", path, exc.strerror)
            return False
        return True

    def _entries(self) -> list[_Entry]:
        """What is in the folder; nothing, which is logged, where it cannot be read."""
        try:
            return self._scan()
        except OSError as exc:
            log.warning("the chunk KV folder %s cannot be read (%s)", self._root, exc.strerror)
            return []

    def _scan(self) -> list[_Entry]:
        entries = []
        with os.scandir(self._root) as found:
            for item in found:
                if _NAME.fullmatch(item.name) is None:
                    continue
                try:
                    stat = item.stat()
                except FileNotFoundError:
                    continue
                entries.append(_Entry(stat.st_mtime_ns, Path(item.path), stat.st_size))
        return entries

    def _remove_stale(self) -> None:
        for path in self._root.glob(".*.tmp"):
            try:
                old = time.time() - path.stat().st_mtime > _STALE_SECONDS
            except FileNotFoundError:
                continue
            if old:
                self._remove(path)
