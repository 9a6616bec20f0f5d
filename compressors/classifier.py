"""The classifier compressor: leaves out the words that a trained token classifier would, as LLMLingua-2 does."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .base import Job, LossyOptions, Task
from .options import folder, option, whole
from .pruning import Candidate, pruned, time_to_judge
from .result import FAILED_NOTE, Rewrite


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
            texts = [task.text for task in tasks]
            votes = model.votes(texts, remaining=time_to_judge(texts, job.context), clock=job.context.clock)
            candidates = [Candidate.of(task, end=one.end, worth=one.of) for task, one in zip(tasks, votes, strict=True)]
            yield from pruned(tasks, candidates, self.target, job.context)
