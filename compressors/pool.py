"""Candidates that share a budget: what stays of their texts with a choice of atoms, and how many tokens that makes."""

from collections.abc import Sequence
from functools import cached_property

from .atoms import Atom, AtomKind
from .candidate import Candidate
from .companions import Companions
from .context import Count
from .rebuild import Rebuilder
from .result import Rewrite, Span

Place = tuple[int, int]
"""The number of a candidate, and that of an atom in it."""


class Pool:
    """`tokens` are those of all texts. With any choice stays what must, and what stays along with what is kept."""

    def __init__(self, candidates: Sequence[Candidate], count: Count) -> None:
        self.candidates, self._count = candidates, count
        self._rebuilders = [Rebuilder(one.text, [atom.span for atom in one.atoms]) for one in candidates]
        self._companions = [Companions(one.text, one.atoms, one.forced) for one in candidates]
        self._sizes: dict[tuple[int, bytes], int] = {}
        self.tokens = sum(count(one.text) for one in candidates)

    @cached_property
    def per_char(self) -> float:
        """Tokens of a character on average."""
        return self.tokens / sum(len(one.text) for one in self.candidates)

    @cached_property
    def least(self) -> int:
        """Tokens that stay whatever is asked."""
        return self.size(())

    @property
    def forced_length(self) -> int:
        """About how many characters must stay."""
        return sum(
            _length(atom) for one in self.candidates for atom, must in zip(one.atoms, one.forced, strict=True) if must
        )

    def length(self, place: Place) -> int:
        """About how many characters a free atom has, with all that stays or goes with it."""
        n, i = place
        one = self.candidates[n]
        return sum(_length(one.atoms[j]) for j in one.bonds.group(i) or (i,))

    def size(self, chosen: Sequence[Place]) -> int:
        """Tokens with these atoms; a text whose choice was seen before is not counted again."""
        total = 0
        for n, mask in enumerate(self._masks(chosen)):
            key = (n, bytes(mask))
            if key not in self._sizes:
                text = Rewrite.of_kept(self._spans(n, mask)).text(self.candidates[n].text)
                self._sizes[key] = self._count(text)
            total += self._sizes[key]
        return total

    def spans(self, chosen: Sequence[Place]) -> list[list[Span]]:
        """What stays of each candidate with these atoms."""
        return [self._spans(n, mask) for n, mask in enumerate(self._masks(chosen))]

    def left_out(self, chosen: Sequence[Place]) -> list[Place]:
        """What does not stay with these atoms, in order, headings aside."""
        return [
            (n, i)
            for n, mask in enumerate(self._masks(chosen))
            for i, stays in enumerate(self._with_companions(n, mask))
            if not stays and self.candidates[n].atoms[i].kind is not AtomKind.HEAD
        ]

    def _masks(self, chosen: Sequence[Place]) -> list[list[bool]]:
        """Of each candidate what must stay and what is chosen, [atoms]; nothing yet that stays along."""
        masks = [one.forced.copy() for one in self.candidates]
        for n, i in chosen:
            for j in self.candidates[n].bonds.group(i) or (i,):
                masks[n][j] = True
        return masks

    def _with_companions(self, n: int, mask: list[bool]) -> list[bool]:
        self.candidates[n].bonds.join(mask)
        self._companions[n].join(mask)
        return mask

    def _spans(self, n: int, mask: list[bool]) -> list[Span]:
        return self._rebuilders[n].spans(self._with_companions(n, mask))


def _length(atom: Atom) -> int:
    """In characters, with the gap behind it."""
    return atom.end - atom.start + 1
