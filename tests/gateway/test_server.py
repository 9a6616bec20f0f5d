"""A real server process: what SDKs see, frames, clients that leave, large bodies, keys, shutdown with open streams."""

import asyncio
import hashlib
import json
import signal
import socket
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from promptsluice.gateway.backends.base import Frame
from promptsluice.gateway.stream import EventStream

from .harness import Gateway, eventually, http, start_gateway, stop_gateway

HI: Any = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def sdk(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0)


def test_sdk_completion(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(model="echo:off", messages=HI, max_tokens=2)
    assert raw.headers["x-promptsluice-policy"] == "off" and raw.headers["x-promptsluice-backend"] == "echo"
    answer = raw.parse()
    assert answer.choices[0].message.content == "one two" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 2
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert "promptsluice" not in (answer.model_extra or {})


@pytest.mark.parametrize("usage", [True, False, None])
def test_sdk_stream(sdk: openai.OpenAI, usage: bool | None) -> None:
    options: Any = {} if usage is None else {"stream_options": {"include_usage": usage}}
    chunks = list(sdk.chat.completions.create(model="echo", messages=HI, stream=True, **options))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    assert counted == (chunks[-1:] if usage else [])
    assert all(len(chunk.choices) == (0 if chunk.usage else 1) for chunk in chunks)
    spoken = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert spoken[0].delta.role == "assistant" and spoken[-1].finish_reason == "stop"
    assert "".join(choice.delta.content or "" for choice in spoken) == "one two three"
    assert all(choice.finish_reason is None for choice in spoken[:-1])


def test_sdk_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="echo", messages=HI) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "one two three"


def test_sdk_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as lost:
        sdk.chat.completions.create(model="nope", messages=HI)
    assert lost.value.code == "model_not_found" and lost.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(model="echo", messages=HI, temperature=9, stream=True)
    assert sdk.models.retrieve("org/echo").id == "org/echo"


def test_the_report_comes_only_when_asked(gateway: Gateway) -> None:
    body = {"model": "echo:balanced", "messages": HI}
    report = gateway.post(body, **{"x-promptsluice-report": "1"}).json()["promptsluice"]
    assert report["policy"] == "balanced" and report["backend"] == "echo" and report["tokens_in"] == 3
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    frames = gateway.post(streamed, **{"x-promptsluice-report": "1"}).text.strip().split("\n\n")
    carrying = [json.loads(frame[6:]) for frame in frames[:-1] if "promptsluice" in frame]
    assert len(carrying) == 1 and carrying[0]["usage"]["total_tokens"] == 6 and frames[-1] == "data: [DONE]"
    assert "promptsluice" not in gateway.post(streamed).text


def test_a_policy_that_cannot_retrieve_goes_on_without(gateway: Gateway) -> None:
    failures = 'promptsluice_step_failures_total{policy="rag",step="retrieve"'
    before = gateway.metric(failures)
    response = gateway.post({"model": "echo:rag", "messages": HI}, **{"x-promptsluice-report": "true"})
    assert response.status_code == 200
    (step,) = response.json()["promptsluice"]["steps"]
    assert step["name"] == "retrieve" and "there is no collection 'docs'" in step["note"]
    assert gateway.metric(failures) == before + 1


