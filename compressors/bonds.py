"""Atoms that stay or go together: a negation or a modal with what it governs, and/or with what they join."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from .atoms import Atom, AtomKind
from .function_words import bound, governing, joining


class Bonds:
    """Of one text's atoms. `joints` are the conjunctions, which nobody chooses."""

    def __init__(self, text: str, atoms: Sequence[Atom]) -> None:
        self._starts, self._ends = [atom.start for atom in atoms], [atom.end for atom in atoms]
        spans = [self._within(span) for span in bound(text)]
        for span in governing(text):
            low, high = self._within(span)
            governed = high < len(atoms) and atoms[high].kind in (AtomKind.WORD, AtomKind.FIXED)
            spans.append((low, high + governed))
        self._groups = _merged(spans)
        self._firsts = [low for low, _ in self._groups]
        self._joints = [
            (i, _word(atoms, i - 1, -1), _word(atoms, i + 1, 1))
            for span in joining(text)
            for i in range(*self._within(span))
            if atoms[i].span == span and self.group(i) is None  # the whole word: O'Brien and e-mail join nothing
        ]
        self.joints = frozenset(i for i, _, _ in self._joints)

    def group(self, i: int) -> range | None:
        """The atoms that stay or go with atom `i`, itself among them; None if there are no others."""
        at = bisect_right(self._firsts, i) - 1
        return range(*self._groups[at]) if at >= 0 and i < self._groups[at][1] else None

    def spread(self, keep: list[bool]) -> None:
        """Set whole groups of which any atom is set."""
        for low, high in self._groups:
            if any(keep[low:high]):
                keep[low:high] = [True] * (high - low)

    def join(self, keep: list[bool]) -> None:
        """Set conjunctions between two kept words."""
        for i, before, after in self._joints:
            keep[i] = keep[i] or (before is not None and after is not None and keep[before] and keep[after])

    def _within(self, span: tuple[int, int]) -> tuple[int, int]:
        return bisect_right(self._ends, span[0]), bisect_left(self._starts, span[1])


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending and disjoint; those that share an atom are one. Lone atoms are left out."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif high > low:
            found.append((low, high))
    return [(low, high) for low, high in found if high - low > 1]


def _word(atoms: Sequence[Atom], i: int, step: int) -> int | None:
    """The nearest word from atom `i` on; None at the end of a sentence."""
    while 0 <= i < len(atoms) and atoms[i].kind not in (AtomKind.END, AtomKind.MARKER, AtomKind.HEAD):
        if atoms[i].kind in (AtomKind.WORD, AtomKind.FIXED):
            return i
        i += step
    return None
