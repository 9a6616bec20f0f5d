"""Legacy text completions on the wire: whole or as chunks, with log-probabilities in columns."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..prompt import Usage
from .wire import Choice, dumps, stopped

Told = Sequence[Mapping[str, Any]]
"""Of each token an object, as chats have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that is said back before its completion: its text, its tokens' bytes where log-probabilities were asked
    for, and how many of the first of these stand for nothing in the text.
    """

    text: str
    tokens: Sequence[bytes] = ()
    added: int = 0


@dataclass(slots=True)
class _Offsets:
    """Where tokens begin in their text, in characters; one that begins within a character begins where that does."""

    at: int = 0

    def of(self, raw: bytes) -> int:
        within = raw[:1] and _continues(raw[0])
        start = max(0, self.at - 1 if within else self.at)
        self.at += sum(not _continues(byte) for byte in raw)
        return start


@dataclass(slots=True)
class _Columns:
    """OpenAI's legacy form of log-probabilities."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, one: Mapping[str, Any], offset: int) -> None:
        top: dict[str, float] = {}
        for other in (*one["top_logprobs"], one):
            top.setdefault(other["token"], other["logprob"])
        self._row(one["token"], one["logprob"], top, offset)

    def add_unknown(self, raw: bytes) -> None:
        """A text's first token, of which a model says nothing."""
        self._row(raw.decode("utf-8", "backslashreplace"), None, None, 0)

    def _row(self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class TextWriter:
    """Writes one text completion; a choice of prompt p has an index from p * `n` on. `echoes` by prompt, if any.

    For `deltas.py`, whose chat frames it has the counterparts of.
    """

    def __init__(self, *, model: str, n: int = 1, echoes: Sequence[Echo] = ()) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._shared = dumps(self._head)[:-1]
        self._n = n
        self._echoes = echoes
        self._offsets: dict[int, _Offsets] = {}

    def begin(self, index: int = 0, *, logprobs: Told | None = None) -> bytes:
        """The first chunk of a choice: its prompt, where that is said back, with what is told of its tokens."""
        echo = self._echo(index)
        return b"" if echo is None else self._chunk(index, echo.text, self._of_prompt(index, echo, logprobs))

    def content(self, text: str, *, index: int = 0, logprobs: Told | None = None) -> bytes:
        """A chunk with a piece of the text."""
        return self._chunk(index, text, self._columns(index, logprobs))

    def finish(self, reason: str, *, index: int = 0, stop: str | None = None) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(index, "", None, reason=reason, stop=stop)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk: no choices, sent last and only to who asked."""
        return self._shared + b',"choices":[],"usage":' + dumps(usage.to_wire()) + b"}"

    def whole(self, choices: Sequence[Choice], *, usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        listed = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return dumps({**self._head, "choices": listed, "usage": usage.to_wire()})

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        echo, text, columns = self._echo(index), choice.text, None
        if echo is not None:
            text = echo.text + text
            columns = self._of_prompt(index, echo, choice.prompt_logprobs)
        told = self._columns(index, choice.logprobs, columns)
        return _choice(index, text, told, reason=choice.reason, stop=choice.stop)

    def _echo(self, index: int) -> Echo | None:
        return self._echoes[index // self._n] if self._echoes else None

    def _of_prompt(self, index: int, echo: Echo, told: Told | None) -> _Columns | None:
        offsets = self._offsets[index] = _Offsets()
        if told is None or not echo.tokens:
            offsets.at = len(echo.text)
            return None
        columns, entries = _Columns(), iter(told)
        for place, raw in enumerate(echo.tokens):
            offset = 0 if place < echo.added else offsets.of(_shown(raw, echo) if place == echo.added else raw)
            if place == 0:
                columns.add_unknown(raw)
            else:
                columns.add(next(entries), offset)
        offsets.at = len(echo.text)
        return columns

    def _columns(self, index: int, told: Told | None, columns: _Columns | None = None) -> _Columns | None:
        if told is None:
            return columns
        columns, offsets = columns or _Columns(), self._offsets.setdefault(index, _Offsets())
        for one in told:
            columns.add(one, offsets.of(bytes(one["bytes"])))
        return columns

    def _chunk(
        self, index: int, text: str, columns: _Columns | None, *, reason: str | None = None, stop: str | None = None
    ) -> bytes:
        choice = _choice(index, text, columns, reason=reason, stop=stop)
        return self._shared + b',"choices":[' + dumps(choice) + b"]}"


def _choice(index: int, text: str, columns: _Columns | None, *, reason: str | None, stop: str | None) -> dict[str, Any]:
    told = None if columns is None else columns.to_wire()
    return {"index": index, "text": text, "logprobs": told, "finish_reason": reason, **stopped(stop)}


def _shown(raw: bytes, echo: Echo) -> bytes:
    """A text's first token without the space that some tokenizers put before it."""
    return raw[1:] if raw[:1] == b" " and not echo.text.startswith(" ") else raw


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80
