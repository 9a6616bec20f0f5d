"""What makes requests cheap: busy routes go past FastAPI, and frames of one read go out in one write."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import httpx
import pytest
from promptsluice.gateway import (
    routes_chat,
    routes_completions,
    routes_compress,
    routes_embeddings,
    routes_messages,
    routes_models,
    routes_responses,
)
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Frame
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.direct import Direct
from promptsluice.gateway.stream import EventStream
from promptsluice.policies import PolicySet
from promptsluice.prompt import Overloaded, PromptsluiceError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

POLICY = """
version: 1
default_policy: "off"
backends:
  echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}
"""
ROUTERS = [
    one.router
    for one in (
        routes_chat,
        routes_completions,
        routes_compress,
        routes_embeddings,
        routes_messages,
        routes_models,
        routes_responses,
    )
]


@pytest.mark.parametrize("path", ["/odd", "/v1/messages/odd"])
async def test_a_bug_behind_the_framework_is_answered_in_our_form(path: str, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(PolicySet.from_text(POLICY), backends={"echo": EchoBackend("echo", models=["echo"])})

    secret = "what the user said"

    @app.get(f"{path}/bug")
    async def bug() -> None:
        raise ZeroDivisionError(secret)

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client,
    ):
        answered = await client.get(f"{path}/bug")
    assert answered.status_code == 500 and answered.headers["content-type"] == "application/json"
    error, request_id = answered.json()["error"], answered.headers["x-request-id"]
    assert error["type"] == ("api_error" if path != "/odd" else "server_error")
    assert request_id in error["message"] and secret not in answered.text + caplog.text
    assert caplog.text.count("failed: builtins.ZeroDivisionError") == 1


async def test_busy_routes_are_answered_past_the_framework() -> None:
    app = create_app(PolicySet.from_text(POLICY), backends={"echo": EchoBackend("echo", models=["echo"])})

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("framework")(scope, receive, send)

    async def on_error(request: Request, error: Any) -> Response:
        assert isinstance(error, PromptsluiceError)
        return PlainTextResponse(error.message, error.status)

    direct = Direct(framework, routers=ROUTERS, on_error=on_error)

    async def outer(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        scope.update(app=app, state={"request_id": "r"})
        await direct(scope, receive, send)

    chat = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://x") as client,
    ):
        answered = await client.post("/v1/chat/completions", json=chat)
        assert answered.status_code == 200 and "hello" in answered.text
        for path in ("completions", "responses", "messages", "embeddings", "compress", "chat/completions"):
            refused = await client.post(f"/v1/{path}", content=b"{")
            assert refused.status_code == 400 and refused.text != "framework", path
        for method, path in (("GET", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/v1/nowhere")):
            assert (await client.request(method, path)).text == "framework"


async def written(frames: AsyncGenerator[Frame, None]) -> list[bytes]:
    """The bodies of a stream's writes."""
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    response = EventStream(frames, headers={}, request_id="r", first_frame_s=0.01)
    await response({}, asyncio.Queue[Any]().get, send)
    return sent[1:]


async def test_the_head_waits_for_the_first_frame_and_not_for_ever() -> None:
    async def at_once() -> AsyncGenerator[Frame, None]:
        raise Overloaded("full")
        yield

    with pytest.raises(Overloaded):
        await written(at_once())

    async def late() -> AsyncGenerator[Frame, None]:
        await asyncio.sleep(0.05)
        raise Overloaded("full")
        yield

    head_only, error = await written(late())
    assert head_only == b"" and error.startswith(b'data: {"error":')


async def test_frames_of_one_read_go_out_in_one_write() -> None:
    async def frames() -> AsyncGenerator[Frame, None]:
        yield Frame(data=b"1", more=True)
        yield Frame(data=b"2", more=True)
        yield Frame(data=b"3")
        yield Frame(data=b"4", more=True)
        yield Frame(data=b"")

    assert await written(frames()) == [b"data: 1\n\ndata: 2\n\ndata: 3\n\n", b"data: 4\n\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize("error", [Overloaded("full"), ValueError("a bug")])
async def test_what_waits_to_be_written_goes_out_before_an_error(error: Exception) -> None:
    async def frames() -> AsyncGenerator[Frame, None]:
        yield Frame(data=b"1")
        yield Frame(data=b"2", more=True)
        raise error

    first, rest = await written(frames())
    assert first == b"data: 1\n\n"
    assert rest.startswith(b'data: 2\n\ndata: {"error":') and rest.count(b"data: ") == 2


async def test_a_last_frame_that_promises_more_is_written() -> None:
    async def frames() -> AsyncGenerator[Frame, None]:
        yield Frame(data=b"1", more=True)

    assert await written(frames()) == [b"data: 1\n\ndata: [DONE]\n\n"]
