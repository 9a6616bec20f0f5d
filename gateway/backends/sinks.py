"""What every prompt of a model may begin with: the ids after which its chunks are computed (kv_reuse/anchors.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from ...backend_engine.chat import ChunkMark
from ...backend_engine.tokenizer import ChatTokenizer
from ...kv_reuse.anchors import Anchor
from ...kv_reuse.prose import DOCUMENTS
from ...prompt import BadRequest
from ...rag.render import render_block

LADDER = (1, 4, 8)
"""How many documents stand before a chunk: with SmolLM2's tokens about 240, 700 and 1,400 of them.

Each rung may cost one more stored copy of a chunk. What was measured (docs/kv_reuse.md) is the nearest of five lengths
of about this range; these three of it were not, nor longer ones.
"""

_DAY = date(2025, 1, 1)  # for templates that write the date: what is stored serves on the next day, too
_PART = 5  # a sink may take one part in so many of a prompt; the others are for chunks


@dataclass(frozen=True)
class _Document:
    """As retrieval would bring it, from nowhere."""

    text: str
    chunk_id: str = ""
    headings: Sequence[str] = ()


def sinks_of(tokenizer: ChatTokenizer, *, room: int, before: Sequence[Mapping[str, Any]] = ()) -> list[Anchor]:
    """The beginnings, up to a retrieved document's text, of chats that have some documents of ours before it, behind
    the messages `before`; the shortest one first.

    Those that are not too long for the `room`, the tokens of a prompt. If none fits that, what the chat template begins
    with; nothing where there is no chat template. Whoever shares a store should say the same room, that of the model,
    or they miss each other's chunks.
    """
    if not tokenizer.has_template:
        return []
    texts = [*DOCUMENTS[: LADDER[-1]], "."]
    block = render_block([_Document(text) for text in texts])
    starts = _before_each(tokenizer, before, [(text, source is not None) for text, source in block])
    sinks = [starts[count] for count in LADDER if len(starts.get(count, ())) <= longest_sink(room)]
    return sinks or list(_before_each(tokenizer, before, [(".", True)]).values())


def longest_sink(room: int) -> int:
    """How many tokens a sink may have, for prompts of at most `room`."""
    return room // _PART


def _before_each(
    tokenizer: ChatTokenizer, before: Sequence[Mapping[str, Any]], pieces: Sequence[tuple[str, bool]]
) -> dict[int, Anchor]:
    """The ids before each piece that is marked, by its number among these, in a user's message of these pieces."""
    content, marks = "", []
    for text, marked in pieces:
        if marked:
            marks.append(ChunkMark(message=len(before), part=None, start=len(content), end=len(content) + len(text)))
        content += text
    chat = [*before, {"role": "user", "content": content}]
    try:
        encoded = tokenizer.encode_chat(chat, chunks=marks, day=_DAY)
    except BadRequest:  # by a template that takes the time apart, which has no fixed one
        encoded = tokenizer.encode_chat(chat, chunks=marks)
    return {mark: encoded.ids[:start] for start, _, mark in encoded.spans}
