"""Anthropic's cache marks over the turns of real conversations: where they were, before text that stays what it was.

The upstream here finds prefixes as that API does: it remembers the text up to each mark, and a request hits when the
text up to one of its own blocks is remembered.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.policies import PolicySet

from .harness import Exchange, Upstream

FILE = """
version: 1
default_policy: POLICY
backends: {claude: {kind: openai, base_url: "http://127.0.0.1:PORT/v1", models: [m], messages: native}}
collections: {root: ROOT/c}
kv_cache: {path: ROOT/kv}
policies:
  spacing: {extends: lossless, min_prompt_tokens: 600, token_value_ms: 50}
  eager:
    extends: spacing
    compress: [{use: lossless}, {use: extractive, kinds: [history, tool_result], target_rate: 0.5, min_tokens: 40}]
    protect: {system: false}
    rewrite_timeout: 300
"""
SAMPLE = Path(__file__).parents[1] / "data" / "policies" / "airline.jsonl"
MARK = {"cache_control": {"type": "ephemeral"}}
ANSWER = b'{"id": "msg_1", "type": "message", "content": [], "usage": {"input_tokens": 3, "output_tokens": 4}}'
Body = dict[str, Any]


def as_blocks(message: Body) -> tuple[str, list[Body]]:
    """A chat message in Anthropic's form; results of tools with the white space that careless tools write."""
    if message["role"] == "tool":
        try:
            text = json.dumps(json.loads(message["content"]), indent=4)
        except ValueError:
            text = message["content"]
        return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], [*([{"type": "text", "text": message["content"]}] if message["content"] else []), *calls]


def requests() -> Iterator[Body]:
    """The requests of one conversation, the mark always on the system prompt and on the newest block."""
    system, *turns = json.loads(SAMPLE.read_text("utf-8").splitlines()[1])["messages"]
    messages: list[Body] = []
    for message in turns:
        role, blocks = as_blocks(message)
        if role == "assistant":
            marked = [{**block, **MARK} for block in messages[-1]["content"][-1:]]
            newest = {"role": "user", "content": [*messages[-1]["content"][:-1], *marked]}
            texts = [{"type": "text", "text": system["content"], **MARK}]
            yield {"model": "m", "max_tokens": 9, "system": texts, "messages": [*messages[:-1], newest]}
        messages.append({"role": role, "content": blocks})


def prefixes(body: Body) -> Iterator[tuple[bytes, bool]]:
    """For each block a digest of all text up to it, and whether it is marked."""
    digest = hashlib.sha256()
    blocks = [("system", block) for block in body["system"]]
    blocks += [(message["role"], block) for message in body["messages"] for block in message["content"]]
    for role, block in blocks:
        bare = {name: value for name, value in block.items() if name != "cache_control"}
        digest.update(json.dumps([role, bare]).encode())
        yield digest.digest(), "cache_control" in block


def marks(body: Body) -> list[bool]:
    return [marked for _, marked in prefixes(body)]


@pytest.mark.parametrize("policy", ["spacing", pytest.param("eager", marks=pytest.mark.slow)])
async def test_every_turn_finds_what_the_turn_before_has_marked(
    upstream: Upstream, minilm_dir: Path, tmp_path: Path, policy: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(FILE.replace("POLICY", policy).replace("PORT", str(upstream.port)).replace("ROOT", str(tmp_path)))
    app = create_app(PolicySet.load(file))
    upstream.answer(lambda exchange: Exchange.json(exchange, "200 OK", ANSWER))
    asked = list(requests())
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for body in asked:
            response = await client.post("/v1/messages", json=body, timeout=300)
            assert response.status_code == 200 and "x-promptsluice-failed" not in response.headers
    sent = [json.loads(exchange.body) for exchange in upstream.seen]
    assert [marks(body) for body in sent] == [marks(body) for body in asked]
    remembered: set[bytes] = set()
    for place, body in enumerate(sent):
        found = list(prefixes(body))
        newest = {digest for digest, marked in found[1:] if marked}
        known = remembered & {digest for digest, _ in found}
        assert len(known) == (1 + place if place else 0), "the system prompt, and every turn's mark so far"
        remembered |= {digest for digest, marked in found if marked}
        assert len(newest) == 1
    changed = sum(len(exchange.body) for exchange in upstream.seen) / sum(len(json.dumps(body)) for body in asked)
    assert changed < 0.95, "or nothing was shown"
