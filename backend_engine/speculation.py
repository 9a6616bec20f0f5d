"""How many tokens to guess ahead, and for whom: as many as pay, by what guesses were worth so far and what rows cost.

A guess costs one more row of a step. It is never drawn from: each row draws its own token with its own randomness,
exactly as if the tokens before it had come one step at a time, and a guess only decides whether that row was run in
time. So the tokens are those of an engine that does not guess, greedy or sampled, and for the same seed the very same
ones; rejection sampling (Leviathan et al. 2023) keeps only their distribution. Both accept as often: a guess that is
certain of itself is accepted with the probability that the model gives it.
"""

import sys
from collections.abc import Sequence as Sequences

import numpy as np
from numpy.typing import NDArray

from .drafter import Drafter
from .model import Decoder
from .sequence import NO_ROWS, Rows, Sequence
from .step_cost import StepCost, measured, measured_mixed, measured_singles
from .steps import MixedSteps, SingleRowSteps

# Steps with guesses must promise this much more tokens a second.
_WORTH = 1.1
# On a GPU the host looks for guesses while a step runs: for at most so many sequences, each of which takes so many
# seconds (30 to 70 us beside an H200), and no longer than such a part of a step, which it has much else to do in.
_MOST_SEQUENCES, _LOOKING_S, _LOOKING = 8, 50e-6, 0.15
# Of what steps with guesses take beyond their cost, the newest one counts for so much, and no more than so many times
# its cost; and it is forgotten while there are none, so that one slow moment does not end them for good.
_NEWEST, _MOST_TIMES, _FORGOTTEN = 0.1, 3.0, 0.999


class Speculator:
    """Chooses the guesses of a step: those with the most tokens a second, by `cost`; at most `most` a sequence.

    A step with guesses has at most `sequences` sequences, and `rows` rows. `plain` is what steps without guesses cost,
    where these are others: then both are seconds of whole steps, and what the host adds is learned as they run.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        most: int,
        plain: StepCost | None = None,
        sequences: int = sys.maxsize,
        rows: int = sys.maxsize,
    ) -> None:
        assert most > 0, most
        self._cost = cost
        self._most = most
        self._plain = plain
        self._sequences = sequences
        self._rows = rows
        self._beyond = 0.0  # seconds that a step with guesses takes more than its cost
        # By the number of sequences: whether to look, as guesses that are all right would pay.
        self._hopeful: dict[int, bool] = {}

    def drafts(self, sequences: Sequences[Sequence], *, room: int) -> list[Rows]:
        """The guesses for each of some decoding sequences, at most `room` in all; an empty list if nobody has any."""
        room = min(room, self._rows - len(sequences))
        if room < 1 or not self._can_pay(len(sequences)):
            return []
        chances = [self._chances(sequence) for sequence in sequences]
        counts = self._counts(chances, room)
        if not counts.any():
            self._beyond *= _FORGOTTEN
            return []
        return [
            sequence.drafter.draft(sequence.ids, count) if count and sequence.drafter is not None else NO_ROWS
            for sequence, count in zip(sequences, counts.tolist(), strict=True)
        ]

    def ran(self, *, rows: int, seconds: float) -> None:
        """Learn from a step with guesses, which had so many rows in all."""
        if self._plain is not None:
            cost = self._cost.of(rows)
            beyond = min(max(0.0, seconds - cost), _MOST_TIMES * cost)
            self._beyond += _NEWEST * (beyond - self._beyond)

    def _chances(self, sequence: Sequence) -> NDArray[np.float64]:
        most = min(self._most, sequence.most - sequence.length - 1) if sequence.predictable else 0
        if most < 1:
            return np.empty(0)
        if sequence.drafter is None:
            sequence.drafter = Drafter(sequence.tokens[: sequence.prompt])
        sequence.drafter.observe(sequence.ids)
        return sequence.drafter.chances(most)

    def _counts(self, chances: list[NDArray[np.float64]], room: int) -> Rows:
        """How many guesses each sequence gets: the likeliest ones of all, as many as make the step's rate highest."""
        sizes = [len(each) for each in chances]
        likely = np.concatenate(chances)
        order = (-likely).argsort(kind="stable")[:room]
        rates = self._rates(len(chances), likely[order], beyond=self._beyond)
        best = int(rates.argmax())
        if rates[best] < _WORTH * rates[0]:
            best = 0
        owners = np.repeat(np.arange(len(sizes)), sizes)
        return np.bincount(owners[order[:best]], minlength=len(sizes))

    def _can_pay(self, sequences: int) -> bool:
        if sequences > self._sequences:
            return False
        if sequences not in self._hopeful:
            rates = self._rates(sequences, np.ones(self._most * sequences))
            hidden = self._plain is None or sequences * _LOOKING_S <= _LOOKING * self._plain.of(sequences)
            self._hopeful[sequences] = sequences > 0 and hidden and bool(rates.max() >= _WORTH * rates[0])
        return self._hopeful[sequences]

    def _rates(self, sequences: int, likely: NDArray[np.float64], *, beyond: float = 0.0) -> NDArray[np.float64]:
        """Tokens a second with none, one, two, ... of the guesses."""
        tokens = sequences + np.concatenate(([0.0], likely.cumsum()))
        seconds = self._cost.at(sequences + np.arange(len(tokens))) + beyond
        if self._plain is not None:
            seconds[0] = self._plain.of(sequences)
        return tokens / seconds


def speculator(
    decoder: Decoder,
    steps: SingleRowSteps | None,
    mixed: MixedSteps | None,
    *,
    most: int,
    spare: int,
    cost: StepCost | None = None,
) -> Speculator | None:
    """One for an engine that guesses at most `most` tokens a request; without a `cost`, that is measured now.

    With `steps`, guesses run through `mixed`, and where there is none, there are no guesses. `spare` is the table row
    that is nobody's.
    """
    if most < 1:
        return None
    if steps is None:
        return Speculator(cost or measured(decoder), most=most)
    if mixed is None:
        return None
    sequences, rows = min(_MOST_SEQUENCES, spare), mixed.sizes[-1]
    if cost is not None:
        return Speculator(cost, most=most, sequences=sequences, rows=rows)
    return Speculator(
        measured_mixed(decoder, mixed, spare=spare, most=sequences * (1 + most)),
        most=most,
        plain=measured_singles(steps, spare=spare, most=sequences),
        sequences=sequences,
        rows=rows,
    )
