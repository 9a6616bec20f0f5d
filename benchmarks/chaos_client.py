"""A client of chaos.py: one chat over a socket of its own, which may leave in the middle; and what came of it."""

import asyncio
import json
from dataclasses import dataclass

PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`how` is what the upstream is told; `leaves_s`: after so long the client goes, with a reset if it is `rude`."""

    how: str
    stream: bool
    leaves_s: float | None = None
    rude: bool = False
    key: str = "chaos"
    model: str = "far"
    text: str | None = None
    max_tokens: int = 100

    def request(self) -> bytes:
        content = self.text or f"do:{self.how}"
        body = {"model": self.model, "stream": self.stream, "max_tokens": self.max_tokens}
        raw = json.dumps({**body, "messages": [{"role": "user", "content": content}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\nconnection: close"
        return f"{head}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


async def outcome(port: int, ask: Ask) -> str:
    """In a word how it ended: whole, error, an HTTP status, left; "wrong: ..." for what must never be."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        return f"refused ({type(error).__name__})"
    try:
        writer.write(ask.request())
        if ask.leaves_s is not None:
            await asyncio.sleep(ask.leaves_s)
            if ask.rude:
                writer.transport.abort()
            return "left"
        async with asyncio.timeout(PATIENCE_S):
            return judged(await reader.read(), ask)
    except TimeoutError:
        return "wrong: no end"
    except OSError as error:
        return f"wrong: {type(error).__name__}"
    finally:
        writer.close()


def judged(raw: bytes, ask: Ask) -> str:
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.1 ") else 0
    if status != 200:
        return str(status) if b'"error"' in body and b'"internal"' not in body else f"wrong: {raw[:300]!r}"
    if not ask.stream:
        return "whole" if b'"choices"' in body else f"wrong: {raw[:300]!r}"
    done, failed = b"data: [DONE]" in body, b'data: {"error"' in body
    ended = body.endswith(b"0\r\n\r\n")
    if not ended or done == failed:
        return f"wrong: {'both' if done else 'neither'} end, {raw[-200:]!r}"
    return "whole" if done else "error frame"
