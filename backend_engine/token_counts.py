"""How often each token stands in the running requests that penalize repetition, as one tensor row for each of them.

Rows are given when a request is first asked for and taken back when it leaves the running table; without any, no memory
is held. What is new since the last time is added with one operation for all requests.
"""

import numpy as np
import torch
from torch import Tensor

from .sequence import Sequence

IN_PROMPT = 1 << 30
"""Added to a count if the token stands in the prompt."""


class TokenCounts:
    """Int32 counts by the row that a sequence has in the running table."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: Tensor | None = None  # [capacity, vocab]
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._counted: dict[int, int] = {}  # how many of a sequence's tokens are in its counts

    @property
    def nbytes(self) -> int:
        """The memory that is held now."""
        return 0 if self._counts is None else self._counts.nbytes

    def of(self, sequences: list[Sequence], *, vocab: int) -> Tensor:
        """Counts [S, vocab] of the tokens that each sequence has generated, with `IN_PROMPT` added."""
        for sequence in sequences:
            if sequence.row not in self._slots:
                self._enter(sequence, vocab)
        assert self._counts is not None
        fresh = [sequence.tokens[self._counted[sequence.row] : sequence.length] for sequence in sequences]
        slots = np.array([self._slots[sequence.row] for sequence in sequences], dtype=np.int64)
        place = self._tensor(np.repeat(slots, [len(tokens) for tokens in fresh])), self._tensor(np.concatenate(fresh))
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._counts.index_put_(place, one, accumulate=True)
        self._counted.update((sequence.row, sequence.length) for sequence in sequences)
        return self._counts[self._tensor(slots)]

    def forget(self, row: int) -> None:
        """A sequence has left this row of the running table."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))
            del self._counted[row]
        if not self._slots:
            self._counts, self._free = None, []

    def _enter(self, sequence: Sequence, vocab: int) -> None:
        if not self._free:
            self._grow(vocab)
        assert self._counts is not None
        prompt = self._tensor(sequence.tokens[: sequence.prompt])
        self._counts[self._free[-1]] = 0
        self._counts[self._free[-1], prompt] = IN_PROMPT
        # Noted last: where the device has no memory for it, the row was never entered.
        self._slots[sequence.row], self._counted[sequence.row] = self._free.pop(), sequence.prompt

    def _grow(self, vocab: int) -> None:
        before = 0 if self._counts is None else len(self._counts)
        grown = torch.zeros((max(1, 2 * before), vocab), dtype=torch.int32, device=self._device)
        if self._counts is not None:
            grown[:before] = self._counts
        self._counts = grown
        self._free += range(before, len(grown))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
