"""Answers that are given again: only to the same request, in whatever framing it asks for."""

import json
from math import inf
from typing import Any

import openai
import pytest
from promptsluice.gateway.answer_cache import AnswerCache, Key
from promptsluice.gateway.backends.base import Frame
from promptsluice.gateway.replay import Gathering, chunks_of

from .harness import Gateway, Upstream, http
from .test_cases_streams import data_of
from .test_upstream import DONE, USAGE, USAGE_CHUNK, answers, chunk

SCHEMA = {"type": "json_schema", "json_schema": {"name": "A", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]

OTHER = {**CALLS[0], "id": "c2"}


def completion(text: str | None = "ab", **message: Any) -> bytes:
    said = {"role": "assistant", "content": text, "refusal": None, **message}
    choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": "tool_calls" if message else "stop"}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "far", "system_fingerprint": "x"}
    return json.dumps({**head, "choices": [choice], "usage": USAGE}).encode()


def request(question: str, *, policy: str = "cached", **fields: Any) -> dict[str, Any]:
    messages = fields.pop(
        "messages", [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": question}]
    )
    return {"model": f"far:{policy}", "messages": messages, **fields}


def state(gateway: Gateway, body: Any, **headers: str) -> str:
    """Whether the answer was known."""
    response = gateway.post(body, **headers)
    assert response.status_code == 200, response.text
    return response.headers["x-promptsluice-cache"]


def others(question: str) -> dict[str, dict[str, Any]]:
    """Requests that differ from the first one in one thing other than the question."""
    user = {"role": "user", "content": question}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    return {
        "system": request(question, messages=[{"role": "system", "content": "Answer in German."}, user]),
        "no system": request(question, messages=[user]),
        "history": request(question, messages=[user, {"role": "assistant", "content": "Hm?"}, user]),
        "image": request(question, messages=[{"role": "user", "content": [image, {"type": "text", "text": question}]}]),
        "tools": request(question, tools=[TOOL]),
        "response_format": request(question, response_format=SCHEMA),
        "temperature": request(question, temperature=0.1),
        "seed": request(question, seed=1),
        "n": request(question, n=2),
        "stop": request(question, stop=["x"]),
        "max_tokens": request(question, max_tokens=7),
        "unknown field": request(question, chat_template_kwargs={"enable_thinking": False}),
        "model": request(question) | {"model": "org/far:cached"},
        "policy": request(question, policy="alike"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cached", "alike"])
def test_gw_42_all_but_the_framing_has_to_be_equal(gateway: Gateway, upstream: Upstream, policy: str) -> None:
    question = f"What is the capital of Norway, asked under {policy}?"
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    assert state(gateway, request(question, policy=policy)) == "miss"
    assert state(gateway, request(question, policy=policy)) == "hit"
    for name, body in others(question).items():
        if policy == "alike":
            body = {**body, "model": body["model"].replace("cached", "alike")}
            if name == "policy":
                body["model"] = "far:alike-too"
        assert state(gateway, body) == "miss", name
        assert state(gateway, body) == "hit", name
    assert len(upstream.seen) == 1 + len(others(question))


@pytest.mark.slow
def test_gw_42_a_question_that_means_the_same(gateway: Gateway, upstream: Upstream) -> None:
    first, again = "How tall is the Eiffel Tower?", "How tall is the Eiffel tower?"
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    assert state(gateway, request(first, policy="alike")) == "miss"
    assert state(gateway, request(again, policy="alike")) == "hit"
    assert state(gateway, request("How do I boil an egg?", policy="alike")) == "miss"
    for name, body in others(again).items():
        if name != "policy":
            body = {**body, "model": body["model"].replace("cached", "alike")}
            assert state(gateway, body) == "miss", name
    assert state(gateway, request(first)) == "miss" and state(gateway, request(again)) == "miss", "only where asked for"


@pytest.mark.slow
def test_gw_42_questions_that_the_embedder_would_cut(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    for report in ("The report says how the year was. " * 60, "word " * 5000):
        first, other = (request(f"{report}{end}", policy="alike") for end in ("Who wrote it?", "What does it cost?"))
        assert state(gateway, first) == "miss" and state(gateway, other) == "miss"
        assert state(gateway, first) == "hit", "the very same is known"


def test_gw_42_keys_do_not_share_answers(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    body = request("Whose answer is it?")
    assert state(gateway, body, authorization="Bearer one") == "miss"
    assert state(gateway, body, authorization="Bearer two") == "miss"
    assert state(gateway, body, authorization="Bearer one") == "hit"


def test_failures_are_not_kept(gateway: Gateway, upstream: Upstream) -> None:
    body = request("Does it fail?")
    upstream.answer(lambda exchange: exchange.json("400 Bad Request", b'{"error": {"message": "no"}}'))
    assert gateway.post(body).status_code == 400
    upstream.answer(answers(chunk("a")))
    gateway.post({**body, "stream": True})
    upstream.answer(answers(chunk("a"), b'data: {"error": {"message": "no"}}\n\n'))
    gateway.post({**body, "stream": True})
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"choices": []}'))
    assert state(gateway, body) == "miss" and state(gateway, body) == "miss"
    assert "x-promptsluice-cache" not in gateway.post(request("x", policy="off")).headers


def streamed(gateway: Gateway, body: Any, **options: Any) -> tuple[list[Any], Any]:
    """The chunks with choices, and the usage frame if there is one; checks the framing."""
    more = {"stream_options": options} if options else {}
    response = gateway.post({**body, "stream": True, **more})
    assert response.headers["x-promptsluice-cache"] == "hit"
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = data_of(response.content)
    assert done == "[DONE]" and len({(one["id"], one["model"], one["object"]) for one in chunks}) == 1
    usage = chunks.pop() if options.get("include_usage") else None
    assert all(len(one["choices"]) == 1 and one.get("usage") is None for one in chunks)
    return [one["choices"][0] for one in chunks], usage


@pytest.mark.parametrize("calls", [False, True])
def test_gw_44_a_whole_answer_is_given_again_as_a_stream(gateway: Gateway, upstream: Upstream, calls: bool) -> None:
    body = request(f"Framing, whole first, calls {calls}?")
    whole = completion(None, tool_calls=CALLS) if calls else completion()
    upstream.answer(lambda exchange: exchange.json("200 OK", whole))
    assert state(gateway, body) == "miss"
    for options in ({}, {"include_usage": False}, {"include_usage": True}):
        chunks, usage = streamed(gateway, body, **options)
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["delta"] == {} and chunks[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
        assert all(one["finish_reason"] is None for one in chunks[:-1])
        if calls:
            assert chunks[1]["delta"] == {"tool_calls": [{"index": 0, **CALLS[0]}]}
        else:
            assert chunks[1]["delta"] == {"content": "ab"}
        assert usage is None or (usage["choices"] == [] and usage["usage"] == USAGE)
    assert gateway.post(body).content == whole, "and as it was"
    assert len(upstream.seen) == 1


def test_gw_44_the_sdk_reads_what_is_given_again(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", completion(None, tool_calls=CALLS)))
    body = request("Does the SDK read it?")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(**body)
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            again = stream.get_final_completion().choices[0]
    assert len(upstream.seen) == 1 and again.finish_reason == "tool_calls"
    calls = whole.choices[0].message.tool_calls
    assert calls and again.message.tool_calls
    assert again.message.tool_calls[0].model_dump()["function"]["arguments"] == CALLS[0]["function"]["arguments"]


STREAMS = {
    "with usage": (chunk("a"), chunk("b", finish="stop"), USAGE_CHUNK, DONE),
    "without": (chunk("a"), chunk("b", finish="stop"), DONE),
}


@pytest.mark.parametrize("sent", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("asked", [False, True])
def test_gw_44_a_stream_is_given_again_as_a_whole(gateway: Gateway, upstream: Upstream, sent: Any, asked: bool) -> None:
    body = request(f"Framing, stream first, {len(sent)} {asked}?")
    upstream.answer(answers(*sent))
    first = gateway.post({**body, "stream": True, "stream_options": {"include_usage": asked}})
    assert first.headers["x-promptsluice-cache"] == "miss" and first.text.rstrip().endswith("[DONE]")
    response = gateway.post(body)
    assert response.headers["x-promptsluice-cache"] == "hit"
    answer = response.json()
    assert answer["object"] == "chat.completion" and answer["id"] == "c"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "ab"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert len(sent) == 3 or answer["usage"]["total_tokens"] == 7
    assert [one["delta"].get("content") for one in streamed(gateway, body)[0]][1] == "ab"
    assert len(upstream.seen) == 1


def test_gw_44_anthropics_route_is_answered_from_the_same_answers(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    url = f"{gateway.url}/v1/messages"
    body = {"model": "far:cached", "max_tokens": 5, "messages": [{"role": "user", "content": "As a message?"}]}
    assert http.post(url, json=body).headers["x-promptsluice-cache"] == "miss"
    again = http.post(url, json=body)
    assert again.headers["x-promptsluice-cache"] == "hit" and again.json()["content"][0]["text"] == "ab"
    assert again.json()["usage"]["output_tokens"] == 4
    events = http.post(url, json={**body, "stream": True})
    assert events.headers["x-promptsluice-cache"] == "hit" and '"text":"ab"' in events.text
    assert '"output_tokens":4' in events.text and len(upstream.seen) == 1


def test_hits_are_counted_and_not_billed(gateway: Gateway, upstream: Upstream) -> None:
    billed = 'promptsluice_billed_tokens_total{backend="far",model="far",policy="cached",type="prompt"}'
    known = 'promptsluice_answer_cache_total{outcome="hit",policy="cached"}'
    upstream.answer(lambda exchange: exchange.json("200 OK", completion()))
    body = request("What does it cost?")
    gateway.post(body)
    before = gateway.metric(billed), gateway.metric(known)
    assert state(gateway, body) == "hit" and streamed(gateway, body)
    assert (gateway.metric(billed), gateway.metric(known)) == (before[0], before[1] + 2)


@pytest.mark.parametrize("choices", [1, 3])
def test_there_and_back_again(choices: int) -> None:
    said = [
        {"role": "assistant", "content": "some text", "refusal": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [*CALLS, {**CALLS[0], "id": "c2"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    told = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}], "refusal": None}
    listed = [
        {"index": index, "message": said[index], "logprobs": None if index else told, "finish_reason": "stop"}
        for index in range(choices)
    ]
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": listed, "usage": USAGE}
    gathering = Gathering()
    for frame in chunks_of(whole, include_usage=True):
        gathering.add(frame)
    found = json.loads(gathering.whole() or b"")
    for choice in (*whole["choices"], *found["choices"]):
        choice["message"] = {name: value for name, value in choice["message"].items() if value is not None}
        choice["logprobs"] = (choice["logprobs"] or {}).get("content")
    assert found == whole


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [{"choices": []}],
        [{"choices": [{"index": 0, "delta": {"content": "a"}}]}],
        [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}, {"index": 1, "delta": {}}]}],
        [{"choices": [{"delta": {}, "finish_reason": "stop"}]}],
        [{"choices": [{"index": 0, "delta": {"tool_calls": [CALLS[0], OTHER]}, "finish_reason": "stop"}]}],
        [{"choices": "x"}],
        [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}, {"index": "1", "finish_reason": "stop"}]}],
        [{"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"logprob": -inf}]},
                       "finish_reason": "stop"}]}],
    ],
)  # fmt: skip
def test_what_is_odd_is_not_kept(chunks: list[Any]) -> None:
    gathering = Gathering()
    for one in chunks:
        gathering.add(Frame(data=json.dumps(one).encode()))
    assert gathering.whole() is None


