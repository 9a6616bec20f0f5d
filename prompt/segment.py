"""Segment: a piece of a prompt with its role, its kind and the place that it was cut from."""

from dataclasses import dataclass
from enum import StrEnum

Path = tuple[str | int, ...]


class Kind(StrEnum):
    """What a segment is, which decides what may be done to it."""

    SYSTEM = "system"
    INSTRUCTION = "instruction"
    QUESTION = "question"
    DOCUMENT = "document"
    HISTORY = "history"
    TOOL_SCHEMA = "tool_schema"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    CODE = "code"
    IMAGE = "image"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One piece of the prompt; immutable, changed only through `Prompt.replace`.

    `path` is the JSON path of the string leaf that the text belongs to, for example `("messages", 3, "content")`; the
    texts of all segments of one leaf, joined in order, are the leaf. Segments that are no text leaf (an image, a tool
    schema) have `rewritable=False` and are never written back.
    `message` is the index in `messages` (-1 for a tool schema). `unit` numbers messages that stand or fall together: an
    assistant turn with tool calls and the results of these calls share one.
    `original` is the text as it came in, None for inserted (retrieved) text. `source` names where retrieved text is
    from.
    """

    id: int
    role: str
    kind: Kind
    text: str
    path: Path
    message: int
    unit: int
    rewritable: bool
    source: str | None = None
    original: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the text differs from what came in (inserted text counts as changed)."""
        return self.text != self.original
