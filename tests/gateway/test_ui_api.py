"""The page's files, and the JSON below /ui/api: what is counted, who sees it, and that no text is kept unasked."""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Stream, estimated_tokens
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.policies import PolicySet
from promptsluice.prompt import UpstreamError

SECRET = "xylophone-4711"
FILE = """
version: 1
default_policy: off
server: {%s}
backends: {echo: {kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo, broken]}}
policies:
  off: {extends: off, allow_client_policy: all}
  tidy: {extends: lossless, min_prompt_tokens: 0, token_value_ms: 100}
  again: {extends: off, cache: {ttl: 60}}
"""


class Echo(EchoBackend):
    """An echo that counts white space, too, and whose model `broken` fails with a message that quotes."""

    def count_tokens(self, text: str) -> int:
        return estimated_tokens(text)

    async def complete(self, call: Call) -> Answer | Stream:
        if call.model == "broken":
            raise UpstreamError(f"cannot read {SECRET}")
        return await super().complete(call)


@asynccontextmanager
async def serving(server: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with an echo and these server settings."""
    backend = Echo("echo", models=("echo", "broken"))
    app = create_app(PolicySet.from_text(FILE % server), backends={"echo": backend})
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        yield client


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving() as client:
        yield client


async def chat(
    client: httpx.AsyncClient, text: str = "hi there", *, model: str = "echo", **fields: Any
) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def shown(client: httpx.AsyncClient, path: str = "overview?window=0", key: str = "") -> Any:
    response = await client.get(f"/ui/api/{path}", headers={"authorization": f"Bearer {key}"} if key else {})
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    return response.json()


async def latest(client: httpx.AsyncClient, key: str = "") -> Any:
    """The last request, whole."""
    lines = (await shown(client, "requests?limit=1", key))["requests"]
    return await shown(client, f"requests/{lines[0]['id']}", key)


class Markup(HTMLParser):
    """What of a page could run, or comes from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.sources: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.sources.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)


async def test_the_page_runs_nothing_inline_and_asks_nobody_else(client: httpx.AsyncClient) -> None:
    page = await client.get("/ui")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    markup = Markup(page.text)
    assert markup.inline == [] and markup.sources
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    imported = set(markup.sources)
    for name in sorted(imported):
        file = await client.get(f"/{name}")
        assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff", name
        assert file.headers["content-security-policy"] == page.headers["content-security-policy"]
    for name in ("app", "charts", "dom", "format", "overview", "request", "segments", "system"):
        script = (await client.get(f"/ui/{name}.js")).text
        hosts = set(re.findall(r"https?://[^\"'`]*", script)) - {"http://www.w3.org/2000/svg"}
        assert not hosts and not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script)
        assert set(re.findall(r'from "(.*?)"', script)) <= {
            f"./{one}.js" for one in ("charts", "dom", "format", "overview", "request", "segments", "system")
        }


