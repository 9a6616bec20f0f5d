"""The perplexity compressor: leaves out the words that the model itself foresees. Whole words, source white space."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .atoms import Atom, AtomKind, atoms_of
from .base import FLOOR_NOTE, LossyOptions, Task, TextCompressor
from .budget import most_that_fit
from .context import CompressionContext
from .function_words import governing, kept_alone
from .rebuild import Rebuilder
from .result import FAILED_NOTE, LATE_NOTE, Rewrite, Span
from .surprise import surprise_of

_CLOSERS = {"(": ")", "[": "]", "{": "}", "（": "）", "【": "】"}


@dataclass(frozen=True, kw_only=True)
class Perplexity(LossyOptions, TextCompressor):
    """Keeps the atoms (see atoms.py) of highest surprise until the rate is met, in their order.

    Negations, modals, and/or stay with what they govern; headings stay; a sentence's end mark stays with any word of
    it, a list bullet with any word of its line. The same text gives the same result whatever stands around it.
    """

    name = "perplexity"

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        if context.score is None:
            return Rewrite.whole(task.text, note=f"perplexity needs a scorer; {FAILED_NOTE}")
        atoms = atoms_of(task.text, protected=task.protected)
        surprise, scored = surprise_of(task.text, [atom.span for atom in atoms], score=context.score, context=context)
        note = ""
        target = self.target_rate * task.tokens
        if scored < len(task.text):
            note = f"{LATE_NOTE}: {scored} of {len(task.text)} characters judged, the rest kept"
            target += (1.0 - self.target_rate) * task.tokens * (len(task.text) - scored) / len(task.text)
        pruning = _Pruning(task, atoms, surprise, scored, context)
        fit = pruning.most(target)
        return Rewrite.of_kept(pruning.spans(fit), note=note if fit else "; ".join(filter(None, (note, FLOOR_NOTE))))


class _Pruning:
    """The choice among one text's atoms."""

    def __init__(
        self, task: Task, atoms: list[Atom], surprise: NDArray[np.float64], scored: int, context: CompressionContext
    ) -> None:
        self._task, self._atoms, self._context = task, atoms, context
        self._forced = _forced(task.text, atoms, scored)
        if atoms and not any(self._forced):
            # A text never vanishes: its most surprising word stays, or whatever it has.
            words = [i for i, atom in enumerate(atoms) if atom.kind is AtomKind.WORD]
            self._forced[max(words or [0], key=lambda i: (surprise[i], -i))] = True
        free = [
            i for i, atom in enumerate(atoms) if not self._forced[i] and atom.kind in (AtomKind.WORD, AtomKind.PUNCT)
        ]
        self._order = sorted(free, key=lambda i: (-surprise[i], i))
        self._rebuilder = Rebuilder(task.text, [atom.span for atom in atoms])
        self._partners = _partners(task.text, atoms)
        self._leaning = [_leans_on(atoms, i) for i in range(len(atoms))]

    def most(self, target: float) -> int:
        """How many free atoms fit a budget of `target` tokens beside the forced ones."""
        text, per_char = self._task.text, self._task.tokens / len(self._task.text)
        lengths = [self._atoms[i].end - self._atoms[i].start + 1 for i in self._order]
        fixed = sum(atom.end - atom.start + 1 for atom, must in zip(self._atoms, self._forced, strict=True) if must)
        room = target / per_char - fixed
        return most_that_fit(
            len(self._order),
            size_of=lambda k: self._context.count(Rewrite.of_kept(self.spans(k)).text(text)),
            target=target,
            guess=sum(1 for spent in itertools.accumulate(lengths) if spent <= room),
            expired=self._context.expired,
        )

    def spans(self, count: int) -> list[Span]:
        """The spans that stay when the `count` most surprising free atoms do. A greater count keeps a superset."""
        keep = self._forced.copy()
        for i in self._order[:count]:
            keep[i] = True
        self._with_pairs(keep)
        for i, neighbour in enumerate(self._leaning):
            if neighbour is not None and keep[i] and not self._forced[i]:
                keep[i] = keep[neighbour]
        self._with_marks(keep)
        return self._rebuilder.spans(keep)

    def _with_pairs(self, keep: list[bool]) -> None:
        """Brackets stay when something between them does."""
        so_far = [0, *itertools.accumulate(map(int, keep))]
        for opening, closing in self._partners:
            keep[opening] = keep[closing] = keep[opening] or keep[closing] or so_far[closing] > so_far[opening + 1]

    def _with_marks(self, keep: list[bool]) -> None:
        """Sentence ends stay with a kept word of their sentence, list markers with a kept word of their line."""
        marker: int | None = None
        spoken = False
        for i, atom in enumerate(self._atoms):
            if atom.kind is AtomKind.MARKER:
                marker = i
            elif atom.kind is AtomKind.END:
                keep[i] = keep[i] or spoken
                spoken = False
            elif keep[i]:
                spoken = True
                if marker is not None and self._atoms[marker].line == atom.line:
                    keep[marker] = True


def _partners(text: str, atoms: Sequence[Atom]) -> list[tuple[int, int]]:
    """Indices of brackets that belong together, and of bold marks in one line; a later pair may hold earlier ones."""
    pairs: list[tuple[int, int]] = []
    open_: list[int] = []
    bold: int | None = None
    for i, atom in enumerate(atoms):
        if atom.kind is not AtomKind.PAIR:
            continue
        mark = text[atom.start]
        if mark == "*":
            if bold is not None and atoms[bold].line == atom.line:
                pairs.append((bold, i))
                bold = None
            else:
                bold = i
        elif mark in _CLOSERS:
            open_.append(i)
        elif open_ and _CLOSERS[text[atoms[open_[-1]].start]] == mark:
            pairs.append((open_.pop(), i))
    return pairs


def _leans_on(atoms: Sequence[Atom], i: int) -> int | None:
    """The neighbour without which a punctuation atom means nothing: what it touches, on the left if anything."""
    if atoms[i].kind is not AtomKind.PUNCT:
        return None
    if i and atoms[i - 1].end == atoms[i].start:
        return i - 1
    if i + 1 < len(atoms) and atoms[i + 1].start == atoms[i].end:
        return i + 1
    return None


def _forced(text: str, atoms: Sequence[Atom], scored: int) -> list[bool]:
    """Atoms that stay whatever the budget: protected ones, small words that matter, what was not judged in time."""
    forced = [atom.kind is AtomKind.FIXED or atom.end > scored for atom in atoms]
    starts, ends = [atom.start for atom in atoms], [atom.end for atom in atoms]
    for start, end in governing(text):
        low, high = bisect_right(ends, start), bisect_left(starts, end)
        for i in range(low, min(high + 1, len(atoms))):
            forced[i] = forced[i] or i < high or atoms[i].kind is AtomKind.WORD
    for start, end in kept_alone(text):
        for i in range(bisect_right(ends, start), bisect_left(starts, end)):
            forced[i] = True
    return forced
