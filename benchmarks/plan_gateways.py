"""A gateway for each way in this process, with its own engine, caches and learned costs. Used by plan.py."""

import argparse
import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plan_requests import Asked
from plan_rows import Row, setting_of
from plan_ways import policy_file

if TYPE_CHECKING:
    from promptsluice.gateway.house import Sluice

_TOLD = ("overhead_ms", "tokens_in", "tokens_out", "cached", "reused", "recomputed")
_PATIENCE_S = 600.0
_LOOK_S = 0.01


class Gateway:
    """One way's."""

    def __init__(self, way: str, client: Any, sluice: "Sluice", *, setting: str = "") -> None:
        self.way, self._setting = way, setting
        self._client = client
        self._backend = sluice.backends["local"]

    async def ask(self, number: int, asked: Asked, *, tokens: int) -> Row:
        """Have a request answered, and wait until nothing is left to do. SystemExit where it fails."""
        body = {"model": "local", "messages": asked.messages, "max_tokens": tokens, "temperature": 0}
        began = time.perf_counter()
        reply = await self._client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        seconds = time.perf_counter() - began
        if reply.status_code != 200:
            raise SystemExit(f"request {number} under {self.way}: {reply.status_code} {reply.text[:500]}")
        await self._idle()
        report = reply.json()["promptsluice"]
        return Row(
            request=number,
            kind=asked.kind,
            way=self.way,
            seconds=seconds,
            idle_s=time.perf_counter() - began - seconds,
            **{name: report[name] for name in _TOLD},
            steps={step["name"]: step["ms"] for step in report["steps"]},
            setting=self._setting,
        )

    async def _idle(self) -> None:
        """Wait for the work that nobody waits for."""
        until = time.perf_counter() + _PATIENCE_S
        while any(self._backend.stats()[name] for name in ("kv_jobs", "waiting", "running")):
            if time.perf_counter() > until:
                raise SystemExit(f"the gateway of {self.way} was still at work after {_PATIENCE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def opened(way: str, root: Path, options: argparse.Namespace) -> AsyncIterator[Gateway]:
    """A gateway that is ready, with all that it loads at its first use loaded."""
    import httpx
    from promptsluice.gateway.app import create_app
    from promptsluice.policies import PolicySet

    app = create_app(PolicySet.from_text(policy_file(way, root=root, options=options)))
    async with app.router.lifespan_context(app):
        sluice = app.state.sluice
        await sluice.backends["local"].available()
        await asyncio.to_thread(sluice.rooms.embed, ["to load it"])
        transport = httpx.ASGITransport(app)
        headers = {"x-promptsluice-report": "1"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers, timeout=None
        ) as client:
            gateway = Gateway(way, client, sluice, setting=setting_of(options))
            for asked in _first():
                await gateway.ask(-1, asked, tokens=2)
            yield gateway


def _first() -> Iterable[Asked]:
    text = " ".join(f"Sentence number {number} of a text that warms up." for number in range(40))
    yield Asked("warm-up", [{"role": "user", "content": "Hello"}])
    documents = {"role": "user", "content": f"<document>\n{text}\n</document>"}
    yield Asked("warm-up", [documents, {"role": "user", "content": "Which number is the last?"}])


@contextmanager
def one_copy_of_the_weights() -> Iterator[None]:
    """A gigabyte for each engine otherwise. They may share it, for only one of them computes at a time."""
    from promptsluice.gateway.backends import engine_room

    load = engine_room.load_model
    engine_room.load_model = functools.cache(load)
    try:
        yield
    finally:
        engine_room.load_model = load
