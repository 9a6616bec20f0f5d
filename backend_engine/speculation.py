"""How many tokens to guess ahead, and for whom: as many as pay, by what guesses were worth so far and what rows cost.

A guess costs one more row of a step. It is never drawn from: each row draws its own token with its own randomness,
exactly as if the tokens before it had come one step at a time, and a guess only decides whether that row was run in
time. So the tokens are those of an engine that does not guess, greedy or sampled, and for the same seed the very same
ones; rejection sampling (Leviathan et al. 2023) keeps only their distribution. Both accept as often: a guess that is
certain of itself is accepted with the probability that the model gives it.
"""

from collections.abc import Sequence as Sequences

import numpy as np
from numpy.typing import NDArray

from .drafter import Drafter
from .model import Decoder
from .sequence import NO_ROWS, Rows, Sequence
from .step_cost import StepCost, measured, measured_steps
from .steps import SingleRowSteps

# Steps with guesses must promise this much more tokens a second.
_WORTH = 1.1


class Speculator:
    """Chooses the guesses of a step: those with the most tokens a second, by `cost`; at most `most` a sequence.

    A step with guesses has at most `sequences` sequences.
    """

    def __init__(self, cost: StepCost, *, most: int, sequences: int | None = None) -> None:
        assert most > 0, most
        self._cost = cost
        self._most = most
        self._sequences = sequences
        self._hopeful: dict[int, bool] = {}  # by the number of sequences: whether guesses that are all right would pay

    def drafts(self, sequences: Sequences[Sequence], *, room: int) -> list[Rows]:
        """The guesses for each of some decoding sequences, at most `room` in all; an empty list if nobody has any."""
        if room < 1 or not self._can_pay(len(sequences)):
            return []
        chances = [self._chances(sequence) for sequence in sequences]
        counts = self._counts(chances, room)
        if not counts.any():
            return []
        return [
            sequence.drafter.draft(sequence.ids, count) if count and sequence.drafter is not None else NO_ROWS
            for sequence, count in zip(sequences, counts.tolist(), strict=True)
        ]

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
        rates = self._rates(len(chances), likely[order])
        best = int(rates.argmax())
        if rates[best] < _WORTH * rates[0]:
            best = 0
        owners = np.repeat(np.arange(len(sizes)), sizes)
        return np.bincount(owners[order[:best]], minlength=len(sizes))

    def _can_pay(self, sequences: int) -> bool:
        if self._sequences is not None and sequences > self._sequences:
            return False
        if sequences not in self._hopeful:
            rates = self._rates(sequences, np.ones(self._most * sequences))
            self._hopeful[sequences] = sequences > 0 and bool(rates.max() >= _WORTH * rates[0])
        return self._hopeful[sequences]

    def _rates(self, sequences: int, likely: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens a second with none, one, two, ... of the guesses."""
        tokens = sequences + np.concatenate(([0.0], likely.cumsum()))
        return tokens / self._cost.at(sequences + np.arange(len(tokens)))


def speculator(
    decoder: Decoder, steps: SingleRowSteps | None, *, most: int, spare: int, cost: StepCost | None = None
) -> Speculator | None:
    """One for an engine that guesses at most `most` tokens a request; without a `cost`, that is measured now.

    With `steps`, guesses run through these alone; `spare` is the table row that is nobody's.
    """
    if steps is None:
        return Speculator(cost or measured(decoder), most=most) if most > 0 else None
    sequences, rows = steps.drafting
    most = min(most, rows - 1)
    return Speculator(cost or measured_steps(steps, spare=spare), most=most, sequences=sequences) if most > 0 else None
