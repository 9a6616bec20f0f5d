"""/v1/completions: choices by prompt, echoes, log-probabilities in columns; upstreams get and give bytes unchanged."""

import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from promptsluice.gateway.text_parameters import text_parameters
from promptsluice.gateway.text_wire import Echo, TextWriter
from promptsluice.gateway.wire import Choice
from promptsluice.prompt import BadRequest, Usage

from .harness import Exchange, Gateway, Upstream, http
from .test_upstream import DONE, UPSTREAM_KEY, USAGE, USAGE_CHUNK, answers


def post(gateway: Gateway, body: Mapping[str, Any] | bytes, **headers: str) -> Any:
    content: Any = {"content": body} if isinstance(body, bytes) else {"json": body}
    return http.post(f"{gateway.url}/v1/completions", **content, headers=headers)


def frames(gateway: Gateway, **body: Any) -> list[Any]:
    """The data of a stream's frames, parsed; "[DONE]" as it is."""
    response = post(gateway, {"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_each_prompt_has_its_choices(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    prompts = ["a b", "c d e"]
    whole = client.completions.create(model="echo", prompt=prompts, n=2, echo=True)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == ["a ba b", "a ba b", "c d ec d e", "c d ec d e"]
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 10)
    texts, ends = [""] * 4, [0] * 4
    for chunk in client.completions.create(model="echo", prompt=prompts, n=2, echo=True, stream=True):
        (choice,) = chunk.choices
        assert not ends[choice.index], "nothing comes after a choice's end"
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices] and ends == [1] * 4
    by_ids = client.completions.create(model="echo", prompt=[[7, 8], [9]])
    assert [choice.text for choice in by_ids.choices] == ["7 8", "9"]
    assert client.completions.create(model="echo", prompt=[7, 8, 9]).choices[0].text == "7 8 9"


def test_an_answer_has_sixteen_tokens_unless_it_may_have_more(gateway: Gateway) -> None:
    words = "w " * 20
    short = post(gateway, {"model": "echo", "prompt": words}).json()
    assert short["usage"]["completion_tokens"] == 16 and short["choices"][0]["finish_reason"] == "length"
    long = post(gateway, {"model": "echo", "prompt": words, "max_tokens": 99}).json()
    assert long["usage"]["completion_tokens"] == 20 and long["choices"][0]["finish_reason"] == "stop"
    assert long["choices"][0]["logprobs"] is None


def test_usage_comes_last_and_to_who_asked(gateway: Gateway) -> None:
    asked = frames(gateway, model="echo", prompt=["a", "b c"], stream_options={"include_usage": True})
    assert asked[-1] == "[DONE]" and asked[-2]["choices"] == []
    assert asked[-2]["usage"]["total_tokens"] == 6 and asked[-2]["object"] == "text_completion"
    assert all(len(one["choices"]) == 1 and "usage" not in one for one in asked[:-2])
    plain = frames(gateway, model="echo", prompt="a")
    assert plain[-1] == "[DONE]" and all(one["choices"] for one in plain[:-1])


