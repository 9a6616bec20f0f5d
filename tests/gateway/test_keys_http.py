"""API keys and limits as clients meet them: statuses, error bodies, headers, and what comes of those who leave."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Frame, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.policies import PolicySet
from promptsluice.policies.match import digest
from promptsluice.prompt import Usage

from .harness import Driven

HI = [{"role": "user", "content": "one two three four"}]
CHAT = "/v1/chat/completions"
FILE = f"""
version: 1
default_policy: off
server:
  metrics: keyed
  api_keys:
    - {{name: all, sha256: {digest("all")}}}
    - name: narrow
      sha256: {digest("narrow")}
      scopes: [inference, "collections:read"]
      models: [echo]
      policies: [off, lossless]
      collections: [handbook]
    - {{name: watcher, sha256: {digest("watcher")}, scopes: [metrics]}}
    - {{name: old, sha256: {digest("old")}, expires: 2020-01-01}}
    - {{name: few, sha256: {digest("few")}, limits: {{requests_per_minute: 2}}}}
    - {{name: daily, sha256: {digest("daily")}, limits: {{tokens_per_day: 3000, tokens_per_minute: 2000}}}}
    - {{name: single, sha256: {digest("single")}, limits: {{concurrent: 1}}}}
backends:
  echo: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo, other]}}
policies:
  asks: {{extends: off, retrieve: {{collection: docs}}}}
"""


class Gated(EchoBackend):
    """Streams a word and its usage or an error, each when told to; whole answers are an echo's."""

    def __init__(self) -> None:
        super().__init__("echo", models=["echo", "other"])
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.calls = 0

    async def complete(self, call: Call) -> Answer | Stream:
        self.calls += 1
        if call.stream:
            return Stream(frames=self._frames(usage=call.include_usage))
        return await super().complete(call)

    async def _frames(self, *, usage: bool) -> AsyncGenerator[Frame, None]:
        yield Frame(data=b'{"choices":[{"index":0,"delta":{"content":"word"}}]}', content=4)
        self.begun.set()
        await self.go.wait()
        yield Frame(data=b"{}" if usage else b"", usage=Usage(prompt_tokens=100, completion_tokens=23))


class House:
    """An application and a client of it."""

    def __init__(self, app: Any, client: httpx.AsyncClient, backend: Gated) -> None:
        self.app, self.client, self.backend = app, client, backend

    async def post(self, key: str, path: str = CHAT, **fields: Any) -> httpx.Response:
        body = {"model": "echo", "messages": HI, "max_tokens": 8, **fields}
        return await self.client.post(path, json=body, headers={"authorization": f"Bearer {key}"} if key else {})

    async def get(self, key: str, path: str) -> httpx.Response:
        return await self.client.get(path, headers={"x-api-key": key})

    def sample(self, name: str, **labels: str) -> float:
        return self.app.state.sluice.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def opened(text: str, root: Path) -> AsyncIterator[House]:
    backend = Gated()
    text += f"collections: {{root: {root}/c}}\nkv_cache: {{path: {root}/kv}}\n"
    app = create_app(PolicySet.from_text(text), backends={"echo": backend})
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield House(app, client, backend)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(FILE, tmp_path) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/messages", "/v1/nothing", "/tokenize", "/v1/responses"])
async def test_who_is_not_known_is_told_so_before_anything_is_read(house: House, path: str) -> None:
    for key, code in (("", "invalid_api_key"), ("wrong", "invalid_api_key"), ("old", "expired_api_key")):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = await house.client.post(path, content=b"\xff no json", headers=headers)
        assert response.status_code == 401, response.text
        if path == "/v1/messages":
            assert response.json()["type"] == "error" and error_of(response)["type"] == "authentication_error"
        else:
            assert error_of(response) == {**error_of(response), "type": "authentication_error", "code": code}
        assert key == "" or key not in response.text.replace("'old'", "")
    assert house.sample("promptsluice_key_requests_total", key="unknown", outcome="unauthorized") == 3
    assert house.backend.calls == 0


