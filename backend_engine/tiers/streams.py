"""The order of copies beside the engine's steps, as a contract, and for a CPU, where each copy is made at once.

With the contract apart, the order itself is tested without a GPU, by a stream that does everything as late as it may.
"""

from collections.abc import Callable
from typing import Protocol


class Mark(Protocol):
    """A place in a side stream."""

    def hold(self) -> None:
        """Keep what the engine's stream is given from here on from starting before the mark is reached."""
        ...

    def wait(self) -> None:
        """Block this thread until the mark is reached; from any thread."""
        ...

    @property
    def reached(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class SideStream(Protocol):
    """Runs copies in the order given, beside the engine's stream. For the engine's thread, marks apart."""

    def follow(self) -> None:
        """What is run from here on comes after all that the engine's stream was given so far."""
        ...

    def run(self, work: Callable[[], None]) -> None: ...

    def mark(self) -> Mark: ...


class _Reached:
    reached = True

    def hold(self) -> None:
        return

    def wait(self) -> None:
        return


class InlineStream:
    """Runs everything at once. See SideStream."""

    def follow(self) -> None:
        return

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Mark:
        return _Reached()
