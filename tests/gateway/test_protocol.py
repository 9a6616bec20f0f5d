"""Clients that are slow on purpose, over real sockets: heads that do not end, and answers that nobody takes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from promptsluice.gateway.edge import Edge
from promptsluice.gateway.metrics import Metrics
from promptsluice.gateway.protocol import BoundedProtocol
from uvicorn.server import ServerState

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
FOREVER_S = 3600.0
SOON_S = 0.05


class App:
    """Answers `ok`, or with `megabytes` of nothing; tells when it is done."""

    def __init__(self, *, megabytes: int = 0) -> None:
        self.megabytes, self.ended, self.served = megabytes, asyncio.Event(), 0

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        self.served += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]
                        if not self.megabytes else []})  # fmt: skip
            for _ in range(self.megabytes):
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await send({"type": "http.response.body", "body": b"ok" if not self.megabytes else b""})
        finally:
            self.ended.set()


class Endless:
    """Behind the edge: works on a request until it is stopped; tells when it begins and when its client is gone."""

    def __init__(self) -> None:
        self.begun, self.stopped, self.served = asyncio.Event(), asyncio.Event(), 0
        self.edge = Edge(self, max_body_bytes=1 << 20, body_timeout_s=FOREVER_S, metrics=Metrics(), admit=self._admit)

    async def _admit(self, scope: Any) -> None:
        """Everybody."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.served += 1
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass  # by then the other side had cut it off


@asynccontextmanager
async def serving(app: Any, **bounds: float) -> AsyncIterator[tuple[int, ServerState]]:
    config = uvicorn.Config(app, log_level="warning", log_config=None)
    config.load()
    state = ServerState()
    kind = type("Bounded", (BoundedProtocol,), {"head_s": FOREVER_S, "stalled_s": FOREVER_S, **bounds})
    server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], state


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET[:-2], b"\r\n", GET + b"GET / HTTP/1.1\r\nhos"])
async def test_a_head_that_does_not_end_is_cut_off(sent: bytes) -> None:
    app = App()
    async with serving(app, head_s=SOON_S) as (port, state):
        async with connected(port) as (reader, writer):
            writer.write(sent)
            answer = await reader.read()
            assert b"HTTP/1.1 408 Request Timeout\r\nconnection: close" in answer
            assert answer.count(b"200 OK") == app.served == sent.count(GET)
        assert not state.connections


async def test_a_head_that_drips_is_cut_off_as_well() -> None:
    async with serving(App(), head_s=SOON_S) as (port, _), connected(port) as (reader, writer):
        cut = asyncio.create_task(reader.read())
        while not cut.done():
            writer.write(b"x")
            await asyncio.wait({cut}, timeout=SOON_S / 10)
        assert cut.result().startswith(b"HTTP/1.1 4")


async def test_who_is_in_time_is_served_again_and_again() -> None:
    app = App()
    async with serving(app) as (port, _), connected(port) as (reader, writer):
        for piece in (GET[:5], GET[5:], GET + GET[:9], GET[9:]):
            writer.write(piece)
            await asyncio.sleep(0)
        answers = b""
        while answers.count(b"ok") < 3:
            answers += await reader.read(1000)
        assert app.served == 3 and b"408" not in answers


async def test_a_head_beyond_all_size_is_refused() -> None:
    app = App()
    async with serving(app, head_bytes=10_000) as (port, _), connected(port) as (reader, writer):
        cut = asyncio.create_task(reader.read())
        writer.write(GET[:-2])
        try:
            while not cut.done():
                writer.write(b"x-more: %s\r\n" % (b"y" * 500))
                await asyncio.wait({cut}, timeout=0.001)
            assert cut.result().startswith(b"HTTP/1.1 431 ")
        except ConnectionError:
            pass  # cut off while it was still sending
        assert app.served == 0


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    app = App(megabytes=64)
    async with serving(app, stalled_s=SOON_S) as (port, state):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(GET)
        await asyncio.wait_for(app.ended.wait(), 60)
        sock.close()
        assert not state.connections


