"""Summaries and originals in the house: who is asked, what it costs, what is kept for whom."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Backend, Call, ModelCard, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.kept_texts import KeptTexts
from promptsluice.gateway.summaries import Summaries
from promptsluice.policies import PolicySet
from promptsluice.policies.schema import SummariesSpec
from promptsluice.prompt import ConfigError, Usage

from .harness import Driven

FILE = """
version: 1
default_policy: short
server:
  api_keys:
    - {{name: one, env: KEY_ONE}}
    - {{name: two, env: KEY_TWO}}
    - {{name: poor, env: KEY_POOR, limits: {{tokens_per_day: 900}}}}
    - {{name: even, env: KEY_EVEN, limits: {{tokens_per_day: 1200}}}}
  summaries: {{path: {path}}}
backends:
  main: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [main]}}
  writer: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [small]}}
policies:
  short:
    compress:
      - {{use: lossless}}
      - {{use: summarize, options: {{backend: writer, model: small, min_tokens: 64, fallback: none}}}}
    token_value_ms: 100
    originals: {{marks: true}}
"""
TURN = "Somebody told a long story about a boat and a lake and the people on the other side of the water. " * 12


class Writer(Backend):
    """Writes the same summary for everybody, and counts."""

    def __init__(self) -> None:
        super().__init__("writer")
        self.calls: list[Call] = []
        self.status = 200
        self.told: Usage | None = Usage(prompt_tokens=300, completion_tokens=5)
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def models(self) -> Sequence[ModelCard]:
        return []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def complete(self, call: Call) -> Answer | Stream:
        self.calls.append(call)
        self.asked.set()
        await self.go.wait()
        choice = {"message": {"role": "assistant", "content": "A story of a boat."}, "finish_reason": "stop"}
        return Answer(body=json.dumps({"choices": [choice]}).encode(), status=self.status, usage=self.told)


class House:
    def __init__(self, app: Any, client: httpx.AsyncClient, writer: Writer) -> None:
        self.app, self.client, self.writer = app, client, writer

    def charged(self, key: str) -> float:
        registry = self.app.state.sluice.metrics.registry
        return registry.get_sample_value("promptsluice_key_tokens_total", {"key": key}) or 0.0

    async def post(self, *turns: str, key: str = "k1", path: str = "/v1/compress") -> httpx.Response:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            messages += [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": turn}]
        body = {"model": "main", "messages": [*messages, {"role": "user", "content": "And now?"}]}
        headers = {"authorization": f"Bearer {key}", "x-promptsluice-report": "1"}
        return await self.client.post(path, json=body, headers=headers)

    async def original(self, original_id: str, *, key: str = "k1") -> httpx.Response:
        return await self.client.get(f"/v1/originals/{original_id}", headers={"authorization": f"Bearer {key}"})


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[House]:
    writer = Writer()
    policies = PolicySet.from_text(FILE.format(path=path))
    app = create_app(policies, backends={"main": EchoBackend("main", models=["main"]), "writer": writer})
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield House(app, client, writer)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setenv("KEY_ONE", "k1")
    monkeypatch.setenv("KEY_TWO", "k2")
    monkeypatch.setenv("KEY_POOR", "k3")
    monkeypatch.setenv("KEY_EVEN", "k4")
    async with opened(tmp_path / "summaries.sqlite") as house:
        yield house


async def test_a_summary_is_asked_for_once_and_billed_apart(house: House) -> None:
    first = await house.post(TURN)
    said = first.json()["messages"][1]["content"]
    assert said.startswith("[summary of ") and "A story of a boat." in said
    assert first.json()["promptsluice"]["side_prompt"] == 300 and first.headers["x-promptsluice-tokens-side"] == "305"
    (call,) = house.writer.calls
    assert call.policy.passthrough and call.headers == {"x-promptsluice-policy": "off"} and not call.stream
    assert call.prompt.body["temperature"] == 0 and call.prompt.body["model"] == "small"

    later = await house.post(TURN, "Yes.")
    assert later.json()["messages"][:2] == first.json()["messages"][:2]
    assert later.headers["x-promptsluice-tokens-side"] == "0" and len(house.writer.calls) == 1
    metrics = (await house.client.get("/metrics")).text
    assert 'promptsluice_side_tokens_total{policy="short",type="prompt"} 300.0' in metrics


async def test_summaries_and_originals_are_their_tenants_own(house: House) -> None:
    report = (await house.post(TURN)).json()
    (original_id,) = report["promptsluice"]["originals"]
    assert report["messages"][1]["content"].endswith(f"\n[original: {original_id}]")
    assert (await house.original(original_id)).json() == {"id": original_id, "object": "original", "text": TURN}
    foreign = await house.original(original_id, key="k2")
    assert foreign.status_code == 404 and foreign.json()["error"]["code"] == "original_not_found"
    assert (await house.original(original_id, key="nobody")).status_code == 401
    await house.post(TURN, key="k2")
    assert len(house.writer.calls) == 2
    assert (await house.original(original_id, key="k2")).json()["text"] == TURN


async def test_a_summary_is_charged_to_the_key_that_it_is_for(house: House) -> None:
    await house.post(TURN)
    assert house.charged("one") == 305, "nothing else was sent anywhere"
    await house.post(TURN)
    assert house.charged("one") == 305, "it was kept"
    answer = await house.post(TURN, key="k2", path="/v1/chat/completions")
    assert house.charged("two") == 305 + answer.json()["usage"]["total_tokens"]
    house.writer.status = 500
    await house.post(f"Another. {TURN}")
    assert house.charged("one") == 305, "who was refused pays nothing"
    house.writer.status, house.writer.told = 200, None
    await house.post(f"A third. {TURN}")
    assert 605 < house.charged("one") < 805, "an estimate of what was asked and said"


async def test_a_summary_needs_room_in_the_limits(house: House) -> None:
    first = await house.post(TURN, key="k3")
    reserved = 900 - int(first.headers["x-ratelimit-remaining-tokens"])
    assert len(house.writer.calls) == 1 and 305 < reserved < 595 and house.charged("poor") == 305
    second = await house.post(f"Another. {TURN}", key="k3")
    assert len(house.writer.calls) == 2 and int(second.headers["x-ratelimit-remaining-tokens"]) < 595 - 305
    third = await house.post(f"A third. {TURN}", key="k3")
    (note,) = [step["note"] for step in third.json()["promptsluice"]["steps"] if step["name"] == "summarize"]
    assert third.status_code == 200 and len(house.writer.calls) == 2 and "no summary came" in note
    assert house.charged("poor") == 610
    metrics = (await house.client.get("/metrics")).text
    assert 'key="poor",outcome="tokens_per_day"' not in metrics, "the request itself was let in"


async def test_a_summary_is_taken_out_of_what_its_request_has_reserved(house: House) -> None:
    async def left() -> int:
        """By a request that costs nothing: the summary is there."""
        return int((await house.post(TURN, key="k4")).headers["x-ratelimit-remaining-tokens"])

    answer = await house.post(TURN, key="k4", path="/v1/chat/completions")
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0", "the longest answer alone has nearly all of it"
    assert answer.headers["x-promptsluice-tokens-side"] == "305"
    assert house.charged("even") == 305 + answer.json()["usage"]["total_tokens"]
    assert await left() == 1200 - house.charged("even"), "neither kept nor given back twice"


@pytest.mark.slow
async def test_who_leaves_gives_back_what_was_lent_for_a_summary(house: House) -> None:
    house.writer.go.clear()
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": TURN}]
    body = {"model": "main", "messages": [*messages, {"role": "user", "content": "And now?"}]}
    asked = Driven(house.app, "/v1/chat/completions", body, key="k4")
    await house.writer.asked.wait()
    await asked.leave()
    house.writer.go.set()
    while not house.charged("even"):  # noqa: ASYNC110 - the worker goes on by itself
        await asyncio.sleep(0.005)
    await asyncio.sleep(0)
    left = await house.post("Short.", key="k4")
    assert house.charged("even") == 305 and left.headers["x-ratelimit-remaining-tokens"] == str(1200 - 305)


async def test_who_leaves_pays_for_the_summary_that_still_comes(house: House) -> None:
    house.writer.go.clear()
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": TURN}]
    body = {"model": "main", "messages": [*messages, {"role": "user", "content": "And now?"}]}
    asked = Driven(house.app, "/v1/compress", body, key="k1")
    await house.writer.asked.wait()
    await asked.leave()
    assert house.charged("one") == 0
    house.writer.go.set()
    while not house.charged("one"):  # noqa: ASYNC110 - the worker goes on by itself
        await asyncio.sleep(0.005)
    assert house.charged("one") == 305


async def test_only_what_is_sent_settles_a_conversation(house: House) -> None:
    def remembered(answer: httpx.Response) -> bool:
        return "turns" in [step["name"] for step in answer.json()["promptsluice"]["steps"]]

    chat = "/v1/chat/completions"
    assert not remembered(await house.post(TURN)) and not remembered(await house.post(TURN, "Yes."))
    assert not remembered(await house.post(TURN, path=chat))
    assert remembered(await house.post(TURN, "Yes.")), "as it would be sent now"
    assert remembered(await house.post(TURN, "Yes.", path=chat))


async def test_originals_of_an_earlier_turn_are_those_that_lost_something(house: House) -> None:
    spaced = TURN.replace(". ", ".  \n\n\n\n")
    for steps in (["lossless", "summarize"], ["turns"]):
        answer = await house.post("Short.   \n\n\n\n\n" * 12, spaced, path="/v1/chat/completions")
        report = answer.json()["promptsluice"]
        assert [step["name"] for step in report["steps"]] == steps and report["tokens_out"] < report["tokens_in"]
        (original_id,) = report["originals"]
        assert (await house.original(original_id)).json()["text"] == spaced


async def test_a_backend_that_refuses_costs_nothing_but_the_summary(house: House) -> None:
    house.writer.status = 500
    answer = await house.post(TURN, path="/v1/chat/completions")
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "And now?"
    *_, step = answer.json()["promptsluice"]["steps"]
    assert "no summary came" in step["note"] and answer.json()["promptsluice"]["originals"] == []


async def test_summaries_outlive_a_process(house: House, tmp_path: Path) -> None:
    first = (await house.post(TURN)).json()["messages"]
    async with opened(tmp_path / "summaries.sqlite") as again:
        assert (await again.post(TURN)).json()["messages"] == first
        assert not again.writer.calls


def test_a_policy_names_a_backend_that_is_there() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'nobody' \\(of main, writer\\)"):
        PolicySet.from_text(FILE.format(path="x").replace("backend: writer, model", "backend: nobody, model"))


def test_kept_texts_are_bounded() -> None:
    now = [0.0]
    kept = KeptTexts(limit=1000, total=1500, age=60, clock=lambda: now[0])
    assert not kept.put("a", "huge", "x" * 2000)
    for key in ("1", "2", "3"):
        assert kept.put("a", key, "x" * 300)
    assert kept.get("a", "1") is None and kept.get("a", "2") == kept.get("a", "3") == "x" * 300
    assert kept.get("b", "2") is None
    kept.put("b", "4", "y" * 800)
    assert kept.get("a", "2") is None and kept.get("a", "3") and kept.get("b", "4")
    now[0] = 61
    assert kept.get("a", "3") is None and kept.get("b", "4") is None


def test_summaries_on_disk_are_bounded_and_a_broken_disk_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "summaries.sqlite"
    spec = SummariesSpec(bytes=0, disk=2000)
    summaries = Summaries(spec, path)
    for n in range(20):
        summaries.of("a").put(str(n), "x" * 100)
    found = [n for n in range(20) if summaries.of("a").get(str(n))]
    assert found == list(range(15, 20))
    assert summaries.of("b").get("19") is None
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database, but a text that is long enough" * 40)
    other = Summaries(spec, broken).of("a")
    other.put("1", "x")
    assert other.get("1") is None
