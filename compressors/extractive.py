"""The extractive compressor: whole sentences, list items and blocks, chosen by their relevance to the question."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..prompt import BadRequest
from .base import Job, LossyOptions, Task, missed_note
from .context import CompressionContext
from .nearest import with_nearest
from .options import folder, one_of, option, share
from .relevance import judge
from .result import FAILED_NOTE, LATE_NOTE, Rewrite
from .selection import Selection
from .units import Choice, Units


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
            units = Units(list(group), job.context)
            yield from units.rewrites(self._choice(units, job.context))

    def _choice(self, units: Units, context: CompressionContext) -> Choice:
        must = units.with_headings(units.must)
        if self._settled(units, must):
            return with_nearest(self._noted(units, must), units, self, context)
        judged = judge(units, context, by=self.relevance, model=self.model)
        selection = Selection(units, judged, self, context, redundancy=self.redundancy)
        choice = selection.within_target()
        if judged.seen < len(units):
            choice = Choice(choice.keep, f"{LATE_NOTE}: {judged.seen} of {len(units)} sentences judged, the rest kept")
        elif not choice.note:
            choice = self._noted(units, choice.keep)
            if choice.keep == selection.least and any(units.must):
                choice = with_nearest(choice, units, self, context)
        return selection.with_floor(choice)

    def _settled(self, units: Units, must: list[bool]) -> bool:
        """Whether protected text alone fills the budget in every segment, so that nothing is left to choose."""
        everywhere = all(any(units.must[i] for i in numbers) for numbers in units.segments)
        return everywhere and units.size(must) >= self.target(units.tokens)

    def _noted(self, units: Units, keep: list[bool]) -> Choice:
        """With a note where more stays than was asked for."""
        size, wanted = units.size(keep), self.target(units.tokens)
        return Choice(keep, missed_note(size, wanted=wanted, tokens=units.tokens) if size > wanted else "")
