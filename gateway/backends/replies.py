"""What an upstream replied, read: a whole answer, or a stream's events in order; its errors become ours.

Once a stream has begun nothing is asked again.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import httpx

from ...prompt import PromptsluiceError, UpstreamError, UpstreamTimeout, Usage
from ..wire import EventSplitter
from .base import Answer, Asked, Frame
from .forms import Form, StreamReader, to_be_read
from .sending import Reply
from .upstream import Secret

_MAX_ANSWER = 64 << 20
_DRAIN_S = 0.1


class Replies:
    """Reads the replies of the backend `name`. Where one says its key, the `secret`, that is not passed on."""

    def __init__(self, name: str, secret: Secret) -> None:
        self._name = name
        self._secret = secret

    async def whole(self, response: Reply, headers: Mapping[str, str], form: Form) -> Answer:
        """The answer, or the error, in a form that clients read. UpstreamError for what is neither."""
        body = await self.body(response)
        status = response.status
        if status == 200:
            return Answer(body=body, headers=headers, usage=form.usage(body))
        if 300 <= status < 400:
            raise UpstreamError(f"backend {self._name!r} answered with a redirect ({status}), which is not followed")
        if not 400 <= status < 600:
            raise UpstreamError(f"backend {self._name!r} answered with status {status}, which is neither yes nor no")
        return Answer(body=self._secret.hidden_in(form.error(status, body)), status=status, headers=headers)

    async def body(self, response: Reply) -> bytes:
        """All bytes. UpstreamError or UpstreamTimeout where they break off, UpstreamError where they are too many."""
        body = bytearray()
        try:
            while piece := await self._piece(response):
                body += piece
                if len(body) > _MAX_ANSWER:
                    raise UpstreamError(f"backend {self._name!r} answered with more than {_MAX_ANSWER >> 20} MiB")
        finally:
            await response.aclose()
        return bytes(body)

    async def frames(self, response: Reply, call: Asked, reader: StreamReader) -> AsyncGenerator[Frame, None]:
        """The upstream's events as the reader puts them in order; nothing after an error."""
        splitter = EventSplitter()
        try:
            while piece := await self._piece(response):
                items, error = self._read(splitter, reader, piece, unread=call.unread)
                if items and items[-1].more and not (reader.over and response.over):
                    items[-1] = replace(items[-1], more=False)
                for item in items:
                    note(call, item.usage)
                    yield item
                if error is not None:
                    raise error
                if reader.over:
                    await self._drain(response)
                    return
        finally:
            await response.aclose()
        for data in splitter.finish():
            for item in reader.read(data):
                yield item
        for item in reader.end():
            note(call, item.usage)
            yield item

    async def _drain(self, response: Reply) -> None:
        """Read to the body's end, so that the connection can serve again; an upstream that dawdles loses it."""
        if response.over:
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                while await response.read():
                    pass
        except (TimeoutError, httpx.HTTPError):
            return

    def _read(
        self, splitter: EventSplitter, reader: StreamReader, piece: bytes, *, unread: bool
    ) -> tuple[list[Frame], UpstreamError | None]:
        """All frames that a piece of the body completes, and what is wrong with what follows them."""
        items = list[Frame]()
        try:
            for data in to_be_read(splitter, reader, piece, items) if unread else splitter.feed(piece):
                items += reader.read(data)
                if reader.over:
                    break
        except UpstreamError as error:
            return items, error
        except ValueError as error:
            return items, UpstreamError(f"backend {self._name!r}: {error}")
        return items, None

    async def _piece(self, response: Reply) -> bytes:
        """The next bytes of the body, b"" at its end."""
        try:
            return await response.read()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self.ours(error) from error

    def ours(self, error: httpx.HTTPError | httpx.StreamError) -> PromptsluiceError:
        """The one seam where httpx's errors become ours."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return UpstreamError(f"backend {self._name!r} cannot be reached")
        if isinstance(error, httpx.PoolTimeout):
            return UpstreamTimeout(f"backend {self._name!r} has no free connection")
        if isinstance(error, httpx.TimeoutException):
            return UpstreamTimeout(f"backend {self._name!r} did not answer in time")
        if isinstance(error, httpx.LocalProtocolError):
            return PromptsluiceError(
                f"a header for backend {self._name!r} cannot be sent: it has to be printable Latin-1"
            )
        return UpstreamError(f"backend {self._name!r} broke off ({type(error).__name__})")


def note(call: Asked, usage: Usage | None) -> None:
    """Enter what the upstream's own prefix cache saved."""
    if usage is not None:
        call.report.cached = usage.cached_tokens
