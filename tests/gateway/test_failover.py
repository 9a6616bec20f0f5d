"""Fallbacks: who is asked, how often, and whose answer or error the client sees."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from promptsluice.gateway.backends.base import Frame, Stream
from promptsluice.gateway.failover import opened

from .harness import Exchange, Gateway, Upstream, eventually, http

HI = [{"role": "user", "content": "hi there"}]
BROKEN = b'{"error": {"message": "no", "type": "server_error", "param": null, "code": null}}'
UNREACHABLE_ATTEMPTS = 3


def test_the_next_one_answers(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"ok": 1}'))
    response = gateway.post({"model": "lame", "messages": HI, "odd": 1})
    assert response.json() == {"ok": 1}
    assert response.headers["x-promptsluice-backend"] == "far"
    assert response.headers["x-promptsluice-attempts"] == str(UNREACHABLE_ATTEMPTS + 1)
    assert json.loads(upstream.seen[0].body) == {"model": "far", "messages": HI, "odd": 1}


@pytest.mark.slow
def test_the_last_one_answers(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("500 Internal Server Error", BROKEN))
    fell = 'promptsluice_fallbacks_total{backend="far",to="echo"}'
    before = gateway.metric(fell)
    answer = gateway.post({"model": "lame", "messages": HI})
    assert answer.json()["choices"][0]["message"]["content"] == "hi there"
    assert answer.headers["x-promptsluice-backend"] == "echo" and len(upstream.seen) == 1
    streamed = gateway.post({"model": "lame", "messages": HI, "stream": True})
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
    assert gateway.metric(fell) == before + 2


def test_when_all_fail_the_last_error_is_told_once(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("500 Internal Server Error", BROKEN))
    response = gateway.post({"model": "lamer", "messages": HI})
    assert response.status_code == 500 and response.content == BROKEN and len(upstream.seen) == 1
    assert response.headers["x-promptsluice-attempts"] == str(UNREACHABLE_ATTEMPTS + 1)


@pytest.mark.slow
def test_a_bad_request_is_nobody_elses(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("400 Bad Request", BROKEN))
    response = gateway.post({"model": "lame", "messages": HI})
    assert response.status_code == 400 and response.headers["x-promptsluice-backend"] == "far"


def test_nothing_is_glued_to_an_answer_that_has_begun(gateway: Gateway, upstream: Upstream) -> None:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}

    async def breaks_off(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        exchange.reset()

    upstream.answer(breaks_off)
    response = gateway.post({"model": "lame", "messages": HI, "stream": True})
    frames = [json.loads(line[6:]) for line in response.text.strip().split("\n\n")]
    assert frames[0] == chunk and "error" in frames[1] and len(frames) == 2
    eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)


@pytest.mark.slow
def test_a_stream_that_fails_before_its_first_frame_is_anothers(gateway: Gateway, upstream: Upstream) -> None:
    async def says_only_200(exchange: Exchange) -> None:
        await exchange.head()
        exchange.reset()

    upstream.answer(says_only_200)
    response = gateway.post({"model": "lame", "messages": HI, "stream": True})
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n"), response.text
    assert response.headers["x-promptsluice-backend"] == "echo" and len(upstream.seen) == 1
    assert response.headers["x-promptsluice-attempts"] == str(UNREACHABLE_ATTEMPTS + 2)


@pytest.mark.parametrize("waits", [False, True])
async def test_an_opened_stream_that_nobody_reads_is_closed(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptsluice.gateway.failover.FIRST_FRAME_S", 0.01 if waits else 60.0)
    closed = asyncio.Event()

    async def frames() -> AsyncGenerator[Frame, None]:
        try:
            await asyncio.sleep(3600 if waits else 0)
            yield Frame(data=b"{}")
        finally:
            closed.set()

    stream = await opened(Stream(frames=frames()))
    assert not closed.is_set()
    await stream.frames.aclose()
    assert closed.is_set()


EMBEDDED = b'{"object": "list", "data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}'


@pytest.mark.slow
def test_embeddings_fall_back_to_who_has_them(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", EMBEDDED))
    raw = b'{"model": "lame",  "input": [1, 2.50]}'
    response = http.post(f"{gateway.url}/v1/embeddings", content=raw)
    assert response.status_code == 200 and response.content == EMBEDDED
    assert response.headers["x-promptsluice-backend"] == "far"
    assert response.headers["x-promptsluice-attempts"] == str(UNREACHABLE_ATTEMPTS + 1)
    assert upstream.seen[0].body == raw.replace(b'"lame"', b'"far"')
    # The echo, which comes next, has no vectors: far's own error is the last word.
    upstream.answer(lambda exchange: exchange.json("500 Internal Server Error", BROKEN))
    response = http.post(f"{gateway.url}/v1/embeddings", content=raw)
    assert response.status_code == 500 and response.content == BROKEN
    dead = http.post(f"{gateway.url}/v1/embeddings", json={"model": "dead", "input": "a"})
    assert dead.status_code == 502 and dead.json()["error"]["type"] == "upstream_error"
