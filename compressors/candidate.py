"""A draft that was judged: what must stay of it, and what each atom is worth of which a budget decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .atoms import Atom, AtomKind, heads_over
from .base import Task
from .bonds import Bonds
from .draft import Draft
from .outline import worth_with_heading
from .result import Span

# What a negation or a modal is worth beyond the surprise of what it governs, in nats.
_GOVERNS = 6.0
# What any word is worth, in nats, as far as its place counts for more than others: what answers is read whole.
_IN_PLACE = 8.0

SpanValues = Callable[[Sequence[Span]], NDArray[np.float64]]
"""A value of each span, ascending and disjoint: [spans]."""


@dataclass(frozen=True)
class Candidate:
    """What a draft's atoms are worth where they stand, and how much that place counts, both [atoms]. Neither says
    anything of atoms that are not open.
    """

    draft: Draft
    worth: NDArray[np.float64]
    weight: NDArray[np.float64]

    @classmethod
    def unjudged(cls, draft: Draft) -> Self:
        """With nothing known of any worth."""
        return cls(draft, np.zeros(len(draft.atoms)), np.ones(len(draft.atoms)))

    @classmethod
    def judged(cls, draft: Draft, task: Task, *, end: int, worth: SpanValues, weight: SpanValues | None = None) -> Self:
        """The task's draft, or what of it was judged, all before `end`, with its worth and its weight."""
        one = cls.unjudged(draft.before(end, task))
        one.worth[one.draft.open] = worth(one.draft.spans)
        if weight is not None:
            one.weight[one.draft.open] = weight(one.draft.spans)
        return one

    @property
    def text(self) -> str:
        return self.draft.text

    @property
    def cut(self) -> int:
        return len(self.text)

    @property
    def atoms(self) -> list[Atom]:
        return self.draft.atoms

    @property
    def bonds(self) -> Bonds:
        return self.draft.bonds

    @cached_property
    def forced(self) -> list[bool]:
        """Atoms that stay whatever the budget. A text never vanishes: its best word stays, or whatever it has."""
        forced = self.draft.fixed.copy()
        if self.atoms and not any(forced):
            words = [i for i, atom in enumerate(self.atoms) if atom.kind is AtomKind.WORD]
            forced[max(words or [0], key=lambda i: (self._value(i, self.worth[i]), -i))] = True
            self.bonds.spread(forced)
        return forced

    @cached_property
    def free(self) -> list[tuple[int, float]]:
        """Atoms that are chosen, with their worth: one of each group that stays together, worth as much as its best
        and more, for without it others say the opposite. Less where a heading or label would stay for its sake.
        """
        found: dict[int, float] = {}
        for i in self.draft.open:
            if self.forced[i]:
                continue
            group = self.bonds.group(i)
            if group is None:
                found[i] = self._value(i, self.worth[i])
            elif i == next(j for j in group if j in self._open):
                found[i] = self._value(i, max(self.worth[j] for j in group) + _GOVERNS)
        return list(self._with_heads(found).items())

    def _value(self, i: int, worth: float) -> float:
        """What so much is worth at an atom's place."""
        return float(worth * self.weight[i] + _IN_PLACE * (self.weight[i] - 1.0))

    @cached_property
    def _open(self) -> frozenset[int]:
        return frozenset(self.draft.open)

    def _with_heads(self, worth: dict[int, float]) -> dict[int, float]:
        """The same atoms, those under a heading that nothing yet holds sharing its cost."""
        under: dict[int, list[int]] = {}
        for i in worth:
            head = self.atoms[i].head
            if head is not None and self.atoms[i].kind is not AtomKind.PUNCT:  # which brings none along
                under.setdefault(head, []).append(i)
        held = {head for i, must in enumerate(self.forced) if must for head in heads_over(self.atoms, i)}
        for head, members in under.items():
            if head not in held and not self.forced[head]:
                size = len(self.text[self.atoms[head].start : self.atoms[head].end].split())
                shared = worth_with_heading([worth[i] for i in members], size)
                worth.update(zip(members, shared, strict=True))
        return worth
