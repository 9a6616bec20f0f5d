"""The lossless compressor: white space that means nothing, JSON layout, repeats; on request tables and rows.

A reader can still tell all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..prompt import BadRequest, Kind
from . import repeats
from .base import Compressor, Job, Task
from .context import CompressionContext
from .options import flag, option, whole
from .result import Rewrite
from .structure.folds import has_folds
from .structure.lines import shortened_lines
from .structure.markdown import without_table_padding
from .structure.templates import has_templates
from .whitespace import without_blank_space, without_json_layout

# Only what was said by tools and documents is written in another form: nobody's own words are.
_DATA = frozenset({Kind.DOCUMENT, Kind.TOOL_RESULT})


@dataclass(frozen=True, kw_only=True)
class Lossless(Compressor):
    """Idempotent. Each of its ways can be switched on and off.

    `space`, `json` (layout) and `markdown` (the padding of tables) only leave out. `repeats` puts a reference where a
    block of at least `repeat_chars` characters stood before. Of documents and tool results alone, and where that saves
    tokens: `folds` (repeated lines with their count), `templates` (lines that differ in their numbers), `tables` (JSON
    of like objects, which is no JSON any more; with `json`). Run it before lossy compressors: they keep references, but
    not the wording of the block that a reference names.
    """

    name = "lossless"
    lossless = True

    space: bool = option(True, flag)
    json: bool = option(True, flag)
    markdown: bool = option(True, flag)
    folds: bool = option(True, flag)
    templates: bool = option(False, flag)
    tables: bool = option(False, flag)
    repeats: bool = option(True, flag)
    repeat_chars: int = option(400, whole(least=250))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tables and not self.json:
            raise BadRequest("tables are written only where json is on", param="tables")

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        tasks = {task.segment.id: task for task in job.tasks}
        tidy: dict[int, Rewrite] = {}
        for key, task in tasks.items():
            if job.context.expired():
                break
            tidy[key] = self._shorter(task, job.context)
        if self.repeats and not job.context.expired():
            texts = [
                (segment.id, tidy[segment.id].text(segment.text) if segment.id in tidy else segment.text)
                for segment in job.prompt.segments
            ]
            folded = repeats.rewrites(((key, text, key in tidy) for key, text in texts), least=self.repeat_chars)
            tidy |= {key: tidy[key].then(later) for key, later in folded.items()}
        for key, rewrite in tidy.items():
            yield tasks[key], rewrite

    def _shorter(self, task: Task, context: CompressionContext) -> Rewrite:
        """What only leaves out, and then the forms of data, each where it has fewer tokens than there were before."""
        text = task.text
        best = self._tidied(text, tables=False)
        if task.segment.kind not in _DATA or has_folds(text) or has_templates(text):
            return best
        if self.tables:
            best = _fewer_tokens(text, best, self._tidied(text, tables=True), context)
        lines = shortened_lines(best.text(text), folds=self.folds, templates=self.templates)
        return _fewer_tokens(text, best, best.then(lines), context)

    def _tidied(self, text: str, *, tables: bool) -> Rewrite:
        rewrite = without_json_layout(text, tables=tables) if self.json else Rewrite.whole(text)
        if self.space:
            rewrite = rewrite.then(without_blank_space(rewrite.text(text)))
        if self.markdown:
            rewrite = rewrite.then(without_table_padding(rewrite.text(text)))
        return rewrite


def _fewer_tokens(text: str, one: Rewrite, other: Rewrite, context: CompressionContext) -> Rewrite:
    """The other one if it has fewer tokens, else the first."""
    before, after = one.text(text), other.text(text)
    return other if after != before and context.count(after) < context.count(before) else one