async def test_files_are_asked_for_again_only_when_they_change(client: httpx.AsyncClient) -> None:
    first = await client.get("/ui/style.css")
    again = await client.get("/ui/style.css", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert (await client.head("/ui")).status_code == 200
    slash = await client.get("/ui/")
    assert slash.status_code == 308 and slash.headers["location"] == "../ui"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/ui/routes.py", "/ui/..%2Froutes.py", "/ui/%2e%2e%2fapp.py", "/ui/api", "/ui/x/y", "/ui/" + "z" * 3000]
)
async def test_nothing_else_is_a_file(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"


async def test_without_traffic_everything_is_empty_and_there(client: httpx.AsyncClient) -> None:
    overview = await shown(client)
    assert overview["totals"]["requests"] == 0 and overview["policies"] == []
    assert overview["totals"]["ttft_ms"] == {"p50": None, "p95": None, "p99": None, "count": 0}
    assert [backend["name"] for backend in overview["system"]["backends"]] == ["echo"]
    assert (await shown(client, "requests")) == {"requests": [], "kept": 0}
    for window in ("900", "3600", "86400"):
        assert len((await shown(client, f"overview?window={window}"))["slots"]) in (60, 240)


async def test_what_is_asked_wrongly_is_said(client: httpx.AsyncClient) -> None:
    for path in ("overview?window=7", "requests?limit=0", "requests?limit=x", "requests?limit=1000"):
        response = await client.get(f"/ui/api/{path}")
        assert response.status_code == 400 and response.json()["error"]["param"] in ("window", "limit")
    gone = await client.get("/ui/api/requests/00ff")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "record_not_found"
    assert (await client.post("/ui/api/overview")).status_code == 405


async def test_a_request_is_shown_with_its_segments_and_without_its_text(client: httpx.AsyncClient) -> None:
    text = SECRET + "\n\n\n\n\n".join(
        f"{bird} sings   by the    river." for bird in ("Wren", "Owl", "Swan", "Lark", "Duck")
    )
    body = {"model": "echo:tidy", "messages": [{"role": "user", "content": one} for one in (text, "Why?")]}
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    one = await latest(client)
    assert (one["request_id"], one["policy"], one["outcome"], one["status"]) == ("mine", "tidy", "ok", 200)
    assert one["path"] == "/v1/chat/completions" and one["stream"] is False and one["ttft_ms"] is None
    assert one["usage"] == answer.json()["usage"]
    kept = {name: value for name, value in answer.headers.items() if name.startswith("x-promptsluice-")}
    assert one["headers"].items() <= kept.items()
    assert one["plan_ms"]["planned"] > 0 and [step["name"] for step in one["report"]["steps"]] == ["lossless"]
    assert one["report"]["steps"][0]["saved_ms"] is not None
    segments = one["segments"]
    assert [segment["kind"] for segment in segments] == ["history", "question"]
    assert [segment["fate"] for segment in segments] == ["pruned", "kept"]
    assert segments[0]["uses"] == ["lossless"] and "lossless" in segments[0]["reason"]
    sizes = {part["fate"]: part["chars"] for part in segments[0]["parts"]}
    assert sizes["kept"] + sizes["pruned"] == len(text)
    everything = json.dumps([one, await shown(client), await shown(client, "requests")])
    assert SECRET not in everything and '"text": null' in everything


async def test_text_is_kept_where_the_file_says_so() -> None:
    async with serving("records: {text: true}") as client:
        hostile = f"<script>{SECRET}</script> \u202e \u0000 \U0001f600"
        await chat(client, hostile)
        one = await latest(client)
        assert [part["text"] for segment in one["segments"] for part in segment["parts"]] == [hostile]


async def test_streams_have_a_time_to_their_first_token(client: httpx.AsyncClient) -> None:
    assert (await chat(client, stream=True)).text.rstrip().endswith("[DONE]")
    one = await latest(client)
    assert one["stream"] and 0 < one["ttft_ms"] <= one["total_ms"]
    overview = await shown(client)
    assert overview["policies"][0]["ttft_ms"]["count"] == 1
    assert overview["slots"][-1]["ttft_ms"]["p50"] == pytest.approx(one["ttft_ms"], rel=0.06)


async def test_what_is_refused_or_fails_is_counted_without_its_message(client: httpx.AsyncClient) -> None:
    assert (await chat(client, model=f"no {SECRET}")).status_code == 404
    assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await client.post("/v1/messages", json={"model": "echo"})).status_code == 400
    assert (await client.post("/v1/completions", json={"model": SECRET, "prompt": "x"})).status_code == 404
    assert (await chat(client, model="broken")).status_code == 502
    overview, lines = await shown(client), (await shown(client, "requests"))["requests"]
    assert (overview["totals"]["refused"], overview["totals"]["failed"]) == (4, 1)
    assert [line["outcome"] for line in lines] == ["failed", "refused", "refused", "refused", "refused"]
    assert [line["status"] for line in lines] == [502, 404, 400, 400, 404]
    assert (await latest(client))["error"] == {"type": "upstream_error", "param": None, "code": "upstream_error"}
    assert SECRET not in json.dumps([lines, *[await shown(client, f"requests/{line['id']}") for line in lines]])


