"""The two forms that an upstream's answers have: OpenAI's and Anthropic's. No I/O here."""

import json
from collections.abc import Iterator, Mapping
from typing import Protocol

from ...prompt import UpstreamError, Usage
from ..messages import form as messages
from ..messages.stream import MessageStreamReader
from .base import Frame
from .upstream import ChatStreamReader, Secret, as_error_body, usage_of


class StreamReader(Protocol):
    """Reads the data of a stream's events in order and says what goes to the client; `over` after the last one."""

    over: bool

    def read(self, data: bytes) -> Iterator[Frame]:
        """Frames to send for one event. UpstreamError for data that has not the form."""
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
