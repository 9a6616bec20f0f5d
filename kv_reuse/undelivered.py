"""Deletions that a server has not taken yet: remembered until it has, by files where there is a folder for them."""

import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from .files import write_whole

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"^[0-9a-f]{64}$", re.MULTILINE)
_SUFFIX = ".deleted"


class Undelivered:
    """Digests of chunks to be deleted. For any thread.

    In `folder` each deletion is a file of its own, which nobody changes: it outlives the process, and others that share
    the folder deliver it as well. None, or a folder that cannot be written to: this process alone remembers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._here: dict[str, tuple[str, ...]] = {}  # by names of their own, as files have
        self._lock = threading.Lock()

    def add(self, digests: Collection[str]) -> None:
        """They are to be deleted; on disk, where there is one, when this returns."""
        if not digests:
            return
        name = f"{uuid.uuid4().hex}{_SUFFIX}"
        try:
            if self._folder is not None:
                write_whole(self._folder / name, "\n".join(digests))
                return
        except OSError as error:
            log.warning("a deletion is only remembered by this process, not in %s: %s", self._folder, error.strerror)
        with self._lock:
            self._here[name] = tuple(digests)

    def deliver(self, send: Callable[[Collection[str]], object]) -> None:
        """Have all sent; each is remembered until `send` has returned for it. What that raises passes through, and
        OSError for a folder that cannot be read: nobody knows what is to be deleted, then."""
        with self._lock:
            here = tuple(self._here.items())
        for name, digests in here:
            send(digests)
            with self._lock:
                self._here.pop(name, None)  # another thread may have been faster
        for path in self._files():
            try:
                digests = _DIGEST.findall(path.read_text(encoding="ascii", errors="replace"))
            except FileNotFoundError:
                continue  # another process, or thread, has delivered it
            send(digests)
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        try:
            names = [] if self._folder is None else os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []  # nothing was ever deleted here
        return [Path(self._folder or "", name) for name in names if name.endswith(_SUFFIX)]
