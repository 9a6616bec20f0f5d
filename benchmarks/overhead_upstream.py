"""The fake upstream of gateway_overhead.py: a chat completion after a fixed time, whole or as 50 frames.

Run: python benchmarks/overhead_upstream.py PORT [--wait-ms 20] [--gap-ms 0]

One process, raw asyncio, no JSON read: it looks for `"stream":true` in the body. Each frame is a write and an HTTP
chunk of its own, as a real server's are; `--gap-ms` lies between them.
"""

import argparse
import asyncio
import json
from typing import cast

import uvloop

FRAMES = 50
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "
_SHARED = {"id": "chatcmpl-1", "created": 1, "model": "fake"}


def whole() -> bytes:
    message = {"role": "assistant", "content": " word" * FRAMES}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": FRAMES, "total_tokens": 100 + FRAMES}
    body = json.dumps({**_SHARED, "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
    return _HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def frames() -> list[bytes]:
    """The stream's writes: the head with the first frame, the others, and the end."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": " word"} for _ in range(FRAMES - 2)), {}]
    shared = {**_SHARED, "object": "chat.completion.chunk"}
    datas = [
        json.dumps({**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]})
        for delta in deltas
    ]
    events = [f"data: {data}\n\n".encode() for data in (*datas, "[DONE]")]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    head = _HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n"]


class Upstream(asyncio.Protocol):
    """One connection; requests come one after the other."""

    WHOLE, FRAMES = whole(), frames()

    def __init__(self, *, wait_s: float, gap_s: float) -> None:
        self._wait_s, self._gap_s = wait_s, gap_s
        self._received = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = bytes(self._received).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0) if end else 0
        if not end or len(body) < length:
            return
        self._received.clear()
        loop = asyncio.get_running_loop()
        if b'"stream":true' in body.replace(b" ", b""):
            loop.call_later(self._wait_s, self._stream, 0)
        else:
            loop.call_later(self._wait_s, self._transport.write, self.WHOLE)

    def _stream(self, at: int) -> None:
        while at < len(self.FRAMES):
            self._transport.write(self.FRAMES[at])
            at += 1
            if self._gap_s and at < len(self.FRAMES):
                asyncio.get_running_loop().call_later(self._gap_s, self._stream, at)
                return


async def served(port: int, *, wait_s: float, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(wait_s=wait_s, gap_s=gap_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--wait-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(served(args.port, wait_s=args.wait_ms / 1000, gap_s=args.gap_ms / 1000))
