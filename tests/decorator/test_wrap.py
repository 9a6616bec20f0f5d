"""wrap() with the real OpenAI SDK against a loopback server that records what it was sent."""

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from promptsluice import wrap
from promptsluice.gateway.inprocess import Optimizer
from pydantic import BaseModel

LONG: Any = [{"role": "user", "content": "filler a filler b"}, {"role": "user", "content": "filler stays here"}]
SHORT = [{"role": "user", "content": "a b"}, {"role": "user", "content": "filler stays here"}]


class Upstream(http.server.ThreadingHTTPServer):
    """Answers chat completions with `{"word": "hello"}`, whole or streamed, and keeps the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def sent(self) -> Any:
        """The messages of the last request."""
        return self.bodies[-1]["messages"]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        upstream = self.server
        assert isinstance(upstream, Upstream)
        upstream.bodies.append(body)
        upstream.headers.append({name.lower(): value for name, value in self.headers.items()})
        if "input" in body:
            self._answer("application/json", json.dumps(EMBEDDING))
        elif body.get("stream"):
            deltas = (
                ({"role": "assistant", "content": '{"word": '}, None),
                ({"content": '"hello"}'}, None),
                ({}, "stop"),
            )
            frames = [json.dumps(chunk(delta, finish)) for delta, finish in deltas]
            self._answer("text/event-stream", "".join(f"data: {frame}\n\n" for frame in (*frames, "[DONE]")))
        else:
            self._answer("application/json", json.dumps(WHOLE))

    def _answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


TEXT = '{"word": "hello"}'
WHOLE = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip
EMBEDDING = {
    "object": "list", "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1},
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
}  # fmt: skip


def chunk(delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


class Answer(BaseModel):
    word: str


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def plain(upstream: Upstream) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def client(plain: openai.OpenAI, optimizer: Optimizer) -> openai.OpenAI:
    return wrap(plain, config=optimizer)


def test_create_sends_rewritten_messages(client: openai.OpenAI, upstream: Upstream) -> None:
    answer = client.chat.completions.create(model="m", messages=LONG, temperature=0.5)
    assert answer.choices[0].message.content == '{"word": "hello"}'
    assert upstream.bodies == [{"model": "m", "messages": SHORT, "temperature": 0.5}]


def test_the_original_client_stays_as_it_was(client: openai.OpenAI, plain: openai.OpenAI, upstream: Upstream) -> None:
    plain.chat.completions.create(model="m", messages=LONG)
    assert upstream.sent == LONG
    assert type(plain) is openai.OpenAI


def test_it_is_an_openai_client(client: openai.OpenAI) -> None:
    assert isinstance(client, openai.OpenAI)
    assert isinstance(client.chat.completions, Completions)
    assert type(client).__name__ == "OpenAI"
    assert client.api_key == "k"
    assert client.chat.completions is client.chat.completions


def test_streaming(client: openai.OpenAI, upstream: Upstream) -> None:
    text = ""
    with client.chat.completions.create(model="m", messages=LONG, stream=True) as stream:
        for part in stream:
            text += part.choices[0].delta.content or ""
    assert text == '{"word": "hello"}'
    assert upstream.sent == SHORT


def test_the_stream_helper(client: openai.OpenAI, upstream: Upstream) -> None:
    with client.chat.completions.stream(model="m", messages=LONG) as stream:
        assert stream.get_final_completion().choices[0].message.content == '{"word": "hello"}'
    assert [body["messages"] for body in upstream.bodies] == [SHORT]


def test_parse(client: openai.OpenAI, upstream: Upstream) -> None:
    answer = client.chat.completions.parse(model="m", messages=LONG, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(word="hello")
    assert [body["messages"] for body in upstream.bodies] == [SHORT]


def test_raw_and_streaming_responses(client: openai.OpenAI, upstream: Upstream) -> None:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=LONG)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == '{"word": "hello"}'
    client.with_raw_response.chat.completions.create(model="m", messages=LONG)
    with client.chat.completions.with_streaming_response.create(model="m", messages=LONG) as response:
        assert "hello" in response.read().decode()
    assert [body["messages"] for body in upstream.bodies] == [SHORT] * 3


def test_copies_with_other_options_stay_wrapped(client: openai.OpenAI, upstream: Upstream) -> None:
    for copied in (client.with_options(timeout=5), client.copy(default_headers={"x-mine": "1"})):
        copied.chat.completions.create(model="m", messages=LONG)
        assert upstream.sent == SHORT
    assert upstream.headers[-1]["x-mine"] == "1"


@pytest.mark.slow
def test_the_beta_way_to_chat_is_the_same(client: openai.OpenAI, upstream: Upstream) -> None:
    client.beta.chat.completions.create(model="m", messages=LONG)
    assert upstream.sent == SHORT


def test_other_resources_are_untouched(client: openai.OpenAI, upstream: Upstream) -> None:
    client.embeddings.create(model="m", input="filler a", encoding_format="float")
    assert upstream.bodies[-1]["input"] == "filler a"


def test_a_missing_argument_is_the_sdks_error(client: openai.OpenAI) -> None:
    with pytest.raises(TypeError, match="Missing required arguments"):
        client.chat.completions.create(model="m")  # type: ignore[call-overload]


def test_wrapping_twice_replaces_the_policy(client: openai.OpenAI, optimizer: Optimizer, upstream: Upstream) -> None:
    wrap(client, policy="off", config=optimizer).chat.completions.create(model="m", messages=LONG)
    assert upstream.sent == LONG
    client.chat.completions.create(model="m", messages=LONG)
    assert upstream.sent == SHORT


def test_the_report_of_the_last_call(client: Any) -> None:
    client.chat.completions.create(model="m", messages=LONG)
    assert client.promptsluice_report.policy == "balanced"
    assert client.promptsluice_report.tokens_out < client.promptsluice_report.tokens_in
    seen: list[Any] = ["not asked"]
    other = threading.Thread(target=lambda: seen.append(client.promptsluice_report))
    other.start()
    other.join()
    assert seen[-1] is None, "another thread made no call"


def test_a_failing_optimizer_does_not_fail_the_call(
    plain: openai.OpenAI, optimizer: Optimizer, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        wrap(plain, policy="nonsense", config=optimizer).chat.completions.create(model="m", messages=LONG)
    assert upstream.sent == LONG
    assert "nonsense" in caplog.text
    with pytest.raises(Exception, match="nonsense"):
        wrap(plain, policy="nonsense", config=optimizer, strict=True).chat.completions.create(model="m", messages=LONG)


def test_messages_of_the_sdk_itself(client: openai.OpenAI, upstream: Upstream) -> None:
    answer = client.chat.completions.create(model="m", messages=LONG)
    turns: Any = [LONG[0], answer.choices[0].message, LONG[1]]
    client.chat.completions.create(model="m", messages=iter(turns))
    assert upstream.sent == [SHORT[0], {"role": "assistant", "content": '{"word": "hello"}'}, SHORT[1]]


async def test_async_clients(optimizer: Optimizer, upstream: Upstream) -> None:
    async with openai.AsyncOpenAI(base_url=upstream.url, api_key="k", max_retries=0) as plain:
        client = wrap(plain, config=optimizer)
        assert isinstance(client, openai.AsyncOpenAI)
        assert isinstance(client.chat.completions, AsyncCompletions)
        await client.chat.completions.create(model="m", messages=LONG)
        parsed = await client.chat.completions.parse(model="m", messages=LONG, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(word="hello")
        async with client.chat.completions.stream(model="m", messages=LONG) as stream:
            assert await stream.get_final_completion()
        text = ""
        async for part in await client.chat.completions.create(model="m", messages=LONG, stream=True):
            text += part.choices[0].delta.content or ""
        assert text == '{"word": "hello"}'
        raw = await client.with_options(timeout=5).chat.completions.with_raw_response.create(model="m", messages=LONG)
        assert raw.status_code == 200
        report: Any = getattr(client, "promptsluice_report")  # noqa: B009 - not part of the client's type
        assert report.policy == "balanced"
    assert [body["messages"] for body in upstream.bodies] == [SHORT] * 5


def test_azure_clients(optimizer: Optimizer, upstream: Upstream) -> None:
    with openai.AzureOpenAI(base_url=upstream.url, api_key="k", api_version="v", max_retries=0) as plain:
        client = wrap(plain, config=optimizer)
        client.with_options(timeout=5).chat.completions.create(model="m", messages=LONG)
    assert isinstance(client, openai.AzureOpenAI)
    assert upstream.sent == SHORT


@pytest.mark.parametrize("wrong", [None, object(), openai])
def test_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="needs an OpenAI or AsyncOpenAI client"):
        wrap(wrong)
