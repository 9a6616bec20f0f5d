"""One event loop in a thread of its own, for callers that have none. Daemonic: it never keeps a process alive."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on a background event loop; the loop starts with the first one.

    After a fork the child has no such thread, so it gets a new loop on first use; nothing of the parent's is touched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def running(self) -> bool:
        """Whether there is a loop of this process."""
        return self._loop is not None and self._pid == os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start the coroutine on the loop and return its future; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Block until the coroutine is done. Raises RuntimeError on the loop's own thread, where it would never end."""
        if self._thread is threading.current_thread():
            coroutine.close()
            raise RuntimeError("a blocking call on the background loop's own thread would wait for itself")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller must not leave the work running
            raise

    async def join(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await the coroutine from another running loop without blocking it; cancellation is passed on."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self) -> None:
        """Cancel what runs, close the loop and end the thread. A later call starts afresh. Idempotent."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="promptsluice-loop", daemon=True
                )
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
