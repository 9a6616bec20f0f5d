"""What one step runs, as a value: a row for each decode and each token guessed for it, then chunks of prefills."""

from dataclasses import dataclass, field, replace

import numpy as np

from .sampling import COLDEST
from .sequence import NO_ROWS, Rows, Sequence
from .steps import Draw
from .types import PrefillWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prefill: rows `first .. first + count - 1` of its sequence's plan. `quota` of the repairable run.

    `last`: the prefill is complete with it. `probed`: only the probe is, after which the prefill is planned anew.
    """

    sequence: Sequence
    first: int
    count: int
    quota: int = 0
    narrowed: bool = False
    last: bool = False
    probed: bool = False

    @property
    def rows(self) -> Rows:
        return self.sequence.plan[self.first : self.first + self.count]

    @property
    def scored(self) -> Rows:
        """Rows within the chunk that yield a prompt token's log-probability."""
        telling = self.sequence.telling
        if telling is None:
            return NO_ROWS
        rows = self.rows
        inside = int(np.searchsorted(rows, len(telling)))
        return np.flatnonzero(telling[rows[:inside]])

    @property
    def logits(self) -> Rows:
        """Rows within the chunk whose logits are needed."""
        return np.append(self.scored, self.count - 1) if self.draws else self.scored

    @property
    def draws(self) -> bool:
        """Whether a token is drawn from its last row."""
        return self.last and self.sequence.generates


@dataclass(slots=True)
class StepPlan:
    """What one step runs: a row for each of `decodes` and for each token guessed for it, then `chunks` of prefills.

    `drafts` are the guesses for each of `decodes`, or empty where nobody has any.
    """

    decodes: list[Sequence] = field(default_factory=list)
    drafts: list[Rows] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks)]

    @property
    def single(self) -> bool:
        """Whether every sequence runs one row and draws from it: decodes, and prefills that lack their last token."""
        return (
            bool(self.sequences)
            and not self.drafts
            and all(
                chunk.count == 1 and chunk.draws and not chunk.narrowed and not len(chunk.scored)
                for chunk in self.chunks
            )
        )

    @property
    def plain(self) -> bool:
        """Whether all rows go through all layers, and of a prefill only the last one has logits that anybody needs."""
        return not any(chunk.narrowed or chunk.sequence.probing or len(chunk.scored) for chunk in self.chunks)

    @property
    def rows(self) -> int:
        return int(self.widths.sum()) + sum(chunk.count for chunk in self.chunks)

    @property
    def draw(self) -> Draw:
        """The least kind by which every token can be drawn; by the host if it is not `single`."""
        if not self.single:
            return Draw.HOST
        kinds = {_kind(sequence) for sequence in self.sequences}
        return Draw.HOST if Draw.HOST in kinds else max(kinds)

    @property
    def drawing(self) -> list[Sequence]:
        """The sequences that get a new token."""
        return [*self.decodes, *(chunk.sequence for chunk in self.chunks if chunk.draws)]

    @property
    def owners(self) -> list[Sequence]:
        """For each row that draws a token, whose it is."""
        return [
            sequence for sequence, draft in zip(self.drawing, self.guesses, strict=True) for _ in range(1 + len(draft))
        ]

    @property
    def guesses(self) -> list[Rows]:
        """For each of `drawing`, the tokens guessed for it."""
        return (self.drafts or [NO_ROWS] * len(self.decodes)) + [NO_ROWS] * (len(self.drawing) - len(self.decodes))

    @property
    def widths(self) -> Rows:
        """How many rows of each of `decodes` run; each of them draws a token."""
        return 1 + np.fromiter(map(len, self.drafts or [NO_ROWS] * len(self.decodes)), np.int64, len(self.decodes))

    def account(self, seconds: float) -> None:
        """Give each prefill its part of a step that took so long, by rows; before its rows are planned anew."""
        rows = self.rows
        for chunk in self.chunks:
            share, seen = chunk.count / rows, int(chunk.rows.sum()) + chunk.count
            chunk.sequence.work += PrefillWork(steps=share, rows=chunk.count, pairs=seen, seconds=share * seconds)


def next_chunk(sequence: Sequence, budget: int) -> Chunk:
    """The next rows of a prefill, at most `budget` of them."""
    count = min(budget, len(sequence.plan) - sequence.ran)
    chunk = Chunk(sequence=sequence, first=sequence.ran, count=count)
    if sequence.ran + count == len(sequence.plan):
        chunk = replace(chunk, last=not sequence.probing, probed=sequence.probing)
    if sequence.repairable is None:
        return chunk
    repairable = int(np.count_nonzero(sequence.repairable[sequence.ran : sequence.ran + count]))
    quota = sequence.quota(count)
    return replace(chunk, quota=quota, narrowed=quota < repairable)


def _kind(sequence: Sequence) -> Draw:
    params = sequence.request.sampling
    first = sequence.request.first_logprobs and sequence.first_logprobs is None
    if first or sequence.undecided or sequence.matcher is not None or not params.plain:
        return Draw.HOST
    if params.temperature <= COLDEST:
        return Draw.LIKELIEST
    return Draw.FILTERED if params.filtered else Draw.SAMPLED
