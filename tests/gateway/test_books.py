"""When the books of a request are written, and of what moment they tell."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from promptsluice.backend_engine.types import Delta
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Frame, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.backends.generations import count_template
from promptsluice.gateway.stream import EventStream
from promptsluice.policies import PolicySet

from .harness import Driven

POLICY = """
version: 1
default_policy: "off"
backends: {echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}}
"""
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "one two three"}]}
BEFORE, AFTER = "promptsluice_prompt_tokens_before", "promptsluice_prompt_tokens_after"
TTFT = "promptsluice_time_to_first_token_seconds_count"


class Exact(EchoBackend):
    """Makes a prompt's sizes exact, as an engine does, and says its second word when it may."""

    def __init__(self) -> None:
        super().__init__("echo", models=["echo"])
        self.go_on = asyncio.Event()

    async def complete(self, call: Call) -> Answer | Stream:
        count_template(call.report, call.report.tokens_out + 1000)
        return await super().complete(call)

    async def _deltas(self, words: Sequence[str], most: int | None) -> AsyncGenerator[Delta, None]:
        async for delta in super()._deltas(words, most):
            yield delta
            await self.go_on.wait()


@asynccontextmanager
async def opened(backend: Exact) -> AsyncIterator[FastAPI]:
    app = create_app(PolicySet.from_text(POLICY), backends={"echo": backend})
    async with app.router.lifespan_context(app):
        yield app


def sample(app: FastAPI, name: str, **labels: str) -> float:
    return app.state.sluice.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_sizes_are_those_that_were_planned_with() -> None:
    backend = Exact()
    backend.go_on.set()
    async with opened(backend) as app:
        asked = Driven(app, "/v1/chat/completions", CHAT, key="any")
        await asked.done
        assert asked.status == 200 and sample(app, f"{BEFORE}_count", policy="off") == 1
        assert 0 < sample(app, f"{BEFORE}_sum", policy="off") == sample(app, f"{AFTER}_sum", policy="off") < 1000


async def test_a_request_lasts_until_its_answer_is_there_however_slowly_it_is_taken() -> None:
    backend, taken_at = Exact(), list[float]()
    backend.go_on.set()

    class Slow(Driven):
        async def _send(self, message: Any) -> None:
            taken_at.append(time.perf_counter())
            await asyncio.sleep(0.02)
            await super()._send(message)

    async with opened(backend) as app:
        await Slow(app, "/v1/chat/completions", CHAT, key="any").done
        (line,) = app.state.sluice.rooms.records.page(None, limit=2, before=None)
        record = app.state.sluice.rooms.records.get(None, line["id"])
        assert 0 < record.total_s <= taken_at[0] - record.began


async def test_the_first_token_is_in_the_metrics_while_its_stream_goes_on() -> None:
    backend, way = Exact(), {"model": "echo", "policy": "off", "backend": "echo"}
    async with opened(backend) as app:
        asked = Driven(app, "/v1/chat/completions", {**CHAT, "stream": True}, key="any")
        while not any(b"one" in message.get("body", b"") for message in asked.sent):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asked.done.done() and sample(app, TTFT, **way) == 1
        backend.go_on.set()
        await asked.done
        assert sample(app, TTFT, **way) == 1


async def test_a_head_that_cannot_be_sent_ends_the_request() -> None:
    closed = asyncio.Event()

    async def frames() -> AsyncGenerator[Frame, None]:
        try:
            await asyncio.Event().wait()
            yield Frame(data=b"1")
        finally:
            closed.set()

    async def send(message: Any) -> None:
        raise RuntimeError("Invalid HTTP header value.")

    response = EventStream(frames(), headers={}, request_id="r", first_frame_s=0.01)
    with pytest.raises(RuntimeError, match="header value"):
        await asyncio.wait_for(response({}, asyncio.Queue[Any]().get, send), 60)
    assert closed.is_set()
