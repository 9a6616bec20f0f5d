"""Putting a model into the cache: built beside its place, described, made durable, and moved in with one rename.

Killed at any moment, it leaves the old state or the new one, and litter that the next pull of this model removes.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ...prompt import ModelUnavailable, StorageFull
from . import manifest as manifests
from .manifest import Manifest
from .progress import Progress
from .sources import DISK_FULL


@contextmanager
def exclusive(root: Path, folder: str, *, wait_s: float, progress: Progress) -> Iterator[None]:
    """Only one process at a time builds `folder`; ModelUnavailable after `wait_s`. The lock dies with its holder."""
    (root / ".locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / ".locks" / f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.stage(f"waiting for another process that pulls {folder}")
        try:
            lock.acquire(timeout=wait_s)
        except Timeout:
            raise ModelUnavailable(
                f"another process has been pulling {folder} for over {wait_s:g} s; its lock is {lock.lock_file}"
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """The seam at which errors of the cache's disk become ours."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise StorageFull(f"the disk of {where} is full; nothing was kept") from error
        raise ModelUnavailable(f"the model cache {where} cannot be used: {error}") from error


def require_space(root: Path, needed: int) -> None:
    """Refuse early what cannot fit."""
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageFull(f"{needed / 1e6:.0f} MB are needed on the disk of {root}, {free / 1e6:.0f} MB are free")


def install(root: Path, folder: str, *, build: Callable[[Path, Path], Manifest]) -> Path:
    """Have `build(into, scratch)` fill `into`, then move it to `root/folder`. The caller holds the lock.

    `build` returns the manifest without files; they are described here, after it has finished.
    """
    staging = root / ".staging"
    staging.mkdir(parents=True, exist_ok=True)
    for litter in staging.glob(f"{folder}.*"):
        shutil.rmtree(litter, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder}.", dir=staging))
    try:
        into, scratch = work / "model", work / "scratch"
        into.mkdir()
        scratch.mkdir()
        described = build(into, scratch)
        sealed = Manifest(
            name=described.name,
            kind=described.kind,
            provenance=described.provenance,
            files=manifests.record(into),
        )
        manifests.write(into, sealed)
        _make_durable(into)
        _move_in(into, root / folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root / folder


def _move_in(into: Path, target: Path, work: Path) -> None:
    if target.exists():
        target.rename(work / "replaced")
    into.rename(target)
    _sync(target.parent)


def _make_durable(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
