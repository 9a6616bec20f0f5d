"""Several servers of one backend: who is asked, who is left alone, and what the client sees of it."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from promptsluice.gateway.backends.servers import Server, Servers
from promptsluice.gateway.backends.upstream import retry_after_s
from promptsluice.policies.schema import BreakerSpec, UpstreamServer
from promptsluice.prompt.errors import Overloaded

from .harness import Exchange, Gateway, Upstream, start_gateway, stop_gateway

CONFIG = """
version: 1
default_policy: off
backends:
  pair:
    kind: openai
    models: [pair]
    servers: [{{base_url: "http://127.0.0.1:{first}/v1"}}, {{base_url: "http://127.0.0.1:{second}/v1"}}]
    breaker: {{failures: 2, cooldown: 600}}
  sticky:
    kind: openai
    models: [sticky]
    balance: prefix
    servers: [{{base_url: "http://127.0.0.1:{first}/v1"}}, {{base_url: "http://127.0.0.1:{second}/v1"}}]
  gone: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [gone], breaker: {{failures: 1, cooldown: 600}}}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
"""
OK = b'{"ok": 1}'
BUSY = b'{"error": {"message": "busy", "type": "rate_limit_error", "param": null, "code": null}}'
HI = [{"role": "user", "content": "hi"}]


def servers(*weights: float, clock: Any = lambda: 0.0, by_prefix: bool = False, failures: int = 2) -> Servers:
    specs = [UpstreamServer(base_url=f"http://h{i}/v1", weight=weight) for i, weight in enumerate(weights)]
    return Servers(specs, breaker=BreakerSpec(failures=failures, cooldown=10.0), by_prefix=by_prefix, clock=clock)


def asked(pool: Servers, times: int, **how: Any) -> Counter[str]:
    return Counter(pool.next(**how).base_url[7:9] for _ in range(times))


def fail(server: Server, times: int = 2) -> None:
    for _ in range(times):
        server.asked()
        server.failed()


def test_shares_are_by_weight_and_evenly_spread() -> None:
    pool = servers(3, 1)
    assert [pool.next().base_url[8] for _ in range(8)] == ["0", "0", "1", "0", "0", "0", "1", "0"]


def test_a_breaker_opens_and_lets_one_try() -> None:
    now = [0.0]
    pool = servers(1, 1, clock=lambda: now[0])
    bad = pool.next()
    fail(bad)
    assert bad.open and asked(pool, 10) == {"h1": 10}
    assert pool.stats()["server_0_available"] == 0 and pool.stats()["server_0_failures"] == 2
    now[0] = 10.0
    assert not bad.open
    bad.asked()
    assert bad.open, "one request tries it"
    now[0] = 12.0
    bad.failed()
    now[0] = 21.0
    assert bad.open
    now[0] = 22.0
    bad.asked()
    now[0] = 31.0
    assert bad.open, "nothing is known yet"
    now[0] = 32.0
    assert not bad.open, "one more may try, while the first one still waits"
    bad.succeeded()
    fail(bad, 1)
    assert not bad.open and pool.stats()["server_0_available"] == 1


def test_when_all_are_open_the_next_try_is_named() -> None:
    now = [0.0]
    pool = servers(1, 1, clock=lambda: now[0])
    fail(pool.next())
    now[0] = 4.0
    fail(pool.next())
    assert not pool.any()
    with pytest.raises(Overloaded) as raised:
        pool.next()
    assert raised.value.headers["retry-after"] == "6"


def test_failures_0_never_opens() -> None:
    pool = servers(1, failures=0)
    fail(pool.next(), 100)
    assert pool.any() and asked(pool, 1) == {"h0": 1}


def test_who_wants_to_rest_is_asked_last() -> None:
    now = [0.0]
    pool = servers(1, 1, clock=lambda: now[0])
    tired = pool.next()
    tired.succeeded(rest_s=5.0)
    assert asked(pool, 4) == {"h1": 4} and pool.others([]) and not pool.others([pool.next()])
    now[0] = 5.0
    assert asked(pool, 4) == {"h0": 2, "h1": 2}


def test_prefixes_stay_with_their_server() -> None:
    now = [0.0]
    pool, keys = servers(1, 1, 2, clock=lambda: now[0], by_prefix=True), [bytes([n, n // 256]) for n in range(200)]
    homes = {key: pool.next(key=key) for key in keys}
    shares = Counter(server.base_url[7:9] for server in homes.values())
    assert 25 < shares["h0"] < 75 and 25 < shares["h1"] < 75 and 75 < shares["h2"] < 125
    out = homes[keys[0]]
    fail(out)
    for key, home in homes.items():
        assert (pool.next(key=key) is home) == (home is not out), "only its own keys move"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, None), ({"retry-after": "7"}, 7.0), ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
     ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0), ({"retry-after": "-1"}, 0.0),
     ({"retry-after": "²"}, 0.0)],
)  # fmt: skip
def test_when_to_come_back(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@pytest.fixture(scope="module")
def second() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.close()


@pytest.fixture
def balanced(upstream: Upstream, second: Upstream, tmp_path: Any) -> Iterator[Gateway]:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(CONFIG.format(first=upstream.port, second=second.port, root=tmp_path))
    running = start_gateway(policy_file)
    yield running
    stop_gateway(running)


@pytest.mark.slow
def test_over_the_wire(balanced: Gateway, upstream: Upstream, second: Upstream) -> None:
    async def resets(exchange: Exchange) -> None:
        exchange.reset()

    busy = 'promptsluice_backend{backend="pair",name="server_0_available"}'
    upstream.answer(resets)
    second.answer(lambda exchange: exchange.json("200 OK", OK))
    answers = [balanced.post({"model": "pair", "messages": HI}) for _ in range(6)]
    assert all(answer.content == OK for answer in answers)
    assert len(upstream.seen) == 2 and len(second.seen) == 6, "after two failures it is left alone"
    assert answers[0].headers["x-promptsluice-attempts"] == "2" and balanced.metric(busy) == 0
    second.answer(lambda exchange: exchange.json("429 Too Many Requests", BUSY, "retry-after: 30\r\n"))
    limited = balanced.post({"model": "pair", "messages": HI})
    assert limited.status_code == 429 and limited.headers["retry-after"] == "30" and limited.content == BUSY
    assert balanced.post({"model": "gone", "messages": HI}).status_code == 502
    refused = balanced.post({"model": "gone", "messages": HI})
    assert refused.status_code == 503 and 590 < int(refused.headers["retry-after"]) <= 600
    assert refused.json()["error"]["type"] == "overloaded_error"


@pytest.mark.slow
def test_a_conversation_stays_over_the_wire(balanced: Gateway, upstream: Upstream, second: Upstream) -> None:
    for one in (upstream, second):
        one.answer(lambda exchange: exchange.json("200 OK", OK))
    turns: list[Any] = [[{"role": "system", "content": "S"}, {"role": "user", "content": f"q{n}"}] for n in range(12)]
    for messages in turns:
        balanced.post({"model": "sticky", "messages": messages})
    homes = {json.loads(seen.body)["messages"][1]["content"] for seen in upstream.seen}
    assert 0 < len(homes) < 12, "both are used"
    for messages in turns:
        more = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}]
        balanced.post({"model": "sticky", "messages": more})
    assert {json.loads(seen.body)["messages"][1]["content"] for seen in upstream.seen} == homes
    upstream.answer(lambda exchange: exchange.json("429 Too Many Requests", BUSY, "retry-after: 30\r\n"))
    assert balanced.post({"model": "sticky", "messages": turns[0]}).content == OK, "somebody else answers"
