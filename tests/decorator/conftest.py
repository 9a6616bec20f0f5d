"""A small pipeline for the decorator and the client wrapper: it cuts the word "filler" out of what may be rewritten."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from promptsluice.gateway.inprocess import Optimizer
from promptsluice.policies import PolicySet
from promptsluice.prompt import Prompt, Report, UnknownPolicy


class Trimming:
    """Implements the Pipeline protocol. Policy "off" changes nothing, an unknown one is an error, "slow" never ends."""

    def __init__(self) -> None:
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.policies: list[str | None] = []
        self.builds = 0
        self.closes = 0
        self.entered = threading.Event()
        self.cancelled = threading.Event()

    async def build(self, policies: PolicySet) -> "Trimming":
        self.builds += 1
        await asyncio.sleep(0)
        return self

    async def prepare(self, prompt: Prompt, *, policy: str | None) -> tuple[Prompt, Report]:
        self.loops.add(asyncio.get_running_loop())
        self.policies.append(policy)
        if policy == "slow":
            await self._never()
        if policy not in ("off", "balanced", None):
            raise UnknownPolicy(f"unknown policy {policy!r}", param="policy")
        texts = {s.id: s.text.replace("filler ", "") for s in prompt.segments if s.rewritable}
        changed = prompt if policy == "off" else prompt.replace(texts)
        return changed, Report(policy=str(policy), tokens_in=prompt.chars, tokens_out=changed.chars)

    async def close(self) -> None:
        self.closes += 1

    async def _never(self) -> None:
        try:
            self.entered.set()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def trimming() -> Trimming:
    return Trimming()


@pytest.fixture
def optimizer(trimming: Trimming) -> Iterator[Optimizer]:
    with Optimizer(build=trimming.build) as optimizer:
        yield optimizer
