"""The wired house: every room that a policy file asks for, opened once and closed once. No HTTP in here.

The decorator and the HTTP application share it. Heavy rooms (engine, embedder) load when they are first needed, or, for
the engine, in the background right after opening.
"""

from collections.abc import Mapping
from typing import Self

from ..policies import CostModel, PolicySet
from .backends.base import Backend
from .backends.registry import backends_of
from .metrics import Metrics
from .optimization import Tools
from .rooms import Rooms
from .workers import Workers


class Sluice:
    """Holds what requests share. Open it with `await Sluice.open(policy_set)`, on the event loop that will use it."""

    def __init__(
        self, policy_set: PolicySet, *, rooms: Rooms, backends: Mapping[str, Backend], metrics: Metrics
    ) -> None:
        self.policy_set = policy_set
        self.backends = backends
        self.metrics = metrics
        self.readers = Workers("reading", threads=2, waiting=64)
        self.optimizers = Workers("optimizing", threads=2, waiting=64)
        self.librarians = Workers("collection", threads=4, waiting=64)
        self.rooms = rooms
        self.rooms.backends = backends
        self.draining = False

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
        sluice = cls(
            policy_set,
            rooms=rooms,
            backends=_in_order(policy_set, {**backends_of(policy_set, rooms, replaced=given), **given}),
            metrics=metrics or Metrics(models=policy_set.model_names()),
        )
        for backend in sluice.backends.values():
            await backend.start()
        return sluice

    async def close(self) -> None:
        """Stop everything; requests that still run are cut off."""
        for backend in self.backends.values():
            await backend.close()
        for workers in (self.readers, self.optimizers, self.librarians):
            workers.close()

    def tools(self, backend: str) -> Tools:
        """What the optimizer may use for a request to this backend."""
        chosen = self.backends[backend]
        return Tools(
            count=chosen.count_tokens,
            costs=CostModel() if chosen.kv_reuse else CostModel.upstream(),
            retrieve=self.rooms.retrieve,
            embed=self.rooms.embed,
            score=next((score for one in (chosen, *self.backends.values()) if (score := one.scorer())), None),
            kv_reuse=chosen.kv_reuse,
        )

    def not_ready(self) -> dict[str, str]:
        """Why requests cannot be answered yet, by backend; empty when all is ready."""
        reasons = {name: reason for name, backend in self.backends.items() if (reason := backend.ready()) is not None}
        return {**reasons, "server": "shutting down"} if self.draining else reasons

    def healthy(self) -> bool:
        return all(backend.healthy() for backend in self.backends.values())


def _in_order(policy_set: PolicySet, backends: Mapping[str, Backend]) -> dict[str, Backend]:
    """In the order of the policy file, what is not in it last."""
    return {name: backends[name] for name in (*policy_set.backends, *backends)}
