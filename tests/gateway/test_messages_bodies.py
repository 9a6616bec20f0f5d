"""What becomes of a Messages body: as a chat, refused, with policies and fallbacks; errors in Anthropic's form."""

import json
import socket
from typing import Any

import anthropic
import pytest

from .harness import Exchange, Gateway, Upstream, eventually, http, raw_request
from .test_messages import HI, WEATHER, ask, completion, post


def test_what_becomes_of_a_body(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", completion({"content": "ok"})))
    marked = {"cache_control": {"type": "ephemeral"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    pdf = {
        "type": "document",
        "title": "a.pdf",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
    }
    text_document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a text"}}
    turn = [image, {"type": "text", "text": "see", **marked}, pdf, text_document]
    shown = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}, image], **marked}
    thought = [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So."},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"é": [1.5, None]}},
    ]
    response = ask(
        gateway,
        system=[{"type": "text", "text": "a", **marked}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": turn},
            {"role": "assistant", "content": thought},
            {"role": "user", "content": [shown]},
        ],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        tools=[{**WEATHER, **marked, "type": "custom"}],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        odd={"x": 1},
    )
    assert response.status_code == 200, response.text
    sent = json.loads(upstream.seen[0].body)
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}}
    function = {"name": "f", "arguments": '{"é": [1.5, null]}'}
    assert sent == {
        "model": "far",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "user",
                "content": [url, {"type": "text", "text": "see"}, file, {"type": "text", "text": "a text"}],
            },
            {
                "role": "assistant",
                "content": "So.",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "x", "tool_call_id": "c"},
            {"role": "user", "content": [url]},
        ],
        "max_tokens": 50,
        "temperature": 0.5,
        "top_k": 3,
        "user": "u",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": WEATHER["name"],
                    "description": WEATHER["description"],
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
        "odd": {"x": 1},
    }


USER = {"role": "user", "content": "hi"}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [7]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "new_kind"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        ({"messages": [{"role": "system", "content": "x"}, USER]}, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "input": 7}]}, USER]}, "input"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": ["x"]}, "tools.0"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"model": None}, "model"),
        ({"stream": 1}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
    ],
    ids=str,
)
def test_bad_bodies_are_named_in_anthropics_form(gateway: Gateway, path: str, fields: Any, named: str) -> None:
    response = post(gateway, {"model": "echo", "max_tokens": 5, "messages": [USER], **fields}, path=path)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"] and body["request_id"] == response.headers["request-id"]


LOST = b'{"model": "nope", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}'


@pytest.mark.slow
def test_every_error_has_anthropics_form(gateway: Gateway, claude: anthropic.Anthropic) -> None:
    for method, body, status, kind in (
        ("POST", b"{", 400, "invalid_request_error"),
        ("POST", b"[" * 5000, 400, "invalid_request_error"),
        ("POST", LOST.replace(b"nope", b"echo").replace(b"max_tokens", b"most"), 400, "invalid_request_error"),
        ("POST", LOST, 404, "not_found_error"),
        ("POST", LOST.replace(b"nope", b"dead"), 502, "api_error"),
        ("POST", b"x" * (7 << 20), 413, "request_too_large"),
        ("GET", b"", 405, "invalid_request_error"),
    ):
        response = http.request(method, f"{gateway.url}/v1/messages", content=body)
        assert response.status_code == status and response.json()["error"]["type"] == kind, response.text
    lost = http.get(f"{gateway.url}/v1/messages/nope").json()
    assert lost["type"] == "error" and lost["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        claude.messages.create(model="nope", max_tokens=1, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="echo", max_tokens=1, messages=HI, extra_body={"temperature": 9}, stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_upstream_errors_are_translated(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    extra = "retry-after: 30\r\nx-should-retry: false\r\n"
    for body in (
        b'{"error": {"message": "busy"}}',
        b'{"detail": "busy"}',
        b'{"error": "busy"}',
        b'{"message": "busy"}',
    ):
        upstream.answer(lambda exchange, body=body: exchange.json("429 Too Many Requests", body, extra))
        response = ask(gateway, stream=stream)
        assert response.status_code == 429 and response.headers["retry-after"] == "30"
        assert response.json()["error"] == {"type": "rate_limit_error", "message": "busy"}
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"choices": []}'))
    assert ask(gateway, stream=stream).status_code == 502


def test_a_client_that_leaves_ends_the_work(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.until_closed())
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(raw_request({"model": "far", "max_tokens": 5, "messages": HI}, path="/v1/messages"))
        eventually(lambda: upstream.seen)
    assert upstream.seen[0].closed.wait(5)


def test_policies_fallbacks_and_reports(gateway: Gateway, upstream: Upstream) -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.json("503 Service Unavailable", b"{}", "retry-after: 1\r\n")

    upstream.answer(busy)
    saved = post(gateway, {"model": "lame", "max_tokens": 9, "messages": HI})
    assert saved.json()["content"][0]["text"] == "one two three"
    assert saved.headers["x-promptsluice-backend"] == "echo"
    upstream.answer(lambda exchange: exchange.json("200 OK", completion({"content": "ok"})))
    table = json.dumps([{"id": n, "name": f"row {n}"} for n in range(200)], indent=4)
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    result = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": table},
            *[{"type": "text", "text": "How many?"}],
        ],
    }
    body = {"model": "far:lossless", "max_tokens": 9, "messages": [USER, use, result]}
    response = post(gateway, body, **{"x-promptsluice-report": "1"})
    assert response.json()["promptsluice"]["policy"] == "lossless" and response.json()["type"] == "message"
    sent = json.loads(upstream.seen[0].body)["messages"][2]["content"]
    assert len(sent) < len(table) and json.loads(sent) == json.loads(table)
    streamed = post(gateway, {**body, "model": "echo", "stream": True}, **{"x-promptsluice-report": "1"}).text
    assert streamed.rstrip().split("\n\n")[-1].startswith("event: message_stop") and '"promptsluice":' in streamed
