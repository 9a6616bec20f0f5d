"""The perplexity compressor: leaves out the words that the model itself foresees. Whole words, source white space."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .base import Job, LossyOptions, Task
from .candidate import Candidate, SpanValues
from .context import CompressionContext
from .draft import Draft
from .nearness import Nearness, nearness
from .options import option, share
from .pruning import drafts_in_time, pruned, settled, time_to_judge, unread
from .result import FAILED_NOTE, Rewrite, Span
from .surprise import Surprise, surprise_of

_ENDS = frozenset(".!?:…\n")
# What a name is worth beyond its surprise: it comes again, is foreseen then, and still says who did it.
_NAME = 6.0  # nats
_FOCUS = 100.0  # times what a word is worth, in the sentence that is nearest to the question, beyond once
# A budget in tokens goes farther in words that are worth much for their length; half way, for long words say more.
_CHARS_OF_A_TOKEN, _BY_LENGTH = 4.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Perplexity(LossyOptions):
    """Keeps the atoms (see atoms.py) of highest surprise until the rate is met, in their order.

    Texts of one message share one budget, so that what says something new keeps more than what does not. A token is
    judged by its own surprise; with `focus` above 0 (1 at most) words count for more in sentences that share words with
    the question, which costs next to nothing; with `contrast` above 0 also by how much likelier the question makes a
    token, which costs a second pass of the model (after Jiang et al. (2023), "LongLLMLingua", arXiv:2310.06839).
    Negations and modals stay or go with what they govern, and go last; and/or stay between kept words; a heading or a
    speaker's name stays with any word under it, a sentence's end mark with any word of it, a list bullet with any word
    of its line.
    """

    name = "perplexity"

    contrast: float = option(0.0, share)
    focus: float = option(1.0, share)

    @property
    def cost_name(self) -> str:
        return f"{self.name}-contrast" if self.contrast else self.name

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        if job.context.score is None:
            for task in job.tasks:
                yield task, Rewrite.whole(task.text, note=f"perplexity needs a scorer; {FAILED_NOTE}")
            return
        for _, group in itertools.groupby(job.tasks, key=lambda task: task.segment.message):
            if job.context.expired():
                return
            yield from self._rewrites(list(group), job.context)

    def _rewrites(self, tasks: Sequence[Task], context: CompressionContext) -> Iterator[tuple[Task, Rewrite]]:
        drafts = drafts_in_time(tasks, context)
        if not drafts:
            yield from unread(tasks)
            return
        if settled(drafts, self.target, context):
            yield from pruned(tasks, [Candidate.unjudged(draft) for draft in drafts], self.target, context)
            return
        near = self._near(tasks, context)
        plain = self._pass(drafts, "", context)
        given = f"{tasks[0].question}\n\n" if self.contrast and tasks[0].question else ""
        asked = self._pass(drafts, given, context) if given else [None] * len(tasks)
        candidates = [
            Candidate.judged(draft, task, end=one.end, worth=partial(self._worth, task.text, one, other), weight=weight)
            for draft, task, one, other, weight in zip(drafts, tasks, plain, asked, near, strict=True)
        ]
        yield from pruned(tasks, candidates, self.target, context)

    def _near(self, tasks: Sequence[Task], context: CompressionContext) -> list[SpanValues]:
        """How much words of each text count by how near their sentences are to the question."""
        texts, whole = [task.text for task in tasks], [task.protected for task in tasks]
        question = tasks[0].question if self.focus else ""
        found = nearness(texts, question, whole=whole, expired=context.expired)

        def weight(near: Nearness, spans: Sequence[Span]) -> NDArray[np.float64]:
            return 1.0 + _FOCUS * self.focus * near.of([start for start, _ in spans])

        return [partial(weight, near) for near in found]

    def _worth(self, text: str, plain: Surprise, asked: Surprise | None, spans: Sequence[Span]) -> NDArray[np.float64]:
        """What spans of a text are worth; the contrast counts as far as there was time for both passes."""
        nats = plain.of(spans)
        worth = nats + _NAME * np.array([_named(text, start, end) for start, end in spans], dtype=np.float64)
        if asked is not None:
            seen = np.array([end <= asked.end for _, end in spans], dtype=bool)
            worth += self.contrast * np.where(seen, np.maximum(nats - asked.of(spans), 0.0), 0.0)
        lengths = np.array([end - start for start, end in spans], dtype=np.float64) / _CHARS_OF_A_TOKEN
        return worth / np.maximum(lengths, 1.0) ** _BY_LENGTH

    def _pass(self, drafts: Sequence[Draft], given: str, context: CompressionContext) -> list[Surprise]:
        assert context.score is not None, "offered only where there is a scorer"
        texts = [draft.text for draft in drafts]
        return surprise_of(
            texts,
            score=context.score,
            wanted=[draft.spans for draft in drafts],
            remaining=time_to_judge(texts, context),
            given=given,
        )


def _named(text: str, start: int, end: int) -> bool:
    """Whether a word has a capital that is not its sentence's or its line's."""
    return end - start > 1 < start and text[start].isupper() and text[start - 1] == " " and text[start - 2] not in _ENDS
