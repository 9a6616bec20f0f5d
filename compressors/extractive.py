"""The extractive compressor: whole sentences, list items and blocks, chosen by their relevance to the question."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..prompt import BadRequest
from .base import Job, LossyOptions, Task, missed_note
from .budget import most_that_fit
from .context import CompressionContext
from .lexical import Words, shared_with
from .mmr import Floats, mmr_order, normalized
from .options import folder, one_of, option, share
from .outline import Outline
from .rebuild import Rebuilder
from .result import FAILED_NOTE, LATE_NOTE, Rewrite, Span
from .sentences import Unit, units_of

_log = logging.getLogger(__name__)

_FIRST_BATCH, _BATCH = 16, 64
_KNOWN = 0.2  # of what is asked: with fewer of its words in a text, words say little about what answers
_HEADING = 200  # characters of a heading count for what stands under it
_OF_DOCUMENT = 0.3  # of its best unit's score goes to each unit of a segment
# After the prefix that fits, so many of the next best are tried in the room that is left.
_FILLERS = 12
# While less than this share of the target is met, what did not fit is left out and the rest ordered anew: so often at
# most. Nearer than that, whole sentences rarely come.
_NEAR, _SEARCHES = 0.9, 8
# Over the budget goes one sentence at most: of so many characters, or of this share of the budget where that is more.
_ASIDE_CHARS, _ASIDE = 300, 0.1


@dataclass(frozen=True, kw_only=True)
class Extractive(LossyOptions):
    """Keeps the units that are nearest to the question and unlike each other (MMR), in their order.

    Segments of one message share one budget, so that a useful document stays and a useless one goes, except for its
    best sentence. A unit with protected text stays; where such units leave room for no other, so does the sentence that
    shares most words with the question, unless one that stays shares the same words or `ceiling_tokens` has no room. A
    heading stays with anything it heads. `redundancy` from 0 (relevance alone) to 1. A segment is judged by the
    question of its own turn (see question.py).

    `relevance` is by "words" shared with the question (BM25), by "meaning" (an embedder), by a "cross_encoder" that
    reads the question with each unit (`model`: its folder), or "auto": by words, but by meaning where the text has too
    few of the question's words and there is an embedder.
    """

    name = "extractive"

    redundancy: float = option(0.3, share)
    relevance: str = option("auto", one_of("auto", "words", "meaning", "cross_encoder"))
    model: str = option("", folder)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.relevance == "cross_encoder") != bool(self.model):
            raise BadRequest(
                "model, the folder of a sentence-transformers CrossEncoder, goes with relevance: cross_encoder",
                param="model",
            )
        if self.model and not (Path(self.model) / "config.json").is_file():
            raise BadRequest(
                f"model: there is no config.json in {self.model!r}; name the folder of a sentence-transformers"
                " CrossEncoder",
                param="model",
            )

    @property
    def cost_name(self) -> str:
        return f"{self.name}-{self.relevance}"

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        if job.context.embed is None and self.relevance == "meaning":
            for task in job.tasks:
                yield task, Rewrite.whole(task.text, note=f"extractive needs an embedder; {FAILED_NOTE}")
            return
        for _, group in itertools.groupby(job.tasks, key=lambda task: task.segment.message):
            if job.context.expired():
                return
            yield from _Selection(list(group), self, job.context).rewrites()


class _Judged(NamedTuple):
    """The first `seen` units: `vectors` [seen, dim], normalized, for likeness, and `relevance` [seen]."""

    vectors: Floats
    relevance: Floats
    seen: int


class _Selection:
    """The units of one message's segments and the choice among them. Units are numbered over all its segments."""

    def __init__(self, tasks: Sequence[Task], options: Extractive, context: CompressionContext) -> None:
        self._tasks, self._options, self._context = tasks, options, context
        self._units: list[tuple[int, Unit]] = []
        self._ranges: list[tuple[int, int]] = []
        self._rebuilders: list[Rebuilder] = []
        for n, task in enumerate(tasks):
            units = units_of(task.text, whole=task.protected)
            self._ranges.append((len(self._units), len(self._units) + len(units)))
            self._rebuilders.append(Rebuilder(task.text, [unit.span for unit in units]))
            self._units += [(n, unit) for unit in units]
        self._must: list[bool] = []
        for task, (start, end) in zip(tasks, self._ranges, strict=True):
            self._must += _touched([unit for _, unit in self._units[start:end]], task.protected)
        self._sections = _headings_above(self._units)
        self._heads = frozenset(above for above in self._sections if above is not None)
        for task, (start, end) in zip(tasks, self._ranges, strict=True):
            if task.goes_on and start < end:
                self._must[end - 1] |= self._units[end - 1][1].level > 0
                for head in self._over(end - 1):
                    self._must[head] = True
        self._sizes: dict[tuple[int, tuple[bool, ...]], int] = {}
        chars = sum(len(task.text) for task in tasks)
        self._total = sum(task.tokens for task in tasks)
        self._per_char = self._total / chars if chars else 0.0

    def rewrites(self) -> Iterator[tuple[Task, Rewrite]]:
        seen, judged = len(self._units), None
        keep = least = self._with_headings(self._must.copy())
        if not self._settled(least):
            judged = self._judged()
            seen, forced = judged.seen, self._forced(judged.relevance, judged.seen)
            keep, least = self._chosen(judged, forced), self._with_headings(forced.copy())
        note = ""
        if seen < len(self._units):
            note = f"{LATE_NOTE}: {seen} of {len(self._units)} sentences judged, the rest kept"
        elif not self._context.expired():
            note = self._missed(keep)
            if keep == least and any(self._must):
                keep, note = self._with_nearest(keep, note)
            if judged is not None:
                keep, note = self._with_floor(judged, keep, note)
        for n, task in enumerate(self._tasks):
            yield task, Rewrite.of_kept(self._rebuilders[n].spans(keep[slice(*self._ranges[n])]), note=note)

    def _settled(self, keep: list[bool]) -> bool:
        """Whether protected text alone fills the budget in every segment, so that nothing is left to choose."""
        everywhere = all(any(self._must[start:end]) for start, end in self._ranges)
        return everywhere and self._size(keep) >= self._options.target(self._total)

    def _missed(self, keep: list[bool]) -> str:
        """A note where more stays than was asked for, else nothing."""
        size, wanted = self._size(keep), self._options.target(self._total)
        return missed_note(size, wanted=wanted, tokens=self._total) if size > wanted else ""

    def _with_nearest(self, keep: list[bool], note: str) -> tuple[list[bool], str]:
        """With the sentence, of those that could go, that shares most with the question, though there is no room for it
        beside what must stay: without what answers all the rest stays for nothing. By words, and of what stays only
        where those stand. The note says how many tokens must stay without it.
        """
        question = self._tasks[0].question
        free = [i for i, stays in enumerate(keep) if not stays and i not in self._heads] if question else []
        words = Words(map(self._text, free), expired=self._context.expired)
        scores = words.bm25(question, stop_words=False)
        if len(scores) < len(free):
            note = f"{LATE_NOTE}: {len(scores)} of {len(free)} sentences compared with the question"
        target = self._options.target(self._total)
        longest = max(_ASIDE * target, _ASIDE_CHARS * self._per_char)
        near = [k for k, i in enumerate(free[: len(scores)]) if scores[k] > 0 and self._estimate(i) <= longest]
        if not near:
            return keep, note
        best = free[max(near, key=lambda k: (scores[k], -k))]
        shared = shared_with(question)
        asked = shared(self._text(best))
        staying = (i for i, stays in enumerate(keep) if stays and i not in self._heads)
        if any(self._context.expired() or shared(self._text(i)) >= asked for i in staying):
            return keep, note
        wider = keep.copy()
        wider[best] = True
        size, fresh = self._size(keep), self._size(self._with_headings(wider))
        if self._options.ceiling_tokens is not None and fresh > max(self._options.ceiling_tokens, target):
            return keep, note
        if fresh > target and not note:
            note = missed_note(size, wanted=target, tokens=self._total)
        return wider, f"{note}, {fresh - size} more with the sentence nearest to the question" if note else note

    def _with_floor(self, judged: _Judged, keep: list[bool], note: str) -> tuple[list[bool], str]:
        """With the next best units while fewer tokens stay than the floor says, within a ceiling that is above it."""
        floor, ceiling = self._options.floor(self._total), self._options.ceiling_tokens
        most = float(self._total if ceiling is None or ceiling < floor else ceiling)
        size = self._size(keep)
        free = [i for i, stays in enumerate(keep) if not stays and i not in self._heads] if size < floor else []
        if not free:
            return keep, note
        for _ in range(_SEARCHES):
            free = [i for i in free if not keep[i] and self._fits(i, most - size)]
            if size >= floor or not free or self._context.expired():
                break
            best = self._best_first(judged, free, keep, room=0.0)[0]
            wider = self._kept(keep, [best])
            fresh = self._size(wider)
            if fresh <= most:
                keep, size = wider, fresh
            free.remove(best)
        least = f"at least {math.ceil(floor)} of {self._total} tokens were to stay"
        said = f"{least}, whole sentences make it {size}" if size >= floor else f"{least}, {size} do"
        return keep, "; ".join(filter(None, (note, said)))

    def _text(self, i: int) -> str:
        owner, unit = self._units[i]
        return self._tasks[owner].text[unit.start : unit.end]

    def _judged(self) -> _Judged:
        by, question = self._options.relevance, self._tasks[0].question
        if by == "meaning":
            return self._by_meaning()
        words = self._words()
        if by == "cross_encoder" and question:
            return self._by_reading(words, question)
        if by == "auto" and self._context.embed is not None and question and words.known(question) < _KNOWN:
            judged = self._meaning_if_any()
            if judged is not None and (judged.seen == len(self._units) or self._context.expired()):
                return judged  # what was not judged when the time was over stays
        return self._by_words(words)

    def _words(self) -> Words:
        """The units as bags of words, as far as there is time: vectors and the choice take about as long each."""
        context = self._context
        began = context.clock()
        texts = (self._in_context(i) for i in range(len(self._units)))
        return Words(texts, expired=lambda: context.remaining() <= 2.0 * (context.clock() - began))

    def _in_context(self, i: int) -> str:
        """A unit with the heading that it stands under, which often names what the unit calls "it"."""
        above = self._sections[i]
        return self._text(i) if above is None else f"{self._text(above)[:_HEADING]} {self._text(i)}"

    def _meaning_if_any(self) -> _Judged | None:
        """None where the embedder cannot be had: words say less, but something."""
        try:
            return self._by_meaning()
        except Exception as error:  # noqa: BLE001 - an embedder may raise anything; it is logged
            _log.warning("no embedder for extractive, which goes by words: %s", type(error).__name__)
            return None

    def _by_words(self, words: Words) -> _Judged:
        vectors = normalized(words.vectors())
        scores = words.bm25(self._tasks[0].question)
        if not scores.any():
            return _Judged(vectors, _centrality(vectors), len(vectors))
        for start, end in self._ranges:
            if start < min(end, len(scores)):
                scores[start:end] += _OF_DOCUMENT * scores[start:end].max()
        return _Judged(vectors, scores / scores.max(), len(vectors))

    def _by_reading(self, words: Words, question: str) -> _Judged:
        """The best unit counts 1, the worst 0. Stops early when the next batch would not be ready in time."""
        from .cross_encoder import cross_encoder  # imports torch

        vectors = normalized(words.vectors())
        model = cross_encoder(self._options.model, seconds=self._context.remaining())
        if model is None:
            return _Judged(vectors[:0], np.zeros(0, dtype=np.float32), 0)
        rows = list(self._batches(partial(model.scores, question), most=len(vectors), turn=model.turn))
        scores = by_order(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.float32)
        return _Judged(vectors[: len(scores)], scores, len(scores))

    def _by_meaning(self) -> _Judged:
        """Stops early when the next batch would not be ready in time."""
        embed = self._context.embed
        assert embed is not None
        question = self._tasks[0].question
        asked = normalized(embed([question])) if question else None
        rows = list(self._batches(lambda texts: normalized(embed(texts)), most=len(self._units)))
        vectors = np.concatenate(rows) if rows else np.zeros((0, 1), dtype=np.float32)
        if asked is None or not rows:
            return _Judged(vectors, _centrality(vectors), len(vectors))
        return _Judged(vectors, vectors @ asked[0], len(vectors))

    def _batches(
        self,
        judge: Callable[[Sequence[str]], Floats],
        *,
        most: int,
        turn: Callable[[float], AbstractContextManager[bool]] = lambda seconds: nullcontext(True),
    ) -> Iterator[Floats]:
        """What `judge` says of the first `most` units, as far as there is time by the batches before.

        Each begins when it is its `turn`, for which it waits while there is time; that wait says nothing of the speed.
        """
        context = self._context
        at, size, speed = 0, _FIRST_BATCH, 0.0
        while at < most:
            texts = [self._text(i) for i in range(at, min(at + size, most))]
            chars = sum(map(len, texts))
            with turn(context.remaining()) as free:
                began = context.clock()
                if not free or context.remaining() <= chars * speed:
                    return
                found = judge(texts)
                speed = (context.clock() - began) / chars
            yield found
            at, size = at + len(texts), _BATCH

    def _chosen(self, judged: _Judged, forced: list[bool]) -> list[bool]:
        """The forced units and the best that fit the target beside them. While that is much less than the target, what
        did not fit is left out and the next best are ordered anew.
        """
        target = self._options.target(self._total)
        chosen: list[int] = []
        keep, held = forced.copy(), 0
        spent = sum(self._estimate(i) for i, must in enumerate(forced) if must)
        free = [
            i for i in range(judged.seen) if not forced[i] and i not in self._heads
        ]  # they come with what is chosen
        for _ in range(_SEARCHES):
            order = self._best_first(judged, free, keep, room=1.3 * target - spent)
            fitted, tried = self._fitted(forced, chosen, order, target=target, held=held)
            if held and self._context.expired():  # what the search last guessed may be too much
                break
            chosen = fitted
            keep = self._kept(forced, chosen)
            if self._context.expired():
                break
            held = spent = self._size(keep)
            room = target - held
            if held >= _NEAR * target or room < 1:
                break
            free = [i for i in free if not keep[i] and i != tried and self._fits(i, room)]
            if not free:
                break
        return self._kept(forced, chosen)

    def _best_first(self, judged: _Judged, free: Sequence[int], keep: Sequence[bool], *, room: float) -> list[int]:
        """`free`, the best beside what is kept first, as far as the room goes by estimates."""

        def enough(i: int) -> bool:
            nonlocal room
            room -= self._estimate(i)
            return room < 0 or self._context.expired()

        rows = sorted({*free, *(i for i in range(judged.seen) if keep[i])})
        order = mmr_order(
            judged.vectors[rows],
            judged.relevance.astype(np.float32)[rows],
            taken=[k for k, i in enumerate(rows) if keep[i]],
            redundancy=self._options.redundancy,
            enough=lambda k: enough(rows[k]),
        )
        return [rows[k] for k in order]

    def _fits(self, i: int, room: float) -> bool:
        """Whether a unit by itself has no more tokens than that; one is at least a byte."""
        text = self._text(i)
        return len(text.encode("utf-8", "surrogatepass")) <= room or self._context.count(text) <= room

    def _over(self, i: int) -> Iterator[int]:
        """The headings that a unit stands under, nearest first."""
        above = self._sections[i]
        while above is not None:
            yield above
            above = self._sections[above]

    def _estimate(self, i: int) -> float:
        unit = self._units[i][1]
        return (unit.end - unit.start + 1) * self._per_char

    def _forced(self, relevance: Floats, seen: int) -> list[bool]:
        """Units that stay whatever the budget: protected text, what was not judged, and the best of each segment."""
        forced = [must or i >= seen for i, must in enumerate(self._must)]
        for start, end in self._ranges:
            if start < end and not any(forced[start:end]):
                best = max(range(start, end), key=lambda i: (i not in self._heads, relevance[i], -i))
                forced[best] = True
        return forced

    def _kept(self, forced: Sequence[bool], chosen: Sequence[int]) -> list[bool]:
        keep = list(forced)
        for i in chosen:
            keep[i] = True
        return self._with_headings(keep)

    def _fitted(
        self, forced: list[bool], chosen: list[int], order: list[int], *, target: float, held: int
    ) -> tuple[list[int], int | None]:
        """`chosen`, the longest prefix of `order` that fits the target beside these and the forced units, and later
        ones that still fit; and the first that did not. `held` tokens there are without `order`.
        """

        def size(more: Sequence[int]) -> int:
            return self._size(self._kept(forced, [*chosen, *more]))

        room = target - (held or sum(self._estimate(i) for i, must in enumerate(forced) if must))
        fit = most_that_fit(
            len(order),
            size_of=lambda k: size(order[:k]) - held,
            target=target - held,
            guess=sum(1 for spent in itertools.accumulate(map(self._estimate, order)) if spent <= room),
            expired=self._context.expired,
        )
        more = order[:fit]
        for i in order[fit + 1 : fit + 1 + _FILLERS]:
            if self._context.expired():
                break
            room = target - size(more)
            if self._estimate(i) <= room and size([*more, i]) <= target:
                more = [*more, i]
        return [*chosen, *more], order[fit] if fit < len(order) else None

    def _with_headings(self, keep: list[bool]) -> list[bool]:
        for i in range(len(keep) - 1, -1, -1):
            above = self._sections[i]
            if keep[i] and above is not None:
                keep[above] = True
        return keep

    def _size(self, keep: list[bool]) -> int:
        """Tokens of all segments with these units; segments that did not change since are not counted again."""
        total = 0
        for n, task in enumerate(self._tasks):
            mask = tuple(keep[slice(*self._ranges[n])])
            if (n, mask) not in self._sizes:
                spans = self._rebuilders[n].spans(mask)
                self._sizes[n, mask] = self._context.count(Rewrite.of_kept(spans).text(task.text))
            total += self._sizes[n, mask]
        return total