async def test_an_answer_that_is_taken_slowly_is_not() -> None:
    app = App(megabytes=8)
    async with serving(app, stalled_s=FOREVER_S) as (port, _), connected(port) as (reader, writer):
        writer.write(GET)
        size = 0
        while size < 8 << 20:
            size += len(await reader.read(1 << 16))
            await asyncio.sleep(0)
        await asyncio.wait_for(app.ended.wait(), 60)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_request_that_is_on_its_way_at_shutdown_is_served(asks: bool) -> None:
    app = App()
    async with serving(app, late_s=FOREVER_S if asks else SOON_S) as (port, state), connected(port) as (reader, writer):
        while not state.connections:  # noqa: ASYNC110 - the server's side of the connection
            await asyncio.sleep(0)
        (connection,) = state.connections
        assert isinstance(connection, BoundedProtocol)
        connection.shutdown()
        if asks:
            writer.write(GET)
        answer = await reader.read()
        assert answer.endswith(b"ok") and b"connection: close" in answer if asks else answer == b""
        assert app.served == asks


@pytest.mark.parametrize("size", [0, 70_000, 128_000, 500_000])
async def test_a_client_that_leaves_is_noticed_however_long_its_body(size: int) -> None:
    app = Endless()
    async with serving(app.edge) as (port, state), connected(port) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        await writer.drain()
        while not state.tasks:  # noqa: ASYNC110 - the head is there before the body
            await asyncio.sleep(0)
        writer.write(bytes(size))
        await asyncio.wait_for(app.begun.wait(), 60)
        writer.close()
        await asyncio.wait_for(app.stopped.wait(), 60)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_with_requests_that_wait_is_noticed(
    at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = Endless()
    async with serving(app.edge) as (port, state), connected(port) as (_, writer):
        for piece in [GET + GET + GET] if at_once else [GET, GET + GET]:
            writer.write(piece)
            await asyncio.wait_for(app.begun.wait(), 60)
        writer.close()
        await asyncio.wait_for(app.stopped.wait(), 60)
        while state.tasks:  # noqa: ASYNC110 - the server's own
            await asyncio.sleep(0)
        assert app.served == 1 and not [line for line in caplog.messages if "ASGI" in line]


async def test_who_sends_far_ahead_waits_for_his_answers() -> None:
    app = App()
    async with serving(app) as (port, _), connected(port) as (reader, writer):
        writer.write(GET * 50)
        answers = b""
        while answers.count(b"ok") < 50:
            answers += await reader.read(1 << 16)
        assert app.served == 50


@pytest.mark.parametrize("wanted", [b"websocket", b"h2c"])
async def test_an_upgrade_is_answered_as_a_plain_request(wanted: bytes, caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    async with serving(app) as (port, _), connected(port) as (reader, writer):
        for piece in (GET[:-2] + b"connection: upgrade\r\nupgrade: %s\r\n\r\n" % wanted, GET):
            writer.write(piece)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        assert app.served == 2 and not caplog.messages


async def test_nothing_is_written_on_a_connection_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Lost(BoundedProtocol):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for _ in range(9):  # asyncio complains from the fifth on
                self._corked.write(b"a head")
                self._corked.flush()
                self._corked.write(b"another")
                self._corked.write(b"and more")
            lost.set()

    lost, config, state = asyncio.Event(), uvicorn.Config(App(), log_level="warning"), ServerState()
    config.load()
    server = await asyncio.get_running_loop().create_server(lambda: Lost(config, state, {}), "127.0.0.1", 0)
    async with server, connected(server.sockets[0].getsockname()[1]) as (_, writer):
        writer.close()
        await asyncio.wait_for(lost.wait(), 60)
        await asyncio.sleep(0)
        assert not caplog.messages
