"""The two forms that an upstream's answers have: OpenAI's and Anthropic's. No I/O here."""

import json
from collections.abc import Iterator, Mapping
from typing import Protocol

from ...prompt import UpstreamError, Usage
from ..messages import form as messages
from ..messages.stream import MessageStreamReader
from ..wire import EventSplitter
from .base import Frame
from .upstream import ChatStreamReader, Secret, as_error_body, usage_of


class StreamReader(Protocol):
    """Reads the data of a stream's events in order and says what goes to the client; `over` after the last one."""

    over: bool

    def read(self, data: bytes) -> Iterator[Frame]:
        """Frames to send for one event. UpstreamError for data that has not the form."""
        ...

    def run(self, piece: bytes, at: int) -> tuple[int, Frame | None]:
        """From `at` on in a piece of the stream, where an event begins: the events that can go on unread, as one frame
        that is `framed`, and where they end; `at` and None where the next one has to be read.
        """
        ...

    def end(self) -> Iterator[Frame]:
        """At the stream's end: what is left to send. UpstreamError where the answer was not finished."""
        ...


class Form(Protocol):
    """How answers are read."""

    def reader(self) -> StreamReader: ...

    def usage(self, body: bytes) -> Usage | None:
        """Of a whole answer. UpstreamError where it is no JSON object."""
        ...

    def error(self, status: int, body: bytes) -> bytes:
        """Any error's body as an error object of this form."""
        ...


class ChatForm:
    """OpenAI's, of chats and of text completions."""

    def __init__(self, *, backend: str, secret: Secret, include_usage: bool = False, continuous: bool = False) -> None:
        self._backend = backend
        self._secret = secret
        self._include_usage = include_usage
        self._continuous = continuous

    def reader(self) -> StreamReader:
        return ChatStreamReader(
            backend=self._backend,
            secret=self._secret,
            include_usage=self._include_usage,
            continuous=self._continuous,
        )

    def usage(self, body: bytes) -> Usage | None:
        return usage_of(body, backend=self._backend)

    def error(self, status: int, body: bytes) -> bytes:
        return as_error_body(status, body)


class MessagesForm:
    """Anthropic's."""

    def __init__(self, *, backend: str, secret: Secret) -> None:
        self._backend = backend
        self._secret = secret

    def reader(self) -> StreamReader:
        return MessageStreamReader(backend=self._backend, hidden=self._secret.hidden_in)

    def usage(self, body: bytes) -> Usage | None:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"backend {self._backend!r} answered with broken JSON") from error
        if not isinstance(parsed, Mapping):
            raise UpstreamError(f"backend {self._backend!r} answered with JSON that is no object")
        return messages.usage_of(parsed.get("usage"))

    def error(self, status: int, body: bytes) -> bytes:
        return messages.as_error_body(status, body)


def to_be_read(splitter: EventSplitter, reader: StreamReader, piece: bytes, items: list[Frame]) -> Iterator[bytes]:
    """The data of the events that have to be read; the others are put among the items as they are."""
    at = 0
    while at < len(piece) and splitter.between:
        at, run = reader.run(piece, at)
        if run is not None:
            items.append(run)
        end = piece.find(b"\n\n", at) + 2
        if end < 2:
            break
        yield from splitter.feed(piece[at:end])
        at = end
    yield from splitter.feed(piece[at:])
