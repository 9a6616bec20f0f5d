"""The real model: greedy float32 output equals transformers' `generate`, token for token, however it is scheduled.

What one engine makes of all prompts is confirmed by one pass of transformers over each, of some by `generate`, too.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams

from .driving import Collected, Reference, assert_idle, finish, together

pytestmark = pytest.mark.slow
PROMPTS = Path(__file__).parents[1] / "data" / "backend_engine" / "prompts.jsonl"
NEW_TOKENS = 48
# Steps must not depend on measured times here: which rows share a step decides how often somebody is preempted.
UNTIMED = EngineOptions(max_running=8, guessed_tokens=0, stall=None)


class Case(NamedTuple):
    ids: tuple[int, ...]
    expected: list[int]


@pytest.fixture(scope="module")
def model(smollm2: LoadedModel) -> LoadedModel:
    return smollm2


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Engine:
    """Has answered the prompts of all cases, in batches of eight, and keeps their KV."""
    return Engine(model, options=UNTIMED)


@pytest.fixture(scope="module")
def cases(model: LoadedModel, engine: Engine, real_reference: Reference) -> list[Case]:
    """20 prompts, English, Chinese and code, 5 to 2,000 tokens in ascending order; what transformers makes of them."""
    assert model.tokenizer is not None
    records = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [tuple(model.tokenizer.encode_plain(each["text"])[: each["tokens"]]) for each in records]
    assert [len(ids) for ids in prompts] == [each["tokens"] for each in records]
    assert len(prompts) == 20 and len(prompts[0]) == 5 and len(prompts[-1]) == 2000
    sinks = together(engine, *map(request, prompts))
    for ids, sink in zip(prompts, sinks, strict=True):
        real_reference.assert_greedy(ids, sink.tokens, NEW_TOKENS)
    return [Case(ids, sink.tokens) for ids, sink in zip(prompts, sinks, strict=True)]


def request(ids: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(ids=ids, sampling=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))


def outputs(engine: Engine, cases: list[Case]) -> list[list[int]]:
    return [sink.tokens for sink in together(engine, *(request(case.ids) for case in cases))]


def expected(cases: list[Case]) -> list[list[int]]:
    return [case.expected for case in cases]


def test_what_generate_makes_of_some(real_reference: Reference, cases: list[Case]) -> None:
    for case in cases[::9]:
        assert case.expected == real_reference.greedy(case.ids, NEW_TOKENS, ignore_eos=False)


def test_one_by_one(model: LoadedModel, cases: list[Case]) -> None:
    engine = Engine(model, options=UNTIMED)
    for case in cases[::4]:
        assert outputs(engine, [case]) == [case.expected]
    assert_idle(engine)


def test_again_after_a_prefix_hit(engine: Engine, cases: list[Case]) -> None:
    for case in cases[:: len(cases) - 1]:
        (sink,) = together(engine, request(case.ids))
        assert sink.tokens == case.expected
        assert sink.result.cached_tokens == len(case.ids) - 1
    assert_idle(engine)


def test_batches_of_eight_after_partial_prefix_hits(model: LoadedModel, cases: list[Case]) -> None:
    """Each prompt's first half is cached; the batch mixes prefills with decodes."""
    engine = Engine(model, options=UNTIMED)
    halves = [case.ids[: len(case.ids) // 2] for case in cases]
    together(engine, *(GenerationRequest(ids=half, sampling=SamplingParams(max_tokens=0)) for half in halves))
    sinks = together(engine, *(request(case.ids) for case in cases))
    assert [sink.tokens for sink in sinks] == expected(cases)
    assert all(sink.result.cached_tokens >= len(half) for sink, half in zip(sinks, halves, strict=True))
    assert_idle(engine)


def test_batches_of_eight_with_prefill_in_chunks_of_64(model: LoadedModel, cases: list[Case]) -> None:
    engine = Engine(model, options=replace(UNTIMED, step_tokens=64))
    assert outputs(engine, cases) == expected(cases)
    assert_idle(engine)


def test_after_forced_preemption(model: LoadedModel, cases: list[Case]) -> None:
    """Memory for about half of what eight requests come to need."""
    chosen = [case for case in cases if len(case.ids) <= 100][-8:]
    engine = Engine(model, options=replace(UNTIMED, pages=31))
    sinks = [Collected() for _ in chosen]
    for case, sink in zip(chosen, sinks, strict=True):
        engine.add(request(case.ids), sink)
    finish(engine)
    assert engine.stats().preemptions >= 2
    assert [sink.tokens for sink in sinks] == expected(chosen)
    assert_idle(engine)
