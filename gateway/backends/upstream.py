"""What upstream servers send, put right: error bodies, headers, usage, the order of a stream's chunks. No I/O here."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...prompt import UpstreamError, Usage
from ..wire import dumps
from .base import Frame, ModelCard, size_of
from .runs import Pattern

_PASSED = frozenset({"retry-after", "retry-after-ms", "x-should-retry", "openai-processing-ms"})
_LIMITS = ("x-ratelimit-", "anthropic-ratelimit-")
_SLUGS = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    413: ("invalid_request_error", "payload_too_large"),
    422: ("invalid_request_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_CHUNKS = json.JSONDecoder(parse_constant=lambda name: None)  # made once: making it costs as much as reading a chunk
_SAID = frozenset({"content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio"})
_TRIES = 8  # chunks that were not what the ones before them let expect; after so many in a row, few are learned from
_SELDOM = 16  # then it is one of so many
_MOST_TOKENS = 1 << 53  # beyond it counters, which are floats, count no more
_CONTEXT = re.compile(r"context.{0,20}(length|window)|too (long|many tokens)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Secret:
    """A key that never shows: not in its repr, not in anything that goes back to a client."""

    value: str | None = field(repr=False)

    def hidden_in(self, data: bytes) -> bytes:
        """Blank the key out of bytes that go to a client."""
        return data.replace(self.value.encode(), b"***") if self.value else data


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The few response headers that clients act on; hop-by-hop, length and cookie headers stay behind, and what is not
    printable ASCII, which not every value that was read could be written as.
    """
    plain = {name.lower(): value for name, value in headers.items() if value.isascii() and value.isprintable()}
    kept = {name: value for name, value in plain.items() if name in _PASSED or name.startswith(_LIMITS)}
    if "x-request-id" in plain:
        kept["x-promptsluice-upstream-request-id"] = plain["x-request-id"]
    return kept


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds after which a server wants to be asked again; 0 where it says so in a way that is not read here, such as
    a date; None where it says nothing.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        told = headers.get(name)
        if told is not None:
            return int(told) / unit if told.strip().isdecimal() and len(told) < 10 else 0.0
    return None


def as_error_body(status: int, body: bytes) -> bytes:
    """An upstream's error as an OpenAI error object; one that is an error object already stays byte for byte."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
        return body
    return dumps({"error": _error_object(status, parsed)})


def _error_object(status: int, parsed: Any) -> dict[str, Any]:
    """Flat errors of other dialects: vLLM's `{"object": "error", "message"}`, `{"detail"}`, `{"error": "text"}`."""
    flat = parsed if isinstance(parsed, dict) else {}
    found = next((flat[key] for key in ("message", "detail", "error") if flat.get(key)), None)
    message = found if isinstance(found, str) else None if found is None else json.dumps(found)
    kind, code = _SLUGS.get(status, ("upstream_error", "upstream_error"))
    if isinstance(flat.get("type"), str):
        kind = flat["type"]
    if isinstance(flat.get("code"), str):
        code = flat["code"]
    elif status == 400 and message and _CONTEXT.search(message):
        code = "context_length_exceeded"
    param = flat.get("param") if isinstance(flat.get("param"), str) else None
    return {
        "message": message or f"the upstream answered with status {status}",
        "type": kind,
        "param": param,
        "code": code,
    }


def usage_of(body: bytes, *, backend: str) -> Usage | None:
    """The usage of a whole response; UpstreamError when the body is no JSON object."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UpstreamError(f"backend {backend!r} answered with broken JSON") from error
    if not isinstance(parsed, dict):
        raise UpstreamError(f"backend {backend!r} answered with JSON that is no object")
    return read_usage(parsed.get("usage"))


def listed_models(body: bytes) -> list[ModelCard]:
    """The models of an upstream's /models answer; what is malformed in it is left out."""
    try:
        entries = json.loads(body)["data"]
        return [
            ModelCard(id=entry["id"], owned_by=str(entry.get("owned_by", "upstream")))
            for entry in entries
            if isinstance(entry["id"], str)
        ]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []


