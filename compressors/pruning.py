"""The choice among the atoms of some texts that share a budget: which stay, given what each is worth."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .atoms import Atom, AtomKind, atoms_of, heads_over
from .base import Task, missed_note
from .bonds import Bonds
from .budget import filled, most_that_fit
from .companions import Companions
from .context import CompressionContext
from .outline import worth_with_heading
from .rebuild import Rebuilder
from .result import LATE_NOTE, Rewrite, Span

# After the best that fit, so many of the next are tried in the room that is left.
_FILLERS = 16
# While less than this share of what is asked stays, the search goes on behind what was too large, so often in all.
_NEAR, _SEARCHES = 0.97, 8
# What a negation or a modal is worth beyond the surprise of what it governs, in nats.
_GOVERNS = 6.0
# What any word is worth, in nats, as far as its place counts for more than others: what answers is read whole.
_IN_PLACE = 8.0
# Characters a second that are taken apart, and for which the choice is made, at worst on one slow core.
_APART_SPEED, _SPEED = 100_000.0, 60_000.0

Of = Callable[[Sequence[Span]], NDArray[np.float64]]
"""What is said of spans, ascending and disjoint: [spans]."""


@dataclass(frozen=True)
class Draft:
    """A text, or its beginning `text[:cut]` up to white space, in atoms: what is known before anything is judged.
    `goes_on`: behind it, under its last heading or label, stands what nobody here chooses.
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

    def judged(self, task: Task, *, end: int, worth: Of, weight: Of | None = None) -> "Candidate":
        """With the worth and the weight of what was judged, all before `end`."""
        whole = end >= len(task.text)
        draft = self if whole else Draft.of(task, cut=_border(task.text, end, task.protected))
        values, weights = np.zeros(len(draft.atoms)), np.ones(len(draft.atoms))
        values[draft.open] = worth(draft.spans)
        if weight is not None:
            weights[draft.open] = weight(draft.spans)
        return Candidate(draft, values, weights)


@dataclass(frozen=True)
class Candidate:
    """A draft that was judged: what its atoms are worth where they stand, and how much that place counts, both [atoms].
    Neither says anything of atoms that are not open.
    """

    draft: Draft
    worth: NDArray[np.float64]
    weight: NDArray[np.float64]

    @classmethod
    def unjudged(cls, draft: Draft) -> Self:
        """With nothing known of any worth."""
        return cls(draft, np.zeros(len(draft.atoms)), np.ones(len(draft.atoms)))

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
        held: set[int] = set()
        for i, must in enumerate(self.forced):
            head = self.atoms[i].head if must else None
            while head is not None and head not in held:
                held.add(head)
                head = self.atoms[head].head
        for head, members in under.items():
            if head not in held and not self.forced[head]:
                size = len(self.text[self.atoms[head].start : self.atoms[head].end].split())
                shared = worth_with_heading([worth[i] for i in members], size)
                worth.update(zip(members, shared, strict=True))
        return worth


def drafts_in_time(tasks: Sequence[Task], context: CompressionContext) -> list[Draft]:
    """The draft of each task; none at all where there is no time to make them and to see what must stay."""
    needed = sum(len(task.text) for task in tasks) / _APART_SPEED
    if context.remaining() <= needed:
        return []
    drafts = [Draft.of(task) for task in tasks]
    return drafts if context.remaining() > needed else []


def unread(tasks: Sequence[Task]) -> Iterator[tuple[Task, Rewrite]]:
    """All texts whole, for want of time."""
    return ((task, Rewrite.whole(task.text, note=LATE_NOTE)) for task in tasks)


def settled(drafts: Sequence[Draft], target: Callable[[int], float], context: CompressionContext) -> bool:
    """Whether what must stay fills the budget, so that nothing need be judged."""
    if not all(any(draft.fixed) for draft in drafts):
        return False
    pruning = Pruning([Candidate.unjudged(draft) for draft in drafts], context)
    return pruning.least >= target(pruning.tokens)


def pruned(
    tasks: Sequence[Task], candidates: Sequence[Candidate], target: Callable[[int], float], context: CompressionContext
) -> Iterator[tuple[Task, Rewrite]]:
    """The rewrite of each task from its candidate. `target` says how many of so many tokens, in all, are to stay.

    What was not judged in time stays whole; so does everything where it is few enough already.
    """
    if not any(one.cut for one in candidates):
        yield from unread(tasks)
        return
    pruning = Pruning([one for one in candidates if one.cut], context)
    wanted = target(pruning.tokens)
    if wanted >= pruning.tokens:
        return
    kept = iter(pruning.kept(wanted))
    least = pruning.least
    missed = missed_note(least, wanted=wanted, tokens=pruning.tokens) if least > wanted else ""
    for task, one in zip(tasks, candidates, strict=True):
        spans = [*(next(kept) if one.cut else ()), (one.cut, len(task.text))]
        late = f"{LATE_NOTE}: {one.cut} of {len(task.text)} characters judged, the rest kept"
        notes = (late if one.cut < len(task.text) else "", missed if one.cut else "")
        yield task, Rewrite.of_kept(spans, note="; ".join(filter(None, notes)))