def by_order(scores: Floats) -> Floats:
    """Scores, [units], from 0 to 1, the best; what the model gave no number counts as the worst."""
    known = np.isfinite(scores)
    if not known.any():
        return np.zeros_like(scores)
    least = scores[known].min()
    scores = np.where(known, scores, least)
    return (scores - least) / max(float(np.ptp(scores)), 1e-9)


def _centrality(vectors: Floats) -> Floats:
    """Nearness to the middle of all, [n], for where nobody asks."""
    return vectors @ normalized(vectors.mean(axis=0, keepdims=True))[0] if len(vectors) else np.zeros(0, np.float32)


def _headings_above(units: Sequence[tuple[int, Unit]]) -> list[int | None]:
    """For each unit the heading right above it in the outline of its text; it goes along with what it heads."""
    above: list[int | None] = []
    outline, owner = Outline(), -1
    for i, (n, unit) in enumerate(units):
        if n != owner:
            owner, outline = n, Outline()
        above.append(outline.above(i, level=unit.level))
    return above


def _touched(units: Sequence[Unit], spans: Sequence[Span]) -> list[bool]:
    """Which units hold protected text. Both ascending and disjoint."""
    touched, at = [], 0
    for unit in units:
        while at < len(spans) and spans[at][1] <= unit.start:
            at += 1
        touched.append(at < len(spans) and spans[at][0] < unit.end)
    return touched
