"""The compressor that changes nothing: proof of the interface, and a test double."""

from dataclasses import dataclass

from .base import Task, TextCompressor
from .context import CompressionContext
from .result import Rewrite


@dataclass(frozen=True, kw_only=True)
class Identity(TextCompressor):
    """Returns every text as it is."""

    name = "identity"
    lossless = True

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        return Rewrite.whole(task.text)
