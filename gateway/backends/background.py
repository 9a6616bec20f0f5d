"""Work of a backend that nobody waits for, on one thread: jobs in their turn, and lessons in idle time between them.
Failures are told to the log.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ...prompt import PromptsluiceError
from ..edge import log, log_failure
from ..workers import Workers

_WAITING = 256
_LESSONS = 64
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Something to be done as soon as nothing else is to be done; when the monotonic clock reads `until`, `anyway` or
    never. `about` names what it is of, as far as that is known.
    """

    job: Callable[[], object]
    idle: Callable[[], bool]
    until: float
    anyway: bool
    about: frozenset[Hashable] = frozenset()

    def due(self) -> bool | None:
        """Whether it is to be done; None where that is not known yet."""
        if self.idle():
            return True
        return self.anyway if time.monotonic() >= self.until else None


class Background:
    """Runs jobs in the order in which they come. Lessons wait apart, at most `_LESSONS` of them, and give way to jobs
    for as long as there are any. `what` names them in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._workers = Workers("warming", threads=1, waiting=1 << 30)
        self._lessons: deque[Lesson] = deque()
        self._owed: deque[Callable[[], object]] = deque()  # that must be done, and were not begun
        self._lock = threading.Lock()
        self._learning = self._closed = False

    @property
    def unfinished(self) -> int:
        """About how many jobs and lessons wait or run; 0 once there are none."""
        return self._workers.unfinished + len(self._lessons)

    def run(self, job: Callable[[], object], *, must: bool = False) -> None:
        """Have the job done some time; unless it `must` be done, only if there is room for it."""
        with self._lock:
            if self._closed:
                return
            if must:
                self._owed.append(job)
                self._submit(self._owe)
            elif self._workers.unfinished <= _WAITING:
                self._submit(job)

    def learn(self, lesson: Lesson) -> None:
        """Have it done in idle time, unless it is about nothing but what waits already. In place of one that waits and
        is about no more than this one, it is done when that one would have been. Where there is no room the oldest one
        is forgotten, of those that need not be done while there are any."""
        with self._lock:
            covered = [one for one in self._lessons if one.about and one.about <= lesson.about]
            covered = [one for one in covered if lesson.anyway or not one.anyway]
            if covered:
                until = min(lesson.until, *(one.until for one in covered))
                self._lessons[self._lessons.index(covered[0])] = replace(lesson, until=until)
                for one in covered[1:]:
                    self._lessons.remove(one)
                return
            if lesson.about and lesson.about <= self._awaited(anyway=lesson.anyway):
                return
            self._lessons.append(lesson)
            if len(self._lessons) > _LESSONS:
                self._lessons.remove(next((one for one in self._lessons if not one.anyway), self._lessons[0]))
            if not self._learning and not self._closed:
                self._learning = True
                self._submit(self._learn)

    def close(self) -> None:
        """Drop what waits, but for what must be done: see `settle`."""
        with self._lock:
            self._closed = True
        self._workers.close()

    def settle(self) -> None:
        """Do what must be done and was not begun when this was closed. Blocks."""
        while self._owed:
            try:
                self._owe()
            except Exception as error:  # noqa: BLE001 - a failure has nobody to tell but the log, and ends no other
                _log_error(error, self._what)

    def _awaited(self, *, anyway: bool) -> set[Hashable]:
        """What lessons are about that wait, and, if so, will be done `anyway`."""
        return set().union(*(one.about for one in self._lessons if one.anyway or not anyway))

    def _owe(self) -> None:
        """The first of what must be done; nothing where `settle` was faster."""
        with self._lock:
            job = self._owed.popleft() if self._owed else None
        if job is not None:
            job()

    def _submit(self, job: Callable[[], object]) -> None:
        self._workers.submit(job).add_done_callback(lambda done: log_outcome(done, self._what))

    def _learn(self) -> None:
        """One lesson, unless a job comes first; then again, behind what waits."""
        try:
            while (lesson := self._next()) is None and self._lessons and self._workers.unfinished <= 1:
                if self._closed:
                    return
                time.sleep(_LOOK_S)
            if lesson is not None:
                lesson.job()
        finally:
            with self._lock:
                self._learning = bool(self._lessons) and not self._closed
                if self._learning:
                    self._submit(self._learn)

    def _next(self) -> Lesson | None:
        """The first one that is due; those that never will be are gone."""
        with self._lock:
            for lesson in tuple(self._lessons):
                due = lesson.due()
                if due is not None:
                    self._lessons.remove(lesson)
                if due:
                    return lesson
        return None


def log_outcome(done: "asyncio.Task[Any] | Future[Any]", what: str) -> None:
    """A failure in the background has nobody to tell but the log."""
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log_error(error, what)


def _log_error(error: BaseException, what: str) -> None:
    if isinstance(error, PromptsluiceError):
        log.error("%s failed: %s", what, error.message)
    else:
        log_failure(error, request_id=what)
