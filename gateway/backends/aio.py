"""httpx's face on aiohttp's client: what carries requests to upstreams.

httpx's own transport looks at every connection of its pool, with a system call each, whenever a request comes or ends,
and reads HTTP in Python; aiohttp's pool is a dictionary and its parser is in C. Cookies are never kept, redirects never
followed, bodies never unpacked here. No proxies: see `sending.py`.
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import httpx
from multidict import CIMultiDict

_HEAD_LIMIT = 64 << 10  # bytes of one header of an answer, or of its status line
_LARGE = 64 << 10  # bytes; less fits into the socket's buffer, so that writing it cannot stall
_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")  # what aiohttp would add by itself


class AioTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 with at most `max_connections`; who waits longer than the pool's timeout gets httpx.PoolTimeout.

    A request that is cancelled gives its connection back or cuts it, in whatever state it is.
    """

    def __init__(self, *, max_connections: int, keepalive_s: float = 30.0) -> None:
        self._places = asyncio.Semaphore(max_connections)
        self._keepalive_s = keepalive_s
        self._tls = httpx.create_ssl_context()
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer once it has begun; the extension `asked_at` has the reading of time.perf_counter when it had its
        place in the pool. Raises httpx's errors.
        """
        times: Mapping[str, float | None] = request.extensions.get("timeout", {})
        await self._place(times.get("pool"))
        asked_at = time.perf_counter()
        try:
            with _translated(request):
                answer = await self._asked(request, times)
        except BaseException:
            self._places.release()
            raise
        stream = _Body(answer, request, self._places)
        return httpx.Response(
            answer.status,
            headers=answer.raw_headers,
            stream=stream,
            request=request,
            extensions={"asked_at": asked_at},
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _place(self, timeout_s: float | None) -> None:
        if not self._places.locked():
            await self._places.acquire()  # without a wait, which no timer needs to watch
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("no free connection") from error

    async def _asked(self, request: httpx.Request, times: Mapping[str, float | None]) -> aiohttp.ClientResponse:
        body = request.content
        asked = self._opened().request(
            request.method,
            str(request.url),
            headers=CIMultiDict(
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
            ),
            data=body if len(body) < _LARGE else io.BytesIO(body),  # written piece by piece
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(sock_connect=times.get("connect"), sock_read=times.get("read")),
        )
        if len(body) < _LARGE:
            return await asked
        # aiohttp has no timer for writing; this one ends a server that takes the body too slowly, or not at all.
        limits = [times.get(phase) for phase in ("connect", "write", "read")]
        whole = None if None in limits else sum(limit for limit in limits if limit is not None)
        try:
            async with asyncio.timeout(whole):
                return await asked
        except TimeoutError as error:
            raise (
                error if isinstance(error, aiohttp.ClientError) else httpx.WriteTimeout("not written in time")
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s, ssl=self._tls)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=_ADDED,
                max_line_size=_HEAD_LIMIT,
                max_field_size=_HEAD_LIMIT,
            )
        return self._session


class _Body(httpx.AsyncByteStream):
    """The bytes of an answer as they come; closing it frees its place in the pool, once."""

    def __init__(self, answer: aiohttp.ClientResponse, request: httpx.Request, places: asyncio.Semaphore) -> None:
        self._answer, self._request, self._places = answer, request, places
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated(self._request):
            async for piece in self._answer.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._answer.release()  # a connection with more to read is cut, one that is done serves again
            self._places.release()


@contextmanager
def _translated(request: httpx.Request) -> Iterator[None]:
    """The one seam where aiohttp's errors become httpx's."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout("not connected in time", request=request) from error
    except aiohttp.ServerTimeoutError as error:
        raise httpx.ReadTimeout("no answer in time", request=request) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError("not connected", request=request) from error
    except aiohttp.ClientPayloadError as error:
        raise httpx.RemoteProtocolError("the body broke off", request=request) from error
    except (aiohttp.ClientResponseError, aiohttp.ServerDisconnectedError) as error:
        raise httpx.RemoteProtocolError("no answer in HTTP", request=request) from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.ReadError("the connection broke", request=request) from error