class Pruning:
    """One budget over the candidates. `tokens` they have together; `least` of them stay whatever is asked."""

    def __init__(self, candidates: Sequence[Candidate], context: CompressionContext) -> None:
        self._candidates, self._context = candidates, context
        self._rebuilders = [Rebuilder(one.text, [atom.span for atom in one.atoms]) for one in candidates]
        self._companions = [Companions(one.text, one.atoms, one.forced) for one in candidates]
        places = [(n, i) for n, one in enumerate(candidates) for i, _ in one.free]
        worth = [value for one in candidates for _, value in one.free]
        # By worth, then by place; then what no word brings along.
        self._order = [places[k] for k in np.argsort(-np.array(worth), kind="stable")] if places else []
        self._judged = len(self._order)
        self._order += self._left_alone()
        self._sizes: dict[tuple[int, bytes], int] = {}
        self.tokens = sum(context.count(one.text) for one in candidates)

    @cached_property
    def least(self) -> int:
        return self._size(())

    def kept(self, target: float) -> list[list[Span]]:
        """The spans of each candidate that stay, at most `target` tokens in all beside what must; about as many where
        there is no time to count.
        """
        if self._context.expired():
            chosen = list(range(self._guess(0, len(self._order), self._room(target))))
        else:
            chosen = self._searched([], 0, self._judged, target)
            if not chosen or not (self._context.expired() or _near(self._of(chosen), target)):
                chosen = self._searched(chosen, self._judged, len(self._order), target)
        return [self._spans(n, keep) for n, keep in enumerate(self._masks([self._order[k] for k in chosen]))]

    def _left_alone(self) -> list[tuple[int, int]]:
        """What would not stay along with anything if all stayed that is judged: marks without a word, conjunctions
        without two. In their order; where words do not fill the budget, these do.
        """
        return [
            (n, i)
            for n, keep in enumerate(self._masks(self._order))
            for i, stays in enumerate(self._with_companions(n, keep))
            if not stays and self._candidates[n].atoms[i].kind is not AtomKind.HEAD
        ]

    def _searched(self, chosen: list[int], at: int, end: int, target: float) -> list[int]:
        """`chosen` and what of the order from `at` to `end` still fits, first come first served."""
        context = self._context
        held = self._of(chosen) if chosen else 0  # what was there before this search, in tokens
        room = (target - held) / self._per_char if chosen else self._room(target)
        for _ in range(_SEARCHES):
            fit = most_that_fit(
                end - at,
                size_of=lambda k: self._of(chosen, range(at, at + k)) - held,  # noqa: B023 - called before they change
                target=target - held,
                guess=self._guess(at, end, room),
                expired=context.expired,
            )
            if held and context.expired():  # what the search last guessed may be too much
                break
            chosen = [*chosen, *range(at, at + fit)]
            at = min(end, at + fit + 1)  # this one was too large
            chosen = filled(
                chosen, range(at, min(end, at + _FILLERS)), size_of=self._of, target=target, expired=context.expired
            )
            at = min(end, at + _FILLERS)
            if at == end or context.expired():
                break
            held = self._of(chosen)
            if _near(held, target):
                break
            room = (target - held) / self._per_char
        return chosen

    def _guess(self, at: int, end: int, room: float) -> int:
        """About how many of the order from `at` to `end` go into so many characters."""
        return sum(1 for spent in itertools.accumulate(self._lengths[at:end]) if spent <= room)

    def _room(self, target: float) -> float:
        """About how many characters that makes beside what must stay."""
        forced = sum(
            _length(atom) for one in self._candidates for atom, must in zip(one.atoms, one.forced, strict=True) if must
        )
        return target / self._per_char - forced

    @cached_property
    def _per_char(self) -> float:
        return self.tokens / sum(len(one.text) for one in self._candidates)

    @cached_property
    def _lengths(self) -> list[int]:
        """In characters, of what is chosen from, with all that stays or goes with it."""
        return [
            sum(_length(self._candidates[n].atoms[j]) for j in self._candidates[n].bonds.group(i) or (i,))
            for n, i in self._order
        ]

    def _of(self, chosen: Sequence[int], more: Sequence[int] = ()) -> int:
        """Tokens with these of the order."""
        return self._size([self._order[k] for k in (*chosen, *more)])

    def _masks(self, chosen: Sequence[tuple[int, int]]) -> list[list[bool]]:
        masks = [one.forced.copy() for one in self._candidates]
        for n, i in chosen:
            for j in self._candidates[n].bonds.group(i) or (i,):
                masks[n][j] = True
        return masks

    def _with_companions(self, n: int, keep: list[bool]) -> list[bool]:
        self._candidates[n].bonds.join(keep)
        self._companions[n].join(keep)
        return keep

    def _spans(self, n: int, keep: list[bool]) -> list[Span]:
        return self._rebuilders[n].spans(self._with_companions(n, keep))

    def _size(self, chosen: Sequence[tuple[int, int]]) -> int:
        """Tokens with these atoms beside the forced ones; a text whose choice was seen before is not counted again."""
        total = 0
        for n, mask in enumerate(self._masks(chosen)):
            key = (n, bytes(mask))
            if key not in self._sizes:
                text = Rewrite.of_kept(self._spans(n, mask)).text(self._candidates[n].text)
                self._sizes[key] = self._context.count(text)
            total += self._sizes[key]
        return total


def time_to_judge(texts: Sequence[str], context: CompressionContext) -> Callable[[], float]:
    """The seconds that are left until the choice must begin, which gets at most half of what there is now."""
    held = min(sum(map(len, texts)) / _SPEED, context.remaining() / 2)
    return lambda: max(0.0, context.remaining() - held)


def _near(size: int, target: float) -> bool:
    """Whether too little is left to be worth another search."""
    return size >= _NEAR * target or size + 1 > target


def _length(atom: Atom) -> int:
    """In characters, with the gap behind it."""
    return atom.end - atom.start + 1


def _border(text: str, end: int, protected: Sequence[Span]) -> int:
    """The last place up to `end` behind white space and in no protected span; 0 if there is none."""
    at = bisect_left([span[0] for span in protected], end) - 1
    if at >= 0 and protected[at][1] > end:
        end = protected[at][0]
    while end and not text[end - 1].isspace():
        end -= 1
    return end
