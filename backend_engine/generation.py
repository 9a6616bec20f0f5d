"""One request seen from outside the engine's thread: an async stream of deltas, or a blocking wait for the result."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from ..prompt.errors import PromptsluiceError
from .types import Delta, Result

Item = Delta | Result | PromptsluiceError


class Mailbox:
    """A sink that hands its items to `post` in the engine's thread and gives them out in its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, post: "Callable[[Mailbox, Item], None]") -> None:
        self.loop = loop
        self._post = post
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()

    def delta(self, delta: Delta) -> None:
        self._post(self, delta)

    def done(self, result: Result) -> None:
        self._post(self, result)

    def failed(self, error: PromptsluiceError) -> None:
        self._post(self, error)

    def receive(self, item: Item) -> None:
        """Called in the loop."""
        self._items.append(item)
        self._arrived.set()

    async def take(self) -> Item:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()


class Generation:
    """The deltas of one request, for one consumer: `async for delta in generation`, then `generation.result`.

    Leaving the loop early, cancelling it, `abort`, or dropping the generation ends the request in the engine. A
    failure of the engine is raised from the iteration.
    """

    def __init__(self, mailbox: Mailbox, abort: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._abort = abort
        self._result: Result | None = None
        self._ended = False

    @property
    def result(self) -> Result:
        """The counters; only after the last delta."""
        assert self._result is not None, "the generation has not ended"
        return self._result

    def abort(self) -> None:
        """End the request soon; the iteration ends with the reason `abort`. No effect after its end."""
        if not self._ended:
            self._abort()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                item = await self._mailbox.take()
                if isinstance(item, Delta):
                    yield item
                    continue
                self._ended = True
                if isinstance(item, PromptsluiceError):
                    raise item
                self._result = item
                return
        finally:
            self.abort()

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self.deltas()

    def __del__(self) -> None:
        self.abort()


class Waiter:
    """A sink for a caller that blocks until its request has ended."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._outcome: Result | PromptsluiceError | None = None

    def delta(self, delta: Delta) -> None:
        """Only the result counts."""

    def done(self, result: Result) -> None:
        self._outcome = result
        self._ended.set()

    def failed(self, error: PromptsluiceError) -> None:
        self._outcome = error
        self._ended.set()

    def wait(self) -> Result:
        self._ended.wait()
        if isinstance(self._outcome, Result):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome


class Collector(Waiter):
    """A waiter that keeps what was generated."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def delta(self, delta: Delta) -> None:
        self.tokens += delta.token_ids


class Finished(NamedTuple):
    """A request that has ended, and the ids that it generated."""

    result: Result
    tokens: tuple[int, ...]
