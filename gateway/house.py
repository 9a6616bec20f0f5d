"""The wired house: every room that a policy file asks for, opened once and closed once. No HTTP in here.

The decorator and the HTTP application share it. Heavy rooms (engine, embedder) load when they are first needed, or, for
the engine, in the background right after opening.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from ..policies import PolicySet
from .backends.base import Backend
from .backends.registry import backends_of
from .generating import Generating
from .keys.counters import Counters
from .keys.opening import counters_of
from .keys.ticket import Ticket
from .metrics import Metrics
from .optimization import Tools
from .rooms import Rooms
from .shadow import Shadows
from .workers import Workers


class Sluice:
    """Holds what requests share. Open it with `await Sluice.open(policy_set)`, on the event loop that will use it."""

    def __init__(
        self,
        policy_set: PolicySet,
        *,
        rooms: Rooms,
        backends: Mapping[str, Backend],
        metrics: Metrics,
        counters: Counters,
        uses: dict[Backend, int] | None = None,
    ) -> None:
        """`uses` counts, over all versions of the file, the houses that still need a backend."""
        self.policy_set = policy_set
        self.backends = backends
        self.metrics = metrics
        self.counters = counters
        self.readers = Workers("reading", threads=2, waiting=64)
        self.optimizers = Workers("optimizing", threads=2, waiting=64)
        self.librarians = Workers("collection", threads=4, waiting=64)
        self.shadows = Shadows()
        self.rooms = rooms
        self.rooms.wire(policy_set, backends)
        self.draining = False
        self._uses = {} if uses is None else uses
        for backend in {*backends.values()}:
            self._uses[backend] = self._uses.get(backend, 0) + 1
        self._holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()

    @classmethod
    async def open(
        cls,
        policy_set: PolicySet,
        *,
        backends: Mapping[str, Backend] | None = None,
        metrics: Metrics | None = None,
    ) -> Self:
        """Wire everything. ConfigError where the file asks for what is not there; models load in the background.

        `backends` take the place of those of the same name in the policy file.
        """
        rooms, given = Rooms(policy_set), backends or {}
        metrics = metrics or Metrics(models=policy_set.model_names())
        sluice = cls(
            policy_set,
            rooms=rooms,
            backends=_in_order(policy_set, {**backends_of(policy_set, rooms, replaced=given), **given}),
            metrics=metrics,
            counters=counters_of(policy_set, metrics.keys),
        )
        for backend in sluice.backends.values():
            await backend.start()
        return sluice

    async def rewired(self, policy_set: PolicySet, *, given: Mapping[str, Backend]) -> "Sluice":
        """The house for a new version of the policy file; it shares all rooms and the backends whose entry is the same.

        Returns when the new backends can answer; raises what keeps them from it, and then nothing has changed. `given`
        are the backends that take the place of the file's.
        """
        kept = {name: self.backends[name] for name in policy_set.backends if name in self._unchanged(policy_set)}
        fresh = backends_of(policy_set, self.rooms, replaced=[*kept, *given])
        try:
            for backend in fresh.values():
                await backend.start()
            for backend in fresh.values():
                await backend.available()
        except BaseException:
            await _close(fresh.values())
            raise
        backends = _in_order(policy_set, {**kept, **fresh, **given})
        return type(self)(
            policy_set,
            rooms=self.rooms,
            backends=backends,
            metrics=self.metrics,
            counters=self.counters,
            uses=self._uses,
        )

    def _unchanged(self, policy_set: PolicySet) -> frozenset[str]:
        old, new = self.policy_set.backends, policy_set.backends
        return frozenset(name for name in old.keys() & new.keys() if old[name] == new[name])

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a request needs this house."""
        self._holders += 1
        self._unheld.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._unheld.set()

    async def retire(self) -> None:
        """Once the last request here has ended, close what no other version uses: neither a later one nor an earlier
        one, whose requests may last longer than this one's.
        """
        await self._unheld.wait()
        unused: list[Backend] = []
        for backend in {*self.backends.values()}:
            self._uses[backend] -= 1
            if not self._uses[backend]:
                del self._uses[backend]
                unused.append(backend)
        await _close(unused)
        await self._close_workers()

    async def close(self) -> None:
        """Stop everything; requests that still run are cut off."""
        await _close(self.backends.values())
        await self.counters.close()
        await self._close_workers()

    async def _close_workers(self) -> None:
        await self.shadows.close()
        for workers in (self.readers, self.optimizers, self.librarians):
            workers.close()

    def tools(self, backend: str) -> Tools:
        """What the optimizer may use to see what it would do to a request to this backend; nothing is asked or kept."""
        chosen = self.backends[backend]
        return Tools(
            count=chosen.count_tokens,
            costs=chosen.costs,
            ledger=chosen.ledger,
            retrieve=self.rooms.retrieve,
            turns=self.rooms.turns,
            embed=self.rooms.embed,
            score=next((score for one in (chosen, *self.backends.values()) if (score := one.scorer())), None),
            kv_reuse=chosen.kv_reuse,
        )

    def tools_for(self, tenant: str, backend: str, *, request_id: str, ticket: Ticket | None = None) -> Tools:
        """What it may use for a tenant's request. To be called on the event loop that the backends run on. `ticket` is
        charged for models that are asked on the side.
        """
        loop = asyncio.get_running_loop()
        return replace(
            self.tools(backend),
            generate=Generating(self.backends, loop, request_id=request_id, tenant=tenant, ticket=ticket),
            memory=self.rooms.summaries.of(tenant),
            keep=lambda key, text: self.rooms.originals.put(tenant, key, text),
            store=lambda policy: self.backends[backend].stored_kv(policy, tenant=tenant),
        )

    def not_ready(self) -> dict[str, str]:
        """Why requests cannot be answered yet, by backend; empty when all is ready."""
        reasons = {name: reason for name, backend in self.backends.items() if (reason := backend.ready()) is not None}
        return {**reasons, "server": "shutting down"} if self.draining else reasons

    def healthy(self) -> bool:
        return all(backend.healthy() for backend in self.backends.values())


async def _close(backends: Collection[Backend]) -> None:
    for backend in backends:
        await backend.close()


def _in_order(policy_set: PolicySet, backends: Mapping[str, Backend]) -> dict[str, Backend]:
    """In the order of the policy file, what is not in it last."""
    return {name: backends[name] for name in (*policy_set.backends, *backends)}