async def test_what_needs_no_key(house: House) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await house.client.get(path)).status_code == 200
    assert (await house.client.get("/metrics")).status_code == 401
    assert (await house.get("all", "/metrics")).status_code == 403
    assert 'promptsluice_key_requests_total{key="all"' in (await house.get("watcher", "/metrics")).text
    assert (await house.client.get("/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/collections", "collections:write"),
        ("DELETE", "/v1/collections/handbook", "collections:write"),
        ("POST", "/v1/collections/handbook/documents", "collections:write"),
        ("DELETE", "/v1/collections/handbook/documents/a/search", "collections:write"),
        ("GET", "/metrics", "metrics"),
    ],
)
async def test_a_key_opens_its_routes_only(house: House, method: str, path: str, scope: str) -> None:
    response = await house.client.request(method, path, headers={"x-api-key": "narrow"}, content=b"{")
    error = error_of(response)
    assert response.status_code == 403 and (error["type"], error["code"]) == ("permission_error", "scope_not_allowed")
    assert f"{method} {path}" in error["message"] and scope in error["message"]
    assert "inference, collections:read" in error["message"]
    assert house.sample("promptsluice_key_requests_total", key="narrow", outcome="forbidden") == 1


async def test_a_key_gets_its_models_policies_and_collections_only(house: House) -> None:
    answer = await house.post("narrow")
    assert answer.status_code == 200 and answer.headers["x-promptsluice-policy"] == "off"
    assert (await house.post("narrow", model="echo:lossless")).headers["x-promptsluice-policy"] == "lossless"
    for fields, code, allowed in (
        ({"model": "other"}, "model_not_allowed", "allowed: echo"),
        ({"model": "echo:asks"}, "policy_not_allowed", "allowed: off, lossless"),
        ({"model": "all-minilm-l6-v2"}, "model_not_allowed", "allowed: echo"),
    ):
        for path in (CHAT, "/v1/completions", "/v1/compress", "/v1/messages"):
            refused = await house.post("narrow", path, prompt="x", **fields)
            assert refused.status_code == 403 and allowed in error_of(refused)["message"], (path, refused.text)
            if path != "/v1/messages":
                assert error_of(refused)["code"] == code
    for path in ("", "/documents", "/search"):
        method = "POST" if path == "/search" else "GET"
        url, headers = f"/v1/collections/docs{path}", {"x-api-key": "narrow"}
        refused = await house.client.request(method, url, headers=headers, json={"query": "x"})
        assert refused.status_code == 403 and error_of(refused)["code"] == "collection_not_allowed"
    assert [model["id"] for model in (await house.get("narrow", "/v1/models")).json()["data"]] == ["echo"]
    assert (await house.get("narrow", "/v1/models/other")).status_code == 404
    assert (await house.get("all", "/v1/models/other")).status_code == 200


async def test_a_policy_that_asks_a_collection_which_the_key_may_not_read(tmp_path: Path) -> None:
    text = FILE.replace("policies: [off, lossless]", "policies: [asks]")
    async with opened(text, tmp_path) as house:
        refused = await house.post("narrow")
        assert refused.status_code == 403 and error_of(refused)["code"] == "collection_not_allowed"
        assert "'docs', which the policy 'asks' asks; allowed: handbook" in error_of(refused)["message"]
        raw = await house.post("narrow", "/v1/completions", prompt="x", messages=None)
        assert raw.status_code == 403 and error_of(raw)["code"] == "policy_not_allowed", "it would go without"
        assert "may not use the policy 'off'; allowed: asks; on a raw prompt 'asks'" in error_of(raw)["message"]


