"""The request pipeline in this process, without a server: what `@optimize` and `wrap` stand on.

It rewrites messages and reports what it did. It never sends anything anywhere: that is the caller's own call.
"""

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol, Self

from ..policies import PolicySet
from ..prompt import Prompt, Report
from .loop_thread import LoopThread

logger = logging.getLogger(__name__)


class Pipeline(Protocol):
    """What an Optimizer needs of the gateway's pipeline; both methods are called on the background loop only."""

    async def prepare(self, prompt: Prompt, *, policy: str | None) -> tuple[Prompt, Report]:
        """Match, retrieve, plan and rewrite. Raises our errors; must not change `prompt`."""
        ...

    async def close(self) -> None:
        """Give back what the pipeline holds. Called once."""
        ...


Build = Callable[[PolicySet], Awaitable[Pipeline]]


class Optimizer:
    """A policy set and its pipeline, built on first use and shared by any number of threads and event loops.

    All work runs on one background event loop, so that a caller's loop is never blocked and the pipeline's own locks
    and connections belong to one loop. Close it, or use it as a context manager, to release them; the next call builds
    them anew. `build` makes the pipeline of a policy set; the default is the gateway's own.
    """

    def __init__(self, config: "str | PathLike[str] | PolicySet | None" = None, *, build: Build | None = None) -> None:
        self._config = config
        self._build = build or _build
        self._loop = LoopThread()
        self._building: asyncio.Task[Pipeline] | None = None

    def prepare(self, messages: Any, *, policy: str | None = None) -> tuple[Prompt, Report]:
        """Pass messages through the pipeline and block until it is done. `policy=None`: the default policy."""
        return self._loop.run(self._prepare(messages, policy))

    async def aprepare(self, messages: Any, *, policy: str | None = None) -> tuple[Prompt, Report]:
        """The same for a caller on an event loop, which goes on running meanwhile. Cancellation is passed on."""
        return await self._loop.join(self._prepare(messages, policy))

    def close(self) -> None:
        """Release the pipeline and end the background thread. Idempotent."""
        if not self._loop.running:
            return
        try:
            self._loop.run(self._release())
        finally:
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _prepare(self, messages: Any, policy: str | None) -> tuple[Prompt, Report]:
        pipeline = await self._built()
        return await pipeline.prepare(Prompt.from_messages(messages), policy=policy)

    async def _built(self) -> Pipeline:
        """The pipeline of this loop; callers that come while it is being built wait for the same one."""
        loop = asyncio.get_running_loop()
        if self._building is None or self._building.get_loop() is not loop or _broke(self._building):
            self._building = loop.create_task(_load_and_build(self._config, self._build))
        return await asyncio.shield(self._building)

    async def _release(self) -> None:
        building, self._building = self._building, None
        if building is not None and building.get_loop() is asyncio.get_running_loop() and not _broke(building):
            await (await building).close()


def _broke(task: "asyncio.Task[Pipeline]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _load_and_build(config: "str | PathLike[str] | PolicySet | None", build: Build) -> Pipeline:
    if isinstance(config, PolicySet):
        return await build(config)
    return await build(await asyncio.to_thread(PolicySet.load, None if config is None else Path(config)))


async def _build(policies: PolicySet) -> Pipeline:
    from .elsewhere import Elsewhere

    return await Elsewhere.open(policies)


Config = str | PathLike[str] | PolicySet | Optimizer | None

_shared: dict[object, Optimizer] = {}
_sharing = threading.Lock()


def optimizer_for(config: Config) -> Optimizer:
    """The Optimizer of a configuration. Equal paths, and the same PolicySet, share one until the process ends."""
    if isinstance(config, Optimizer):
        return config
    key: object = id(config) if isinstance(config, PolicySet) else config and os.path.abspath(fspath(config))
    with _sharing:
        if key not in _shared:
            _shared[key] = Optimizer(config)
        return _shared[key]


@atexit.register
def _close_shared() -> None:
    for optimizer in _shared.values():
        try:
            optimizer.close()
        except Exception as error:  # noqa: BLE001 - nothing can be done about it while the interpreter ends
            logger.debug("an optimizer did not close cleanly: %s", error)
