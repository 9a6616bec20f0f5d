"""Anthropic's SDK on the embedded engine, with tools: called, streamed, answered, counted.

A random model with a real tokenizer: a grammar makes it call what it has to call.
"""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from .harness import PATIENCE_S, Gateway

pytestmark = pytest.mark.slow
MODEL = "tiny"
HI: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
FORCED: Any = {"type": "tool", "name": "get_weather"}


@pytest.fixture(scope="module")
def sdk(mixed: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=mixed.url, api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def used(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_tool_is_called_and_its_result_goes_back(sdk: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER, NOW], "system": "Be brief."}
    first = sdk.messages.create(messages=HI, tool_choice=FORCED, **fields)
    assert first.stop_reason == "tool_use"
    (block,) = used(first)
    assert block.name == "get_weather" and block.input["town"] in ("Oslo", "Rome") and block.id
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "-3 degrees"}]}
    history: Any = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Is that cold?"}]},
    ]
    last = sdk.messages.create(messages=history, **{**fields, "max_tokens": 4})
    assert last.stop_reason in ("max_tokens", "end_turn")
    # The turns that were answered before are found again.
    assert last.usage.cache_read_input_tokens + last.usage.input_tokens > first.usage.input_tokens
    assert last.usage.cache_read_input_tokens > 0
    error: Any = {**result, "is_error": True, "content": "no such town"}
    again = sdk.messages.create(
        messages=[*history[:2], {"role": "user", "content": [error]}], **fields | {"max_tokens": 4}
    )
    assert again.usage.output_tokens <= 4


def test_a_streamed_call_is_the_whole_one(sdk: anthropic.Anthropic) -> None:
    """Each block is opened, filled with pieces of JSON and closed; joined, the pieces are the call."""
    fields: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "messages": HI, "tool_choice": FORCED}
    whole = sdk.messages.create(**fields, extra_body={"seed": 3})
    kinds: list[str] = []
    pieces: list[str] = []
    with sdk.messages.stream(**fields, extra_body={"seed": 3}) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces.append(event.delta.partial_json)
        streamed = stream.get_final_message()
    assert used(streamed)[0].input == used(whole)[0].input and used(streamed)[0].name == "get_weather"
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert len(pieces) > 1 and kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_several_calls_come_as_blocks_of_their_own(sdk: anthropic.Anthropic) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    text = f'Let me see.\n{call}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    written: Any = {"guided_choice": [text]}  # the model writes exactly this
    fields: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER, NOW], "messages": HI, "extra_body": written}
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        starts = [event.index for event in stream if event.type == "content_block_start"]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert said(message) == "Let me see."
        assert [(one.name, one.input) for one in used(message)] == [("get_weather", {"town": "Rome"}), ("now", {})]
        assert len({one.id for one in used(message)}) == 2 and message.stop_reason == "tool_use"
    assert starts == [0, 1, 2]
    alone: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(used(sdk.messages.create(**fields, tool_choice=alone))) == 1
    unread = sdk.messages.create(**fields, tool_choice={"type": "none"})
    assert not used(unread) and unread.stop_reason == "end_turn"


def test_any_tool(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(
        model=MODEL,
        max_tokens=300,
        tools=[WEATHER, NOW],
        messages=HI,
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    )
    assert used(message)[0].name in ("get_weather", "now")


def test_counted_tokens_are_those_that_are_billed(sdk: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "system": "Be brief.", "messages": HI}
    for tools in ([], [WEATHER, NOW]):
        counted = sdk.messages.count_tokens(**fields, tools=tools).input_tokens
        usage = sdk.messages.create(**fields, tools=tools, max_tokens=1).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stop_sequences_and_what_cannot_be_read(sdk: anthropic.Anthropic) -> None:
    written: Any = {"guided_choice": ["one two three"]}
    message = sdk.messages.create(model=MODEL, max_tokens=20, messages=HI, stop_sequences=[" two"], extra_body=written)
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == " two"
    assert said(message) == "one"
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/cat.png"}}
    with pytest.raises(anthropic.BadRequestError) as raised:
        sdk.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [image]}])
    error: Any = raised.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(model="nobody", max_tokens=4, messages=HI)


async def test_the_async_sdk_streams_a_call(mixed: Gateway) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=mixed.url, api_key="any", max_retries=0, timeout=PATIENCE_S) as client,
        client.messages.stream(model=MODEL, max_tokens=200, tools=[WEATHER], messages=HI, tool_choice=FORCED) as stream,
    ):
        message = await stream.get_final_message()
    assert used(message)[0].input["town"] in ("Oslo", "Rome")
