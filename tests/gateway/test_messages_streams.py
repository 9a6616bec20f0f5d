"""The events of a streamed message: calls in all the ways that servers stream them, ends, answers that break off."""

import json
from typing import Any

import anthropic
import pytest

from .harness import Gateway, Upstream, eventually
from .test_messages import HI, WEATHER, ask, call, completion, events
from .test_upstream import DONE, USAGE_CHUNK, answers, chunk


def pieces(*deltas: Any, finish: str = "tool_calls") -> list[bytes]:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    return [b"data: " + json.dumps({"id": "c", "model": "far", "choices": [one]}).encode() + b"\n\n" for one in choices]


def part(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments, **more.pop("function", {})}, **more}]}


def begun(index: int, id: str, name: str, arguments: str = "") -> dict[str, Any]:
    return {"tool_calls": [call(id, name, arguments, index=index)]}


TWO = [("c1", "f", {"a": 1}), ("c2", "g", {"b": [2]})]
STREAMS = {
    "in pieces": (begun(0, "c1", "f"), part(0, '{"a"'), part(0, ": 1}"), begun(1, "c2", "g"), part(1, '{"b": [2]}')),
    "whole": (begun(0, "c1", "f", '{"a": 1}'), begun(1, "c2", "g", '{"b": [2]}')),
    "by turns": (
        begun(0, "c1", "f"),
        begun(1, "c2", "g"),
        part(0, '{"a"'),
        part(1, '{"b":'),
        part(0, ":1}"),
        part(1, "[2]}"),
    ),
    "in one chunk": ({"tool_calls": [call("c1", "f", '{"a":1}'), call("c2", "g", '{"b":[2]}', index=1)]},),
    "the same index": (begun(0, "c1", "f", '{"a":1}'), begun(0, "c2", "g", '{"b":[2]}')),
    "id in every piece": (
        begun(0, "c1", "f", '{"a"'),
        part(0, ":1}", id="c1"),
        begun(1, "c2", "g", '{"b"'),
        part(1, ":[2]}", id="c2"),
    ),
    "text before": (
        {"role": "assistant", "content": ""},
        {"content": "so "},
        begun(0, "c1", "f", '{"a":1}'),
        begun(1, "c2", "g", '{"b":[2]}'),
    ),
}


@pytest.mark.parametrize("deltas", STREAMS.values(), ids=STREAMS.keys())
def test_the_sdk_streams_calls(claude: anthropic.Anthropic, gateway: Gateway, upstream: Upstream, deltas: Any) -> None:
    upstream.answer(answers(*pieces(*deltas), USAGE_CHUNK, DONE))
    with claude.messages.stream(model="far", max_tokens=50, messages=HI, tools=[WEATHER]) as stream:
        message = stream.get_final_message()
    used = [block for block in message.content if block.type == "tool_use"]
    assert [(one.id, one.name, one.input) for one in used] == TWO and message.stop_reason == "tool_use"
    assert message.usage.cache_read_input_tokens == 2 and message.usage.output_tokens == 4
    found = events(gateway)
    open_block, ended = None, -1
    for event in found:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == ended + 1, "one after the other"
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block, ended = None, event["index"]
    assert open_block is None and found[-1]["type"] == "message_stop"


def test_a_call_without_arguments_or_id(claude: anthropic.Anthropic, upstream: Upstream) -> None:
    delta = {"tool_calls": [{"index": 0, "function": {"name": "now", "arguments": ""}}]}
    upstream.answer(answers(*pieces(delta, finish="stop"), DONE))
    with claude.messages.stream(model="far", max_tokens=50, messages=HI) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use" and block.id.startswith("toolu_") and block.input == {}
    assert stream.get_final_message().stop_reason == "tool_use", "whatever the server calls it"


@pytest.mark.parametrize(
    ("reason", "told", "ending"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("something_new", None, ("end_turn", None)),
    ],
)
def test_ends(gateway: Gateway, upstream: Upstream, reason: str, told: Any, ending: tuple[str, str | None]) -> None:
    body = completion({"content": "a"}, reason=reason, stop_reason=told)
    upstream.answer(lambda exchange: exchange.json("200 OK", body))
    whole = ask(gateway, stop_sequences=["END", "STOP"]).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending
    assert json.loads(upstream.seen[0].body)["stop"] == ["END", "STOP"]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": told}]}
    upstream.answer(answers(chunk("a"), b"data: " + json.dumps(last).encode() + b"\n\n", DONE))
    *_, delta, _ = events(gateway, stop_sequences=["END", "STOP"])
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == ending


def test_a_call_that_was_cut_off_is_none(gateway: Gateway, upstream: Upstream) -> None:
    half = {"content": "a", "tool_calls": [call("c1", "f", '{"a": ')]}
    upstream.answer(lambda exchange: exchange.json("200 OK", completion(half, reason="length")))
    cut = ask(gateway).json()
    assert cut["content"] == [{"type": "text", "text": "a"}] and cut["stop_reason"] == "max_tokens"
    upstream.answer(lambda exchange: exchange.json("200 OK", completion(half, reason="tool_calls")))
    assert ask(gateway).status_code == 502


@pytest.mark.parametrize("ending", [b"", b'data: {"error":{"message":"boom"}}\n\n', b"data: {\n\n"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(
    gateway: Gateway, claude: anthropic.Anthropic, upstream: Upstream, ending: bytes
) -> None:
    failed = 'promptsluice_completions_total{backend="far",model="far",outcome="failed",policy="off"}'
    before = gateway.metric(failed)
    upstream.answer(answers(chunk("a"), ending))
    *_, piece, error = events(gateway)
    assert piece["delta"] == {"type": "text_delta", "text": "a"}
    assert error["type"] == "error" and error["error"]["type"] == "api_error" and error["error"]["message"]
    eventually(lambda: gateway.metric(failed) == before + 1)
    with (
        pytest.raises(anthropic.APIStatusError),
        claude.messages.stream(model="far", max_tokens=5, messages=HI) as stream,
    ):
        stream.until_done()
