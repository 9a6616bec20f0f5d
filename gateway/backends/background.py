"""Work of a backend that nobody waits for: in its turn, on one thread. Failures are told to the log."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...prompt import Overloaded, PromptsluiceError
from ..edge import log, log_failure
from ..workers import Workers

_WAITING = 256


class Background:
    """Runs jobs in the order in which they come; what finds no room is not run at all. `what` names them in the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._workers = Workers("warming", threads=1, waiting=_WAITING)

    @property
    def unfinished(self) -> int:
        """How many jobs wait or run."""
        return self._workers.unfinished

    def run(self, job: Callable[[], object]) -> None:
        """Have the job done some time, if there is room for it."""
        try:
            self._workers.submit(job).add_done_callback(lambda done: log_outcome(done, self._what))
        except Overloaded:
            return

    def close(self) -> None:
        """Drop what waits."""
        self._workers.close()


def log_outcome(done: "asyncio.Task[Any] | Future[Any]", what: str) -> None:
    """A failure in the background has nobody to tell but the log."""
    error = None if done.cancelled() else done.exception()
    if isinstance(error, PromptsluiceError):
        log.error("%s failed: %s", what, error.message)
    elif error is not None:
        log_failure(error, request_id=what)