@pytest.mark.parametrize(
    ("policies", "on_failure", "statuses"),
    [
        ("[off, lossless]", "open", {"off": 200, "lossless": 200, "plain": 403}),
        ("[lossless, plain]", "open", {"off": 403, "lossless": 403, "plain": 200}),
        ("[off, lossless, plain]", "closed", {"off": 200, "lossless": 400, "plain": 200}),
    ],
)
async def test_a_raw_prompt_goes_without_a_policy_only_where_that_is_allowed(
    tmp_path: Path, policies: str, on_failure: str, statuses: dict[str, int]
) -> None:
    text = FILE.replace("policies: [off, lossless]", f"policies: {policies}")
    text += "  plain: {extends: off}\n"
    text += f"routes: [{{match: {{}}, on_failure: {on_failure}}}]\n"
    async with opened(text, tmp_path) as house:
        found = {}
        for name in statuses:
            answer = await house.post("narrow", "/v1/completions", model=f"echo:{name}", prompt="x", messages=None)
            found[name] = answer.status_code
            if answer.status_code == 200:
                assert answer.headers["x-promptsluice-policy"] == "off"
            else:
                code = {400: "policy_not_applied", 403: "policy_not_allowed"}[answer.status_code]
                assert error_of(answer)["code"] == code and "x-should-retry" not in answer.headers
        assert found == statuses


async def test_requests_per_minute(house: House) -> None:
    for left in ("1", "0"):
        answer = await house.post("few")
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == left
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
    refused = await house.post("few")
    error = error_of(refused)
    assert refused.status_code == 429 and error == {**error, "type": "requests", "code": "rate_limit_exceeded"}
    assert "'few' on requests per minute: limit 2, used 2, requested 1; try again in" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30 and "x-should-retry" not in refused.headers
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert refused.headers.get_list("x-ratelimit-limit-requests") == ["2"]
    assert house.sample("promptsluice_key_requests_total", key="few", outcome="requests_per_minute") == 1
    assert (await house.post("all")).headers.keys().isdisjoint({"x-ratelimit-limit-requests"})
    messages = await house.post("few", "/v1/messages")
    assert messages.status_code == 429 and error_of(messages)["type"] == "rate_limit_error"
    assert messages.headers["anthropic-ratelimit-requests-limit"] == "2" and messages.headers["retry-after"]


async def test_tokens_are_reserved_and_settled_by_what_was_used(house: House) -> None:
    answer = await house.post("daily", max_tokens=500)
    used = answer.json()["usage"]["total_tokens"]
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 2000 - 500, "reserved while it runs"
    assert house.sample("promptsluice_key_tokens_total", key="daily") == used
    again = await house.post("daily", max_tokens=1)
    assert int(again.headers["x-ratelimit-remaining-tokens"]) >= 2000 - used - 10
    capped = await house.post("daily", max_tokens=100_000)
    assert capped.status_code == 429, "a cap is as large as the limit, of which something is used"
    assert error_of(capped)["type"] == "tokens"
    huge = await house.post("daily", messages=[{"role": "user", "content": "word " * 4000}])
    assert huge.status_code == 429 and "is never let in" in error_of(huge)["message"]
    assert huge.headers["x-should-retry"] == "false" and "retry-after" not in huge.headers
    assert house.backend.calls == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 500}),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 500}),
        (CHAT, {"max_tokens": 5, "n": 1e2}),
        ("/v1/completions", {"max_tokens": 5, "prompt": ["a"] * 100}),
        ("/v1/completions", {"max_tokens": 5, "prompt": "a", "n": 1, "best_of": 100}),
        ("/v1/completions", {"max_tokens": 250, "prompt": [[1, 2], [3]]}),
    ],
)
async def test_no_request_makes_its_reservation_small(house: House, path: str, fields: dict[str, Any]) -> None:
    answer = await house.post("daily", path, **fields)
    assert 1400 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 1500, answer.text


