"""What goes wrong, all at once: each request ends whole or with an error, and nothing is left of it afterwards.

benchmarks/chaos.py does the same at full size; its client and its policy file are used here.
"""

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_client import Ask, outcome
from chaos_file import ChangingFile

from .harness import PATIENCE_S, Exchange, Gateway, Upstream, eventually, http, start_gateway, stop_gateway

pytestmark = pytest.mark.slow

POOL = 8
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
WHOLE = b'{"choices":[{"index":0,"message":{"content":"word"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'


async def misbehave(exchange: Exchange) -> None:
    """As the question says."""
    body = json.loads(exchange.body)
    how, stream = body["messages"][-1]["content"].removeprefix("do:"), bool(body.get("stream"))
    if how == "reset":
        exchange.reset()
    elif how in ("429", "503", "500"):
        await exchange.json(f"{how} No", b'{"error":{"message":"no"}}', "retry-after: 1\r\n" if how == "429" else "")
    elif how == "nonsense":
        await exchange.json("200 OK", b"nonsense")
    elif how == "silent":
        await exchange.until_closed()
    elif not stream:
        await exchange.json("200 OK", WHOLE) if how == "well" else await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
        )
    else:
        await exchange.head()
        for _ in range(30 if how == "long" else 5):
            await exchange.send(WORD)
            await asyncio.sleep(0.05 if how == "long" else 0.001)
        await exchange.send(END if how in ("well", "long") else b"")


class Stage:
    """A gateway over the upstream, whose file may change."""

    def __init__(self, upstream: Upstream, root: Path) -> None:
        self.file = ChangingFile(path=root / "policy.yaml", upstream=upstream.port, pool=POOL)
        self.file.write(read=2)
        self.gateway: Gateway = start_gateway(self.file.path)

    async def ask(self, how: str, *, stream: bool, leaves_s: float | None = None, rude: bool = False) -> str:
        """How it ended, in a word."""
        ask = Ask(how=how, stream=stream, leaves_s=leaves_s, rude=rude, max_tokens=9)
        ended = await outcome(self.gateway.port, ask)
        assert not ended.startswith(("wrong", "refused")), ended
        return ended

    def nothing_is_left(self) -> None:
        """Not even a place of the upstream's pool, nor one of the key's."""
        eventually(lambda: self.gateway.metric("promptsluice_http_in_flight") == 1)  # which is the question itself
        assert self.gateway.metric("promptsluice_key_active") == 0
        places = asyncio.run(self.all_at_once(["long"] * POOL))
        assert places == {"whole": POOL}

    async def all_at_once(self, hows: list[str]) -> Counter[str]:
        return Counter(await asyncio.gather(*(self.ask(how, stream=True) for how in hows)))


@pytest.fixture(scope="module")
def stage(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The last test stops it, so that they stand in this order."""
    upstream.answer(misbehave)
    made = Stage(upstream, tmp_path_factory.mktemp("chaos"))
    yield made
    stop_gateway(made.gateway)


def test_a_storm_while_the_policy_file_changes(stage: Stage) -> None:
    dice = random.Random(7)
    hows = ["well", "reset", "429", "503", "500", "nonsense", "half"] * 20 + ["silent"] * 4
    dice.shuffle(hows)

    async def storm() -> Counter[str]:
        async def rewrite() -> None:
            for version in range(1000):
                await asyncio.sleep(0.15)
                stage.file.write(read=2 + version % 2)

        changing = asyncio.create_task(rewrite())
        places = asyncio.Semaphore(24)

        async def one(how: str, stream: bool) -> str:
            async with places:
                return f"{how} {await stage.ask(how, stream=stream)}"

        found = await asyncio.gather(*(one(how, bool(at % 2)) for at, how in enumerate(hows)))
        changing.cancel()
        return Counter(found)

    found = asyncio.run(storm())
    assert found["well whole"] == 20 and found["429 429"] == 20 and found["reset 502"] == 20
    assert found["503 503"] == found["500 500"] == 20
    assert found["half error frame"] + found["half 502"] == 20 == found["nonsense 502"]
    assert found["silent 504"] == 4
    assert stage.gateway.metric('promptsluice_policy_reloads_total{outcome="accepted"}') >= 1
    assert stage.gateway.metric('promptsluice_policy_reloads_total{outcome="refused"}') == 0
    stage.nothing_is_left()


def test_clients_that_leave_at_any_moment(stage: Stage) -> None:
    dice = random.Random(8)

    async def leave() -> None:
        for _ in range(10):
            await asyncio.gather(
                *(
                    stage.ask(
                        dice.choice(["well", "long", "silent"]),
                        stream=dice.random() < 0.6,
                        leaves_s=dice.choice([0, dice.uniform(0, 0.01), dice.uniform(0, 0.2)]),
                        rude=dice.random() < 0.5,
                    )
                    for _ in range(12)
                )
            )

    asyncio.run(leave())
    stage.nothing_is_left()


def test_at_sigterm_all_streams_finish(stage: Stage) -> None:
    async def streams() -> Counter[str]:
        asked = asyncio.ensure_future(stage.all_at_once(["long"] * POOL))
        while stage.gateway.metric("promptsluice_key_active") < POOL:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.02)
        stage.gateway.process.send_signal(signal.SIGTERM)
        return await asked

    assert asyncio.run(streams()) == {"whole": POOL}
    assert stage.gateway.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
    with pytest.raises(Exception, match="refused"):
        http.get(f"{stage.gateway.url}/healthz")
