"""/v1/messages against a real server: the Anthropic SDK, the translation to chats, and an upstream that speaks it."""

import json
from typing import Any

import anthropic

from .harness import (
    Gateway,
    Upstream,
    http,
)
from .test_upstream import USAGE

HI: Any = [{"role": "user", "content": "one two three"}]


def post(gateway: Gateway, body: Any, *, path: str = "/v1/messages", **headers: str) -> Any:
    content: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
    return http.post(f"{gateway.url}{path}", **content, headers=headers)


def ask(gateway: Gateway, **fields: Any) -> Any:
    return post(gateway, {"model": "far", "max_tokens": 50, "messages": HI, **fields})


def completion(message: Any, *, reason: str = "stop", **choice: Any) -> bytes:
    message = {"role": "assistant", **message}
    choices = [{"index": 0, "message": message, "finish_reason": reason, **choice}]
    return json.dumps({"id": "c", "model": "far", "choices": choices, "usage": USAGE}).encode()


def events(gateway: Gateway, **fields: Any) -> list[Any]:
    """The events of a streamed answer; each has the name that its data says it has."""
    response = ask(gateway, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_the_sdk_gets_a_message(claude: anthropic.Anthropic) -> None:
    raw = claude.messages.with_raw_response.create(model="echo:off", max_tokens=2, messages=HI)
    assert raw.headers["x-promptsluice-policy"] == "off" and raw.headers["request-id"]
    message = raw.parse()
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == "echo"
    assert [block.text for block in message.content if block.type == "text"] == ["one two"]
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 2)
    assert claude.messages.count_tokens(model="echo", system="be brief", messages=HI).input_tokens == 5


def test_the_sdk_streams(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="echo", max_tokens=50, messages=HI) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == "one two three" and len(texts) == 3
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 3 and message.usage.input_tokens == 3


async def test_the_async_sdk_streams(gateway: Gateway) -> None:
    client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="any", max_retries=0)
    async with client, client.messages.stream(model="echo", max_tokens=50, messages=HI) as stream:
        assert "".join([text async for text in stream.text_stream]) == "one two three"


def test_events_come_in_their_order(gateway: Gateway) -> None:
    found = events(gateway, model="echo")
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"] and kinds.count("message_start") == 1
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start, delta = found[0]["message"], found[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3


WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def call(id: str, name: str, arguments: str, *, index: int = 0) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_of_the_sdk(claude: anthropic.Anthropic, upstream: Upstream) -> None:
    """A whole conversation: a call with text before it, its result, and the final answer."""
    calls = [call("c1", "get_weather", '{"town": "Oslo"}'), call("c2", "get_weather", '{"town": "Rome"}', index=1)]
    body = completion({"content": "Let me look.", "tool_calls": calls}, reason="tool_calls")
    upstream.answer(lambda exchange: exchange.json("200 OK", body))
    fields: Any = {"model": "far", "max_tokens": 50, "tools": [WEATHER], "system": "Be brief."}
    first = claude.messages.create(messages=HI, tool_choice={"type": "any"}, **fields)
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    used = [block for block in first.content if block.type == "tool_use"]
    assert [(one.id, one.name, one.input) for one in used] == [
        ("c1", "get_weather", {"town": "Oslo"}), ("c2", "get_weather", {"town": "Rome"}),
    ]  # fmt: skip
    sent = json.loads(upstream.seen[0].body)
    assert sent["tools"][0]["function"]["parameters"] == WEATHER["input_schema"] and sent["tool_choice"] == "required"
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."} and sent["max_tokens"] == 50

    upstream.answer(lambda exchange: exchange.json("200 OK", completion({"content": "Cold."})))
    results: Any = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "-3 degrees"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "20"}], "is_error": False},
        {"type": "text", "text": "Where is it cold?"},
    ]
    history: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = claude.messages.create(messages=history, **fields)
    assert last.stop_reason == "end_turn"
    assert last.usage.input_tokens == 1 and last.usage.cache_read_input_tokens == 2 and last.usage.output_tokens == 4
    _, _, asked, one, two, question = json.loads(upstream.seen[0].body)["messages"]
    assert asked["content"] == "Let me look." and [made["id"] for made in asked["tool_calls"]] == ["c1", "c2"]
    assert json.loads(asked["tool_calls"][1]["function"]["arguments"]) == {"town": "Rome"}
    assert one == {"role": "tool", "tool_call_id": "c1", "content": "-3 degrees"}
    assert two == {"role": "tool", "tool_call_id": "c2", "content": "20"}
    assert question == {"role": "user", "content": "Where is it cold?"}