def test_framing_on_the_socket(gateway: Gateway) -> None:
    body = json.dumps({"model": "echo", "messages": HI, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert headers[b"transfer-encoding"] == b"chunked" and b"content-length" not in headers
    assert headers[b"cache-control"] == b"no-cache" and headers[b"x-accel-buffering"] == b"no"
    assert b"server" not in headers
    # One event a chunk: nothing is held back until the next one.
    chunks = [chunk for chunk in rest.split(b"\r\n") if chunk.startswith(b"data: ")]
    assert all(chunk.endswith(b"\n\n") and chunk.count(b"data: ") == 1 for chunk in chunks)
    assert chunks[-1] == b"data: [DONE]\n\n" and b"\nid:" not in rest and b"\nretry:" not in rest


def test_a_client_that_leaves_a_stream(gateway: Gateway) -> None:
    cancelled = 'promptsluice_completions_total{backend="echo-slow",model="slow",outcome="cancelled",policy="off"}'
    before = gateway.metric(cancelled)
    body = {"model": "slow", "messages": [{"role": "user", "content": "word " * 500}], "stream": True}
    with http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response:
        next(response.iter_bytes())
    eventually(lambda: gateway.metric(cancelled) == before + 1)
    eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)


@pytest.mark.slow
def test_a_large_body(gateway: Gateway) -> None:
    body = {"model": "echo:aggressive", "max_tokens": 1, "messages": [
        {"role": "tool", "content": "lorem ipsum " * 400_000, "tool_call_id": "1"}, *HI]}  # fmt: skip
    response = gateway.post(body)
    assert response.status_code == 200, response.text


def test_work_on_one_request_blocks_nobody(gateway: Gateway) -> None:
    gate, entered = (gateway.log.with_name(name) for name in ("gate", "entered"))
    body = {
        "model": "gated:aggressive",
        "messages": [{"role": "tool", "content": "a " * 500, "tool_call_id": "1"}, *HI],
    }
    gate.touch()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(gateway.post, body)
        try:
            eventually(entered.exists)
            assert http.get(f"{gateway.url}/healthz").status_code == 200
            assert gateway.post({"model": "echo", "messages": HI}).status_code == 200
            assert not waiting.done()
        finally:
            gate.unlink()
        assert waiting.result().status_code == 200


@pytest.fixture
def own_gateway(tmp_path: Path) -> Any:
    """Starts a gateway of a test's own with extra lines in its policy file."""
    started: list[Gateway] = []

    def start(extra: str = "") -> Gateway:
        policy_file = tmp_path / "policy.yaml"
        policy_file.write_text(
            "version: 1\ndefault_policy: off\nbackends:\n"
            '  echo-slow: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [slow]}\n' + extra
        )
        started.append(start_gateway(policy_file))
        return started[-1]

    yield start
    for gateway in started:
        stop_gateway(gateway)


@pytest.mark.slow
def test_shutdown_lets_streams_finish(own_gateway: Any) -> None:
    gateway: Gateway = own_gateway()
    body = {"model": "slow", "messages": [{"role": "user", "content": "a b c d e f g h"}], "stream": True}
    with http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)

        def refuses() -> bool:
            try:
                socket.create_connection(("127.0.0.1", gateway.port)).close()
            except ConnectionRefusedError:
                return True
            return False

        eventually(refuses)
    assert text.rstrip().endswith("data: [DONE]") and '"content":" h"' in text
    assert gateway.process.wait(10) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_api_keys(own_gateway: Any) -> None:
    digest = hashlib.sha256(b"key-one").hexdigest()
    gateway: Gateway = own_gateway(f"server:\n  api_keys:\n    - {{name: one, sha256: {digest}}}\n")
    body = {"model": "slow", "messages": HI, "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-one"}):
        response = gateway.post(body, **headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert http.get(f"{gateway.url}/v1/models", headers=headers).status_code == 401
        assert http.get(f"{gateway.url}/v1/collections", headers=headers).status_code == 401
    assert gateway.post(body, authorization="Bearer key-one").status_code == 200
    assert gateway.post(body, **{"x-api-key": "key-one"}).status_code == 200
    assert http.get(f"{gateway.url}/healthz").status_code == 200
    assert httpx.head(f"{gateway.url}/readyz").status_code == 200


async def test_silence_is_filled_with_comments() -> None:
    go_on = asyncio.Event()
    sent: list[bytes] = []

    async def frames() -> AsyncGenerator[Frame, None]:
        yield Frame(data=b'{"a":1}')
        await go_on.wait()
        yield Frame(data=b'{"a":2}')

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent.count(b": keepalive\n\n") == 2:
            go_on.set()

    async def receive() -> Any:
        raise AssertionError("nobody receives")

    response = EventStream(frames(), headers={}, request_id="r", keepalive_s=0.01, first_frame_s=0.01)
    await response({"type": "http"}, receive, send)
    assert sent[1] == b'data: {"a":1}\n\n' and sent[-2] == b'data: {"a":2}\n\n' and sent[-1] == b"data: [DONE]\n\n"
    assert set(sent[2:-2]) == {b": keepalive\n\n"}


async def test_a_bug_in_mid_stream_is_an_error_frame_without_its_message() -> None:
    sent: list[bytes] = []

    async def frames() -> AsyncGenerator[Frame, None]:
        yield Frame(data=b'{"a":1}')
        raise RuntimeError("the user's secret")

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        raise AssertionError("nobody receives")

    response = EventStream(frames(), headers={}, request_id="r-1")
    await response({"type": "http"}, receive, send)
    error = json.loads(sent[2].removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error" and "r-1" in error["message"] and b"secret" not in b"".join(sent)
    assert len(sent) == 3
