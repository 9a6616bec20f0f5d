"""Runs what a step's plan names, and draws its tokens: through graphs where they fit, else through the decoder."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .drawing import Drawer
from .grammar.filling import Masks
from .model import Decoder
from .plan import StepPlan
from .pool import KVPool
from .scoring import keep_first, score
from .sequence import Sequence
from .steps import Draw, Launched, SingleRowSteps
from .table import RunningTable
from .tiers.base import Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that the device runs for `sequences`, one row each, while the host is busy with the one before."""

    sequences: list[Sequence]
    launched: Launched


class StepRunner:
    """For the engine's thread. `steps`, if any, run plans of one row a request, and guesses.

    `loads` is asked before each step that is not launched behind another one.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KVPool,
        table: RunningTable,
        loads: Callable[[], Loads],
        drawer: Drawer,
        masks: Masks,
        steps: SingleRowSteps | None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._table = table
        self._loads = loads
        self._drawer = drawer
        self._masks = masks
        self._steps = steps

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether the plan can be launched, and the next step behind it, before its tokens are known."""
        return self._steps is not None and plan.draw is not Draw.HOST

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step that overlaps."""
        assert self._steps is not None
        return Flight(sequences=plan.sequences, launched=self._single(self._steps, plan, plan.draw))

    def again(self, flight: Flight) -> Flight:
        """Begin the step after a flight's, for the same sequences; their pages must have room for it."""
        assert self._steps is not None
        self._table.refresh()
        return replace(flight, launched=self._steps.again(flight.launched))

    def run(self, plan: StepPlan) -> list[int]:
        """Compute the plan's rows; score prompts that ask for it; return a token for each row that draws one."""
        if self._steps is not None and plan.single:
            return self._draw(self._single(self._steps, plan, Draw.HOST).logits(), plan)
        loads = self._loads()
        if self._steps is not None and plan.drafts:
            loads.settle()
            self._table.refresh()
            rows, widths = self._table.drafted_rows(plan), plan.widths.tolist()
            return self._draw(self._steps.drafted(*rows, widths), plan)
        try:
            hidden = self._decoder.forward(replace(self._table.layout(plan), loads=loads), self._pool).hidden
        finally:
            loads.settle()  # not all layers are run where all rows are dropped, or where one fails
        place = int(plan.widths.sum())
        drawing = list(range(place))
        for chunk in plan.chunks:
            score(self._decoder, chunk, hidden[place : place + chunk.scored])
            place += len(chunk.logits)
            if chunk.draws:
                drawing.append(place - 1)
        if not drawing:
            return []
        rows = torch.tensor(drawing, device=hidden.device)
        return self._draw(self._decoder.logits(hidden[rows]), plan)

    def _single(self, steps: SingleRowSteps, plan: StepPlan, draw: Draw) -> Launched:
        self._loads().settle()
        self._table.refresh()
        return steps.run(*self._table.single_rows(plan), draw=draw)

    def _draw(self, logits: Tensor, plan: StepPlan) -> list[int]:
        """A token for each row of `logits`. On a GPU the masks are made while it computes the logits."""
        allowed = self._masks.of([sequence.matcher for sequence in plan.owners])
        if plan.chunks:  # else nobody's first token is drawn
            keep_first(logits, plan.owners)
        return self._drawer.draw(logits, plan.owners, self._table.drawing(plan), allowed=allowed)
