"""What stays along with other atoms: brackets, bold marks, punctuation, sentence ends, list markers, headings."""

import itertools
from collections.abc import Sequence

from .atoms import Atom, AtomKind

_CLOSERS = {"(": ")", "[": "]", "{": "}", "（": "）", "【": "】"}


class Companions:
    """Of one text's atoms. What does not depend on the choice is worked out once."""

    def __init__(self, text: str, atoms: Sequence[Atom], forced: Sequence[bool]) -> None:
        self._atoms = atoms
        self._partners = _partners(text, atoms)
        self._points = frozenset(i for i, atom in enumerate(atoms) if atom.kind is AtomKind.PUNCT and not forced[i])
        self._leaning = [(i, neighbour) for i in sorted(self._points) if (neighbour := _leans_on(atoms, i)) is not None]

    def join(self, keep: list[bool]) -> None:
        """Set or clear in `keep` what goes by its neighbours."""
        self._with_heads(keep)
        self._with_pairs(keep)
        for i, neighbour in self._leaning:
            if keep[i]:
                keep[i] = keep[neighbour]
        self._with_marks(keep)

    def _with_pairs(self, keep: list[bool]) -> None:
        """Brackets stay when something between them does."""
        if not self._partners:
            return
        so_far = [0, *itertools.accumulate(map(int, keep))]
        for opening, closing in self._partners:
            keep[opening] = keep[closing] = keep[opening] or keep[closing] or so_far[closing] > so_far[opening + 1]

    def _with_heads(self, keep: list[bool]) -> None:
        """Headings and labels stay with anything under them but mere punctuation, which goes with them."""
        for i in range(len(keep) - 1, -1, -1):
            head = self._atoms[i].head
            if keep[i] and head is not None and i not in self._points:
                keep[head] = True
        for i in self._points:
            head = self._atoms[i].head
            if head is not None and not keep[head]:
                keep[i] = False

    def _with_marks(self, keep: list[bool]) -> None:
        """Sentence ends stay with a kept word of their sentence, markers with a kept word or label of their line."""
        marker: int | None = None
        spoken = False
        for i, atom in enumerate(self._atoms):
            if atom.kind is AtomKind.MARKER:
                marker = i
            elif atom.kind is AtomKind.END:
                keep[i] = keep[i] or spoken
                spoken = False
            else:
                spoken = atom.kind is not AtomKind.HEAD and (spoken or keep[i])
                if keep[i] and marker is not None and self._atoms[marker].line == atom.line:
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
    if i and atoms[i - 1].end == atoms[i].start:
        return i - 1
    if i + 1 < len(atoms) and atoms[i + 1].start == atoms[i].end:
        return i + 1
    return None
