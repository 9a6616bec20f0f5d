"""Failures that the field's proxies were seen with, each as a test of its kind: keys, destinations, limits, errors."""

import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import UPSTREAM_KEY, Exchange, Gateway, Upstream, eventually, http, start_gateway, stop_gateway
from .test_upstream import DONE, HI, chunk

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/compress", "/v1/messages")


def post(gateway: Gateway, path: str, body: Any, **headers: str) -> Any:
    return http.post(f"{gateway.url}{path}", json=body, headers=headers)


def body_for(model: str, **fields: Any) -> dict[str, Any]:
    """A body that every route can read."""
    return {"model": model, "messages": HI, "prompt": "hi", "input": "hi", "max_tokens": 5, **fields}


def ok(upstream: Upstream) -> None:
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"choices": []}'))


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A server that nobody may call."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES[:3])
@pytest.mark.parametrize("name", ["api_base", "base_url", "api_key", "azure_endpoint", "custom_llm_provider", "proxy"])
def test_gw_46_no_field_names_a_destination(
    gateway: Gateway, upstream: Upstream, trap: socket.socket, path: str, name: str
) -> None:
    ok(upstream)
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/"
    value = "sk-test" if name == "api_key" else url
    response = post(gateway, path, body_for("far", **{name: value}), host="169.254.169.254", **{"x-api-base": url})
    assert response.status_code == 200 and len(upstream.seen) == 1
    assert json.loads(upstream.seen[0].body)[name] == value, "inert data"
    assert upstream.seen[0].headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert upstream.seen[0].headers["host"] == f"127.0.0.1:{upstream.port}"


def test_an_idempotency_key_is_its_tenants_own(gateway: Gateway, upstream: Upstream) -> None:
    ok(upstream)
    for path in ROUTES[:3]:
        for tenant in ("one", "one", "two"):
            key = {"authorization": f"Bearer {tenant}", "idempotency-key": "retry-1"}
            assert post(gateway, path, body_for("far"), **key).status_code == 200
        assert post(gateway, path, body_for("far"), authorization="Bearer one").status_code == 200
    sent = [exchange.headers.get("idempotency-key") for exchange in upstream.seen]
    first, again, other, none = sent[:4]
    assert first == again != other and none is None and sent == sent[:4] * 3
    assert first and other and "retry-1" not in first + other and len(first) == 64


SECRET = "gw-test-key-0815"
CARRIERS = (
    "authorization", "x-api-key", "api-key", "proxy-authorization", "cookie", "x-goog-api-key", "x-auth-token",
    "x-forwarded-authorization", "openai-organization", "x-promptsluice-anything",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES[:3])
@pytest.mark.parametrize("name", CARRIERS)
def test_gw_48_no_header_of_a_client_carries_a_key_upstream(
    gateway: Gateway, upstream: Upstream, name: str, path: str
) -> None:
    ok(upstream)
    value = f"Bearer {SECRET}" if "authorization" in name else SECRET
    assert post(gateway, path, body_for("far"), **{name: value}).status_code == 200
    seen = upstream.seen[0].headers
    assert SECRET not in str(seen) and seen["authorization"] == f"Bearer {UPSTREAM_KEY}"
    allowed = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-length", "content-type"}
    assert set(seen) <= allowed | {"authorization", "x-request-id"}


@pytest.mark.slow
def test_gw_50_no_key_in_any_log_metric_or_answer(gateway: Gateway, upstream: Upstream) -> None:
    said = []

    async def leaks(exchange: Exchange) -> None:
        error = {"error": {"message": f"bad {exchange.headers['authorization']}", "type": "t", "code": None}}
        await exchange.json("401 Unauthorized", json.dumps(error).encode())

    for path in ROUTES:
        upstream.answer(leaks)
        for model in ("far", "dead", "nope", "echo:nope", "far:rag"):
            said.append(post(gateway, path, body_for(model), authorization=f"Bearer {SECRET}").text)
            said.append(post(gateway, path, body_for(model, stream=True), **{"x-api-key": SECRET}).text)
    for path in ("/metrics", "/readyz", "/healthz", "/v1/models", "/config", "/openapi.json", "/docs"):
        said.append(http.get(gateway.url + path, headers={"authorization": f"Bearer {SECRET}"}).text)
    said.append(gateway.log.read_text())
    assert "far answered 401" in said[-1], "the debug level is on"
    assert not [text for text in said if UPSTREAM_KEY in text or SECRET in text]


