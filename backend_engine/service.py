"""The engine's thread and the ways into it: submit and abort from any thread, generate in an event loop, run and wait.

A step that raises fails the requests that it ran and nothing else; one for which the device has no memory is tried
again in smaller pieces. Waiting is bounded, by number, tokens and time: what is beyond is refused with a time to retry.
"""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as TokenIds

import numpy as np
import torch

from ..prompt.errors import Overloaded, PromptsluiceError
from .engine import Engine
from .generation import Collector, Finished, Generation, Item, Mailbox, Waiter
from .kept_blends import marked
from .readings import Readings
from .sequence import Sequence, Sink
from .stats import EngineStats
from .types import Blending, GenerationRequest, Result
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S = 60.0
_LONGEST_STEP_S = 60.0
_FINISHES = 33


class EngineService:
    """Owns an engine from `start` to `stop`.

    At most `max_waiting` requests wait, with together at most `max_waiting_tokens` prompt tokens (None: any number; a
    prompt beyond it waits alone), for at most `queue_timeout_s` seconds (None: for ever). A step that takes longer than
    `slow_step_s` seconds is logged with its stack.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        max_waiting_tokens: int | None = None,
        queue_timeout_s: float | None = None,
        slow_step_s: float = 30.0,
    ) -> None:
        self.engine = engine
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._queue_timeout_s = queue_timeout_s
        self._wake = threading.Condition()
        self._inbox: list[Sequence] = []
        self._aborts: list[Sequence] = []
        self._idle: Sequence | None = None  # runs while nobody else wants anything
        self._draining = False
        self._ending = False
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = defaultdict(list)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._stats = engine.stats()
        self._busy = False
        self._finishes: deque[float] = deque(maxlen=_FINISHES)  # when the last requests ended
        self.heartbeat = time.monotonic()
        self._watchdog = Watchdog(self._thread, busy_s=lambda: self.step_s, limit_s=slow_step_s)

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let the present ones run for at most `drain_s` seconds, abort what is left. Blocks.

        A step that has begun ends first; one that hangs is given up after a minute.
        """
        with self._wake:
            self._draining = True
            self._wake.notify()
        try:
            self._stopped(drain_s)
        finally:
            self._watchdog.stop()

    def _stopped(self, drain_s: float) -> None:
        if not self._thread.ident:
            self._end()
            return
        self._thread.join(drain_s)
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._thread.join(_LONGEST_STEP_S)
        if self._thread.is_alive():
            logger.error("the engine's thread hangs in a step and is left behind")

    def submit(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """Queue a request; returns the handle for `abort`. Raises BadRequest, ContextTooLong or Overloaded."""
        sequence = self.engine.prepare(request, sink)
        with self._wake:
            if self._draining:
                raise Overloaded("the engine is shutting down", retry_after=_LONGEST_RETRY_S)
            waiting = [*self._inbox, *self.engine.waiting]
            if len(waiting) >= self._max_waiting:
                raise Overloaded(f"{len(waiting)} requests are waiting already", retry_after=self._retry_after(waiting))
            tokens = sum(other.length for other in waiting)
            if waiting and tokens + sequence.length > (self._max_waiting_tokens or math.inf):
                raise Overloaded(
                    f"requests with {tokens} tokens are waiting already", retry_after=self._retry_after(waiting)
                )
            self._inbox.append(sequence)
            self._wake.notify()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a request before the next step."""
        with self._wake:
            self._aborts.append(sequence)
            self._wake.notify()

    def generate(self, request: GenerationRequest) -> Generation:
        """Queue a request for a consumer in the running event loop. Raises as `submit` does."""
        mailbox = Mailbox(asyncio.get_running_loop(), self._post)
        sequence = self.submit(request, mailbox)
        return Generation(mailbox, lambda: self.abort(sequence))

    def run(self, request: GenerationRequest) -> Result:
        """`run_all` of one request."""
        return self.run_all([request])[0]

    def run_all(self, requests: Iterable[GenerationRequest]) -> list[Result]:
        """Run requests to their ends, in steps that they share; blocks, so never from an event loop.

        Raises as `submit` does, what the engine failed with, and Overloaded when the service stops meanwhile; the
        other requests are aborted then.
        """
        assert threading.current_thread() is not self._thread, "the engine's thread cannot wait for itself"
        waiting: list[tuple[Waiter, Sequence]] = []
        try:
            for request in requests:
                waiter = Waiter()
                waiting.append((waiter, self.submit(request, waiter)))
            results = [waiter.wait() for waiter, _ in waiting]
        except BaseException:
            for _, sequence in waiting:
                self.abort(sequence)
            raise
        if any(result.finish_reason == "abort" for result in results):  # nobody else has the handles
            raise Overloaded("the engine is shutting down", retry_after=_LONGEST_RETRY_S)
        return results

    def run_idle(self, request: GenerationRequest) -> Finished | None:
        """Run a request marked `idle` while there is nothing else to do, in steps of few rows; blocks.

        None if there is, or if somebody came meanwhile, who waits for one small step then. One at a time.
        """
        assert request.idle and threading.current_thread() is not self._thread
        waiter = Collector()
        with self._wake:
            assert self._idle is None, "one idle request at a time"
            if self._inbox or self.engine.has_work:
                return None
            self._idle = self.submit(request, waiter)
        try:
            result = waiter.wait()
        finally:
            with self._wake:
                self._idle = None
        return None if result.finish_reason == "abort" else Finished(result, tuple(waiter.tokens))

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs at this moment; from any thread."""
        with self._wake:
            return not (self._inbox or self.engine.has_work)

    def known_tokens(self, ids: TokenIds[int], *, namespace: str = "", blending: Blending | None = None) -> int:
        """About how many leading tokens of a prompt the prefix tree has now, with `blending` also as part of a blended
        prompt; from any thread."""
        tree, kept, whole = self.engine.tree, self.engine.kept, np.asarray(ids, dtype=np.int64)
        before, begun = whole[:-1], None
        plain = tree.known(before, namespace=namespace)
        if blending is not None:
            begun = kept.find(whole, kept.digests(before, namespace=namespace), blending)
        if begun is None or plain >= begun.tokens:
            return plain
        return max(plain, tree.known(marked(before, begun.marks), namespace=namespace))

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._stats

    def readings(self) -> Readings:
        """What monitoring wants to know."""
        return self.engine.readings(self._stats)

    def healthy(self, *, within_s: float = 60.0) -> bool:
        """False if the thread has died, or has been in one step for longer than `within_s` seconds."""
        return self._thread.is_alive() and self.step_s <= within_s

    @property
    def step_s(self) -> float:
        """For how many seconds the present step has been running; 0 between steps."""
        return max(0.0, time.monotonic() - self.heartbeat) if self._busy else 0.0

    @torch.inference_mode()
    def _main(self) -> None:
        try:
            while self._wait():
                self._take()
                self._step()
                self._flush()
        finally:
            self._end()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._wake:
            while not (self._inbox or self._aborts or self._ending or self.engine.has_work):
                if self._draining:
                    return False
                self._busy = False
                self._wake.wait()
            self._busy, self.heartbeat = True, time.monotonic()
            return not self._ending

    def _take(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            for sequence in inbox:
                self.engine.enqueue(sequence)
            if self._idle is not None and any(sequence is not self._idle for sequence in self.engine.sequences):
                aborts.append(self._idle)
        for sequence in aborts:
            self.engine.abort(sequence)
        self._refuse_late()

    def _refuse_late(self) -> None:
        """Tell who has waited too long that there is no room; who has been served before goes on waiting."""
        if self._queue_timeout_s is None:
            return
        began = time.monotonic() - self._queue_timeout_s
        waiting = self.engine.waiting
        for sequence in waiting:
            if sequence.submitted < began and sequence.admitted is None:
                error = f"no room for this request within {self._queue_timeout_s:g} s"
                self.engine.refuse(sequence, Overloaded(error, retry_after=self._retry_after(waiting)))

    def _step(self) -> None:
        without_memory = False
        try:
            self.engine.step()
        except torch.OutOfMemoryError as error:
            logger.warning("the device has no memory for a step; smaller ones are tried: %s", error)
            without_memory = True
        except Exception as error:
            logger.exception("an engine step failed")
            self.engine.fail(PromptsluiceError(f"the engine failed on this request: {error}"))
        if without_memory:  # out here nothing holds the failed step's tensors any more
            self.engine.relieve()
        ended = self._stats.finished
        self._stats = self.engine.stats()
        self._finishes.extend([time.monotonic()] * (self._stats.finished - ended))

    def _end(self) -> None:
        """Abort everything that is left, so that nobody waits for a thread that is gone."""
        with self._wake:
            self._draining = self._ending = True
        self._busy = False
        self._take()
        for sequence in self.engine.sequences:
            self.engine.abort(sequence)
        self._stats = self.engine.stats()
        self._flush()
        self.engine.close()

    def _post(self, mailbox: Mailbox, item: Item) -> None:
        self._outbox[mailbox.loop].append((mailbox, item))

    def _flush(self) -> None:
        """Deliver a step's items with one call per event loop; waking a loop is a system call."""
        for loop, items in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed, and with it everyone who waited there
                self._abandon([mailbox for mailbox, _ in items])
        self._outbox.clear()

    def _abandon(self, mailboxes: list[Mailbox]) -> None:
        gone = {id(mailbox) for mailbox in mailboxes}
        with self._wake:
            self._aborts += [sequence for sequence in self.engine.sequences if id(sequence.sink) in gone]

    def _retry_after(self, waiting: Collection[Sequence]) -> float:
        """About when a quarter of those who wait have been served: seconds, by how fast the last requests ended."""
        ended = list(self._finishes)
        if len(ended) < 2:
            return 1.0
        each = (time.monotonic() - ended[0]) / (len(ended) - 1)
        return min(_LONGEST_RETRY_S, each * math.ceil(len(waiting) / 4))


def _deliver(items: list[tuple[Mailbox, Item]]) -> None:
    for mailbox, item in items:
        mailbox.receive(item)
