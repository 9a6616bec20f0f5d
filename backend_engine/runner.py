"""Runs what a step's plan names, and draws its tokens: through graphs where they fit, else through the decoder."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .drawing import Drawer, Drawn
from .grammar.filling import Masks
from .model import Decoder, Joints
from .plan import StepPlan
from .pool import KVPool
from .sampling import COLDEST, UNDECIDED
from .scoring import keep_first, score
from .sequence import Phase, Sequence
from .steps import Draw, Launched, MixedSteps, SingleRowSteps
from .table import RunningTable
from .tiers.base import Loads
from .tiers.empty import NO_LOADS
from .transfers import Fetch, sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that the device runs for `sequences`, one row each, while the host is busy with the one before.

    `behind`: launched before the tokens of the one before were known. `drawn` is what the host has drawn for the
    `live` ones, if it is the host's to draw.
    """

    sequences: list[Sequence]
    launched: Launched
    draw: Draw
    behind: bool = False
    drawn: Drawn | None = None

    @property
    def live(self) -> list[bool]:
        """Whether each has run on its own newest token: not who has ended, or was undecided when this was launched."""
        return [
            sequence.phase is not Phase.DONE and not (self.behind and sequence.undecided) for sequence in self.sequences
        ]


class StepRunner:
    """For the engine's thread. `steps`, if any, run plans of one row a request; `mixed`, if any, plain plans of few
    rows.

    `joints`, if any, are the decoder's for other plans. `loads` is asked before each step that is not launched behind
    another one; `carry` takes those back of which a step did not wait for all layers.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        pool: KVPool,
        table: RunningTable,
        loads: Callable[[], Loads],
        carry: Callable[[Loads], None],
        drawer: Drawer,
        masks: Masks,
        steps: SingleRowSteps | None,
        mixed: MixedSteps | None = None,
        joints: Joints | None = None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._table = table
        self._loads = loads
        self._carry = carry
        self._drawer = drawer
        self._masks = masks
        self._steps = steps
        self._mixed = mixed
        self._joints = joints

    def overlaps(self, plan: StepPlan) -> bool:
        """Whether the plan can be launched, and the next step behind it, before its tokens are known."""
        return self._steps is not None and plan.single

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step that overlaps."""
        assert self._steps is not None
        self._loads().settle()
        draw = plan.draw
        self._table.refresh(draw)
        return Flight(
            sequences=plan.sequences, launched=self._steps.run(*self._table.single_rows(plan), draw=draw), draw=draw
        )

    def draw(self, flight: Flight) -> Flight:
        """Queue the drawing of a flight's tokens behind it, if it is the host's to draw; masks are filled meanwhile.

        On a GPU that waits for the flight only where a row was undecided before.
        """
        if flight.draw is not Draw.HOST:
            return flight
        rows = [row for row, live in enumerate(flight.live) if live]
        plan = StepPlan(decodes=[flight.sequences[row] for row in rows])
        logits = flight.launched.logits()
        if not rows:  # kernels of no rows are not launched
            none = torch.empty(0, dtype=torch.int64)
            return replace(flight, drawn=Drawn(ids=none, asking=[], fetch=Fetch(none)))
        if len(rows) < len(flight.sequences):
            logits = logits[sent(rows, logits.device)]
        ahead = not any(sequence.undecided for sequence in plan.decodes)
        return replace(flight, drawn=self._drawn(logits, plan, ahead=ahead))

    def again(self, flight: Flight) -> Flight:
        """Begin the step after a flight's, for the same sequences; their pages must have room for it."""
        assert self._steps is not None
        self._table.refresh(flight.draw)
        drawn = None if flight.drawn is None else flight.drawn.ids
        launched = self._steps.again(flight.launched, drawn=drawn)
        return replace(flight, launched=launched, behind=True, drawn=None)

    def ids(self, flight: Flight) -> list[int]:
        """The tokens of a flight's sequences, UNDECIDED for those that have none; waits for the device."""
        if flight.drawn is None:
            return [one if live else UNDECIDED for one, live in zip(flight.launched.ids(), flight.live, strict=True)]
        tokens = iter(self._drawer.read(flight.drawn))
        return [next(tokens) if live else UNDECIDED for live in flight.live]

    def run(self, plan: StepPlan) -> list[int]:
        """Compute the plan's rows; score prompts that ask for it; return a token for each row that draws one."""
        loads = self._loads()
        if self._mixed is not None and loads is NO_LOADS and plan.plain and plan.rows <= self._mixed.sizes[-1]:
            self._table.refresh_pages()
            ids, places, owners, widths = self._table.mixed_rows(plan)
            hidden = self._mixed.run(ids, places, owners, widths)
            lasts = (widths.cumsum() - 1)[len(plan.decodes) :]
            ends = [last for last, chunk in zip(lasts.tolist(), plan.chunks, strict=True) if chunk.draws]
            return self._drawn_from(hidden, [*range(int(widths[: len(plan.decodes)].sum())), *ends], plan)
        try:
            loads.begin()  # while the host lays out the step
            batch = replace(self._table.layout(plan), loads=loads)
            output = self._decoder.forward(batch, self._pool, joints=self._joints)
        except BaseException:
            loads.settle()
            raise
        if not output.complete:
            self._carry(loads)
        hidden = output.hidden
        place = int(plan.widths.sum())
        drawing = list(range(place))
        for chunk in plan.chunks:
            score(self._decoder, chunk, hidden[place : place + len(chunk.scored)])
            place += len(chunk.logits)
            if chunk.draws:
                drawing.append(place - 1)
        return self._drawn_from(hidden, drawing, plan)

    def _drawn_from(self, hidden: Tensor, rows: list[int], plan: StepPlan) -> list[int]:
        """A token from each of `rows`."""
        if not rows:
            return []
        drawn = hidden if len(rows) == len(hidden) else hidden[sent(rows, hidden.device)]
        return self._drawer.read(self._drawn(self._decoder.logits(drawn), plan, ahead=False))

    def _drawn(self, logits: Tensor, plan: StepPlan, *, ahead: bool) -> Drawn:
        """A token for each row of `logits`. On a GPU the masks are made while it computes the logits."""
        owners = plan.owners
        allowed = self._masks.of([sequence.matcher for sequence in owners])
        keep_first(logits, owners)
        greedy = all(sequence.request.sampling.temperature <= COLDEST for sequence in owners)
        params = None if greedy else self._table.drawing(plan)
        return self._drawer.draw(logits, owners, params, allowed=allowed, ahead=ahead)
