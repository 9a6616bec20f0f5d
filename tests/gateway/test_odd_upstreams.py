"""Upstreams whose chat completions are none, asked for them by the routes that say them in another form: their fault
is a 502, or the last event of a stream, and never an internal error."""

import json
from typing import Any

import pytest

from .harness import Exchange, Gateway, Upstream, http

HUGE = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1e999}}'
MESSAGES: list[Any] = [
    "text",
    {"content": "a", "tool_calls": 7},
    {"content": "a", "tool_calls": ["x"]},
    {"content": "a", "tool_calls": [{"id": "c"}]},
]
DELTAS: list[Any] = [
    {"tool_calls": [{"index": [1], "function": {"name": "f", "arguments": "{}"}}]},
    {"tool_calls": ["x"]},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "far", "input": "hi"},
    "/v1/messages": {"model": "far", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}


def ask(gateway: Gateway, path: str, **fields: Any) -> Any:
    return http.post(f"{gateway.url}{path}", json={**BODIES[path], **fields})


def whole(choice: Any) -> bytes:
    return json.dumps({"model": "far", "choices": [{"index": 0, "finish_reason": "stop", **choice}]}).encode()


def streams(upstream: Upstream, *choices: Any) -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.head()
        for choice in choices:
            await exchange.send(b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n")
        await exchange.send(b"data: [DONE]\n\n")

    upstream.answer(stream)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [HUGE, *(whole({"message": message}) for message in MESSAGES)])
def test_whole_answers_that_are_none(gateway: Gateway, upstream: Upstream, path: str, body: bytes) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", body))
    response = ask(gateway, path)
    assert response.status_code == 502, response.text


@pytest.mark.parametrize("delta", DELTAS)
def test_chunks_that_are_none_end_a_response(gateway: Gateway, upstream: Upstream, delta: Any) -> None:
    streams(upstream, {"delta": {"content": "a"}}, {"delta": delta})
    events = ask(gateway, "/v1/responses", stream=True).text
    assert events.rstrip().rpartition("event: ")[2].startswith("response.failed"), events
    assert "the backend sent a tool call" in events and "internal error" not in events


@pytest.mark.parametrize(
    "odd",
    [
        {"delta": {"content": 5}, "logprobs": {"content": [{"token": "b", "logprob": float("-inf")}]}},
        {"delta": {"tool_calls": 7}},
        {"delta": {}, "finish_reason": ["stop"]},
    ],
)
def test_what_is_odd_in_a_chunk_is_passed_over(gateway: Gateway, upstream: Upstream, odd: Any) -> None:
    streams(upstream, {"delta": {"content": "a"}}, odd, {"delta": {}, "finish_reason": "stop"})
    events = ask(gateway, "/v1/responses", stream=True).text
    last = json.loads(events.rstrip().rpartition("data: ")[2])
    assert last["type"] == "response.completed" and last["response"]["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_minus_infinity_is_told_as_openai_does(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    told = {"content": [{"token": "a", "logprob": float("-inf"), "bytes": [97], "top_logprobs": []}]}
    if stream:
        streams(upstream, {"delta": {"content": "a"}, "logprobs": told}, {"delta": {}, "finish_reason": "stop"})
    else:
        body = whole({"message": {"content": "a"}, "logprobs": told})
        upstream.answer(lambda exchange: exchange.json("200 OK", body))
    text = ask(gateway, "/v1/responses", stream=stream).text
    answered = json.loads(text.rstrip().rpartition("data: ")[2])["response"] if stream else json.loads(text)
    assert answered["output"][0]["content"][0]["logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_an_object_already(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    calls = [{"index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]
    if stream:
        streams(upstream, {"delta": {"tool_calls": calls}}, {"delta": {}, "finish_reason": "tool_calls"})
    else:
        body = whole({"message": {"content": None, "tool_calls": calls}})
        upstream.answer(lambda exchange: exchange.json("200 OK", body))
    text = ask(gateway, "/v1/responses", stream=stream).text
    call = (json.loads(text.rstrip().rpartition("data: ")[2])["response"] if stream else json.loads(text))["output"][0]
    assert json.loads(call["arguments"]) == {"a": 1} and call["call_id"]
