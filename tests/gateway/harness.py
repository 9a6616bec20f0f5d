"""What the gateway tests stand on: a gateway process, and an upstream on loopback that misbehaves exactly as told."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

# How long a client waits for what must come. A busy machine needs patience; only a fault needs all of it.
PATIENCE_S = 120.0
http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))

UPSTREAM_KEY = "sk-upstream-secret-4711"


@dataclass
class Exchange:
    """One request as the upstream got it, and the ways to answer it, down to the byte."""

    line: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: threading.Event = field(default_factory=threading.Event)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: str = "200 OK", content_type: str = "text/event-stream", extra: str = "") -> None:
        await self.send(
            f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\nconnection: close\r\n{extra}\r\n".encode()
        )

    async def json(self, status: str, body: bytes, extra: str = "") -> None:
        await self.head(status, "application/json", f"content-length: {len(body)}\r\n{extra}")
        await self.send(body)

    def reset(self) -> None:
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Return when the gateway has closed its side."""
        await self.reader.read()
        self.closed.set()

    async def wait_for_close(self, seconds: float) -> None:
        """The same, for so long at most; TimeoutError after that."""
        async with asyncio.timeout(seconds):
            await self.until_closed()


Behaviour = Callable[[Exchange], Awaitable[None]]


class Upstream:
    """An HTTP server in a thread. `behave` answers each request; `seen` has what came."""

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.behave: Behaviour
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def answer(self, behave: Behaviour) -> None:
        self.seen.clear()
        self.behave = behave

    def soon(self, call: Callable[[], object]) -> None:
        """Run something in the upstream's loop."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            exchange = Exchange(head[0], headers, body, reader, writer)
            self.seen.append(exchange)
            await self.behave(exchange)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@dataclass
class Gateway:
    """A running gateway process."""

    url: str
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def post(self, body: object, **headers: str) -> httpx.Response:
        """A chat completion from a Python body or from raw bytes."""
        url = f"{self.url}/v1/chat/completions"
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return http.post(url, **content, headers=headers)  # type: ignore[arg-type]

    def metric(self, line_start: str) -> float:
        """The sum of all samples whose line begins so."""
        lines = http.get(f"{self.url}/metrics").raise_for_status().text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


def raw_request(body: object, *, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    """A POST as it goes over a socket; `body` as JSON, or the very bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{extra}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def eventually(true: Callable[[], object], *, within_s: float = PATIENCE_S) -> None:
    """Poll until `true()` holds; fail when it does not in time."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.01)


def start_gateway(policy_file: Path, *, log_level: str = "info", **environ: str) -> Gateway:
    """Start a process and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = policy_file.with_suffix(".log")
    launcher = Path(__file__).parent / "launcher.py"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(launcher), str(policy_file), str(port), log_level],
            stdout=out,
            stderr=out,
            env={**os.environ, **environ},
        )
    gateway = Gateway(f"http://127.0.0.1:{port}", port, process, log)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return http.get(f"{gateway.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    eventually(ready)
    return gateway


def stop_gateway(gateway: Gateway) -> None:
    gateway.process.terminate()
    gateway.process.wait(timeout=PATIENCE_S)


class Driven:
    """One POST to an application in this process, driven by hand: its client can leave."""

    def __init__(self, app: Any, path: str, body: Mapping[str, Any], *, key: str) -> None:
        self._body, self._gone = json.dumps(body).encode(), asyncio.Event()
        self.sent: list[Any] = []
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "root_path": "",
            "query_string": b"", "headers": [(b"authorization", f"Bearer {key}".encode())],
            "server": ("x", 80), "client": ("y", 1),
        }  # fmt: skip
        self.done = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    async def leave(self) -> None:
        self._gone.set()
        await self.done
