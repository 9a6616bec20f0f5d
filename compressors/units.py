"""The units of one message's segments, which share a budget: their texts and sizes, and what stays along with them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .base import Task
from .context import CompressionContext, Count
from .outline import Outline
from .rebuild import Rebuilder
from .result import Rewrite, Span
from .sentences import Unit, units_of

_PIECE = 4000  # characters, which say how long a count takes


class Choice(NamedTuple):
    """Which units stay, [units], and a note where that is not what was asked for."""

    keep: list[bool]
    note: str = ""


class Units:
    """Numbered over all segments of a message; `segments` has the numbers of each.

    `texts` [units]. `above`: the heading or label right above each in its segment, which goes along with what it heads;
    `heads` are those that head something. `must`: which stay whatever is asked, for protected text in them or code
    behind the segment that they head. `tokens` of all segments, and `per_char`, of a character on average.
    """

    def __init__(self, tasks: Sequence[Task], context: CompressionContext) -> None:
        self._count = context.count
        self._segments: list[_Segment] = []
        self.texts: list[str] = []
        self.above: list[int | None] = []
        self.must: list[bool] = []
        for task in tasks:
            self._add(task, units_of(task.text, whole=task.protected))
        self.heads = frozenset(above for above in self.above if above is not None)
        self.segments = [segment.numbers for segment in self._segments]
        self.question = tasks[0].question
        self.tokens = sum(task.tokens for task in tasks)
        chars = sum(len(task.text) for task in tasks)
        self.per_char = self.tokens / chars if chars else 0.0

    def _add(self, task: Task, units: Sequence[Unit]) -> None:
        numbers = range(len(self.texts), len(self.texts) + len(units))
        outline = Outline()
        self._segments.append(_Segment(task, numbers, Rebuilder(task.text, [unit.span for unit in units])))
        self.texts += [task.text[unit.start : unit.end] for unit in units]
        self.above += [outline.above(i, level=unit.level) for i, unit in zip(numbers, units, strict=True)]
        self.must += _touched(units, task.protected)
        if task.goes_on and units:
            self.must[-1] |= units[-1].level > 0
            for head in self.over(numbers[-1]):
                self.must[head] = True

    def over(self, i: int) -> Iterator[int]:
        """The headings that a unit stands under, nearest first."""
        above = self.above[i]
        while above is not None:
            yield above
            above = self.above[above]

    def __len__(self) -> int:
        return len(self.texts)

    def free(self, keep: Sequence[bool]) -> list[int]:
        """The units that may be chosen beside those that stay. Headings come with what is chosen."""
        return [i for i, stays in enumerate(keep) if not stays and i not in self.heads]

    def with_headings(self, keep: Sequence[bool], more: Iterable[int] = ()) -> list[bool]:
        """Those that stay, `more` of them, and the headings above all these."""
        wider = list(keep)
        for i in more:
            wider[i] = True
        for i in range(len(wider) - 1, -1, -1):
            above = self.above[i]
            if wider[i] and above is not None:
                wider[above] = True
        return wider

    def estimate(self, i: int) -> float:
        """Tokens of a unit by its length."""
        return (len(self.texts[i]) + 1) * self.per_char

    def fits(self, i: int, room: float) -> bool:
        """Whether a unit by itself has no more tokens than that; one is at least a byte."""
        text = self.texts[i]
        return len(text.encode("utf-8", "surrogatepass")) <= room or self._count(text) <= room

    def counting(self, tokens: float, clock: Callable[[], float]) -> float:
        """Seconds that a count of so many tokens takes, by a piece of the text."""
        piece = self._segments[0].task.text[:_PIECE]
        began = clock()
        return tokens / max(1, self._count(piece)) * (clock() - began)

    def size(self, keep: Sequence[bool]) -> int:
        """Tokens of all segments with these units."""
        return sum(segment.size(keep, self._count) for segment in self._segments)

    def rewrites(self, choice: Choice) -> Iterator[tuple[Task, Rewrite]]:
        """Each segment's task with what stays of it."""
        for segment in self._segments:
            yield segment.task, Rewrite.of_kept(segment.spans(choice.keep), note=choice.note)


@dataclass(frozen=True)
class _Segment:
    """A task and the numbers of its units. Sizes are kept by which of these stay: counting is dear."""

    task: Task
    numbers: range
    rebuilder: Rebuilder
    sizes: dict[tuple[bool, ...], int] = field(default_factory=dict)

    def size(self, keep: Sequence[bool], count: Count) -> int:
        own = self._own(keep)
        if own not in self.sizes:
            self.sizes[own] = count(Rewrite.of_kept(self.rebuilder.spans(own)).text(self.task.text))
        return self.sizes[own]

    def spans(self, keep: Sequence[bool]) -> list[Span]:
        return self.rebuilder.spans(self._own(keep))

    def _own(self, keep: Sequence[bool]) -> tuple[bool, ...]:
        return tuple(keep[self.numbers.start : self.numbers.stop])


def _touched(units: Sequence[Unit], spans: Sequence[Span]) -> list[bool]:
    """Which units hold protected text. Both ascending and disjoint."""
    touched, at = [], 0
    for unit in units:
        while at < len(spans) and spans[at][1] <= unit.start:
            at += 1
        touched.append(at < len(spans) and spans[at][0] < unit.end)
    return touched
