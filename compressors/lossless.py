"""The lossless compressor: white space that means nothing, JSON layout, repeated blocks.

A reader can still tell all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from . import repeats
from .base import Compressor, Job, Task
from .options import flag, option, whole
from .result import Rewrite
from .whitespace import without_blank_space, without_json_layout


@dataclass(frozen=True, kw_only=True)
class Lossless(Compressor):
    """Idempotent. Each of its three ways can be switched off.

    `repeat_chars` is the smallest block, in characters, that a reference may replace. Run it before lossy compressors:
    they keep references, but not the wording of the block that a reference names.
    """

    name = "lossless"
    lossless = True

    space: bool = option(True, flag)
    json: bool = option(True, flag)
    repeats: bool = option(True, flag)
    repeat_chars: int = option(400, whole(least=250))

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        tasks = {task.segment.id: task for task in job.tasks}
        tidy: dict[int, Rewrite] = {}
        for key, task in tasks.items():
            if job.context.expired():
                break
            tidy[key] = self._tidied(task.text)
        if self.repeats and not job.context.expired():
            texts = [
                (segment.id, tidy[segment.id].text(segment.text) if segment.id in tidy else segment.text)
                for segment in job.prompt.segments
            ]
            folded = repeats.rewrites(((key, text, key in tidy) for key, text in texts), least=self.repeat_chars)
            tidy |= {key: tidy[key].then(later) for key, later in folded.items()}
        for key, rewrite in tidy.items():
            yield tasks[key], rewrite

    def _tidied(self, text: str) -> Rewrite:
        rewrite = without_json_layout(text) if self.json else Rewrite.whole(text)
        if self.space:
            rewrite = rewrite.then(without_blank_space(rewrite.text(text)))
        return rewrite
