"""A side stream that does everything as late as it may: what only seems to be in order fails the tests."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class LateStream:
    """Copies are made when somebody waits for them. See streams.SideStream."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def follow(self) -> None:
        return

    def run(self, work: Callable[[], None]) -> None:
        with self.lock:
            self.waiting.append(work)

    def mark(self) -> "LateMark":
        with self.lock:
            return LateMark(self, self.done + len(self.waiting))

    def reach(self, place: int) -> None:
        with self.lock:
            while self.done < place:
                self.waiting.pop(0)()
                self.done += 1


@dataclass
class LateMark:
    stream: LateStream
    place: int

    def hold(self) -> None:
        self.stream.reach(self.place)

    def wait(self) -> None:
        self.stream.reach(self.place)

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.place