@pytest.mark.parametrize(
    "said",
    [
        {"message": {"content": "a", "tool_calls": "zz"}},
        {"message": {"content": "a", "tool_calls": [None]}},
        {"message": "a"},
        {"message": {"content": "a"}, "logprobs": {"content": [{"logprob": -inf}]}},
    ],
)
def test_an_answer_that_has_no_other_framing_is_not_kept(gateway: Gateway, upstream: Upstream, said: Any) -> None:
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", **said}]}).encode()
    upstream.answer(lambda exchange: exchange.json("200 OK", body))
    asked = request(f"What is odd about {json.dumps(said)}?")
    assert gateway.post(asked).content == body
    assert state(gateway, asked) == "miss"


def test_what_is_kept_has_bounds() -> None:
    now = [0.0]
    cache = AnswerCache(100, clock=lambda: now[0])
    keys = [Key("rest", str(number)) for number in range(4)]
    for key in keys[:2]:
        cache.put(key, b"x" * 40, ttl=10)
    assert cache.get(keys[0]) is not None
    cache.put(keys[2], b"x" * 40, ttl=20)
    assert [cache.get(key) is not None for key in keys] == [True, False, True, False], "the longest unused one went"
    cache.put(keys[3], b"x" * 101, ttl=10)
    assert cache.get(keys[3]) is None and cache.get(keys[0]) is not None
    now[0] = 10.0
    assert cache.get(keys[0]) is None and cache.get(keys[2]) is not None
    cache.put(keys[2], b"y" * 90, ttl=10)
    assert cache.get(keys[2]) == b"y" * 90
