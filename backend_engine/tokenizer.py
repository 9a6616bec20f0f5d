"""Text and chat messages to token ids, such that text from outside never becomes a control token.

A chat template mixes its own control tokens with what users wrote. Before rendering, everything in the messages that
looks like a special token, and every chunk that must keep its own ids, is swapped for a sentinel, which a copy of the
tokenizer knows as special tokens. In the ids, sentinels are then replaced by the plain encoding of what they stand for.
Without either, the ids are exactly those of transformers' `apply_chat_template`.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..prompt.errors import BadRequest, ConfigError
from .chat import TOOL_MARKS, ChunkMark, PlainMessage, plain_messages
from .sentinels import Sentinels, Swaps, sentinel_tokens
from .token_bytes import TokenBytes

# Of models that are loaded at once, each in its thread: transformers is found half imported by the second one.
_IMPORTING = threading.Lock()
# In place of transformers' own function, instead of which it passes no other one on to a template.
_DATED = "{{%- macro strftime_now(format) -%}}{{{{ format{} }}}}{{%- endmacro %}}\n"  # the line's end is trimmed
_DATES = ("a", "A", "b", "B", "d", "-d", "m", "-m", "y", "Y", "j")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a chat, and what the marked chunks became: (first token, number of tokens, index of the mark).

    Spans ascend. A chunk that the template left out has none; one that it repeated has several.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...] = ()


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        self._template = _read(path)
        self.backend: Tokenizer = _copy(self._template.backend_tokenizer)
        self._plain = _copy(self.backend)
        self._plain.encode_special_tokens = True
        self._marked = _copy(self.backend)
        self._marked.add_special_tokens(sentinel_tokens())
        self._sentinels = Sentinels(self._marked, _special_texts(self.backend))

    @cached_property
    def longest_token(self) -> int:
        """Characters in the longest token: a text of n characters has at least n over this many tokens, unless the
        tokenizer's normalizer shortens it.
        """
        return max(map(len, self.backend.get_vocab(with_added_tokens=False)))

    @property
    def has_template(self) -> bool:
        return bool(self._template.chat_template)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` standing alone; the text of a special token is plain text, and nothing is put around it."""
        return _ids(self._plain, text)

    def encode_raw(self, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], int]:
        """Ids of a prompt that its sender has laid out himself: the text of a special token becomes that token.

        With `add_special_tokens`, what the tokenizer puts around a text (most often a token before it) is there too;
        the second value is the number of ids that were so put before the text.
        """
        encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        mask = encoding.special_tokens_mask
        return encoding.ids, mask.index(0) if 0 in mask else len(mask)

    def count(self, text: str) -> int:
        """Number of tokens of `encode_plain(text)`."""
        return len(self.encode_plain(text))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chunks: Sequence[ChunkMark] = (),
        day: date | None = None,
    ) -> Encoded:
        """Render Chat Completions messages with the model's template, up to where the assistant begins to speak.

        `chunks` are disjoint; each becomes exactly `encode_plain` of its characters. `day` is what a template writes
        that asks for the date, its name or its numbers (not the time); else it gets that of now. Raises BadRequest
        naming the message or field that the model cannot take (an image, tools without support, what the template
        itself rejects).
        """
        template = self._chat_template(bool(tools))
        if tools and "tools" not in template:
            raise BadRequest("this model's chat template has no place for tools", param="tools")
        swaps = Swaps(self._sentinels)
        prepared = _swapped(plain_messages(messages, template), chunks, swaps)
        text = self._render(prepared, swaps.everywhere(list(tools)) if tools else None, day)
        ids, spans = swaps.restored(_ids(self._marked, text), self.encode_plain)
        return Encoded(tuple(ids), tuple(spans))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each id stands for, alone."""
        return TokenBytes(self.backend)

    def stream(self) -> "TokenStream":
        """A fresh incremental decoder for one generation."""
        return TokenStream(self.backend, self._marks)

    @cached_property
    def _marks(self) -> dict[int, str]:
        """Tool calls are read out of the text: what marks them there has to be in it."""
        return {token: text for text in TOOL_MARKS if (token := self.special_token(text)) is not None}

    def special_token(self, text: str) -> int | None:
        """The id of the special token that is written so; None where there is none."""
        token = self.backend.token_to_id(text)
        return token if token is not None and text in self._special else None

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(_special_texts(self.backend))

    @property
    def tool_template(self) -> str:
        """The chat template for requests with tools; empty where there is none at all."""
        return self._chat_template(with_tools=True) if self.has_template else ""

    def _chat_template(self, with_tools: bool) -> str:
        if not self.has_template:
            raise BadRequest("this model has no chat template; it cannot answer chat messages", param="model")
        return self._template.get_chat_template(None, [{}] if with_tools else None)

    def _render(self, messages: list[Any], tools: list[Any] | None, day: date | None) -> str:
        from jinja2 import TemplateError

        template = self._chat_template(bool(tools))
        if day is not None and "strftime_now" in template:
            letters = "".join(f"|replace('%{one}', '{day.strftime(f'%{one}')}')" for one in _DATES)
            template = _DATED.format(letters) + template
        try:
            return self._template.apply_chat_template(
                messages, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the model's chat template rejects these messages: {error}", param="messages") from error


class TokenStream:
    """Turns one generation's ids into text as they come. Holds back the bytes of an unfinished character.

    `marks` are the special tokens that are text nevertheless.
    """

    def __init__(self, backend: Tokenizer, marks: Mapping[int, str]) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._marks = marks

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished, or for a special token."""
        return self._stream.step(self._backend, token_id) or self._marks.get(token_id, "")


def _swapped(messages: list[PlainMessage], chunks: Sequence[ChunkMark], swaps: Swaps) -> list[dict[str, Any]]:
    places: list[list[tuple[int, int, int]]] = [[] for _ in messages]
    for index, mark in enumerate(chunks):
        places[mark.message].append((*messages[mark.message].place(mark), index))
    return [
        {**swaps.everywhere(message.fields), "content": swaps.content(message.content, sorted(marks))}
        for message, marks in zip(messages, places, strict=True)
    ]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The one of the library's ways that lets other threads run: `encode` stops them, for seconds on a large text."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _read(path: Path) -> Any:
    with _IMPORTING:
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ConfigError(f"the tokenizer cannot be read ({error})", file=str(path)) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError("the tokenizer has no tokenizer.json form, which the engine needs", file=str(path))
    return tokenizer


def _copy(backend: Tokenizer) -> Tokenizer:
    copied = Tokenizer.from_str(backend.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied


def _special_texts(backend: Tokenizer) -> list[str]:
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
