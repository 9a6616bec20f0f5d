"""Tells the log where the engine hangs: the stack of its thread, once for each step that takes too long."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches `thread` from one of its own. `busy_s` says for how long it has been in its present step, 0 for none."""

    def __init__(self, thread: threading.Thread, *, busy_s: Callable[[], float], limit_s: float) -> None:
        self._watched = thread
        self._busy_s = busy_s
        self._limit_s = limit_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join()
        # It refers to who refers to us: cut, so that an engine's memory is free at once, not when cycles are collected.
        self._busy_s = lambda: 0.0

    def _watch(self) -> None:
        told = False
        while not self._ended.wait(min(1.0, self._limit_s / 4)):
            seconds = self._busy_s()
            if seconds > self._limit_s and not told:
                logger.error("the engine has been in one step for %.0f s, here:\n%s", seconds, self._stack())
            told = seconds > self._limit_s

    def _stack(self) -> str:
        """Where the thread is: files, lines and names, no values."""
        frame = sys._current_frames().get(self._watched.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "its thread has ended"
