"""/v1/responses through a real server, as the OpenAI SDK uses it: on a backend of ours and on an upstream."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import openai
import pytest
from promptsluice.gateway.responses.kept import Kept, ResponseStore
from promptsluice.policies.schema import ResponsesSpec
from promptsluice.prompt.errors import NotFound
from pydantic import BaseModel

from .harness import Exchange, Gateway, Upstream, http

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 7,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="one", max_retries=0, timeout=60) as one:
        yield one


def says(upstream: Upstream, message: dict[str, Any], *, finish_reason: str = "stop") -> None:
    """Have the upstream answer with a whole chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "far-1", "choices": [choice], "usage": USAGE}
    upstream.answer(lambda exchange: exchange.json("200 OK", json.dumps(body).encode()))


def streams(upstream: Upstream, deltas: Sequence[dict[str, Any]], *, end: str = "stop") -> None:
    """Have the upstream stream these deltas, then how it ends, the usage and the end mark."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "far-1"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": end})
    chunks = [{**head, "choices": [choice]} for choice in choices] + [{**head, "choices": [], "usage": USAGE}]

    async def stream(exchange: Exchange) -> None:
        await exchange.head()
        for chunk in chunks:
            await exchange.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await exchange.send(b"data: [DONE]\n\n")

    upstream.answer(stream)


def sent(upstream: Upstream) -> Any:
    return json.loads(upstream.seen[-1].body)


@pytest.mark.slow
def test_a_text(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="hi there", instructions="Be kind.", metadata={"a": "b"})
    assert made.output_text == "hi there" and made.status == "completed" and made.object == "response"
    assert made.id.startswith("resp_") and made.instructions == "Be kind." and made.metadata == {"a": "b"}
    assert made.usage is not None and made.usage.input_tokens == 4 and made.usage.output_tokens == 2
    assert made.usage.total_tokens == 6 and made.usage.input_tokens_details.cached_tokens == 0


def test_what_an_upstream_is_asked(client: openai.OpenAI, upstream: Upstream) -> None:
    says(upstream, {"content": "ok"})
    client.responses.create(
        model="far",
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "user", "content": [
                {"type": "input_text", "text": "b"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
            ]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ],
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low"},
        text={"verbosity": "low", "format": {"type": "json_object"}},
        extra_body={"top_k": 5},
    )  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for name in ("c1", "c2")
    ]
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert sent(upstream) == {
        "model": "far",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": [
                {"type": "text", "text": "b"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
            ]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_object"},
        "top_k": 5,
    }  # fmt: skip


def test_calls_thoughts_and_usage_of_an_upstream(client: openai.OpenAI, upstream: Upstream) -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    says(upstream, {"content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]}, finish_reason="stop")
    made = client.responses.create(model="far", input="How is it in Rome?", tools=[WEATHER])
    thought, text, called = cast("list[Any]", made.output)
    assert thought.content[0].text == "hm" and text.content[0].text == "Let me see."
    assert (called.type, called.call_id, called.name, called.arguments) == (
        "function_call", "c9", "weather", '{"city": "Rome"}',
    )  # fmt: skip
    assert made.model == "far-1" and made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens == 16
    assert made.usage.output_tokens_details.reasoning_tokens == 3


def test_cut_by_max_output_tokens(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="one two three", max_output_tokens=2)
    assert made.status == "incomplete" and made.output_text == "one two"
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    assert cast("Any", made.output[0]).status == "incomplete"
    events = list(client.responses.create(model="echo", input="one two three", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "one two"


def test_parse(client: openai.OpenAI, upstream: Upstream) -> None:
    says(upstream, {"content": '{"name": "Ada", "age": 36}'})
    made = client.responses.parse(model="far", input="Who?", text_format=Person)
    assert made.output_parsed == Person(name="Ada", age=36)
    asked = sent(upstream)["response_format"]
    assert asked["type"] == "json_schema" and asked["json_schema"]["strict"] is True
    assert asked["json_schema"]["name"] == "Person" and asked["json_schema"]["schema"]["required"] == ["name", "age"]


TEXT_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
    "response.content_part.done", "response.output_item.done", "response.completed",
]  # fmt: skip


def test_the_events_of_a_text(gateway: Gateway, client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="echo", input="hi there", stream=True))
    assert [event.type for event in events] == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = cast("Any", events[-1]).response
    assert last.output_text == "hi there" and last.usage.output_tokens == 2
    assert cast("Any", events[0]).response.id == last.id and cast("Any", events[0]).response.status == "in_progress"
    raw = http.post(f"{gateway.url}/v1/responses", json={"model": "echo", "input": "hi there", "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in raw.text.removesuffix("\n\n").split("\n\n")]
    assert [line[0] for line in lines] == [f"event: {name}" for name in TEXT_EVENTS]
    assert all(json.loads(data.removeprefix("data: "))["type"] == head[7:] for head, data in lines)


def test_the_stream_helper_with_a_schema(client: openai.OpenAI, upstream: Upstream) -> None:
    streams(
        upstream, [{"role": "assistant", "content": ""}, {"content": '{"name": "Ada", '}, {"content": '"age": 36}'}]
    )
    with client.responses.stream(model="far", input="Who?", text_format=Person) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots == ['{"name": "Ada", ', '{"name": "Ada", "age": 36}']
    assert final.output_parsed == Person(name="Ada", age=36)
    assert final.usage is not None and final.usage.input_tokens_details.cached_tokens == 16
    assert sent(upstream)["stream_options"] == {"include_usage": True}


def test_the_events_of_thoughts_texts_and_calls(client: openai.OpenAI, upstream: Upstream) -> None:
    def call(index: int, arguments: str, **first: Any) -> dict[str, Any]:
        name = {"name": first.pop("name")} if first else {}
        return {"tool_calls": [{"index": index, **first, "function": {**name, "arguments": arguments}}]}

    deltas = [
        {"role": "assistant", "reasoning_content": "hm"},
        {"content": "Let me "},
        {"content": "see."},
        call(0, "", id="a", type="function", name="weather"),
        call(0, '{"city": '),
        call(0, '"Rome"}'),
        call(1, "{}", id="b", type="function", name="weather"),
    ]
    streams(upstream, deltas, end="tool_calls")
    with client.responses.stream(model="far", input="How is it?", tools=[WEATHER]) as stream:
        types = [event.type.removeprefix("response.") for event in stream]
        final = stream.get_final_response()
    assert types == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    _, text, first, second = cast("list[Any]", final.output)
    assert text.content[0].text == "Let me see." and final.status == "completed"
    assert (first.call_id, first.name, first.arguments) == ("a", "weather", '{"city": "Rome"}')
    assert (second.call_id, second.arguments) == ("b", "{}")


def test_a_stream_that_breaks_off_has_failed(client: openai.OpenAI, upstream: Upstream) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}

    async def breaks_off(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        exchange.reset()

    upstream.answer(breaks_off)
    events = list(client.responses.create(model="far", input="hi", stream=True))
    last = cast("Any", events[-1])
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    assert last.response.output_text == "a"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_errors_keep_their_status(client: openai.OpenAI, upstream: Upstream) -> None:
    error = {"error": {"message": "slow down", "type": "rate_limit_error", "param": None, "code": "rate"}}
    upstream.answer(
        lambda exchange: exchange.json("429 Too Many Requests", json.dumps(error).encode(), "retry-after: 7\r\n")
    )
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as raised:
            client.responses.create(model="far", input="hi", stream=stream)
        assert raised.value.response.headers["retry-after"] == "7" and raised.value.code == "rate"


def test_a_conversation_goes_on(client: openai.OpenAI, upstream: Upstream) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    says(upstream, {"content": "Let me see.", "tool_calls": [call]})
    one = client.responses.create(model="far", input="How is it?", instructions="Be kind.", tools=[WEATHER])
    streams(upstream, [{"content": "Sunny."}])
    output: Any = [{"type": "function_call_output", "call_id": "c1", "output": "sun"}]
    events = client.responses.create(model="far", input=output, previous_response_id=one.id, stream=True)
    two = cast("Any", list(events)[-1]).response
    asked = sent(upstream)["messages"]
    says(upstream, {"content": "Bye."})
    client.responses.create(model="far", input="Thanks.", previous_response_id=two.id)
    assert asked == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    answered = [*asked, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks."}]
    assert sent(upstream)["messages"] == answered
    resent: Any = [{"role": "user", "content": "How is it?"}, *(item.to_dict() for item in one.output), *output]
    client.responses.create(model="far", input=resent)
    assert sent(upstream)["messages"] == asked, "who sends it all himself gets the same prompt"


def test_kept_and_deleted(gateway: Gateway, client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    stranger = client.with_options(api_key="two")
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(model="echo", input="and?", previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found" and raised.value.param == "previous_response_id"
    unkept = client.responses.create(model="echo", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"include": ["moods"]}, "include"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"what": 1}, "what"),
        ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "input[0].content[0]"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_cannot_be_served_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    response = http.post(f"{gateway.url}/v1/responses", json={"model": "echo", "input": "hi", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == param or error["param"].startswith(f"{param}."), error


def kept(size: int = 10, previous: str | None = None) -> Kept:
    return Kept(response=b"r" * (size - 2), messages=b"[]", previous=previous)


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = ResponseStore(ResponsesSpec(count=3, bytes=100, total=150, age=60), clock=lambda: now[0])
    store.put("a", "1", kept())
    store.put("a", "2", kept(previous="1"))
    store.put("a", "3", kept())
    assert store.conversation("a", "2") == [b"[]", b"[]"]
    store.put("a", "4", kept())
    with pytest.raises(NotFound):
        store.get("a", "3")  # the conversation of 2 was used later
    store.put("a", "large", kept(101))
    with pytest.raises(NotFound):
        store.get("a", "large")
    store.put("a", "5", kept(90))
    with pytest.raises(NotFound) as raised:
        store.conversation("a", "2")
    assert raised.value.code == "previous_response_not_found"
    store.put("b", "6", kept(60))
    assert store.get("b", "6").size == 60
    with pytest.raises(NotFound):
        store.get("a", "4")  # over all tenants together there is no room for it
    now[0] = 61.0
    with pytest.raises(NotFound):
        store.get("b", "6")
