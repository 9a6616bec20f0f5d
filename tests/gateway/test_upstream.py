"""The upstream backend against a real server that resets, splits, hangs, refuses and lies."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from promptsluice.gateway.backends.openai import UpstreamBackend
from promptsluice.policies.schema import OpenAIBackend
from promptsluice.prompt import PromptsluiceError

from .harness import UPSTREAM_KEY, Exchange, Gateway, Upstream, eventually, http

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chunk(text: str = "", *, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "far", "choices": [choice], **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
USAGE_CHUNK = b"data: " + json.dumps({"id": "c", "choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def events(gateway: Gateway, **fields: Any) -> list[Any]:
    """The data frames of a streamed answer, parsed; "[DONE]" as it is. Checks the framing on the way."""
    response = gateway.post({"model": "far", "messages": HI, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def answers(*pieces: bytes) -> Any:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        for piece in pieces:
            await exchange.send(piece)

    return behave


def test_body_arrives_byte_for_byte(gateway: Gateway, upstream: Upstream) -> None:
    answer = b'{"id":"x","choices":[],"n":1.50e3}'
    upstream.answer(lambda exchange: exchange.json("200 OK", answer))
    raw = b'{ "model" : "far",\n "messages": [{"role":"developer","content":"caf\\u00e9","x":1.0}], "odd":{"x":1e5}}'
    response = gateway.post(raw, **{"content-type": "text/plain"})
    assert response.content == answer
    assert upstream.seen[0].body == raw
    assert upstream.seen[0].line == "POST /v1/chat/completions HTTP/1.1"


def test_a_policy_suffix_changes_the_model_and_nothing_else(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}"))
    gateway.post(b'{"top_k":5,  "model":"org/far:lossless","messages":[{"role":"user","content":"hi"}],"y":[1.0]}')
    assert upstream.seen[0].body == (
        b'{"top_k":5,  "model":"org/far","messages":[{"role":"user","content":"hi"}],"y":[1.0]}'
    )


def test_no_key_and_no_foreign_header_goes_upstream(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}"))
    secret = "gw-test-key-0815"
    sent = {
        "authorization": f"Bearer {secret}",
        "x-api-key": secret,
        "cookie": f"s={secret}",
        "traceparent": "00-1-2-03",
    }
    gateway.post({"model": "far", "messages": HI}, **sent, **{"x-promptsluice-report": "1"})
    seen = upstream.seen[0].headers
    assert secret not in str(seen)
    assert seen["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert seen["traceparent"] == "00-1-2-03"
    assert not {"cookie", "x-api-key", "x-promptsluice-report"} & set(seen)


def test_fields_that_name_a_destination_are_inert(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}"))
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/"
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        for model in ("far", "echo"):
            gateway.post({"model": model, "messages": image, "api_base": url, "base_url": url, "api_key": "sk-test"})
        trap.settimeout(0)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert len(upstream.seen) == 1


STREAM = chunk("a") + chunk("b", finish="stop") + USAGE_CHUNK + DONE


@pytest.mark.slow
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_split_at_every_byte(gateway: Gateway, upstream: Upstream, line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    before = gateway.metric('promptsluice_billed_tokens_total{backend="far",model="far",policy="off",type="prompt"}')
    upstream.answer(answers(*(stream[i : i + 1] for i in range(len(stream)))))
    first, second, usage, done = events(gateway, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"]["content"] + second["choices"][0]["delta"]["content"] == "ab"
    assert usage["choices"] == [] and usage["usage"] == USAGE and done == "[DONE]"
    after = gateway.metric('promptsluice_billed_tokens_total{backend="far",model="far",policy="off",type="prompt"}')
    assert after - before == 3


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_usage_is_stripped_from_who_did_not_ask(gateway: Gateway, upstream: Upstream, options: Any) -> None:
    upstream.answer(answers(STREAM))
    frames = events(gateway, **({"stream_options": options} if options else {}))
    assert len(frames) == 3 and frames[-1] == "[DONE]"
    assert all("usage" not in frame for frame in frames[:-1])


def test_usage_on_a_chunk_with_choices_gets_a_frame_of_its_own(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(answers(chunk("a", usage=None), chunk("b", finish="stop", usage=USAGE), DONE))
    first, second, usage, done = events(gateway, stream_options={"include_usage": True})
    assert first["usage"] is None and "usage" not in second
    assert usage["choices"] == [] and usage["usage"] == USAGE and done == "[DONE]"


def test_comments_ids_and_retries_are_not_passed(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(answers(b": ping\n\nid: 1\nretry: 5\nevent: x\n" + chunk("a", finish="stop") + DONE))
    first, done = events(gateway)
    assert first["choices"][0]["delta"]["content"] == "a" and done == "[DONE]"


def test_death_in_mid_stream_is_an_error_frame(gateway: Gateway, upstream: Upstream) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head(extra="transfer-encoding: chunked\r\n")
        for piece in (chunk("a"), chunk("b")):
            await exchange.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        exchange.reset()

    failed = 'promptsluice_completions_total{backend="far",model="far",outcome="failed",policy="off"}'
    before = gateway.metric(failed)
    upstream.answer(behave)
    first, second, error = events(gateway)
    assert first["choices"][0]["delta"]["content"] == "a" and second["choices"][0]["finish_reason"] is None
    assert set(error) == {"error"} and error["error"]["code"] == "upstream_error"
    assert gateway.metric(failed) == before + 1


@pytest.mark.parametrize("ending", [b"", b'data: {"id":"c","choices":[{"ind'])
def test_an_end_without_a_finish_is_an_error_frame(gateway: Gateway, upstream: Upstream, ending: bytes) -> None:
    upstream.answer(answers(chunk("a"), ending))
    first, error = events(gateway)
    assert first["choices"][0]["delta"]["content"] == "a" and error["error"]["type"] == "upstream_error"
    reported = gateway.post({"model": "far", "messages": HI, "stream": True}, **{"x-promptsluice-report": "1"}).text
    assert [json.loads(frame[6:]) for frame in reported.split("\n\n")[:-1]] == [first, error]


def test_a_finished_answer_without_done_is_whole(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(answers(chunk("a", finish="stop"), USAGE_CHUNK.rstrip()))
    first, usage, done = events(gateway, stream_options={"include_usage": True})
    assert first["choices"][0]["finish_reason"] == "stop" and usage["usage"] == USAGE and done == "[DONE]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [b'{"error":{"message":"boom","type":"x","param":null,"code":null}}', b'{"object":"error","message":"boom"}'],
)
def test_an_error_frame_ends_the_stream(gateway: Gateway, upstream: Upstream, data: bytes) -> None:
    upstream.answer(answers(chunk("a"), b"data: " + data + b"\n\n" + DONE))
    before, error = events(gateway)
    assert error["error"]["message"] == "boom"
    reported = gateway.post({"model": "far", "messages": HI, "stream": True}, **{"x-promptsluice-report": "1"}).text
    assert [json.loads(frame[6:]) for frame in reported.split("\n\n")[:-1]] == [before, error]
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="boom"):
        list(client.chat.completions.create(model="far", messages=HI, stream=True))  # type: ignore[call-overload]


FLAT = b'{"object":"error","message":"maximum context length is 2048 tokens","type":"BadRequestError","code":400}'
WRAPPED = b'{ "error": {"message":"m","type":"t","param":null,"code":null} }'


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        ("400 Bad Request", FLAT, "maximum context length is 2048 tokens", "context_length_exceeded"),
        ("422 Unprocessable Entity", b'{"detail":"no"}', "no", None),
        ("500 Internal Server Error", b'{"error":"oops"}', "oops", "upstream_error"),
        ("404 Not Found", b"<html>lost</html>", "the upstream answered with status 404", None),
        ("400 Bad Request", b"[" * 100_000, "the upstream answered with status 400", None),
    ],
)
def test_foreign_errors_are_wrapped(
    gateway: Gateway, upstream: Upstream, status: str, body: bytes, message: str, code: str | None
) -> None:
    upstream.answer(lambda exchange: exchange.json(status, body))
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == int(status[:3])
    error = response.json()["error"]
    assert (error["message"], error["code"], error["param"]) == (message, code, None)
    assert isinstance(error["type"], str)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_pass_with_their_headers(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    extra = (
        "retry-after: 30\r\nretry-after-ms: 30000\r\nx-ratelimit-remaining-requests: 0\r\nx-should-retry: false\r\n"
        "set-cookie: a=b\r\nx-request-id: up-1\r\nserver: secret-server\r\n"
    )
    upstream.answer(lambda exchange: exchange.json("429 Too Many Requests", WRAPPED, extra))
    response = gateway.post({"model": "far", "messages": HI, "stream": stream})
    assert response.status_code == 429 and response.content == WRAPPED
    assert response.headers["retry-after"] == "30" and response.headers["retry-after-ms"] == "30000"
    assert response.headers["x-ratelimit-remaining-requests"] == "0" and response.headers["x-should-retry"] == "false"
    assert response.headers["x-promptsluice-upstream-request-id"] == "up-1"
    assert not {"set-cookie", "server"} & set(response.headers)
    assert len(upstream.seen) == 1


def test_the_upstream_key_never_comes_back(gateway: Gateway, upstream: Upstream) -> None:
    body = json.dumps(
        {"error": {"message": f"bad key {UPSTREAM_KEY}", "type": "t", "param": None, "code": None}}
    ).encode()
    upstream.answer(lambda exchange: exchange.json("401 Unauthorized", body))
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == 401 and response.json()["error"]["message"] == "bad key ***"


@pytest.mark.slow
def test_retries_are_bounded_and_counted(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("502 Bad Gateway", b""))
    response = gateway.post({"model": "far", "messages": HI})
    assert (
        response.status_code == 502 and response.headers["x-promptsluice-attempts"] == "3" and len(upstream.seen) == 3
    )

    async def second_time_well(exchange: Exchange) -> None:
        if len(upstream.seen) == 1:
            exchange.reset()
        else:
            await exchange.json("200 OK", b'{"ok":1}')

    upstream.answer(second_time_well)
    response = gateway.post({"model": "far", "messages": HI})
    assert response.json() == {"ok": 1} and response.headers["x-promptsluice-attempts"] == "2"


@pytest.mark.parametrize("coding", ["br", "gzip"])
def test_an_answer_that_cannot_be_read_is_paid_for_once(gateway: Gateway, upstream: Upstream, coding: str) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}", f"content-encoding: {coding}\r\n"))
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == 502 and len(upstream.seen) == 1


async def test_a_header_that_cannot_be_sent_is_no_fault_of_the_server() -> None:
    spec = OpenAIBackend(kind="openai", base_url="http://127.0.0.1:1/v1")
    for transport in (None, httpx.MockTransport(lambda request: httpx.Response(200))):
        backend = UpstreamBackend("far", spec, api_key="sk-€", transport=transport)
        await backend.start()
        with pytest.raises(PromptsluiceError, match="header for backend 'far'") as raised:
            await backend.relay("/embeddings", b"{}", headers={}, request_id="1")
        assert raised.value.status == 500 and raised.value.headers["x-promptsluice-attempts"] == "1"
        assert backend.stats()["server_0_failures"] == 0
        await backend.close()


@pytest.mark.slow
def test_an_unreachable_upstream(gateway: Gateway) -> None:
    response = gateway.post({"model": "dead", "messages": HI})
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_error" and "dead" in response.json()["error"]["message"]


@pytest.mark.slow
def test_a_silent_upstream_times_out(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.until_closed())
    response = gateway.post({"model": "hushed", "messages": HI})
    assert response.status_code == 504 and response.json()["error"]["code"] == "upstream_timeout"
    assert len(upstream.seen) == 1


def test_one_framing_only(gateway: Gateway, upstream: Upstream) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head(content_type="application/json", extra="transfer-encoding: chunked\r\nx-y: 1\r\n")
        await exchange.send(b"2\r\n{}\r\n0\r\n\r\n")

    upstream.answer(behave)
    response = gateway.post({"model": "far", "messages": HI})
    assert response.headers["content-length"] == "2" and "transfer-encoding" not in response.headers


def test_nonsense_is_a_bad_gateway(gateway: Gateway, upstream: Upstream) -> None:
    for status, body in (("200 OK", b"<html>"), ("302 Found", b"")):
        upstream.answer(
            lambda exchange, status=status, body=body: exchange.json(status, body, "location: http://x/\r\n")
        )
        assert gateway.post({"model": "far", "messages": HI}).status_code == 502
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}"))
    assert gateway.post({"model": "far", "messages": HI, "stream": True}).status_code == 502


@pytest.fixture
def leaving(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        yield client


def send_chat(client: socket.socket, *, stream: bool) -> None:
    body = json.dumps({"model": "far", "messages": HI, "stream": stream}).encode()
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("status", ["200 OK", "429 Too Many Requests"])
def test_header_values_that_cannot_be_written_stay_behind(gateway: Gateway, upstream: Upstream, status: str) -> None:
    async def answer(exchange: Exchange) -> None:
        body = b'{"choices": [], "error": {"message": "no"}}'
        await exchange.head(status, "application/json", f"content-length: {len(body)}\r\nx-request-id: \u6f22\r\n")
        await exchange.send(body)

    upstream.answer(answer)
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == int(status[:3]) and "x-promptsluice-upstream-request-id" not in response.headers


@pytest.mark.parametrize("body", [b'{"detail": [{"input": NaN}]}', b'{"message": {"limit": 1e999}}'])
def test_errors_that_are_no_json_pass_as_text(gateway: Gateway, upstream: Upstream, body: bytes) -> None:
    upstream.answer(lambda exchange: exchange.json("400 Bad Request", body))
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == 400 and ("NaN" in response.text or "Infinity" in response.text)
    assert isinstance(response.json()["error"]["message"], str)


def test_a_usage_beyond_all_numbers_is_not_counted(gateway: Gateway, upstream: Upstream) -> None:
    body = b'{"choices": [], "usage": {"prompt_tokens": %s, "completion_tokens": 1}}' % (b"9" * 400)
    upstream.answer(lambda exchange: exchange.json("200 OK", body))
    assert gateway.post({"model": "far", "messages": HI}).content == body


def test_a_number_out_of_range_in_a_chunk_that_has_to_be_rewritten(gateway: Gateway, upstream: Upstream) -> None:
    data = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "x": 1e999, "usage": {}}\n\n'
    upstream.answer(answers(data, DONE))
    response = gateway.post({"model": "far", "messages": HI, "stream": True})
    assert response.status_code == 502 and "out of range" in response.json()["error"]["message"]


@pytest.mark.parametrize("status", ["204 No Content", "202 Accepted", "666 Odd"])
def test_a_status_that_is_no_answer_is_a_bad_gateway(gateway: Gateway, upstream: Upstream, status: str) -> None:
    upstream.answer(lambda exchange: exchange.head(status))
    response = gateway.post({"model": "far", "messages": HI})
    assert response.status_code == 502 and status[:3] in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte(
    gateway: Gateway, upstream: Upstream, leaving: socket.socket, stream: bool
) -> None:
    cancelled = 'promptsluice_completions_total{backend="far",model="far",outcome="cancelled",policy="off"}'
    before = gateway.metric(cancelled)
    upstream.answer(lambda exchange: exchange.until_closed())
    send_chat(leaving, stream=stream)
    eventually(lambda: upstream.seen)
    leaving.close()
    assert upstream.seen[0].closed.wait(2)
    eventually(lambda: gateway.metric(cancelled) == before + 1)
    assert gateway.metric("promptsluice_http_in_flight") == 1  # the request for the metrics itself


def test_a_client_that_leaves_in_mid_stream(gateway: Gateway, upstream: Upstream, leaving: socket.socket) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(chunk("a"))
        await exchange.until_closed()

    cancelled = 'promptsluice_completions_total{backend="far",model="far",outcome="cancelled",policy="off"}'
    before = gateway.metric(cancelled)
    upstream.answer(behave)
    send_chat(leaving, stream=True)
    received = b""
    while b'"content": "a"' not in received:
        received += leaving.recv(4096)
    leaving.close()
    assert upstream.seen[0].closed.wait(2)
    eventually(lambda: gateway.metric(cancelled) == before + 1)


def test_no_key_in_any_log(gateway: Gateway, upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b"{}"))
    gateway.post({"model": "far", "messages": HI}, authorization="Bearer gw-test-key-0815")
    eventually(lambda: "request_id=" in gateway.log.read_text())  # once the answer is out
    text = gateway.log.read_text() + http.get(f"{gateway.url}/metrics").text
    assert UPSTREAM_KEY not in text and "gw-test-key-0815" not in text


def test_the_wait_for_first_tokens_tells_what_prefill_costs(gateway: Gateway, upstream: Upstream) -> None:
    def cost() -> tuple[float, ...]:
        """Of a request and of a token, which may be nothing: this upstream answers all prompts as fast."""
        kinds = ("fixed", "token")
        return tuple(gateway.metric(f'promptsluice_cost_{kind}_ms{{backend="far",what="prefill"}}') for kind in kinds)

    assumed = cost()
    for size in range(100, 2000, 190):
        told = {**USAGE, "prompt_tokens": size}
        used = b"data: " + json.dumps({"id": "c", "choices": [], "usage": told}).encode() + b"\n\n"
        upstream.answer(answers(chunk("a", finish="stop"), used, DONE))
        events(gateway, stream_options={"include_usage": True})
    assert cost() != assumed