def read_usage(raw: Any) -> Usage | None:
    """Of a `usage` object; None for what is none."""
    if not isinstance(raw, dict):
        return None
    details = raw.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(raw.get("prompt_tokens")),
        completion_tokens=_count(raw.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else 0


class ChatStreamReader:
    """Reads the data of the events of a stream of chat or text chunks in order and says what goes to the client.

    Chunks pass as the bytes they are. A usage that rides on a chunk with choices is moved to a frame of its own at the
    end; it is dropped where the client did not ask. `over` is set by [DONE] and by an error: nothing is read after it.
    """

    def __init__(self, *, backend: str, secret: Secret, include_usage: bool, continuous: bool = False) -> None:
        self._backend = backend
        self._secret = secret
        self._include_usage = include_usage
        self._continuous = continuous
        self._usage_frame: bytes | None = None
        self._usage: Usage | None = None
        self._open: set[int] = set()
        self._finished: set[int] = set()
        self._last: tuple[bytes, dict[str, Any]] | None = None
        self._pattern: Pattern | None = None
        self._missed = 0
        self.over = False

    def run(self, piece: bytes, at: int) -> tuple[int, Frame | None]:
        """From `at` on, where an event begins: the events that can go on unread, as one frame, and where they end."""
        if self._last is not None:
            self._missed += self._pattern is not None
            if self._missed < _TRIES or self._missed % _SELDOM == 0:
                self._pattern = Pattern.of(*self._last) or self._pattern
            self._last = None
        if self._pattern is None:
            return at, None
        end, size, events = self._pattern.run(piece, at)
        if end == at:
            return at, None
        self._missed = 0
        return end, Frame(data=piece[at:end], content=size, events=events, framed=True, more=True)

    def read(self, data: bytes) -> Iterator[Frame]:
        """Frames to send for one event, with `more` until their taker knows better. UpstreamError for data that is no
        JSON object.
        """
        if data.strip() == b"[DONE]":
            yield from self._close()
            return
        chunk = self._parsed(data)
        if chunk.get("error") or chunk.get("object") == "error":
            self.over = True
            yield Frame(data=self._secret.hidden_in(as_error_body(500, data)), failed=True)
            return
        choices = chunk.get("choices")
        choices = choices if isinstance(choices, list) else []
        self._note(choices)
        usage = chunk.get("usage")
        if not isinstance(usage, dict) or (self._continuous and choices):
            self._last = (data, chunk) if len(choices) == 1 else None
            yield Frame(data=data, content=_said_in(choices), more=True)
        else:
            self._usage = read_usage(usage)
            self._usage_frame = data if not choices else self._dumped({**chunk, "choices": []})
            if choices:
                bare = {name: value for name, value in chunk.items() if name != "usage"}
                yield Frame(data=self._dumped(bare), content=_said_in(choices), more=True)

    def end(self) -> Iterator[Frame]:
        """The stream's end without [DONE]: fine when every choice has finished, else the upstream broke off."""
        if self.over:
            return
        if not self._finished or self._open - self._finished:
            raise UpstreamError(f"backend {self._backend!r} ended its stream before the answer was finished")
        yield from self._close()

    def _close(self) -> Iterator[Frame]:
        self.over = True
        if self._usage_frame is not None:
            yield Frame(data=self._usage_frame if self._include_usage else b"", usage=self._usage)

    def _note(self, choices: list[Any]) -> None:
        for choice in choices:
            if isinstance(choice, dict):
                index = choice.get("index")
                index = index if isinstance(index, int) else 0
                self._open.add(index)
                if choice.get("finish_reason") is not None:
                    self._finished.add(index)

    def _dumped(self, chunk: Mapping[str, Any]) -> bytes:
        try:
            return dumps(chunk)
        except ValueError as error:  # a number such as 1e999, which was read as infinity
            raise UpstreamError(f"backend {self._backend!r} sent a chunk with a number out of range") from error

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = _CHUNKS.decode(data.decode())
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"backend {self._backend!r} sent a chunk that is broken JSON") from error
        if not isinstance(chunk, dict):
            raise UpstreamError(f"backend {self._backend!r} sent a chunk that is no JSON object")
        return chunk


def _said_in(choices: list[Any]) -> int:
    """About how many bytes of text the choices of a chunk have."""
    size = 0
    for choice in choices:  # plain loops, and few calls: this is asked for every frame
        if isinstance(choice, dict):
            text, delta = choice.get("text"), choice.get("delta")
            if text:
                size += _size(text)
            if isinstance(delta, dict):
                for name, value in delta.items():
                    if value and name in _SAID:
                        size += len(value) if isinstance(value, str) and value.isascii() else _size(value)
    return size


def _size(value: Any) -> int:
    """Of a text, or of the texts in tool calls and other parts; what is none counts as one byte."""
    if isinstance(value, str):
        return size_of(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(1, sum(_size(part) for part in parts if part))
