"""Bad input: each a clear OpenAI error object, and a server that goes on."""

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from .harness import Gateway, Upstream, eventually, http

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "echo", "messages": HI, **fields}).encode()


TOOL = {"type": "function", "function": {"name": "f"}}
ANOTHER = {"type": "function", "function": {"name": "g"}}
NAMELESS = {"type": "function", "function": {}}
NESTED = (
    b'{"model":"echo","messages":[{"role":"user","content":"x"}],"x":' + b"[" * 10_000 + b"0" + b"]" * 10_000 + b"}"
)
TWO_THOUSAND = b'{"model":"echo","messages":' + b'[{"a":' * 1_000 + b"0" + b"}]" * 1_000 + b"}"

CASES: list[tuple[str, bytes, int, str | None, str | None]] = [
    ("broken JSON", b'{"model":', 400, None, "invalid_json"),
    ("no JSON at all", b"hello", 400, None, "invalid_json"),
    ("nothing", b"", 400, None, "invalid_json"),
    ("two models", b'{"model":"echo",' + chat(model="far")[1:], 400, "model", "ambiguous_field"),
    ("two models, one with an escape", b'{"m\\u006fdel":"echo",' + chat()[1:], 400, "model", "ambiguous_field"),
    ("two spellings of model", chat(Model="far"), 400, "Model", "ambiguous_field"),
    ("a spelling that folds to stream", chat()[:-1] + b',"\\u017ftream":true}', 400, "\u017ftream", "ambiguous_field"),
    ("max_tokens in capitals", chat(MAX_TOKENS=9), 400, "MAX_TOKENS", "ambiguous_field"),
    ("messages twice", chat()[:-1] + b', "messages": []}', 400, "messages", "ambiguous_field"),
    ("best_of twice", chat(best_of=1)[:-1] + b',"best_of":9}', 400, "best_of", "ambiguous_field"),
    ("n_predict twice", chat(n_predict=1)[:-1] + b',"n_predict":9}', 400, "n_predict", "ambiguous_field"),
    (
        "include_usage twice",
        chat(stream=True)[:-1] + b',"stream_options":{"include_usage":false,"include_usage":true}}',
        400,
        "stream_options.include_usage",
        "ambiguous_field",
    ),
    (
        "an option of a stream in another spelling",
        chat(stream=True, stream_options={"Include_Usage": True}),
        400,
        "stream_options.Include_Usage",
        "ambiguous_field",
    ),
    ("not UTF-8", b'{"model":"\xff"}', 400, None, "invalid_json"),
    ("no object", b"[1]", 400, None, "invalid_json"),
    ("10,000 levels in an ignored field", NESTED, 400, None, None),
    ("2,000 levels", TWO_THOUSAND, 400, None, None),
    ("lone surrogate", b'{"model":"echo","messages":[{"role":"user","content":"\\ud800"}]}', 400, None, None),
    ("NaN", b'{"model":"echo","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None, None),
    ("no model", json.dumps({"messages": HI}).encode(), 400, "model", None),
    ("model of a wrong type", chat(model=7), 400, "model", None),
    ("unknown model", chat(model="nope"), 404, "model", "model_not_found"),
    ("unknown policy", chat(model="echo:nope"), 400, "policy", "policy_not_found"),
    ("no messages", b'{"model":"echo"}', 400, "messages", None),
    ("empty messages", chat(messages=[]), 400, "messages", None),
    ("messages of a wrong type", chat(messages="hi"), 400, "messages", None),
    ("a message of a wrong type", chat(messages=["hi"]), 400, "messages[0]", None),
    ("no role", chat(messages=[{"content": "hi"}]), 400, "messages[0].role", None),
    ("content of a wrong type", chat(messages=[{"role": "user", "content": 7}]), 400, "messages[0].content", None),
    ("tools of a wrong type", chat(tools="x"), 400, "tools", None),
    ("stream of a wrong type", chat(stream="yes"), 400, "stream", None),
    ("stream_options of a wrong type", chat(stream=True, stream_options=1), 400, "stream_options", None),
    (
        "include_usage of a wrong type",
        chat(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
        None,
    ),
    ("negative temperature", chat(temperature=-0.1), 400, "temperature", "invalid_value"),
    ("absurd temperature", chat(temperature=1e308), 400, "temperature", "invalid_value"),
    ("a temperature beyond floats", chat(temperature=10**400), 400, "temperature", "invalid_value"),
    ("a boolean temperature", chat(temperature=True), 400, "temperature", "invalid_value"),
    ("a textual temperature", chat(temperature="1"), 400, "temperature", "invalid_value"),
    ("top_p 0", chat(top_p=0), 400, "top_p", "invalid_value"),
    ("top_k -2", chat(top_k=-2), 400, "top_k", "invalid_value"),
    ("min_p 2", chat(min_p=2), 400, "min_p", "invalid_value"),
    ("a huge seed", chat(seed=1 << 70), 400, "seed", "invalid_value"),
    ("negative max_tokens", chat(max_tokens=-1), 400, "max_tokens", "invalid_value"),
    ("fractional max_tokens", chat(max_completion_tokens=1.5), 400, "max_completion_tokens", "invalid_value"),
    ("five stops", chat(stop=["a"] * 5), 400, "stop", "invalid_value"),
    ("an empty stop", chat(stop=""), 400, "stop", "invalid_value"),
    ("an object as stop", chat(stop={}), 400, "stop", "invalid_value"),
    ("a number of 5,000 digits", chat(seed=0)[:-1] + b"1" * 5_000 + b"}", 400, None, "invalid_json"),
    ("a number as stop", chat(stop=[7]), 400, "stop[0]", "invalid_value"),
    ("no choices", chat(n=0), 400, "n", "invalid_value"),
    ("too many choices", chat(n=129), 400, "n", "invalid_value"),
    ("log-probabilities of an echo", chat(logprobs=True), 400, "logprobs", "unsupported_value"),
    ("top_logprobs alone", chat(top_logprobs=3), 400, "top_logprobs", "invalid_value"),
    ("too many top_logprobs", chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    ("a numeric logprobs, as of completions", chat(logprobs=3), 400, "logprobs", "invalid_value"),
    ("a bias of words", chat(logit_bias={"the": 5}), 400, "logit_bias", "invalid_value"),
    ("a bias of a wrong type", chat(logit_bias=[5]), 400, "logit_bias", "invalid_value"),
    ("a huge bias", chat(logit_bias={"1": 101}), 400, "logit_bias.1", "invalid_value"),
    ("a huge penalty", chat(frequency_penalty=2.5), 400, "frequency_penalty", "invalid_value"),
    ("a low penalty", chat(presence_penalty=-2.5), 400, "presence_penalty", "invalid_value"),
    ("no repetition penalty", chat(repetition_penalty=0), 400, "repetition_penalty", "invalid_value"),
    ("a negative min_tokens", chat(min_tokens=-1), 400, "min_tokens", "invalid_value"),
    ("a textual stop id", chat(stop_token_ids=["1"]), 400, "stop_token_ids[0]", "invalid_value"),
    ("a number of stop ids", chat(stop_token_ids=1), 400, "stop_token_ids", "invalid_value"),
    ("a forced tool of an echo", chat(tool_choice="required", tools=[TOOL]), 400, "tool_choice", "unsupported_value"),
    ("a forced tool without tools", chat(tool_choice="required"), 400, "tool_choice", "invalid_value"),
    ("an odd tool_choice", chat(tool_choice="perhaps"), 400, "tool_choice", "unsupported_value"),
    ("a tool that is not there", chat(tools=[TOOL], tool_choice=ANOTHER), 400, "tool_choice", "invalid_value"),
    (
        "a tool without a name",
        chat(tools=[NAMELESS]),
        400,
        "tools[0].function.name",
        "invalid_value",
    ),
    ("a tool that is no function", chat(tools=[{"type": "custom"}]), 400, "tools[0]", "unsupported_value"),
    (
        "JSON mode of an echo",
        chat(response_format={"type": "json_object"}),
        400,
        "response_format",
        "unsupported_value",
    ),
    ("a broken schema", chat(guided_json={"items": {"not": {}}}), 400, "guided_json.items.not", "invalid_value"),
    (
        "a field of another engine",
        chat(structured_outputs={"x": 1}),
        400,
        "structured_outputs.x",
        "unsupported_parameter",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "body", "status", "param", "code"), CASES, ids=[case[0] for case in CASES])
def test_chat_completions(
    gateway: Gateway, what: str, body: bytes, status: int, param: str | None, code: str | None
) -> None:
    response = gateway.post(body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert "Traceback" not in response.text
    assert gateway.post(chat()).json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("path", ["completions", "embeddings", "messages", "responses", "compress"])
def test_no_route_takes_a_field_twice_or_in_another_spelling(gateway: Gateway, path: str) -> None:
    body = {"model": "echo", "messages": HI, "prompt": "hi", "input": "hi", "max_tokens": 5}
    for raw in (json.dumps({**body, "Model": "far"}), '{"user": "a",' + json.dumps({**body, "user": "b"})[1:]):
        response = http.post(f"{gateway.url}/v1/{path}", content=raw)
        assert (response.status_code == 400 and "ambiguous_field" in response.text) or path == "messages", response.text
        assert "another spelling of 'model'" in response.text or "'user' is given twice" in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": None, "max_tokens": None, "stop": None, "n": None, "tools": None, "unknown": None},
        {"max_tokens": 65_535, "temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0.0},
        {"max_tokens": 10**40, "top_k": -1, "n": 1, "logprobs": False, "logit_bias": {}, "seed": -5},
        {
            "frequency_penalty": 0.5,
            "presence_penalty": -2,
            "repetition_penalty": 1.1,
            "logit_bias": {"0": -100, "7": 1},
        },
        {"repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [2, 3], "logprobs": False, "top_logprobs": 0},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "stop": ["x", "y"]},
        {"stream_options": None, "stream": None, "api_base": "http://169.254.169.254/", "api_key": "sk-test"},
    ],
)
def test_harmless_fields_are_accepted(gateway: Gateway, fields: dict[str, Any]) -> None:
    assert gateway.post(chat(**fields)).json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, *HI],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, *HI],
        [{"role": "system", "content": ""}, {"role": "assistant", "content": None}, *HI],
        [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": None}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
            *HI,
        ],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
@pytest.mark.parametrize("policy", ["off", "balanced", "aggressive", "rag"])
def test_odd_messages_pass_every_policy(gateway: Gateway, messages: list[dict[str, Any]], policy: str) -> None:
    response = gateway.post(chat(model=f"echo:{policy}", messages=messages))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "hi"


def test_nothing_but_empty_texts(gateway: Gateway) -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
    response = gateway.post(chat(model="echo:aggressive", messages=messages))
    assert response.status_code == 200 and response.headers["x-promptsluice-tokens-in"] == "0"


def test_routes_methods_and_parameters(gateway: Gateway) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/no/such", 404),
        ("GET", "/v1/collections/nope", 404),
        ("POST", "/v1/chat/completions/", 404),
    ):
        response = http.request(method, gateway.url + path)
        assert response.status_code == status, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get(f"{gateway.url}/v1/chat/completions").headers["allow"] == "POST"


def test_models_with_slashes(gateway: Gateway) -> None:
    listed = http.get(f"{gateway.url}/v1/models").json()
    assert listed["object"] == "list"
    names = ["echo", "org/echo", "slow", "gated", "far", "org/far", "hushed", "dead", "lame", "lamer"]
    assert [model["id"] for model in listed["data"]] == names
    one = http.get(f"{gateway.url}/v1/models/org/echo").json()
    assert one["id"] == "org/echo" and one["object"] == "model"


def test_a_body_of_20_mib(gateway: Gateway) -> None:
    body = chat(messages=[{"role": "user", "content": "x" * (20 << 20)}])
    response = gateway.post(body)
    assert response.status_code == 413 and response.json()["error"]["code"] == "payload_too_large"
    pieces = (body[at : at + 65_536] for at in range(0, len(body), 65_536))
    response = http.post(f"{gateway.url}/v1/chat/completions", content=pieces)
    assert response.status_code == 413 and "transfer-encoding" not in response.request.headers.get("content-length", "")
    assert gateway.post(chat()).status_code == 200


def test_a_compressed_body_is_named(gateway: Gateway) -> None:
    response = gateway.post(gzip.compress(chat()), **{"content-encoding": "gzip"})
    assert response.status_code == 400 and "content-encoding" in response.json()["error"]["message"]
    assert gateway.post(chat(), **{"content-encoding": "identity"}).status_code == 200


def test_a_body_that_never_ends_is_cut_off(gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = 0
        try:
            while sent < 200:
                client.sendall(piece)
                sent += 1
        except ConnectionError:
            pass
        assert sent < 100
    eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)


def test_request_ids(gateway: Gateway) -> None:
    assert gateway.post(chat(), **{"x-request-id": "mine-1.2"}).headers["x-request-id"] == "mine-1.2"
    for odd in ("a b", "x" * 200, "é".encode().decode("latin-1"), ""):
        response = http.post(
            f"{gateway.url}/v1/chat/completions", content=chat(), headers=[(b"x-request-id", odd.encode("latin-1"))]
        )
        assert response.headers["x-request-id"].startswith("req_")
    assert gateway.post(b"{").headers["x-request-id"].startswith("req_")


@pytest.mark.slow
def test_label_values_are_bounded(gateway: Gateway, upstream: Upstream) -> None:
    def size() -> int:
        return len(http.get(f"{gateway.url}/metrics").text.splitlines())

    size()  # which has lines of its own from then on
    with httpx.Client(base_url=gateway.url) as client:
        for number in range(3):
            client.get(f"/random/{number}")
            client.request("PROPFIND", f"/random/{number}")
            client.post("/v1/chat/completions", content=chat(model=f"random-{number}"))
            client.get(f"/v1/models/random-{number}")
        before = size()
        for number in range(3, 100):
            client.get(f"/random/{number}")
            client.request(f"ODD{number}", f"/random/{number}")
            client.post("/v1/chat/completions", content=chat(model=f"random-{number}"))
            client.get(f"/v1/models/random-{number}")
        assert size() == before


def test_unknown_header_policy(gateway: Gateway) -> None:
    response = gateway.post(chat(), **{"x-promptsluice-policy": "nope"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "policy_not_found"
