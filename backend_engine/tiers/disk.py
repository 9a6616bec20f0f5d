"""The disk tier's folder: one file a page, shared by any number of processes and models under one byte budget.

The folder itself is the only state: names are keys, modification times the LRU order. There are no lock files; every
race ends in a miss. All methods but `has` block on the file system.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

from ...prompt.errors import ConfigError
from .pagefile import HEAD_BYTES, DamagedPage, check, head

logger = logging.getLogger(__name__)

_SUFFIX = ".page"
_STALE_S = 3600.0  # a temporary file this old was left by a process that died while writing
_RETRY_S = 60.0  # how long nothing is written after a write that failed
_SCAN_S = 30.0
_ROOM = 0.9  # of the budget stays when files have to go, so that not every write has to look for some


class _Entry(NamedTuple):
    """A page file; sorts by age, oldest first."""

    mtime_ns: int
    path: str
    size: int


class DiskFolder:
    """Page files of one `space` (model, dtype, sizes) below `root`, at most `budget` bytes with all others there.

    A file is written beside its place and renamed, so a reader sees all of it or nothing; nothing is synced, because
    what a crash of the machine leaves behind does not match its checksum. What other processes write counts when the
    folder is looked through: when this one passes the budget, every half minute of writing, and at `refresh`.
    """

    def __init__(self, root: Path, *, budget: int, space: bytes, page_bytes: int) -> None:
        self.budget = budget
        self.bytes = self.written = self.read_pages = self.damaged = self.failures = 0
        self._root = root
        self._folder = root / space.hex()
        self._space = space
        self._page_bytes = page_bytes
        self._keys: set[bytes] = set()  # replaced, or changed by one atomic step: may be asked from any thread
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._stamp = 0
        self._closed_until = 0.0
        self._scanned = 0.0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (probe := self._folder / f".{os.getpid()}.tmp").touch()
            probe.unlink(missing_ok=True)  # another engine of this process may be trying the same
            self.refresh()
        except OSError as error:
            raise ConfigError(f"the prefix cache's folder {root} cannot be used: {error.strerror}") from error

    @property
    def pages(self) -> int:
        return len(self._keys)

    @property
    def writable(self) -> bool:
        return time.monotonic() >= self._closed_until

    def has(self, key: bytes) -> bool:
        """Whether a read would probably succeed; touches no file."""
        return key in self._keys

    def read(self, key: bytes) -> memoryview | None:
        """The page's KV. None where it is gone or no good; then it is forgotten, and the log says why."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                data = bytearray(HEAD_BYTES + self._page_bytes + 1)  # one more, to see a file that is too long
                length = _read_into(file, memoryview(data))
            payload = check(memoryview(data)[:length], space=self._space, key=key, size=self._page_bytes)
        except FileNotFoundError:
            payload = None  # another process needed the room
        except OSError as error:
            logger.warning("page file %s cannot be read (%s)", path, error.strerror)
            payload = None
        except DamagedPage as error:
            logger.warning("page file %s is damaged and was removed: %s", path, error)
            self._remove(path)
            self.damaged += 1
            payload = None
        if payload is None:
            self._keys.discard(key)
            return None
        self._touch(path)
        self.read_pages += 1
        return payload

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Keep the page as the most recently used one; False where that failed, and then for a while for all."""
        size = HEAD_BYTES + len(payload)
        if not self.writable or size > self.budget:
            return False
        try:
            with self._reserved(size):
                self._write(key, payload)
        except OSError as error:
            self._closed_until = time.monotonic() + _RETRY_S
            self.failures += 1
            logger.warning(
                "nothing is written to the prefix cache's folder %s for %.0f s: %s",
                self._root,
                _RETRY_S,
                error.strerror,
            )
            return False
        self._keys.add(key)
        self.written += 1
        return True

    def refresh(self) -> None:
        """Look through the folder: what others wrote is found, what they removed is not, what a dead one left goes."""
        with self._lock:
            self._scan()

    @contextmanager
    def _reserved(self, size: int) -> Iterator[None]:
        """Count `size` bytes more, for which others go; no longer where the write fails."""
        with self._lock:
            if self.bytes + size > self.budget:
                self._make_room(size)
            elif time.monotonic() - self._scanned > _SCAN_S:
                self._scan()
            self.bytes += size
        try:
            yield
        except BaseException:
            with self._lock:
                self.bytes -= size
            raise

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{_SUFFIX}"

    def _write(self, key: bytes, payload: memoryview) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{os.getpid()}-{id(self)}-{next(self._number)}.tmp"
        try:
            with open(temporary, "xb", buffering=0, opener=_private) as file:
                for part in (memoryview(head(self._space, key, payload)), payload):
                    while part:
                        part = part[file.write(part) :]
            self._touch(temporary)
            os.replace(temporary, path)
        except BaseException:
            self._remove(temporary)
            raise

    def _touch(self, path: str) -> None:
        # File systems stamp with a clock of milliseconds; a strictly growing stamp keeps the order exact.
        with self._lock:
            self._stamp = stamp = max(self._stamp + 1, time.time_ns())
        try:
            os.utime(path, ns=(stamp, stamp))
        except OSError as error:
            logger.debug("page file %s keeps its age (%s)", path, error.strerror)

    def _make_room(self, size: int) -> None:
        """Remove the oldest files, of whatever model, until `size` bytes more leave some room."""
        entries = sorted(self._scan())
        goal = max(0, min(int(self.budget * _ROOM), self.budget - size))
        for entry in entries:
            if self.bytes <= goal:
                return
            self._remove(entry.path)
            self.bytes -= entry.size
            if (key := _key(os.path.basename(entry.path))) is not None:
                self._keys.discard(key)

    def _scan(self) -> list[_Entry]:
        entries, keys, own = [], set[bytes](), f"{self._folder}/"
        for folder, _, names in os.walk(self._root, onerror=_refuse):
            for name in names:
                path = f"{folder}/{name}"
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    continue  # another process was faster
                if name.endswith(_SUFFIX):
                    entries.append(_Entry(stat.st_mtime_ns, path, stat.st_size))
                    if path.startswith(own) and (key := _key(name)) is not None:
                        keys.add(key)
                elif name.endswith(".tmp") and time.time() - stat.st_mtime > _STALE_S:
                    self._remove(path)
        self._keys = keys
        self._scanned = time.monotonic()
        self.bytes = sum(entry.size for entry in entries)
        # A clock that was set back must not make new files look older than what is here.
        self._stamp = max([self._stamp, *(entry.mtime_ns for entry in entries)])
        return entries

    def _remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return  # another process was faster
        except OSError as error:
            logger.warning("page file %s cannot be removed (%s)", path, error.strerror)


def _key(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name[: -len(_SUFFIX)])
    except ValueError:
        return None  # not one of ours


def _refuse(error: OSError) -> None:
    """A folder that vanishes while it is looked through is another process's doing; one that cannot be read is not."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # KV tells the text that it was computed from


def _read_into(file: RawIOBase, view: memoryview) -> int:
    """Fill `view` as far as the file goes."""
    length = 0
    while count := file.readinto(view[length:]):
        length += count
    return length