def test_no_policy_is_applied_and_the_headers_say_so(gateway: Gateway) -> None:
    response = post(gateway, {"model": "echo:lossless", "prompt": "a  b"}, **{"x-promptsluice-report": "1"})
    assert response.json()["choices"][0]["text"] == "a  b" and response.json()["model"] == "echo"
    assert response.headers["x-promptsluice-policy"] == "off" and response.headers["x-promptsluice-backend"] == "echo"
    assert response.json()["promptsluice"]["policy"] == "off"
    assert post(gateway, {"model": "echo:nonsense", "prompt": "a"}).status_code in (400, 404)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 1}, "top_logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "guided_choice": ["x"]}, "response_format"),
    ],
)
def test_bad_requests_name_the_field(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    response = post(gateway, {"model": "echo", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model": "echo", "prompt": NaN}', b'{"prompt": "a"}'])
def test_bodies_that_are_none(gateway: Gateway, body: bytes) -> None:
    assert post(gateway, body).status_code == 400


def test_what_a_request_may_ask() -> None:
    parameters = text_parameters({"model": "m", "prompt": [[1, 2], "x"], "n": 2, "best_of": 2, "user": "u"})
    assert parameters.prompts == ((1, 2), "x") and parameters.choices == 4
    assert parameters.sampling().max_tokens == 16 and parameters.sampling().logprobs is None
    assert text_parameters({"prompt": "a", "max_tokens": None, "suffix": ""}).max_tokens == 16
    assert text_parameters({"prompt": "a", "logprobs": 0}).sampling().logprobs == 0
    with pytest.raises(BadRequest, match="best_of"):
        text_parameters({"prompt": "a", "best_of": 2})


def told(*tokens: bytes) -> list[dict[str, Any]]:
    return [
        {
            "token": raw.decode("utf-8", "backslashreplace"),
            "logprob": -1.0,
            "bytes": list(raw),
            "top_logprobs": [{"token": "?", "logprob": -0.5, "bytes": [63]}],
        }
        for raw in tokens
    ]


def test_columns_of_an_echo_and_its_completion() -> None:
    """The tokenizer's begin token has no place in the text; nor has the space that it puts before a text."""
    smiley = "é😀".encode()
    tokens = [b"<s>", b" Caf", smiley[:2], smiley[2:4], smiley[4:]]
    writer = TextWriter(model="m", echoes=[Echo(text="Café😀", tokens=tokens, added=1)])
    choice = Choice(text=" ok", reason="stop", logprobs=told(b" ok"), prompt_logprobs=told(*tokens[1:]))
    body = json.loads(writer.whole([choice], usage=Usage(prompt_tokens=5, completion_tokens=1)))
    assert body["choices"][0]["text"] == "Café😀 ok"
    columns = body["choices"][0]["logprobs"]
    assert columns["text_offset"] == [0, 0, 3, 4, 4, 5]
    assert columns["tokens"] == ["<s>", " Caf", "é", "\\xf0\\x9f", "\\x98\\x80", " ok"]
    assert columns["token_logprobs"] == [None, -1, -1, -1, -1, -1]
    assert columns["top_logprobs"][0] is None and columns["top_logprobs"][1] == {"?": -0.5, " Caf": -1.0}
    streamed = TextWriter(model="m", echoes=[Echo(text="Café😀", tokens=tokens, added=1)])
    first = json.loads(streamed.begin(logprobs=told(*tokens[1:])))["choices"][0]
    second = json.loads(streamed.content(" ok", logprobs=told(b" ok")))["choices"][0]
    assert first["text"] + second["text"] == "Café😀 ok"
    assert {name: first["logprobs"][name] + second["logprobs"][name] for name in columns} == columns


def text_chunk(text: str = "", *, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps({"id": "c", "object": "text_completion", "choices": [choice], **fields}).encode()
        + (b"\n\n")
    )


def test_upstreams_get_and_give_bytes_as_they_are(gateway: Gateway, upstream: Upstream) -> None:
    answer = b'{"id":"x","choices":[],"n":1.50e3}'
    upstream.answer(lambda exchange: exchange.json("200 OK", answer))
    raw = b'{ "model" : "far",\n "prompt": [1, 2],  "suffix":"x", "best_of": 5, "odd": {"x":1e5}}'
    response = post(gateway, raw, authorization="Bearer client-key")
    assert response.content == answer and response.headers["x-promptsluice-policy"] == "off"
    (seen,) = upstream.seen
    assert seen.line == "POST /v1/completions HTTP/1.1" and seen.body == raw
    assert seen.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    post(gateway, b'{"x":1.0,  "model":"org/far:lossless","prompt":"a"}')
    assert upstream.seen[-1].body == b'{"x":1.0,  "model":"org/far","prompt":"a"}'


def test_upstream_streams(gateway: Gateway, upstream: Upstream) -> None:
    sent = text_chunk("a", odd=1.0), text_chunk("b", finish="stop", usage=USAGE)
    upstream.answer(answers(sent[0], sent[1], DONE))
    response = post(gateway, {"model": "far", "prompt": "x", "stream": True})
    assert response.content.startswith(sent[0]) and response.content.endswith(DONE)
    assert "usage" not in response.text and response.headers["x-promptsluice-attempts"] == "1"
    assert upstream.seen[0].headers["accept"] == "text/event-stream"
    upstream.answer(answers(text_chunk("b", finish="stop"), USAGE_CHUNK, DONE))
    *_, usage, done = frames(gateway, model="far", prompt="x", stream_options={"include_usage": True})
    assert usage["usage"] == USAGE and done == "[DONE]"


@pytest.mark.parametrize("ending", [b"", b'data: {"error":{"message":"boom"}}\n\n', b"data: {\n\n"])
def test_a_broken_upstream_stream_ends_with_an_error_frame(gateway: Gateway, upstream: Upstream, ending: bytes) -> None:
    upstream.answer(answers(text_chunk("a"), ending))
    first, error = frames(gateway, model="far", prompt="x")
    assert first["choices"][0]["text"] == "a" and set(error) == {"error"}


@pytest.mark.slow
def test_upstream_errors_and_fallbacks(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("400 Bad Request", b'{"detail":"no"}'))
    refused = post(gateway, {"model": "far", "prompt": "x", "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "no"

    async def busy(exchange: Exchange) -> None:
        await exchange.json("503 Service Unavailable", b"{}", "retry-after: 1\r\n")

    upstream.answer(busy)
    saved = post(gateway, {"model": "lame", "prompt": "to be said back"})
    assert saved.json()["choices"][0]["text"] == "to be said back"
    assert saved.headers["x-promptsluice-backend"] == "echo" and json.loads(upstream.seen[0].body)["model"] == "far"
    assert post(gateway, {"model": "dead", "prompt": "x"}).status_code == 502
    assert post(gateway, {"model": "nope", "prompt": "x"}).status_code == 404
