"""The compressor interface. The base selects segments, finds what is protected, measures, checks and falls back; a
plug-in writes one function, from texts to rewrites.
"""

import itertools
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..prompt import BadRequest, Kind, Prompt, Segment
from .context import CompressionContext
from .options import check_options, kinds, option, or_none, rate, share, some_of, whole
from .protect import CATEGORIES, SCAN_SPEED, protected_spans
from .question import question_finder
from .result import FAILED_NOTE, LATE_NOTE, Change, Compression, Rewrite, Span

_log = logging.getLogger(__name__)
_OPEN_KINDS = frozenset({Kind.DOCUMENT, Kind.HISTORY, Kind.INSTRUCTION, Kind.TOOL_RESULT, Kind.OTHER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One text to be rewritten. `question` is that of the segment's turn, `tokens` the size, `protected` the spans that
    must come out verbatim (ascending, disjoint; empty for a lossless compressor). `goes_on`: code of the same message
    follows, which stands under the text's last heading or label.
    """

    segment: Segment
    question: str
    tokens: int
    protected: tuple[Span, ...]
    goes_on: bool = False

    @property
    def text(self) -> str:
        return self.segment.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All tasks of one prompt, in order. `prompt` also shows the segments that may not be changed."""

    prompt: Prompt
    tasks: tuple[Task, ...]
    context: CompressionContext


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Makes rewritable segments shorter. An immutable value: its fields are its options, checked when it is made.

    Never touches a segment that is not rewritable or not of `kinds`, or that has fewer than `min_tokens` tokens; never
    makes a text longer; never raises for what a text holds. Equal prompts, options and callables give equal results in
    every process, unless a deadline passes.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    kinds: frozenset[Kind] = option(_OPEN_KINDS, kinds)
    min_tokens: int = option(1, whole(least=1))

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def cost_name(self) -> str:
        """What runs of it are entered as where costs are learned: options that change the work change the name."""
        return self.name

    @abstractmethod
    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        """Yield a rewrite for each task, best first to be ready; a task that is left out keeps its text.

        Owes: stop, or finish what is begun, when `job.context` expires; deterministic; kept spans cover
        `task.protected`. May raise: what was yielded before counts, the rest stays as it was.
        """

    def applies(self, text: str) -> bool:
        """Whether there may be anything for it in a text, by a quick look. The planner asks before it counts on it."""
        return True

    def protected(self, text: str) -> tuple[Span, ...]:
        """The spans of a text that must survive verbatim."""
        return ()

    def compress(self, prompt: Prompt, *, context: CompressionContext) -> Compression:
        """Rewrite the prompt. The caller keeps `prompt`; nothing is changed in place."""
        tasks, notes = self._tasks(prompt, context)
        rewrites: dict[int, Rewrite] = {}
        try:
            for task, rewrite in self.rewrite(Job(prompt=prompt, tasks=tuple(tasks), context=context)):
                rewrites[task.segment.id] = rewrite
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it is logged
            notes.append(failure_note(self.name, error))
        changes = tuple(self._judge(task, rewrites, context) for task in tasks)
        texts = {
            change.segment: rewrites[change.segment].text(task.text)
            for change, task in zip(changes, tasks, strict=True)
            if change.tokens_after < change.tokens_before
        }
        fresh = prompt.replace(texts) if texts else prompt
        return Compression(prompt=fresh, changes=changes, notes=tuple(notes))

    def _tasks(self, prompt: Prompt, context: CompressionContext) -> tuple[list[Task], list[str]]:
        question_of = question_finder(prompt, question=context.question)
        going_on = {a.id for a, b in itertools.pairwise(prompt.segments) if b.kind is Kind.CODE and a.path == b.path}
        tasks: list[Task] = []
        late = 0
        for segment in prompt.segments:
            # A token is at least one byte of UTF-8, so most small texts need no count.
            chosen = context.only is None or segment.id in context.only
            if (
                not chosen
                or not self._open(segment)
                or len(segment.text.encode("utf-8", "surrogatepass")) < self.min_tokens
            ):
                continue
            if context.remaining() <= len(segment.text) / SCAN_SPEED:
                late += 1
                continue
            tokens = context.count(segment.text)
            if tokens >= self.min_tokens:
                protected = self.protected(segment.text)
                tasks.append(
                    Task(
                        segment=segment,
                        question=question_of(segment),
                        tokens=tokens,
                        protected=protected,
                        goes_on=segment.id in going_on,
                    )
                )
        return tasks, [f"{LATE_NOTE}: {late} segments left as they were"] if late else []

    def _open(self, segment: Segment) -> bool:
        return segment.rewritable and segment.kind in self.kinds and not segment.text.isspace() and bool(segment.text)

    def _judge(self, task: Task, rewrites: Mapping[int, Rewrite], context: CompressionContext) -> Change:
        """Accept a rewrite only if it keeps its promises and pays."""
        rewrite = rewrites.get(task.segment.id)
        if rewrite is None:
            return _change(task, Rewrite.whole(task.text, note=LATE_NOTE if context.expired() else ""), task.tokens)
        if not covers(rewrite.kept, task.protected):
            note = f"{self.name} lost protected text; {FAILED_NOTE}"
            _log.error("%s lost protected text in a segment of kind %s", self.name, task.segment.kind)
            return _change(task, Rewrite.whole(task.text, note=note), task.tokens)
        text = rewrite.text(task.text)
        tokens = task.tokens if text == task.text else context.count(text)
        if tokens >= task.tokens:
            return _change(task, Rewrite.whole(task.text, note=rewrite.note), task.tokens)
        return _change(task, rewrite, tokens)


@dataclass(frozen=True, kw_only=True)
class TextCompressor(Compressor):
    """For compressors that look at one text at a time. One text that fails leaves the others their result."""

    @abstractmethod
    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        """Rewrite one text. Owes what `Compressor.rewrite` owes."""

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        for task in job.tasks:
            if job.context.expired():
                return
            try:
                rewrite = self.rewrite_text(task, context=job.context)
            except Exception as error:  # noqa: BLE001 - as above
                rewrite = Rewrite.whole(task.text, note=failure_note(self.name, error))
            yield task, rewrite


@dataclass(frozen=True, kw_only=True)
class LossyOptions(Compressor):
    """Options that all lossy compressors share.

    `target_rate` is the share of the backend's tokens to keep, `target_tokens` how many instead; met from below where
    protected text leaves the room. Whichever is asked, `floor_rate` and `floor_tokens` are the least to keep, and
    `ceiling_tokens` the most; a floor above the ceiling goes before it. All are for what shares a budget: a text, or
    what a compressor says. `protect` names the categories of text that survive verbatim.
    """

    lossless = False

    min_tokens: int = option(48, whole(least=1))
    target_rate: float = option(0.5, rate)
    target_tokens: int | None = option(None, or_none(whole(least=1)))
    floor_rate: float = option(0.0, share)
    floor_tokens: int = option(0, whole(least=0))
    ceiling_tokens: int | None = option(None, or_none(whole(least=1)))
    protect: frozenset[str] = option(CATEGORIES, some_of(CATEGORIES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ceiling_tokens is not None and self.ceiling_tokens < self.floor_tokens:
            raise BadRequest("ceiling_tokens must be at least floor_tokens", param="ceiling_tokens")

    def protected(self, text: str) -> tuple[Span, ...]:
        return protected_spans(text, categories=self.protect)

    def target(self, tokens: int) -> float:
        """How many of so many tokens to keep."""
        wanted = self.target_rate * tokens if self.target_tokens is None else self.target_tokens
        most = wanted if self.ceiling_tokens is None else min(wanted, self.ceiling_tokens)
        return max(min(float(tokens), most), self.floor(tokens))

    def floor(self, tokens: int) -> float:
        """How many of so many tokens are the least to keep."""
        return min(float(tokens), max(self.floor_rate * tokens, self.floor_tokens))


def failure_note(name: str, error: Exception) -> str:
    """Log a compressor's failure and say it in a few words that quote nothing of the prompt."""
    _log.warning("compressor %s failed; the original text is used", name, exc_info=error)
    return f"{name} failed ({type(error).__name__}); {FAILED_NOTE}"


def missed_note(least: int, *, wanted: float, tokens: int) -> str:
    """Why texts of so many tokens in all did not come down to what was asked for."""
    return f"the target rate was missed: {math.floor(wanted)} of {tokens} tokens were asked for, {least} must stay"


def covers(kept: tuple[Span, ...], wanted: tuple[Span, ...]) -> bool:
    """Whether every wanted span lies inside one kept span. Both ascending and disjoint."""
    starts = [start for start, _ in kept]
    for start, end in wanted:
        at = bisect_right(starts, start) - 1
        if start < end and (at < 0 or kept[at][1] < end):
            return False
    return True


def _change(task: Task, rewrite: Rewrite, tokens: int) -> Change:
    return Change(
        segment=task.segment.id,
        path=task.segment.path,
        kind=task.segment.kind,
        tokens_before=task.tokens,
        tokens_after=tokens,
        pieces=rewrite.pieces,
        note=rewrite.note,
    )
