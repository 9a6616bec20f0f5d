"""How requests get to upstreams: cancelled at any moment, cut off, late, and past what a pool allows."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from promptsluice.gateway.backends.aio import AioTransport
from promptsluice.gateway.backends.sending import ProxiedTransport, transport_to_upstreams

Transport = httpx.AsyncBaseTransport
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Gate(httpx.AsyncBaseTransport):
    """Opens a connection for as long as the gate is shut, and tells of it as httpcore does."""

    def __init__(self) -> None:
        self.opening, self.gate, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.opened = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        trace = request.extensions["trace"]
        await trace("connection.connect_tcp.started", {})
        self.opening.set()
        await self.gate.wait()
        await trace("connection.connect_tcp.complete", {})
        self.opened = True
        await trace("http11.send_request_headers.started", {})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody answers")


def test_a_connection_is_opened_to_its_end_and_then_given_up() -> None:
    async def run() -> Gate:
        gate = Gate()
        async with ProxiedTransport(max_connections=1, transport=gate) as sender:
            asked = asyncio.create_task(sender.handle_async_request(httpx.Request("POST", "http://x/")))
            await gate.opening.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert not gate.opened
            gate.gate.set()
            await gate.cancelled.wait()
        return gate

    assert asyncio.run(run()).opened


@asynccontextmanager
async def serving(answer: bytes, *, close: bool = False, stay: bool = False) -> AsyncIterator[str]:
    """A server that gives the same bytes to every request; its URL. `stay`: then it says no more and hangs."""

    ended = list[asyncio.Task[None]]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                if stay:
                    await reader.read()
                if close:
                    break
            writer.close()
            await writer.wait_closed()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    await asyncio.wait_for(asyncio.gather(*ended), 10)


def asking(url: str, **times: float) -> httpx.Request:
    return httpx.Request("GET", url, extensions={"timeout": times})


@pytest.mark.parametrize(
    "made", [lambda: AioTransport(max_connections=4), lambda: ProxiedTransport(max_connections=4)], ids=["aio", "httpx"]
)
@pytest.mark.parametrize("close", [True, False])
async def test_no_connection_is_lost(made: Callable[[], Transport], close: bool) -> None:
    """Requests that leave after any number of turns of the loop, on a real server: no place of the pool is lost."""

    async def leave(sender: Transport, url: str, turns: int) -> None:
        asked = asyncio.create_task(sender.handle_async_request(asking(url, connect=5, pool=5)))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        try:
            await (await asked).aclose()
        except asyncio.CancelledError:
            return

    async with serving(OK, close=close) as url, made() as sender:
        for turns in range(60):
            await asyncio.gather(*(leave(sender, url, turns) for _ in range(4)))
        for _ in range(8):
            response = await sender.handle_async_request(asking(url, pool=5))
            assert await response.aread() == b"ok"
            await response.aclose()
            await response.aclose()  # closing twice gives no place that was not taken


async def test_a_full_pool_is_told_from_a_server_that_is_late() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
    async with serving(head, stay=True) as url, AioTransport(max_connections=1) as sender:
        response = await sender.handle_async_request(asking(url, read=0.05))
        with pytest.raises(httpx.PoolTimeout):
            await sender.handle_async_request(asking(url, pool=0.05))
        with pytest.raises(httpx.ReadTimeout):
            await response.aread()
        await response.aclose()
        again = await sender.handle_async_request(asking(url, pool=5))
        await again.aclose()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"what?\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nok\r\n", httpx.RemoteProtocolError),
    ],
)
async def test_what_is_no_answer_is_an_error_of_httpx(answer: bytes, error: type[Exception]) -> None:
    async with serving(answer, close=True) as url, AioTransport(max_connections=1) as sender:
        for _ in range(2):  # and its place is free again
            with pytest.raises(error):
                response = await sender.handle_async_request(asking(url, pool=5))
                try:
                    await response.aread()
                finally:
                    await response.aclose()


async def test_a_server_that_takes_no_body_is_left() -> None:
    over = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()  # its buffer fills up, and then the socket's
        writer.transport.abort()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    times = {"connect": 0.1, "write": 0.1, "read": 0.1, "pool": 5.0}
    async with AioTransport(max_connections=1) as sender:
        for _ in range(2):
            with pytest.raises(httpx.TimeoutException):
                request = httpx.Request("POST", url, content=b"x" * (64 << 20), extensions={"timeout": times})
                await sender.handle_async_request(request)
    over.set()
    server.close()
    await asyncio.sleep(0.05)


async def test_nobody_there_and_no_cookie_kept() -> None:
    async with AioTransport(max_connections=1) as sender:
        with pytest.raises(httpx.ConnectError):
            await sender.handle_async_request(asking("http://127.0.0.1:1/"))
        seen = list[bytes]()

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 302 Found\r\nlocation: /else\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(2):
            response = await sender.handle_async_request(asking(url))
            assert response.status_code == 302
            await response.aclose()
        server.close()
    assert len(seen) == 2 and not any(b"cookie" in head.lower() or b"/else" in head for head in seen)


async def test_who_waits_for_a_place_in_the_pool_is_not_yet_asking() -> None:
    async with serving(OK) as url, AioTransport(max_connections=1) as sender:
        first = await sender.handle_async_request(asking(url))
        waiting = asyncio.create_task(sender.handle_async_request(asking(url)))
        await asyncio.sleep(0.01)
        freed_at = time.perf_counter()
        await first.aclose()
        second = await waiting
        assert first.extensions["asked_at"] < freed_at <= second.extensions["asked_at"]
        await second.aclose()


def test_a_proxy_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(transport_to_upstreams(max_connections=1), AioTransport)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert isinstance(transport_to_upstreams(max_connections=1), ProxiedTransport)
