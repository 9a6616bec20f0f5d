"""A text in atoms, before any is judged: which of them stay whatever they are worth, and of which worth decides."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from .atoms import Atom, AtomKind, atoms_of, heads_over
from .base import Task
from .bonds import Bonds
from .result import Span


@dataclass(frozen=True)
class Draft:
    """A text, or its beginning `text[:cut]` up to white space. `goes_on`: behind it, under its last heading or label,
    stands what nobody here chooses.
    """

    text: str
    atoms: list[Atom]
    goes_on: bool = False

    @classmethod
    def of(cls, task: Task, *, cut: int | None = None) -> Self:
        """The task's text, or what stands before `cut`."""
        text = task.text[:cut]
        protected = [span for span in task.protected if span[1] <= len(text)]
        return cls(text, atoms_of(text, protected=protected), task.goes_on or len(text) < len(task.text))

    def before(self, end: int, task: Task) -> "Draft":
        """This draft of the task's whole text, or that of what stands before `end`, up to white space."""
        return self if end >= len(task.text) else Draft.of(task, cut=_border(task.text, end, task.protected))

    @cached_property
    def bonds(self) -> Bonds:
        """Which atoms stay or go together."""
        return Bonds(self.text, self.atoms)

    @cached_property
    def fixed(self) -> list[bool]:
        """Atoms that stay whatever they are worth."""
        fixed = [atom.kind is AtomKind.FIXED for atom in self.atoms]
        if self.goes_on and fixed:
            for head in heads_over(self.atoms, len(fixed) - 1):
                fixed[head] = True
        self.bonds.spread(fixed)
        return fixed

    @cached_property
    def open(self) -> list[int]:
        """Atoms whose worth decides whether they stay."""
        return [
            i
            for i, atom in enumerate(self.atoms)
            if atom.kind in (AtomKind.WORD, AtomKind.PUNCT) and not self.fixed[i] and i not in self.bonds.joints
        ]

    @property
    def spans(self) -> list[Span]:
        """Of the open atoms, ascending and disjoint."""
        return [self.atoms[i].span for i in self.open]


def _border(text: str, end: int, protected: Sequence[Span]) -> int:
    """The last place up to `end` behind white space and in no protected span; 0 if there is none."""
    starts = [start for start, _ in protected]
    while end:
        at = bisect_left(starts, end) - 1
        if at >= 0 and protected[at][1] > end:
            end = starts[at]
        elif text[end - 1].isspace():
            break
        else:
            end -= 1
    return end
