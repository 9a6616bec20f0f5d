"""Durable small files: written whole or not at all, and checked when read."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ..prompt import PromptsluiceError, StorageFull

# A file-size limit of the process (EFBIG) is met in the same way as a full disk.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Write = Callable[[Path, bytes], None]


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step that survives a power cut.

    Temporary file, fsync, rename, fsync of the folder. Raises OSError and then leaves `path` as it was; a temporary
    file may stay when the process is killed.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(data: bytes) -> str:
    """BLAKE2b-128 in hexadecimal, against damage (not against forgery)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def damaged(path: Path, what: str) -> PromptsluiceError:
    """The error for a stored file that cannot be used."""
    return PromptsluiceError(
        f"{path} is damaged ({what}); restore it from a backup, or delete the collection and ingest it again",
        code="collection_damaged",
    )


def disk_error(error: OSError, where: Path) -> PromptsluiceError:
    """Our error for an OSError met while writing."""
    if error.errno in DISK_FULL:
        return StorageFull(f"the disk is full ({error.strerror}); {where.name} is as it was before")
    return PromptsluiceError(f"{where.name} cannot be written: {error.strerror}", code="storage_error")