async def test_numbers_that_only_some_servers_read_are_refused_where_they_count(house: House) -> None:
    for name in ("max_tokens", "n"):
        refused = await house.post("daily", **{name: "128"})
        assert refused.status_code == 400 and error_of(refused)["param"] == name
        assert "whole number" in error_of(refused)["message"] and house.backend.calls == 0


async def test_what_a_policy_may_add_is_reserved_too(tmp_path: Path) -> None:
    text = FILE.replace("default_policy: off", "default_policy: asks")
    text = text.replace("{collection: docs}", "{collection: docs, max_tokens: 700}")
    async with opened(text, tmp_path) as house:
        answer = await house.post("daily", max_tokens=100)
        assert answer.status_code == 200 and 1100 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 1200


async def test_what_is_refused_or_fails_costs_no_tokens(house: House) -> None:
    before = await house.post("daily", max_tokens=1)
    for fields in ({"temperature": "hot"}, {"max_tokens": "many"}, {"model": "nosuch"}):
        assert (await house.post("daily", **fields)).status_code in (400, 404)
    after = await house.post("daily", max_tokens=1)
    spent = int(before.headers["x-ratelimit-remaining-tokens"]) - int(after.headers["x-ratelimit-remaining-tokens"])
    assert spent < 20


def streaming(house: House, key: str, **fields: Any) -> Driven:
    return Driven(house.app, CHAT, {"model": "echo", "messages": HI, "stream": True, **fields}, key=key)


async def test_a_place_is_free_again_however_a_stream_ends(house: House) -> None:
    one = streaming(house, "single")
    await house.backend.begun.wait()
    refused = await house.post("single")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert error_of(refused)["code"] == "rate_limit_exceeded" and "1 requests served" in error_of(refused)["message"]
    assert house.sample("promptsluice_key_active", key="single") == 1
    await one.leave()
    assert house.sample("promptsluice_key_active", key="single") == 0
    house.backend.begun.clear()
    two = streaming(house, "single")
    await house.backend.begun.wait()
    house.backend.go.set()
    await asyncio.sleep(0)
    await two.done
    assert two.status == 200 and (await house.post("single")).status_code == 200


async def test_streams_pay_what_their_usage_says_or_what_was_sent(house: House) -> None:
    def charged() -> float:
        return house.sample("promptsluice_key_tokens_total", key="daily")

    left = streaming(house, "daily", max_tokens=50)
    await house.backend.begun.wait()
    await left.leave()
    assert 1 <= charged() <= 30, "the prompt and a word"
    before = charged()
    house.backend.go.set()
    for asked in (True, False):
        whole = streaming(house, "daily", max_tokens=50, stream_options={"include_usage": asked})
        await whole.done
        assert whole.status == 200 and charged() == before + 123
        before = charged()


async def test_limits_without_keys_are_those_of_everybody_together(tmp_path: Path) -> None:
    text = "version: 1\ndefault_policy: off\nserver: {limits: {requests_per_minute: 2}}\n"
    text += 'backends: {echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}}\n'
    async with opened(text, tmp_path) as house:
        assert [(await house.post(key)).status_code for key in ("", "a", "b")] == [200, 200, 429]
        assert house.sample("promptsluice_key_requests_total", key="anonymous", outcome="admitted") == 2
        assert (await house.client.get("/metrics")).status_code == 200


async def test_a_server_of_counters_that_is_gone(tmp_path: Path) -> None:
    for fail, status in (("open", 200), ("closed", 503)):
        counters = f"{{url: 'redis://127.0.0.1:9', fail: {fail}}}"
        text = f"version: 1\ndefault_policy: off\nserver: {{limits: {{concurrent: 2}}, counters: {counters}}}\n"
        text += 'backends: {echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}}\n'
        async with opened(text, tmp_path / fail) as house:
            answer = await house.post("")
            assert answer.status_code == status
            assert house.sample("promptsluice_limit_counters_up") == 0
            if status == 503:
                assert error_of(answer)["type"] == "overloaded_error" and answer.headers["retry-after"]
