"""The classifier compressor: leaves out the words that a trained token classifier would, as LLMLingua-2 does."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Job, LossyOptions, Task
from .candidate import Candidate
from .context import CompressionContext
from .draft import Draft
from .options import folder, option, whole
from .pruning import drafts_in_time, pruned, settled, time_to_judge, unread
from .result import FAILED_NOTE, Rewrite

if TYPE_CHECKING:
    from .token_classifier import TokenClassifier


@dataclass(frozen=True, kw_only=True)
class Classifier(LossyOptions):
    """Keeps the atoms that the model votes for, in the order of its confidence, until the rate is met.

    `model` is the folder of a transformers token classification model with a fast tokenizer, `keep_label` its label
    for tokens to keep: Pan et al. (2024), "LLMLingua-2" (arXiv:2403.12968). Texts of one message share one budget. What
    stays along with kept atoms is as for `perplexity`.
    """

    name = "classifier"

    model: str = option("", folder)
    keep_label: int = option(1, whole(least=0))

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        if not self.model:
            for task in job.tasks:
                yield task, Rewrite.whole(task.text, note=f"classifier needs a model; {FAILED_NOTE}")
            return
        from .token_classifier import classifier  # imports torch

        model = classifier(self.model, self.keep_label)
        for _, group in itertools.groupby(job.tasks, key=lambda task: task.segment.message):
            if job.context.expired():
                return
            tasks = list(group)
            drafts = drafts_in_time(tasks, job.context)
            if drafts:
                candidates = self._candidates(model, tasks, drafts, job.context)
                yield from pruned(tasks, candidates, self.target, job.context)
            else:
                yield from unread(tasks)

    def _candidates(
        self, model: "TokenClassifier", tasks: Sequence[Task], drafts: Sequence[Draft], context: CompressionContext
    ) -> list[Candidate]:
        texts = [task.text for task in tasks]
        if settled(drafts, self.target, context):
            return [Candidate.unjudged(draft) for draft in drafts]
        votes = model.votes(texts, remaining=time_to_judge(texts, context), clock=context.clock)
        return [
            Candidate.judged(draft, task, end=one.end, worth=one.of)
            for draft, task, one in zip(drafts, tasks, votes, strict=True)
        ]
