"""Requests that are cancelled while their connection is being opened."""

import asyncio

import httpx
import pytest
from promptsluice.gateway.backends.sending import Sender


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
        async with httpx.AsyncClient(transport=gate) as client:
            sender = Sender(client)
            asked = asyncio.create_task(sender.send(client.build_request("POST", "http://x/")))
            await gate.opening.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert not gate.opened
            gate.gate.set()
            await gate.cancelled.wait()
        return gate

    assert asyncio.run(run()).opened


def test_no_connection_is_lost() -> None:
    """Requests that leave after any number of turns of the loop, on a real server: no place of the pool is lost."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async def leave(sender: Sender, request: httpx.Request, turns: int) -> None:
        asked = asyncio.create_task(sender.send(request))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        try:
            await (await asked).aclose()
        except asyncio.CancelledError:
            return

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        pool = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=4))
        async with server, httpx.AsyncClient(transport=pool) as client:
            sender = Sender(client)
            for turns in range(60):
                await asyncio.gather(*(leave(sender, client.build_request("GET", url), turns) for _ in range(4)))
            for _ in range(8):
                response = await sender.send(client.build_request("GET", url))
                assert await response.aread() == b"ok"
                await response.aclose()

    asyncio.run(run())
