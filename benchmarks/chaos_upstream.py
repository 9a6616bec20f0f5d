"""The upstream of chaos.py: answers a chat as its last message tells it to, well or badly. Raw asyncio."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

FRAMES = 20
GAP_S = 0.01
_SHARED = {"id": "chatcmpl-1", "created": 1, "model": "far"}
_ASKED = re.compile(rb'"content": ?"do:([a-z0-9-]+)"')


def event(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    data = {**_SHARED, "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def whole() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    return json.dumps({**_SHARED, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


class Exchange:
    """One request, and the ways to answer it."""

    def __init__(self, writer: asyncio.StreamWriter, *, stream: bool) -> None:
        self._writer = writer
        self.stream = stream
        self.cut = False

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: str = "200 OK", *, length: int | None = None, extra: str = "") -> None:
        kind = "text/event-stream" if length is None else "application/json"
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        await self.send(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{size}\r\n{extra}\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def frames(self, count: int, *, gap_s: float = GAP_S) -> None:
        for _ in range(count):
            await self.chunk(event({"content": "word "}))
            await asyncio.sleep(gap_s)

    def reset(self) -> None:
        self.cut = True
        self._writer.transport.abort()

    def close(self) -> None:
        self.cut = True
        self._writer.close()


async def well(exchange: Exchange, *, gap_s: float = GAP_S) -> None:
    if not exchange.stream:
        await asyncio.sleep(gap_s * FRAMES)
        await exchange.head(length=len(whole()))
        await exchange.send(whole())
        return
    await exchange.head()
    await exchange.frames(FRAMES, gap_s=gap_s)
    await exchange.chunk(event({}, "stop") + b"data: [DONE]\n\n")
    await exchange.send(b"0\r\n\r\n")


async def long(exchange: Exchange) -> None:
    await well(exchange, gap_s=0.15)


async def reset_before(exchange: Exchange) -> None:
    exchange.reset()


async def half(exchange: Exchange, *, end: Callable[[Exchange], None]) -> None:
    """Some of an answer; then the connection is gone."""
    if exchange.stream:
        await exchange.head()
        await exchange.frames(3)
    else:
        await exchange.head(length=len(whole()))
        await exchange.send(whole()[:40])
    end(exchange)


async def refuse(exchange: Exchange, *, status: str, extra: str = "") -> None:
    body = b'{"error":{"message":"no","type":"x","param":null,"code":"x"}}'
    await exchange.head(status, length=len(body), extra=extra)
    await exchange.send(body)


async def nonsense(exchange: Exchange) -> None:
    if exchange.stream:
        await exchange.head()
        await exchange.chunk(b"data: {nonsense\n\n")
        await exchange.send(b"0\r\n\r\n")
    else:
        await exchange.head(length=9)
        await exchange.send(b"nonsense!")


async def drip(exchange: Exchange) -> None:
    """Byte for byte, as if the network were almost gone."""
    await exchange.head()
    for data in (event({"content": "word"}), event({}, "stop"), b"data: [DONE]\n\n"):
        for byte in data:
            await exchange.chunk(bytes([byte]))
            await asyncio.sleep(0.002)
    await exchange.send(b"0\r\n\r\n")


async def silent(exchange: Exchange) -> None:
    await asyncio.sleep(60)


BEHAVIOURS: dict[str, Callable[[Exchange], Awaitable[None]]] = {
    "well": well,
    "long": long,
    "reset-before": reset_before,
    "reset-within": lambda exchange: half(exchange, end=Exchange.reset),
    "half": lambda exchange: half(exchange, end=Exchange.close),
    "429": lambda exchange: refuse(exchange, status="429 Too Many Requests", extra="retry-after: 1\r\n"),
    "429-bare": lambda exchange: refuse(exchange, status="429 Too Many Requests"),
    "500": lambda exchange: refuse(exchange, status="500 Internal Server Error"),
    "503": lambda exchange: refuse(exchange, status="503 Service Unavailable"),
    "nonsense": nonsense,
    "drip": drip,
    "silent": silent,
}


class ChaosUpstream:
    """Serves on a free port of loopback; `connections` that are open now."""

    def __init__(self) -> None:
        self.connections = 0
        self._server: asyncio.Server

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        return self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        first: bytes | None = b""
        try:
            while first is not None:
                first = await self._one(reader, writer, first)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> bytes | None:
        """Answer one request that begins with `first`. What was read of the next one; None where there is none."""
        head = first + await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
        asked = _ASKED.search(body)
        exchange = Exchange(writer, stream=b'"stream":true' in body.replace(b" ", b""))
        answering = asyncio.ensure_future(BEHAVIOURS[asked[1].decode() if asked else "well"](exchange))
        more = asyncio.ensure_future(reader.read(1))  # before the answer that is the end
        for one in (answering, more):
            one.add_done_callback(lambda done: done.cancelled() or done.exception())  # a reset is no news here
        await asyncio.wait({answering, more}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            return None
        answering.result()
        if exchange.cut:
            more.cancel()
            return None
        return await more or None
