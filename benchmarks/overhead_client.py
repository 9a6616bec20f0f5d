"""The load of gateway_overhead.py: chat completions over raw, persistent connections, at little cost.

A connection asks, waits for the whole answer and asks again. Two loads:
- `closed`: each connection asks again at once, so that the server is as busy as it can be; this gives requests/s.
- `paced`: requests come at random (Poisson) at a given rate over all connections; a request is measured from when it
  was due, so that a server which falls behind cannot hide it.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import cast

_END = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Timed:
    """Seconds from each request to its answer's first byte of body and to its end; `took` is the run's length."""

    first: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    took: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.end) / self.took


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with one request on its way at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[None]
        self._received = bytearray()
        self._head = self._length = -1
        self.first = self.end = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the class.
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> "asyncio.Future[None]":
        """Done at the answer's end; `first` and `end` are then readings of time.perf_counter."""
        self._received.clear()
        self._head = self._length = -1
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if self._head < 0:
            at = received.find(b"\r\n\r\n")
            if at < 0:
                return
            self._head = at + 4
            head = bytes(received[:at]).lower()
            length = head.partition(b"content-length:")[2].split(b"\r\n")[0].strip()
            self._length = int(length) if length else -1
            if not head.startswith(b"http/1.1 200"):
                self._fail(f"{bytes(received[:400])!r}")
                return
            self.first = 0.0
        if not self.first and len(received) > self._head:
            self.first = time.perf_counter()
        if len(received) - self._head == self._length or (self._length < 0 and received.endswith(_END)):
            self.end = time.perf_counter()
            if self._length < 0 and b"[DONE]" not in received[-64:]:
                self._fail("a stream without its end mark")
            elif not self._answer.done():
                self._answer.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_answer"):
            self._fail(f"the connection was lost: {exc}")

    def close(self) -> None:
        self._transport.close()

    def _fail(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(RuntimeError(why))


def request_to(port: int, *, model: str, stream: bool, key: str = "sk-benchmark") -> bytes:
    """A chat of a few hundred tokens, as the OpenAI SDK sends it."""
    text = "Please say fifty words about the sea, one after the other. " * 16
    body = b'{"model":"%s","messages":[{"role":"user","content":"%s"}]%s}' % (
        model.encode(),
        text.encode(),
        b',"stream":true' if stream else b"",
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\naccept: application/json\r\nuser-agent: OpenAI/Python 2.0\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connected(port: int, count: int) -> list[Connection]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


async def load(port: int, request: bytes, *, connections: int, seconds: float, rate: float | None = None) -> Timed:
    """Run one load; `rate` is in requests/s over all connections, None is the closed loop."""
    opened = await connected(port, connections)
    timed, began = Timed(), time.perf_counter()
    due = _dues(connections, seconds, rate) if rate else [None] * connections
    try:
        await asyncio.gather(
            *(
                _closed(one, request, timed, until=began + seconds)
                if times is None
                else _paced(one, request, timed, [began + at for at in times])
                for one, times in zip(opened, due, strict=True)
            )
        )
    finally:
        timed.took = time.perf_counter() - began
        for one in opened:
            one.close()
    return timed


def _dues(connections: int, seconds: float, rate: float) -> list[list[float]]:
    """When each connection's requests are due; the same in each run."""
    dice, at, due = random.Random(7), 0.0, [list[float]() for _ in range(connections)]
    turn = 0
    while (at := at + dice.expovariate(rate)) < seconds:
        due[turn % connections].append(at)
        turn += 1
    return due


async def _closed(one: Connection, request: bytes, timed: Timed, *, until: float) -> None:
    while (sent := time.perf_counter()) < until:
        await one.ask(request)
        _note(timed, one, sent)


async def _paced(one: Connection, request: bytes, timed: Timed, due: list[float]) -> None:
    for at in due:
        # Who still waits for the answer before does so on the server's account, from the moment that was due; a timer
        # that fires late is the load's own fault.
        ahead = at - time.perf_counter()
        await asyncio.sleep(max(0.0, ahead))
        sent = at if ahead < 0 else time.perf_counter()
        await one.ask(request)
        _note(timed, one, sent)


def _note(timed: Timed, one: Connection, sent: float) -> None:
    timed.first.append(one.first - sent)
    timed.end.append(one.end - sent)
