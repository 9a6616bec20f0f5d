"""Shadow mode: a policy carried out beside a request and reported, but never sent.

Off the request's way: one thread, few places, and nothing is begun while prompts that will be sent wait for theirs.
"""

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..policies import CostModel, Ledger, Resolution
from ..prompt import Overloaded, Prompt, ShadowReport
from .edge import log
from .observed import unobserved
from .optimization import Tools, optimized
from .turns import scope_of
from .workers import Workers

if TYPE_CHECKING:
    from .house import Sluice

_WAITING = 8


class Shadows:
    """Runs shadows; a house has one, and every request that it began for holds the house until its shadow has ended."""

    def __init__(self) -> None:
        self._workers = Workers("shadowing", threads=1, waiting=_WAITING)
        self._running: set[asyncio.Task[None]] = set()

    def begin(
        self, sluice: "Sluice", prompt: Prompt, resolution: Resolution, *, tenant: str, request_id: str
    ) -> ShadowReport | None:
        """Begin with a prompt as it came; None where its route names no shadow. The report is filled in later."""
        if resolution.shadow is None:
            return None
        report = ShadowReport(policy=resolution.shadow)
        try:
            if sluice.optimizers.unfinished:
                raise Overloaded("prompts that will be sent come first")
            # Apart from what is sent, or a conversation that changes to this policy would be taken for one that had it.
            scope = scope_of("shadow", tenant, resolution.backend, sluice.policy_set.policy(resolution.shadow))
            with unobserved():
                done = self._workers.submit(lambda: _carry_out(sluice, prompt, resolution, report, request_id, scope))
        except Overloaded:
            report.state = "dropped"
            sluice.metrics.shadows.ended(report)
            return report
        task = asyncio.create_task(_held(sluice, asyncio.wrap_future(done)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return report

    async def close(self) -> None:
        """Drop what waits; what runs ends by itself."""
        self._workers.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def _held(sluice: "Sluice", done: "asyncio.Future[None]") -> None:
    with sluice.held():
        await asyncio.wait({done})


def _tools(sluice: "Sluice", backend: str) -> Tools:
    """What a request has, but it teaches nobody what work costs: a shadow goes without models on the side."""
    return replace(sluice.tools(backend), ledger=Ledger(CostModel()))


def _carry_out(
    sluice: "Sluice", prompt: Prompt, resolution: Resolution, report: ShadowReport, request_id: str, scope: str
) -> None:
    """On the thread. What breaks in a step is in the report, as for any request."""
    began = time.perf_counter()
    policy = sluice.policy_set.policy(report.policy)
    outcome = optimized(prompt, policy, _tools(sluice, resolution.backend), request_id=request_id, scope=scope)
    report.tokens_in = outcome.tokens_in
    report.tokens_out = outcome.tokens_in + outcome.retrieved - outcome.pruned
    report.steps, report.failed = outcome.steps, outcome.failed
    report.ms = (time.perf_counter() - began) * 1000
    report.state = "failed" if outcome.failed else "done"
    sluice.metrics.shadows.ended(report)
    log.info(
        "request %s: in shadow, policy %s would send %d of %d tokens after %.1f ms%s",
        request_id,
        report.policy,
        report.tokens_out,
        report.tokens_in,
        report.ms,
        "".join(f", without {step} ({why})" for step, why in report.failed.items()),
    )
