"""/v1/messages where the upstream speaks Anthropic's API itself: bodies and events pass as they are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from .harness import UPSTREAM_KEY, Gateway, Upstream, start_gateway, stop_gateway
from .test_messages import HI, post
from .test_upstream import answers

NATIVE = """
version: 1
default_policy: off
backends:
  claude:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    api_key_env: TEST_UPSTREAM_KEY
    models: [m, org/m]
    messages: native
    timeouts: {{connect: 2, read: 5}}
  bearer:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    api_key_env: TEST_UPSTREAM_KEY
    models: [b]
    messages: native
    messages_key: authorization
policies:
  off: {{extends: off, allow_client_policy: all}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
"""


@pytest.fixture(scope="module")
def native(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("native")
    policy_file: Path = root / "policy.yaml"
    policy_file.write_text(NATIVE.format(port=upstream.port, root=root))
    running = start_gateway(policy_file, log_level="debug", TEST_UPSTREAM_KEY=UPSTREAM_KEY)
    yield running
    stop_gateway(running)


@pytest.fixture
def client(native: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=native.url, api_key="any", max_retries=0) as sdk:
        yield sdk


MESSAGE = (
    b'{"id": "msg_1", "type":"message", "content": [], "n":1.50, "usage": {"input_tokens": 3, "output_tokens": 4}}'
)
SIGNED = (
    b'{ "model":"m", "max_tokens":10, "thinking":{"type":"enabled","budget_tokens":1024},\n "messages":['
    b'{"role":"user","content":"q"},{"role":"assistant","content":[{"type":"thinking","thinking":"  spaced \\u00e9 ",'
    b'"signature":"c2ln"},{"type":"redacted_thinking","data":"eA=="},{"type":"server_tool_use","id":"s","input":{"a":1e5}},'
    b'{"type":"new_kind","x":[1.0, {}]},{"type":"text","text":"a"}]},%s{"role":"user","content":[{"type":"text",'
    b'"text":"next","cache_control":{"type":"ephemeral"}}]}], "mcp_servers":[], "odd":1.0}'
)


@pytest.mark.slow
def test_gw_36_signed_blocks_reach_their_maker_byte_for_byte(native: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", MESSAGE))
    raw = SIGNED % b""
    response = post(native, raw, **{"x-api-key": "client", "anthropic-version": "2023-06-01", "anthropic-beta": "b-1"})
    assert response.content == MESSAGE
    (seen,) = upstream.seen
    assert seen.body == raw and seen.line == "POST /v1/messages HTTP/1.1"
    assert seen.headers["x-api-key"] == UPSTREAM_KEY and "authorization" not in seen.headers
    assert seen.headers["anthropic-beta"] == "b-1" and seen.headers["anthropic-version"] == "2023-06-01"
    assert native.metric('promptsluice_billed_tokens_total{backend="claude",model="m",policy="off",type="prompt"}') == 3


@pytest.mark.parametrize("policy", ["lossless", "balanced", "aggressive"])
def test_gw_36_also_where_a_policy_changes_what_stands_beside_them(
    native: Gateway, upstream: Upstream, policy: str
) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", MESSAGE))
    table = json.dumps([{"id": n, "name": f"row {n}"} for n in range(200)], indent=4)
    result = [{"type": "tool_result", "tool_use_id": "t", "content": table, "cache_control": {"type": "ephemeral"}}]
    turns = b'{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"a":1.50}}]},'
    turns += b'{"role":"user", "content":' + json.dumps(result).encode() + b"},"
    raw = (SIGNED % turns).replace(b'"model":"m"', f'"model":"org/m:{policy}"'.encode())
    assert post(native, raw).status_code == 200
    sent = upstream.seen[0].body
    small = json.dumps(json.loads(table), separators=(",", ":"))
    found = json.loads(sent)["messages"][3]["content"][0]["content"]
    assert json.loads(found) == json.loads(table) and len(found) <= len(small) + 200
    assert sent.replace(json.dumps(found).encode(), json.dumps(table).encode()) == raw.replace(
        f":{policy}".encode(), b""
    )


def test_native_counting_and_keys(native: Gateway, upstream: Upstream, client: anthropic.Anthropic) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"input_tokens": 77}'))
    assert client.messages.count_tokens(model="m", messages=HI).input_tokens == 77
    assert upstream.seen[0].line == "POST /v1/messages/count_tokens HTTP/1.1"
    assert (
        post(native, {"model": "b", "messages": HI, "max_tokens": 1}, authorization="Bearer client").status_code == 200
    )
    assert (
        upstream.seen[1].headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
        and "x-api-key" not in upstream.seen[1].headers
    )
    assert upstream.seen[1].headers["anthropic-version"]


def native_events(*events: Any) -> list[bytes]:
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


START = {
    "type": "message_start",
    "message": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_read_input_tokens": 7,
            "cache_creation_input_tokens": 2,
            "output_tokens": 1,
        },
    },
}
TEXT = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "caf\u00e9"}},
    {"type": "content_block_stop", "index": 0},
]
END = [
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
]


@pytest.mark.slow
def test_native_streams_pass_as_they_are(native: Gateway, upstream: Upstream, client: anthropic.Anthropic) -> None:
    sent = native_events(START, {"type": "ping"}, *TEXT, *END)
    upstream.answer(answers(*(bytes([byte]) for byte in b"".join(sent))))
    billed = 'promptsluice_billed_tokens_total{backend="claude",model="m",policy="off",type="%s"}'
    before = [native.metric(billed % kind) for kind in ("prompt", "completion")]
    response = post(native, {"model": "m", "max_tokens": 5, "messages": HI, "stream": True})
    assert response.content == b"".join(sent)
    assert [native.metric(billed % kind) for kind in ("prompt", "completion")] == [before[0] + 14, before[1] + 9]
    with client.messages.stream(model="m", max_tokens=5, messages=HI) as stream:
        assert stream.get_final_text() == "caf\u00e9"


@pytest.mark.parametrize(
    "ending",
    [
        b"",
        b"event: x\ndata: {\n\n",
        *native_events({"type": "error", "error": {"type": "overloaded_error", "message": UPSTREAM_KEY}}),
    ],
)
def test_native_streams_that_break_off(native: Gateway, upstream: Upstream, ending: bytes) -> None:
    upstream.answer(answers(*native_events(START), ending))
    response = post(native, {"model": "m", "max_tokens": 5, "messages": HI, "stream": True})
    last = response.text.rstrip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ") and "message_stop" not in response.text
    assert UPSTREAM_KEY not in response.text and set(json.loads(last.split("data: ")[1])) >= {"type", "error"}


def test_native_errors_pass_as_they_are(native: Gateway, upstream: Upstream) -> None:
    error = b'{"type": "error",  "error": {"type": "overloaded_error", "message": "busy"}, "request_id": "r"}'
    lines = "retry-after: 3\r\nanthropic-ratelimit-requests-remaining: 0\r\n"
    for stream in (False, True):
        upstream.answer(lambda exchange: exchange.json("529 Overloaded", error, lines))
        response = post(native, {"model": "m", "max_tokens": 5, "messages": HI, "stream": stream})
        assert response.status_code == 529 and response.content == error
        assert response.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert response.headers["retry-after"] == "3"
