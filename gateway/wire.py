"""The wire: JSON bodies, SSE frames and chat completion objects, byte for byte as the OpenAI SDKs read them.

Knows no HTTP framework and no backend. All JSON that we make is ASCII: some SSE readers split lines at U+2028 or
U+0085.
"""

import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..prompt import Usage
from .tools.pieces import CallArguments, CallBegun

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"

LOWEST_LOGPROB = -9999.0
"""Stands for less, as in OpenAI's answers: minus infinity is no JSON."""

_CONSTANTS = {"-Infinity": LOWEST_LOGPROB}
_LINE_END = re.compile(rb"\r\n|\r|\n")


def dumps(value: Any) -> bytes:
    """Strict, compact, ASCII JSON; raises ValueError on NaN or infinity, which are no JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes | str) -> Any:
    """JSON that somebody else has written, of which `dumps` can write every part again. ValueError where it is none.

    Python's servers write log-probabilities of minus infinity: that becomes -9999, as in OpenAI's answers; NaN and
    infinity become null. A number beyond all floats is an error, and so is what nests too deep.
    """
    try:
        return json.loads(data, parse_constant=_CONSTANTS.get, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nests too deep") from error


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond all floats")
    return value


def frame(data: bytes, *, event: str = "") -> bytes:
    """One SSE event, with its name where it has one. `data` that spans lines becomes several `data:` lines, as the SSE
    specification has it.
    """
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    name = b"event: " + event.encode() + b"\n" if event else b""
    return name + b"data: " + data + b"\n\n"


def spliced(obj: bytes, key: str, value: Any) -> bytes:
    """Append a member to the JSON object in `obj`, whose other bytes stay; what is no object stays as it is."""
    body = obj.strip()
    if not body.startswith(b"{") or not body.endswith(b"}"):
        return obj
    comma = b"" if body[1:-1].strip() == b"" else b","
    return body[:-1] + comma + dumps(key) + b":" + dumps(value) + b"}"


class EventSplitter:
    """Cuts a byte stream into the data of its SSE events, whatever the reads' borders; CR, LF and CRLF end a line.

    Comments and the fields `event`, `id` and `retry` are dropped: chat streams do not use them. One event may hold at
    most `limit` bytes; a longer one raises ValueError.
    """

    def __init__(self, *, limit: int = 16 << 20) -> None:
        self._limit = limit
        self._line = bytearray()
        self._data: list[bytes] = []
        self._held = 0
        self._after_cr = False

    @property
    def between(self) -> bool:
        """Whether the next byte begins an event."""
        return not self._line and not self._data and not self._after_cr

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `chunk` completes."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        if chunk.endswith(b"\n\n") and not self._line and not self._data and b"\r" not in chunk:
            yield from self._whole_events(chunk)
            return
        first, *rest = _LINE_END.split(chunk)
        self._line += first
        for piece in rest:
            yield from self._end_line()
            self._line += piece
        if len(self._line) + self._held > self._limit:
            raise ValueError(f"an SSE event is longer than {self._limit} bytes")

    def _whole_events(self, chunk: bytes) -> Iterator[bytes]:
        """Of a read that begins and ends between events, as most do: one `data:` line is taken as a whole."""
        for block in chunk[:-2].split(b"\n\n"):
            if len(block) > self._limit:
                raise ValueError(f"an SSE event is longer than {self._limit} bytes")
            if block.startswith(b"data:") and b"\n" not in block:
                yield block[5:].removeprefix(b" ")
                continue
            for line in (*block.split(b"\n"), b""):
                self._line += line
                yield from self._end_line()

    def finish(self) -> Iterator[bytes]:
        """Yield the event that the stream's end cut short of its blank line, if there is one."""
        if self._line:
            yield from self._end_line()
        if self._data:
            yield self._event()

    def _end_line(self) -> Iterator[bytes]:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                yield self._event()
        elif line.startswith(b"data:"):
            value = line[5:].removeprefix(b" ")
            self._data.append(value)
            self._held += len(value)

    def _event(self) -> bytes:
        data = b"\n".join(self._data)
        self._data.clear()
        self._held = 0
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One whole answer. `calls` are its tool calls as chats have them. `logprobs` has an object for each token, None
    where they were not asked for; so has `prompt_logprobs` for the prompt's tokens but the first. `stop` is the stop
    string that ended it, where one did.
    """

    text: str
    reason: str
    calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Mapping[str, Any]] | None = None
    prompt_logprobs: Sequence[Mapping[str, Any]] | None = None
    stop: str | None = None


class ChatWriter:
    """Writes one chat completion, whole or as chunks; all of them carry the same id, time and model."""

    def __init__(self, *, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._shared = dumps({**self._head, "object": "chat.completion.chunk"})[:-1]

    def begin(self, index: int = 0, *, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes:
        """The first chunk of a choice: who speaks. A chat's prompt is not said back, nor what is told of it."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def content(self, text: str, *, index: int = 0, logprobs: Sequence[Mapping[str, Any]] | None = None) -> bytes:
        """A chunk with a piece of the answer, and with what is told of its tokens."""
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def call(
        self,
        piece: CallBegun | CallArguments,
        index: int = 0,
        logprobs: Sequence[Mapping[str, Any]] | None = None,
    ) -> bytes:
        """A chunk with a piece of a tool call; id, type and name are on its first one only."""
        if isinstance(piece, CallBegun):
            function = {"name": piece.name, "arguments": ""}
            delta: dict[str, Any] = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        else:
            delta = {"index": piece.index, "function": {"arguments": piece.text}}
        return self._chunk(index, {"tool_calls": [delta]}, logprobs=logprobs)

    def finish(self, reason: str, *, index: int = 0, stop: str | None = None) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(index, {}, reason=reason, stop=stop)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk: no choices, sent last and only to who asked."""
        return self._shared + b',"choices":[],"usage":' + dumps(usage.to_wire()) + b"}"

    def whole(self, choices: Sequence[Choice], *, usage: Usage) -> bytes:
        """The body of a response that is not streamed."""
        listed = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": _logprobs(choice.logprobs),
                "finish_reason": choice.reason,
                **stopped(choice.stop),
            }
            for index, choice in enumerate(choices)
        ]
        return dumps({**self._head, "object": "chat.completion", "choices": listed, "usage": usage.to_wire()})

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Sequence[Mapping[str, Any]] | None = None,
        reason: str | None = None,
        stop: str | None = None,
    ) -> bytes:
        told = _logprobs(logprobs)
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": reason, **stopped(stop)}
        return self._shared + b',"choices":[' + dumps(choice) + b"]}"


def _message(choice: Choice) -> dict[str, Any]:
    """With calls and no text the content is null."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    return {**message, "content": choice.text or None, "tool_calls": choice.calls} if choice.calls else message


def stopped(stop: str | None) -> Mapping[str, str]:
    """The stop string that ended a choice, under the name that vLLM has for it, if one did."""
    return {} if stop is None else {"stop_reason": stop}


def _logprobs(content: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any] | None:
    return None if content is None else {"content": content, "refusal": None}
