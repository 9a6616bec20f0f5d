"""What is seen of a request: spans with the field's names, one line in the log, and no content in either."""

import asyncio
import json
import logging
import logging.config
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.backends.openai import UpstreamBackend
from promptsluice.gateway.logs import JsonLines, log_config
from promptsluice.gateway.observed import Observing, afterwards, ended
from promptsluice.gateway.observed import log as requests_log
from promptsluice.gateway.tracing import Traces, traced, wanted
from promptsluice.policies import PolicySet
from promptsluice.policies.schema import OpenAIBackend
from promptsluice.prompt import ConfigError

POLICY = """
version: 1
default_policy: "off"
backends:
  echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}
  far: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [far]}
policies:
  "off": {extends: "off", allow_client_policy: all}
  squeezed: {compress: [{use: lossless}], min_prompt_tokens: 0, allow_client_policy: all}
"""
SECRET = "the-secret-word"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Seeing:
    """An application with traces into memory, and an upstream that keeps what it was sent."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.sent: list[httpx.Request] = []
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        policy_set = PolicySet.from_text(POLICY)
        spec = policy_set.backends["far"]
        assert isinstance(spec, OpenAIBackend)
        far = UpstreamBackend("far", spec, api_key="sk-upstream", transport=httpx.MockTransport(self._answer))
        self.app = create_app(policy_set, backends={"echo": EchoBackend("echo", models=["echo"]), "far": far})
        self._traces = Traces(provider)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        return httpx.Response(503, json={"error": {"message": SECRET, "type": "server_error"}})

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app)
        async with self.app.router.lifespan_context(self.app):
            self.app.state.traces = self._traces
            async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30) as client:
                yield client

    def ended(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans.get_finished_spans()}


async def chat(client: httpx.AsyncClient, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
    document = f"{SECRET} is said   \n\n\n\n" + "and again     said \n\n\n\n" * 200
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": document},
        {"role": "user", "content": "what is it?"},
    ]
    body = {"model": "echo", "messages": messages, **fields}
    return await client.post(
        "/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-client", **(headers or {})}
    )


def context_of(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    return span.context


def parent_of(span: ReadableSpan, spans: Mapping[str, ReadableSpan]) -> str | None:
    above = span.parent
    return next((name for name, one in spans.items() if above and context_of(one).span_id == above.span_id), None)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Reads the requests' lines, as JSON."""
    caplog.set_level(logging.INFO, logger=requests_log.name)
    return lambda: [json.loads(JsonLines().format(one)) for one in caplog.records if one.name == requests_log.name]


async def test_a_streamed_request_has_a_span_for_each_step() -> None:
    seeing = Seeing()
    async with seeing.client() as client:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        response = await chat(client, {"traceparent": PARENT, "x-promptsluice-policy": "squeezed"}, **asked)
        assert response.status_code == 200, response.text
    spans = seeing.ended()
    root, operation = spans["POST /v1/chat/completions"], spans["chat echo"]
    assert f"{context_of(root).trace_id:032x}" == PARENT.split("-")[1]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert root.attributes is not None and root.attributes["http.response.status_code"] == 200
    of_root = {name for name, span in spans.items() if parent_of(span, spans) == root.name}
    assert of_root >= {"admission", "match", "plan", "lossless", operation.name}
    of_operation = [name for name, span in spans.items() if parent_of(span, spans) == operation.name]
    assert sorted(of_operation) == ["dispatch", "first token", "stream"]
    assert spans["dispatch"].end_time <= spans["first token"].start_time <= spans["stream"].start_time  # type: ignore[operator]
    assert operation.attributes is not None
    told = dict(operation.attributes)
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "echo"
    assert told["gen_ai.usage.input_tokens"] and told["gen_ai.usage.output_tokens"]
    assert told["promptsluice.policy"] == "squeezed"
    assert told["promptsluice.tokens_out"] < told["promptsluice.tokens_in"]  # type: ignore[operator]
    assert SECRET not in "".join(span.to_json() for span in spans.values())


