"""Rollouts, shadows and closed routes over HTTP: what clients, metrics and the log see, and what is sent."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.policies import PolicySet

FILE = """
version: 1
default_policy: off
server: {{api_keys: [{keys}]}}
backends: {{echo: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [m]}}}}
collections: {{root: {root}/c}}
kv_cache: {{path: {root}/kv}}
policies:
  tight: {{extends: lossless, min_prompt_tokens: 0, token_value_ms: 50}}
  hasty: {{extends: tight, rewrite_timeout: 0.000001}}
  fetching: {{extends: off, retrieve: {{collection: nowhere}}}}
  off: {{extends: off, allow_client_policy: [hasty, fetching]}}
routes:
- {route}
"""
GAPS = "a line  with   gaps\n\n\n\n" * 80


class Recording(EchoBackend):
    """An echo that keeps what it was sent, and can be told to fail or to wait while it counts for the optimizer."""

    def __init__(self) -> None:
        super().__init__("echo", models=["m"])
        self.sent: list[bytes] = []
        self.broken = False
        self.free = threading.Event()
        self.free.set()

    def count_tokens(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert self.free.wait(60)
            if self.broken:
                raise RuntimeError(text)
        return super().count_tokens(text)

    async def complete(self, call: Call) -> Answer | Stream:
        self.sent.append(call.prompt.render())
        return await super().complete(call)


class Gateway:
    """An application with its only backend, and ways to ask it."""

    def __init__(self, client: httpx.AsyncClient, backend: Recording) -> None:
        self.client, self.backend = client, backend

    async def ask(
        self, first: str = "hi", *more: str, path: str = "/v1/chat/completions", **fields: Any
    ) -> httpx.Response:
        headers = fields.pop("headers", {})
        roles = ("user", "assistant") * (len(more) // 2 + 1)
        messages = [{"role": role, "content": text} for role, text in zip(roles, (first, *more), strict=False)]
        body = json.dumps({"model": "m", "max_tokens": 4, "messages": messages, **fields}, indent=1)
        return await self.client.post(path, content=body, headers=headers)

    async def metric(self, start: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    async def until(self, start: str, value: float) -> None:
        async with asyncio.timeout(60):
            while True:
                if await self.metric(start) >= value:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served(root: Path, route: str, *, keys: str = "") -> AsyncGenerator[Gateway]:
    file = root / "policy.yaml"
    file.write_text(FILE.format(root=root, route=route, keys=keys))
    backend = Recording()
    app = create_app(PolicySet.load(file), backends={"echo": backend})
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield Gateway(client, backend)
        backend.free.set()


async def test_a_conversation_stays_in_its_group_and_everybody_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="promptsluice.gateway")
    async with served(tmp_path, "{rollout: {policy: tight, percent: 40, holdout: 20, name: trial}}") as gateway:
        groups: dict[str, str] = {}
        for n in range(30):
            opening = f"question {n}"
            turns: Sequence[tuple[str, ...]] = ((opening,), (opening, "an answer", "another question"))
            told = [await gateway.ask(*turn, headers={"x-request-id": f"r{n}"}) for turn in turns]
            assert len({answer.headers["x-promptsluice-rollout"] for answer in told}) == 1
            groups[opening] = told[0].headers["x-promptsluice-rollout"]
            policy = "tight" if groups[opening] == "trial=rollout" else "off"
            assert {answer.headers["x-promptsluice-policy"] for answer in told} == {policy}
            group = groups[opening].partition("=")[2]
            assert f"request r{n}: rollout trial, group {group}, policy {policy}" in caplog.text
        assert set(groups.values()) == {"trial=rollout", "trial=holdout", "trial=base"}
        for group in ("rollout", "holdout", "base"):
            policy = "tight" if group == "rollout" else "off"
            start = (
                f'promptsluice_rollout_requests_total{{group="{group}",outcome="ok",policy="{policy}",rollout="trial"}}'
            )
            assert await gateway.metric(start) == 2 * list(groups.values()).count(f"trial={group}")
        report = (await gateway.ask("question 1", headers={"x-promptsluice-report": "1"})).json()["promptsluice"]
        assert f"{report['rollout']}={report['group']}" == groups["question 1"]


async def test_messages_and_responses_draw_as_chats_do(tmp_path: Path) -> None:
    async with served(tmp_path, "{rollout: {policy: tight, percent: 50}}") as gateway:
        for n in range(12):
            chat = await gateway.ask(f"q{n}")
            message = await gateway.ask(f"q{n}", path="/v1/messages")
            body = {"model": "m", "input": f"q{n}"}
            response = await gateway.client.post("/v1/responses", json=body)
            assert {r.status_code for r in (chat, message, response)} == {200}
            assert len({r.headers["x-promptsluice-rollout"] for r in (chat, message, response)}) == 1
        raw = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 1})
        assert raw.status_code == 200 and "x-promptsluice-rollout" not in raw.headers


async def test_a_shadow_reports_and_sends_the_original_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="promptsluice.gateway")
    async with served(tmp_path, "{policy: off, shadow: tight}") as gateway:
        answer = await gateway.ask("look", GAPS, "what is it?", headers={"x-request-id": "seen-1"})
        assert answer.status_code == 200
        assert answer.request.content == gateway.backend.sent[0], "byte for byte"
        assert answer.headers["x-promptsluice-policy"] == "off"
        assert answer.headers["x-promptsluice-shadow"].startswith("tight=")
        await gateway.until('promptsluice_shadows_total{outcome="done",policy="tight"}', 1)
        before = await gateway.metric('promptsluice_shadow_tokens_total{policy="tight",what="before"}')
        assert before == len(f"look {GAPS} what is it?".split())
        assert "request seen-1: in shadow, policy tight would send" in caplog.text
        assert "gaps" not in caplog.text


async def test_a_shadow_holds_nobody_up_and_is_dropped_when_there_is_no_room(tmp_path: Path) -> None:
    async with served(tmp_path, "{policy: off, shadow: tight}") as gateway:
        gateway.backend.free.clear()
        answers = [await gateway.ask("look", GAPS, f"what is {n}?", stream=n % 2 == 1) for n in range(14)]
        assert {answer.status_code for answer in answers} == {200}
        states = [answer.headers["x-promptsluice-shadow"] for answer in answers]
        assert states == ["tight=running"] * 9 + ["tight=dropped"] * 5
        assert await gateway.metric('promptsluice_shadows_total{outcome="dropped",policy="tight"}') == 5
        gateway.backend.free.set()
        await gateway.until('promptsluice_shadows_total{outcome="done",policy="tight"}', 9)
        assert len(gateway.backend.sent) == 14


async def test_a_shadow_that_breaks_is_counted_and_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path, "{policy: off, shadow: fetching, on_failure: closed}") as gateway:
        assert (await gateway.ask("hi")).status_code == 200
        await gateway.until('promptsluice_shadows_total{outcome="failed",policy="fetching"}', 1)
        assert await gateway.metric("promptsluice_step_failures_total") == 0


async def test_a_server_that_stops_drops_its_shadows(tmp_path: Path) -> None:
    async with served(tmp_path, "{policy: off, shadow: tight}") as gateway:
        gateway.backend.free.clear()
        for n in range(4):
            assert (await gateway.ask("look", GAPS, f"what is {n}?")).status_code == 200


async def test_an_open_route_goes_on_and_says_without_what(tmp_path: Path) -> None:
    async with served(tmp_path, "{policy: fetching}") as gateway:
        answer = await gateway.ask("hi")
        assert answer.status_code == 200
        assert answer.headers["x-promptsluice-failed"] == "retrieve=collection_not_found"
        counted = 'promptsluice_step_failures_total{policy="fetching",step="retrieve",why="collection_not_found"}'
        assert await gateway.metric(counted) == 1


CLOSED = [("fetching", "retrieve: collection_not_found", "false"), ("hasty", "lossless: late", None)]


@pytest.mark.parametrize(("policy", "why", "retry"), CLOSED)
async def test_a_closed_route_sends_nothing(tmp_path: Path, policy: str, why: str, retry: str | None) -> None:
    async with served(tmp_path, f"{{policy: {policy}, on_failure: closed}}") as gateway:
        for stream in (False, True):
            refused = await gateway.ask("look", GAPS, "what is it?", stream=stream)
            error = refused.json()["error"]
            assert refused.status_code == 500 and error["code"] == "policy_not_applied"
            assert error["type"] == "server_error" and why in error["message"]
            assert refused.headers.get("x-should-retry") == retry
            assert refused.headers["x-promptsluice-policy"] == policy
        message = await gateway.ask("look", GAPS, "what is it?", path="/v1/messages")
        assert message.status_code == 500 and message.json()["error"]["type"] == "api_error"
        response = await gateway.client.post("/v1/responses", json={"model": "m", "input": "hi"})
        assert response.status_code == (500 if policy == "fetching" else 200), "nothing to rewrite, nothing late"
        assert (await gateway.ask("look", GAPS, "so?", path="/v1/compress")).status_code == 500
        assert not any(GAPS[:20].encode() in sent for sent in gateway.backend.sent)
        failed = f'promptsluice_completions_total{{backend="echo",model="m",outcome="failed",policy="{policy}"}}'
        assert await gateway.metric(failed) >= 3


@pytest.mark.parametrize(("then", "status"), [("open", 200), ("closed", 500)])
async def test_counting_that_breaks_is_a_failure_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: str, status: int
) -> None:
    async with served(tmp_path, f"{{policy: tight, on_failure: {then}}}") as gateway:
        gateway.backend.broken = True
        answer = await gateway.ask("look", GAPS, "what is it?")
        assert answer.status_code == status
        assert answer.headers["x-promptsluice-failed"].startswith("count=error")
        assert "with   gaps" not in answer.text + caplog.text
        assert gateway.backend.sent == ([answer.request.content] if then == "open" else [])
