"""Progress of a pull: the contract, the silent one, and bars for a terminal (rich, imported on use)."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self


class Progress(Protocol):
    """Told what a pull does. Called from the pulling thread and, while a download runs, from one other thread."""

    def stage(self, label: str, *, total: int | None = None) -> None:
        """A new stage begins and the one before it is over; `total` is its size in bytes where known."""
        ...

    def at(self, done: int) -> None:
        """`done` bytes of the current stage are finished; never falls within a stage."""
        ...


class Silent:
    """The null progress."""

    def stage(self, label: str, *, total: int | None = None) -> None:
        """Nothing to show."""

    def at(self, done: int) -> None:
        """Nothing to show."""


class RichProgress:
    """A bar for each stage on the terminal; use as a context manager, so that the terminal is given back."""

    def __init__(self) -> None:
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TimeElapsedColumn(),
        )
        self._task: Any = None
        self._total: int | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def stage(self, label: str, *, total: int | None = None) -> None:
        """Complete the bar before and open the next."""
        self._finish()
        self._total = total
        self._task = self._bars.add_task(label, total=total)

    def at(self, done: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.update(self._task, completed=done)

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=self._total or 1, completed=self._total or 1)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder that others may be writing to: what vanishes meanwhile counts as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that vanish; pathlib's rglob raises
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@contextmanager
def watching(folder: Path, report: Callable[[int], None], *, every: float = 0.2) -> Iterator[None]:
    """Report the growing size of `folder` while the body downloads into it by means that show no progress."""
    done = threading.Event()

    def watch() -> None:
        highest = 0
        while not done.wait(every):
            highest = max(highest, size_of(folder))
            report(highest)

    watcher = threading.Thread(target=watch, name="pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
