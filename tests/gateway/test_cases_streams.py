"""Failures that the field's proxies were seen with, each as a test of its kind: streams and framing."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from .harness import Exchange, Gateway, Upstream, eventually, raw_request
from .test_upstream import DONE, HI, USAGE, USAGE_CHUNK, answers, chunk

PIECES = chunk("a"), chunk("b", finish="stop")
CANCELLED = 'promptsluice_completions_total{backend="far",model="far",outcome="cancelled",policy="off"}'
FAILED = 'promptsluice_completions_total{backend="far",model="far",outcome="failed",policy="off"}'
TOKENS = 'promptsluice_billed_tokens_total{backend="far",model="far",policy="off",type="completion"}'


def data_of(body: bytes) -> list[Any]:
    """The data of each event, parsed; "[DONE]" as it is."""
    events = body.split(b"\n\n")
    assert events.pop() == b"", "a stream ends with a whole event"
    texts = [event.removeprefix(b"data: ") for event in events if not event.startswith(b":")]
    return ["[DONE]" if text == b"[DONE]" else json.loads(text) for text in texts]


def asked(gateway: Gateway, **fields: Any) -> list[Any]:
    response = gateway.post({"model": "far", "messages": HI, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return data_of(response.content)


# What upstreams do with their usage.
USAGES = {
    "own frame": (*PIECES, USAGE_CHUNK, DONE),
    "on the last chunk": (PIECES[0], chunk("b", finish="stop", usage=USAGE), DONE),
    "on every chunk": (chunk("a", usage=USAGE), chunk("b", finish="stop", usage=USAGE), DONE),
    "null before": (chunk("a", usage=None), chunk("b", finish="stop", usage=None), USAGE_CHUNK, DONE),
    "twice": (chunk("a"), chunk("b", finish="stop", usage=USAGE), USAGE_CHUNK, DONE),
    "before the end": (chunk("a"), USAGE_CHUNK, chunk("b", finish="stop"), DONE),
    "no end mark": (*PIECES, USAGE_CHUNK),
}


@pytest.mark.parametrize("pieces", USAGES.values(), ids=USAGES.keys())
def test_gw_00_one_usage_frame_last_and_without_choices(gateway: Gateway, upstream: Upstream, pieces: Any) -> None:
    upstream.answer(answers(*pieces))
    *chunks, usage, done = asked(gateway, stream_options={"include_usage": True})
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == USAGE
    assert all(one.get("usage") is None and len(one["choices"]) == 1 for one in chunks)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "ab"


def test_gw_00_the_same_from_a_backend_of_ours(gateway: Gateway) -> None:
    *chunks, usage, done = asked(gateway, model="echo", stream_options={"include_usage": True})
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["total_tokens"] == 2
    assert all(one.get("usage") is None and len(one["choices"]) == 1 for one in chunks)


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, None, {"include_usage": None}])
@pytest.mark.parametrize("pieces", USAGES.values(), ids=USAGES.keys())
def test_gw_02_usage_is_kept_from_who_did_not_ask(
    gateway: Gateway, upstream: Upstream, options: Any, pieces: Any
) -> None:
    upstream.answer(answers(*pieces))
    *chunks, done = asked(gateway, stream_options=options)
    assert done == "[DONE]" and all(one.get("usage") is None and one["choices"] for one in chunks)
    assert json.loads(upstream.seen[0].body)["stream_options"] == options, "what the client said is not altered"


ODD_STREAM = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\r\n\r\n'
    b'data: {"id":"c","choices":[],"usage":{"completion_tokens":7}}\r\n\r\ndata: [DONE]\r\n\r\n'
)


@pytest.mark.slow
@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"], ids=["crlf", "lf", "cr"])
def test_gw_04_every_split_of_a_stream_counts_its_usage_once(gateway: Gateway, upstream: Upstream, end: bytes) -> None:
    stream = ODD_STREAM.replace(b"\r\n", end)
    places = range(1, len(stream), 1 if end == b"\r\n" else 9)
    before, asked_for = gateway.metric(TOKENS), 0
    for at in places:
        upstream.answer(answers(stream[:at], stream[at:]))
        first, usage, done = asked(gateway, stream_options={"include_usage": True})
        assert first["choices"] and usage["usage"] == {"completion_tokens": 7} and done == "[DONE]", at
        asked_for += 1
    assert gateway.metric(TOKENS) - before == 7 * asked_for


@pytest.mark.slow
@pytest.mark.parametrize("sent", [1, 2])
@pytest.mark.parametrize("how", ["reset", "closed", "half an event", "less than promised"])
def test_gw_06_a_stream_that_breaks_off_ends_with_an_error_frame(
    gateway: Gateway, upstream: Upstream, how: str, sent: int
) -> None:
    async def breaks_off(exchange: Exchange) -> None:
        await exchange.head(extra="content-length: 100000\r\n" if how == "less than promised" else "")
        for number in range(sent):
            await exchange.send(chunk(f"t{number}"))
        if how == "half an event":
            await exchange.send(b'data: {"id": "c", "choi')
        if how == "reset":
            # What was sent has to arrive first: a reset throws away what its receiver has not read yet.
            await exchange.reader.read(0)
            upstream.soon(exchange.reset)

    before = gateway.metric(FAILED)
    upstream.answer(breaks_off)
    response = gateway.post({"model": "far", "messages": HI, "stream": True})
    assert response.status_code in (200, 502)
    frames = data_of(response.content) if response.status_code == 200 else [response.json()]
    *chunks, error = frames
    assert set(error) == {"error"} and {"message", "type", "code"} <= set(error["error"])
    assert all(one["choices"][0]["finish_reason"] is None for one in chunks) and "[DONE]" not in frames
    eventually(lambda: gateway.metric(FAILED) == before + 1)
    assert len(upstream.seen) == (1 if response.status_code == 200 else 3), "nothing is retried once it has begun"


@pytest.fixture
def leaving(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        yield client


def test_gw_08_a_client_that_leaves_a_stream_ends_the_upstreams_work(
    gateway: Gateway, upstream: Upstream, leaving: socket.socket
) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.head()
        while not exchange.reader.at_eof():
            await exchange.send(chunk("word "))
            try:
                await exchange.wait_for_close(0.01)
            except TimeoutError:
                continue
        exchange.closed.set()

    before = gateway.metric(CANCELLED)
    upstream.answer(endless)
    leaving.sendall(raw_request({"model": "far", "messages": HI, "stream": True}))
    received = b""
    while b"word" not in received:
        received += leaving.recv(65_536)
    leaving.close()
    assert upstream.seen[0].closed.wait(5)
    eventually(lambda: gateway.metric(CANCELLED) == before + 1)
    eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_gw_10_a_client_that_leaves_before_the_first_token(
    gateway: Gateway, upstream: Upstream, leaving: socket.socket, path: str, stream: bool
) -> None:
    upstream.answer(lambda exchange: exchange.until_closed())
    body = {"model": "far", "messages": HI, "prompt": "x", "input": "x", "stream": stream}
    leaving.sendall(raw_request(body, path=path))
    eventually(lambda: upstream.seen)
    leaving.close()
    assert upstream.seen[0].closed.wait(5)
    eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)


def test_gw_10_also_while_its_prompt_is_being_rewritten(gateway: Gateway, leaving: socket.socket) -> None:
    gate, entered = (gateway.log.with_name(name) for name in ("gate", "entered"))
    entered.unlink(missing_ok=True)
    gate.touch()
    try:
        messages = [{"role": "tool", "content": "a " * 500, "tool_call_id": "1"}, *HI]
        leaving.sendall(raw_request({"model": "gated:lossless", "messages": messages}))
        eventually(entered.exists)
        leaving.close()
        eventually(lambda: gateway.metric("promptsluice_http_in_flight") == 1)
    finally:
        gate.unlink()


@pytest.mark.parametrize(
    "framing",
    [
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"content-length: 2\r\nkeep-alive: 5\r\nproxy-authenticate: x\r\nte: trailers\r\nupgrade: x\r\n\r\n{}",
        b"\r\n{}",  # up to the end of the connection
    ],
    ids=["chunked", "length", "neither"],
)
def test_gw_12_an_answer_has_one_framing(gateway: Gateway, upstream: Upstream, framing: bytes) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n" + framing)

    upstream.answer(behave)
    head, body = answered(gateway, {"model": "far", "messages": HI})
    assert head[b"content-length"] == b"2" and body == b"{}"
    assert not {b"transfer-encoding", b"keep-alive", b"proxy-authenticate", b"te", b"upgrade"} & head.keys()


@pytest.mark.slow
def test_gw_12_an_upstream_with_two_framings_is_no_answer_or_one_framing(gateway: Gateway, upstream: Upstream) -> None:
    async def behave(exchange: Exchange) -> None:
        both = b"transfer-encoding: chunked\r\ncontent-length: 123\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + both)

    upstream.answer(behave)
    head, body = answered(gateway, {"model": "far", "messages": HI})
    assert b"transfer-encoding" not in head and int(head[b"content-length"]) == len(body)
    assert body == b"{}" or json.loads(body)["error"]["code"] == "upstream_error"


def answered(gateway: Gateway, body: dict[str, Any]) -> tuple[dict[bytes, bytes], bytes]:
    """Headers by their lower-case names, none of them twice, and the body, as they came over a socket."""
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(raw_request(body, extra="connection: close\r\n"))
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
    names = [name.lower() for name, _ in lines]
    assert len(set(names)) == len(names), names
    return {name.lower(): value for name, value in lines}, rest