async def test_every_route_of_completions_is_recorded_once(client: httpx.AsyncClient) -> None:
    hi = [{"role": "user", "content": "hi"}]
    await client.post("/v1/completions", json={"model": "echo", "prompt": "once upon", "max_tokens": 2})
    await client.post("/v1/responses", json={"model": "echo", "input": "hi"})
    await client.post("/v1/messages", json={"model": "echo", "messages": hi, "max_tokens": 5})
    await client.post("/v1/messages/count_tokens", json={"model": "echo", "messages": hi})
    await client.post("/v1/compress", json={"model": "echo", "messages": hi})
    lines = (await shown(client, "requests"))["requests"]
    assert [line["path"] for line in lines] == ["/v1/messages", "/v1/responses", "/v1/completions"]
    assert (await shown(client, f"requests/{lines[2]['id']}"))["segments"] is None
    assert (await shown(client, f"requests/{lines[0]['id']}"))["segments"][0]["kind"] == "question"


@pytest.mark.slow
async def test_answers_given_again_are_told_apart(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await chat(client, model="echo:again")
    assert [line["cache"] for line in (await shown(client, "requests"))["requests"]] == ["hit", "hit", "miss"]
    answers = (await shown(client))["system"]["answers"]
    assert (answers["entries"], answers["hits"], answers["misses"]) == (1, 2, 1) and answers["bytes"] > 0


def keys(*names: str, **scopes: str) -> str:
    """The names are the keys, too; `scopes` by name, where they are not the ordinary ones."""
    listed = (
        f"{{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}{scopes.get(name, '')}}}" for name in names
    )
    return f"api_keys: [{', '.join(listed)}]"


async def test_a_key_sees_its_own_requests_only() -> None:
    async with serving(keys("ann", "bob")) as client:
        for path in ("overview", "requests", "requests/00ff"):
            for headers in ({}, {"authorization": "Bearer eve"}):
                assert (await client.get(f"/ui/api/{path}", headers=headers)).status_code == 401
        assert (await client.get("/ui")).status_code == 200
        await chat(client, headers={"authorization": "Bearer ann"})
        await chat(client, headers={"authorization": "Bearer ann"})
        await chat(client, headers={"x-api-key": "bob"})
        of = {name: await shown(client, key=name) for name in ("ann", "bob")}
        assert {name: view["totals"]["requests"] for name, view in of.items()} == {"ann": 2, "bob": 1}
        assert of["ann"]["viewer"] == {"key": "ann", "everybody": False}
        lines = (await shown(client, "requests", "ann"))["requests"]
        assert [line["key"] for line in lines] == ["ann", "ann"]
        theirs = await client.get(f"/ui/api/requests/{lines[0]['id']}", headers={"authorization": "Bearer bob"})
        assert theirs.status_code == 404
        older = f"requests?before={lines[0]['id']}"
        assert [line["id"] for line in (await shown(client, older, "ann"))["requests"]] == [lines[1]["id"]]


async def test_an_admin_sees_everybody_and_a_watcher_what_all_share() -> None:
    listed = keys("ann", "root", "eye", root=", scopes: [admin]", eye=", scopes: [metrics]")
    async with serving(f"{listed}, metrics: keyed") as client:
        await chat(client, headers={"authorization": "Bearer ann"})
        of = {name: await shown(client, key=name) for name in ("ann", "root", "eye")}
        assert {name: view["totals"]["requests"] for name, view in of.items()} == {"ann": 1, "root": 1, "eye": 0}
        assert of["root"]["viewer"] == {"key": "root", "everybody": True}
        assert {name: view["system"] is not None for name, view in of.items()} == {
            "ann": False,
            "root": True,
            "eye": True,
        }
        assert (await latest(client, "root"))["key"] == "ann"
        assert (await shown(client, "requests", "eye"))["requests"] == []
        refused = await chat(client, headers={"authorization": "Bearer root"})
        assert refused.status_code == 403, "who may look at requests may not send any"


async def test_the_page_can_be_turned_off() -> None:
    async with serving("ui: false") as client:
        assert (await client.get("/ui")).status_code == 404
        assert (await client.get("/ui/api/overview")).status_code == 404
        assert (await chat(client)).status_code == 200
    async with serving("records: {count: 0}") as client:
        await chat(client)
        assert (await shown(client))["totals"]["requests"] == 1
        assert (await shown(client, "requests"))["requests"] == []