async def test_the_upstream_hears_of_the_trace_and_a_failure_is_marked_by_its_kind() -> None:
    seeing = Seeing()
    async with seeing.client() as client:
        response = await chat(client, {"traceparent": PARENT, "tracestate": "a=b"}, model="far")
        assert response.status_code == 503
    spans = seeing.ended()
    operation = spans["chat far"]
    trace, span = (f"{context_of(operation).trace_id:032x}", f"{context_of(operation).span_id:016x}")
    assert [one.headers["traceparent"] for one in seeing.sent] == [f"00-{trace}-{span}-01"] * len(seeing.sent)
    assert all(one.headers["tracestate"] == "a=b" for one in seeing.sent) and trace == PARENT.split("-")[1]
    assert operation.attributes is not None and operation.attributes["error.type"] == "failed"
    assert not operation.status.is_ok
    shown = "".join(one.to_json() for one in spans.values())
    assert not any(word in shown for word in (SECRET, "sk-client", "sk-upstream"))


@pytest.mark.slow
async def test_without_traces_a_clients_traceparent_goes_on_as_it_came() -> None:
    seeing = Seeing()
    async with seeing.client() as client:
        seeing.app.state.traces = None
        await chat(client, {"traceparent": PARENT}, model="far")
    assert seeing.sent and all(one.headers["traceparent"] == PARENT for one in seeing.sent)
    assert not seeing.ended()


async def test_a_request_has_one_line_with_what_it_cost(lines: Callable[[], list[dict[str, Any]]]) -> None:
    seeing = Seeing()
    async with seeing.client() as client:
        seeing.app.state.traces = None
        await chat(client, {"x-request-id": "mine-1"}, stream=True, stream_options={"include_usage": True})
        await chat(client, model="nobody's")
        await client.get("/nowhere")
        await client.get("/healthz")
    whole, unknown, nowhere = lines()
    assert whole["event"] == "request" and whole["request_id"] == "mine-1" and whole["level"] == "info"
    assert (whole["route"], whole["method"], whole["status"]) == ("/v1/chat/completions", "POST", 200)
    assert (whole["model"], whole["policy"], whole["backend"], whole["outcome"]) == ("echo", "off", "echo", "ok")
    assert whole["ms"] >= whole["ttft_ms"] >= 0 and whole["completion_tokens"] > 0 and whole["tokens_in"] > 0
    assert (unknown["status"], unknown["error"]) == (404, "model_not_found")
    assert (nowhere["status"], nowhere["error"], nowhere["route"]) == (404, "route_not_found", "other")
    assert not any(word in json.dumps([whole, unknown, nowhere]) for word in (SECRET, "sk-client", "nobody's"))


async def test_a_book_that_fails_leaves_the_others(
    lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    entries: list[str] = []
    with Observing("req_books", method="GET", headers={}, traces=None) as observed:
        afterwards(lambda: entries.append("first"))
        afterwards(lambda: entries.remove(SECRET))
        afterwards(lambda: entries.append("last"))
        ended(observed, method="GET", route="/x", status=200, seconds=0.1)
    assert entries == ["first", "last"] and [line["route"] for line in lines()] == ["/x"]
    assert "request req_books failed: builtins.ValueError" in caplog.text and SECRET not in caplog.text


def test_a_line_is_json_whatever_is_in_it() -> None:
    try:
        raise ValueError(SECRET)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, 'a "quoted"\n%s', ("\udcff line",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line and SECRET not in line
    assert (
        json.loads(line)["message"] == 'a "quoted"\n\udcff line'
        and json.loads(line)["exception"] == "builtins.ValueError"
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_configuration_is_one_that_logging_takes(form: Any) -> None:
    config = log_config(form, "info")
    formatter = logging.config.DictConfigurator(config).configure_formatter(config["formatters"]["chosen"])
    assert "hello" in formatter.format(logging.LogRecord("a", logging.INFO, "f", 1, "hello", (), None))


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_turn_traces_on(variables: dict[str, str], on: bool) -> None:
    assert wanted(variables) is on
    if not on:
        with traced(variables) as traces:
            assert traces is None


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_an_exporter_that_is_not_there_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="OTEL_"), traced(variables):
        pass


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP, to a server that is there, when the gateway stops."""
    came = asyncio.Queue[bytes]()

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        came.put_nowait(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(collect, "127.0.0.1", 0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    def run() -> None:
        with traced() as traces:
            assert traces is not None
            with traces.request("POST", {}) as span:
                span.update_name("POST /v1/chat/completions")

    await asyncio.to_thread(run)
    server.close()
    assert b"POST /v1/chat/completions" in came.get_nowait()
