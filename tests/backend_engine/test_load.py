"""A mixed load through the service: each output equals a lone run, an aborted one is its beginning."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest

from .driving import alone, assert_idle, greedy, random_ids, tiny_engine

REQUESTS = 60


async def _served(service: EngineService, request: GenerationRequest, keep: int | None) -> tuple[list[int], str | None]:
    """The tokens and how it ended; aborted after `keep` tokens."""
    tokens, reason, generation = [], None, service.generate(request)
    async for delta in generation:
        tokens += delta.token_ids
        reason = delta.finish_reason or reason
        if keep is not None and len(tokens) >= keep:
            generation.abort()
    return tokens, reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
async def test_no_token_is_lost_or_doubled(tiny_llama_dir: Path, seed: int) -> None:
    dice, model = random.Random(seed), load_model(tiny_llama_dir)
    engine = tiny_engine(model, pages=120, max_running=8, step_tokens=48, stall=2.5)
    service = EngineService(engine, max_waiting=REQUESTS)
    service.start()
    sent: list[tuple[GenerationRequest, int | None]] = []
    tasks = []
    for number in range(REQUESTS):
        ids = (*random_ids(40, dice.randrange(3))[: dice.choice([0, 40])], *random_ids(dice.randrange(1, 120), number))
        tokens = dice.randrange(1, 30)
        request = greedy(ids, tokens, namespace=dice.choice("abc"), priority=dice.choice([0, 0, 0, 1]))
        keep = dice.randrange(1, tokens + 1) if dice.random() < 0.2 else None
        sent.append((request, keep))
        tasks.append(asyncio.create_task(_served(service, request, keep)))
        await asyncio.sleep(dice.expovariate(200))
    outcomes = await asyncio.gather(*tasks)
    service.stop(drain_s=60)
    assert_idle(engine)
    lone = tiny_engine(model)
    for (request, keep), (tokens, reason) in zip(sent, outcomes, strict=True):
        expected = alone(lone, replace(request, prefix_cache=False)).tokens
        if keep is None or reason == "length":
            assert (tokens, reason) == (expected, "length")
        else:
            assert reason == "abort" and tokens == expected[: len(tokens)] and len(tokens) >= keep