@pytest.mark.parametrize("policy", ["off", "aggressive", "rag"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_gw_52_no_url_of_a_client_is_fetched(
    gateway: Gateway, upstream: Upstream, trap: socket.socket, kind: str, policy: str
) -> None:
    ok(upstream)
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/picture.png"
    part = {"type": kind, kind: {"url": url, "data": url, "file_data": url}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": f"see ![x]({url}) and {url}"}]}]
    assert gateway.post({"model": f"far:{policy}", "messages": messages}).status_code == 200
    assert json.loads(upstream.seen[0].body)["messages"] == messages
    for path in ("/v1/compress", "/tokenize", "/v1/chat/completions"):
        post(gateway, path, {"model": f"echo:{policy}", "messages": messages})


def nested(levels: int, *, pairs: str = "[]", name: str = "x") -> bytes:
    deep = pairs[0] * levels + ("" if pairs[0] == "[" else '"a":0') + pairs[1] * levels
    if pairs[0] == "{":
        deep = '{"a":' * levels + "0" + "}" * levels
    fields = f'"messages":[{{"role":"user","content":"x"}}],"prompt":"x","input":"x","max_tokens":1,"{name}":{deep}'
    return f'{{"model":"echo",{fields}}}'.encode()


@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/detokenize", "/v1/collections"])
@pytest.mark.parametrize("body", [nested(10_000), nested(10_000, pairs="{}"), nested(200_000)[:-200_000]])
def test_gw_54_deep_json_is_a_400(gateway: Gateway, path: str, body: bytes) -> None:
    response = http.post(f"{gateway.url}{path}", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert http.get(f"{gateway.url}/healthz").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["off", "lossless", "aggressive"])
@pytest.mark.parametrize("deep", ["[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 100_000])
def test_gw_54_deep_json_in_texts_is_text(gateway: Gateway, upstream: Upstream, deep: str, policy: str) -> None:
    ok(upstream)
    function = {"name": "f", "arguments": deep}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": f"result: {deep}"},
        *HI,
    ]
    response = gateway.post({"model": f"far:{policy}", "messages": messages})
    assert response.status_code == 200 and json.loads(upstream.seen[0].body)["messages"] == messages
    report = post(gateway, "/v1/compress", {"model": f"far:{policy}", "messages": messages}).json()["promptsluice"]
    assert not [step for step in report["steps"] if "RecursionError" in step["note"]]


FLAT = {"object": "error", "message": "maximum context length is 2048 tokens", "type": "BadRequestError", "code": 400}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES[:3])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (FLAT, "context_length_exceeded"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, None),
        ({"error": "plain words"}, None),
        ({"error": {"message": "m", "type": "t", "param": None, "code": None}}, None),
        ("<html>no</html>", None),
    ],
)
def test_gw_58_errors_have_one_form(
    gateway: Gateway, upstream: Upstream, path: str, body: Any, code: str | None, stream: bool
) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    upstream.answer(lambda exchange: exchange.json("400 Bad Request", raw))
    response = post(gateway, path, body_for("far", stream=stream))
    error = response.json()["error"]
    assert response.status_code == 400 and {"message", "type", "param", "code"} == set(error)
    assert error["message"] and error["code"] == code and not isinstance(error["code"], int)
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        assert response.content == raw, "one that has the form passes unchanged"


PASSED = {
    "retry-after": "30", "retry-after-ms": "30000", "x-ratelimit-remaining-requests": "0",
    "x-ratelimit-reset-tokens": "6m0s", "x-should-retry": "true",
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES[:3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable", "529 Overloaded"])
def test_gw_60_an_upstream_says_when_to_come_back(
    gateway: Gateway, upstream: Upstream, path: str, status: str, stream: bool
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in PASSED.items())
    upstream.answer(lambda exchange: exchange.json(status, b'{"error":{"message":"busy"}}', lines))
    response = post(gateway, path, body_for("far", stream=stream))
    assert response.status_code == int(status[:3]) and response.json() == {"error": {"message": "busy"}}
    assert {name: response.headers[name] for name in PASSED} == PASSED
    assert len(upstream.seen) == 1, "who says when is not asked again before"


CHAIN = """
version: 1
default_policy: off
backends:
  one:
    kind: openai
    base_url: "http://127.0.0.1:{port}/one"
    models: [m]
    fallbacks: [{{backend: two}}, {{backend: three}}]
  two: {{kind: openai, base_url: "http://127.0.0.1:{port}/two", models: [m2], fallbacks: [{{backend: one}}]}}
  three: {{kind: openai, base_url: "http://127.0.0.1:{port}/three", models: [m3], fallbacks: [{{backend: one}}]}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
"""


@pytest.mark.slow
def test_gw_62_attempts_over_retries_and_fallbacks_are_bounded(upstream: Upstream, tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(CHAIN.format(port=upstream.port, root=tmp_path))
    gateway = start_gateway(policy_file)
    try:
        for status, each in (("500 Internal Server Error", 1), ("502 Bad Gateway", 3)):
            for stream in (False, True):
                upstream.answer(
                    lambda exchange, status=status: exchange.json(
                        status, json.dumps({"error": {"message": exchange.line.split("/")[1]}}).encode()
                    )
                )
                response = gateway.post({"model": "m", "messages": HI, "stream": stream})
                asked = [exchange.line.split("/")[1] for exchange in upstream.seen]
                counts = [asked.count(name) for name in ("one", "two", "three")]
                assert asked == sorted(asked, key=["one", "two", "three"].index), "nobody is asked again after another"
                # Fewer where a circuit breaker has learned from the requests before.
                assert all(1 <= count <= each for count in counts)
                assert response.status_code == int(status[:3])
                assert response.json()["error"]["message"] == "three", "the last one's error"
                assert response.headers["x-promptsluice-attempts"] == str(len(asked))
    finally:
        stop_gateway(gateway)


@pytest.mark.slow
def test_gw_64_label_values_are_bounded(gateway: Gateway, upstream: Upstream) -> None:
    def sizes() -> int:
        eventually(lambda: gateway.metric("promptsluice_http_in_flight") <= 1)  # what is not over is not in the books
        return len(http.get(f"{gateway.url}/metrics").text.splitlines())

    def noise(count: int) -> None:
        for _ in range(count):
            word = f"{random.getrandbits(64):x}"
            http.get(f"{gateway.url}/{word}")
            http.get(f"{gateway.url}/v1/models/{word}")
            http.get(f"{gateway.url}/v1/collections/{word}")
            for path in ROUTES:
                post(gateway, path, body_for(word), **{"x-promptsluice-policy": word, "x-request-id": word})
                post(gateway, path, body_for(f"echo:{word}"))
                post(gateway, path, body_for("echo", user=word))

    noise(2)
    before = sizes()
    noise(30)
    assert sizes() == before


RELOADED = """
version: 1
default_policy: {policy}
backends:
  far: {{kind: openai, base_url: "http://127.0.0.1:{port}/{where}", models: [m]}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
"""


@pytest.mark.slow
def test_gw_66_a_file_comes_into_force_as_a_whole_or_not_at_all(upstream: Upstream, tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"

    def write(**values: str) -> None:
        policy_file.write_text(RELOADED.format(port=upstream.port, root=tmp_path, **values))

    def ask() -> Any:
        return gateway.post({"model": "m", "messages": HI})

    release = threading.Event()

    async def slow_for_v1(exchange: Exchange) -> None:
        if b'"stream": true' in exchange.body or b'"stream":true' in exchange.body:
            await exchange.head()
            await exchange.send(chunk("from v1"))
            while not release.is_set():
                await exchange.send(b": wait\n\n")
                try:
                    await exchange.wait_for_close(0.02)
                except TimeoutError:
                    continue
            await exchange.send(chunk(" to the end", finish="stop") + DONE)
        else:
            await exchange.json("200 OK", json.dumps({"path": exchange.line.split()[1]}).encode())

    write(policy="off", where="v1")
    gateway = start_gateway(policy_file)
    try:
        upstream.answer(slow_for_v1)
        assert ask().json()["path"] == "/v1/chat/completions"
        with http.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json={"model": "m", "messages": HI, "stream": True}
        ) as running:
            lines = running.iter_lines()
            assert "from v1" in next(lines)
            write(policy="lossless", where="v2")
            eventually(lambda: ask().json()["path"] == "/v2/chat/completions")
            assert ask().headers["x-promptsluice-policy"] == "lossless", "all of the file or nothing"
            write(policy="off", where='v3"\n    nonsense: 1')
            eventually(lambda: gateway.metric("promptsluice_policy_file_accepted") == 0)
            answer = ask()
            assert answer.json()["path"] == "/v2/chat/completions"
            assert answer.headers["x-promptsluice-policy"] == "lossless"
            ready = http.get(f"{gateway.url}/readyz")
            assert ready.status_code == 200 and "policy.yaml" in ready.json()["policy_file"]
            assert gateway.metric('promptsluice_policy_reloads_total{outcome="refused"}') == 1
            release.set()
            text = "\n".join(lines)
        assert " to the end" in text and text.rstrip().endswith("[DONE]"), "what had begun ends under its version"
    finally:
        release.set()
        stop_gateway(gateway)
