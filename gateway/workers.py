"""Worker threads with a bound: what is heavy leaves the event loop, and what finds no room is refused."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from ..prompt import Overloaded

T = TypeVar("T")


class Workers:
    """`threads` workers and at most `waiting` jobs in their queue. A job that was begun cannot be stopped from
    outside.
    """

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self._name = name
        self._room = threads + waiting
        self._taken = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"promptsluice-{name}")

    async def run(self, job: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """The job's result. Overloaded without room; TimeoutError when it takes longer (the thread goes on)."""
        future = self.submit(job)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queue a job that nobody has to wait for. Overloaded when there is no room."""
        with self._lock:
            if self._taken >= self._room:
                raise Overloaded(f"too many requests wait for the {self._name} workers")
            self._taken += 1
        # In the context of who asks, as in a task: spans of the job are within his.
        future = self._pool.submit(copy_context().run, job)
        future.add_done_callback(self._release)
        return future

    @property
    def unfinished(self) -> int:
        """How many jobs wait or run."""
        return self._taken

    def close(self) -> None:
        """Drop what waits; what runs is left to end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, future: "Future[Any]") -> None:
        with self._lock:
            self._taken -= 1
