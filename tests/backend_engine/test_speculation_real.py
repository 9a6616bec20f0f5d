"""The real model with tokens guessed ahead: greedy float32 output equals transformers' `generate`, token for token."""

from pathlib import Path
from typing import NamedTuple

import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams

from .driving import DEVICE, FREE_ROWS, Collected, Reference, alone, assert_as_far, assert_idle, finish, together

pytestmark = pytest.mark.slow
NEW_TOKENS = 40
NOTE = (
    "Minutes of the garden club: Anna brings the seeds on Monday. Boris waters the beds until Thursday. "
    "Carla repairs the fence. Nobody has found the key of the shed."
)
CODE = "def total(prices: list[float]) -> float:\n    result = 0.0\n    for price in prices:\n        result += price\n"
PROMPTS = (
    f"{NOTE}\n\nRepeat this text, word for word.",
    f"{NOTE}\n\nWho brings the seeds? Quote the sentence.",
    f"{NOTE}\n\nSummarize this text.",
    f"```python\n{CODE}```\n\nWrite this code again, with `total` renamed to `add`.",
    "Count from one to twenty: one, two, three, four, five,",
    "Why is the sky blue?",
    "Write a list of ten animals.",
    "What is the capital of France?",
)


class Case(NamedTuple):
    request: GenerationRequest
    expected: list[int]


@pytest.fixture(scope="module")
def model(smollm2: LoadedModel, smollm2_dir: Path) -> LoadedModel:
    return smollm2 if DEVICE == "cpu" else load_model(smollm2_dir, dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def cases(model: LoadedModel, real_reference: Reference) -> list[Case]:
    """What an engine without guesses makes of the prompts, confirmed by transformers."""
    assert model.tokenizer is not None
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]).ids for text in PROMPTS]
    requests = [GenerationRequest(ids=tuple(ids), sampling=params) for ids in prompts]
    plain = Engine(model, options=EngineOptions(pages=400, max_running=8, guessed_tokens=0, stall=None))
    cases = [Case(request, sink.tokens) for request, sink in zip(requests, together(plain, *requests), strict=True)]
    for request, expected in cases:
        real_reference.assert_greedy(request.ids, expected, NEW_TOKENS)
    return cases


def guessing(model: LoadedModel, pages: int = 400) -> Engine:
    options = EngineOptions(pages=pages, max_running=8, guessed_tokens=15, stall=None)
    return Engine(model, options=options, step_cost=FREE_ROWS)


def test_one_by_one_and_again_after_a_prefix_hit(model: LoadedModel, cases: list[Case]) -> None:
    engine = guessing(model)
    for _ in range(2):
        assert [alone(engine, case.request).tokens for case in cases] == [case.expected for case in cases]
    stats = engine.stats()
    assert stats.cached_tokens > 0 and stats.accepted_tokens > stats.drafted_tokens // 4 > 0
    assert_idle(engine)


def test_a_batch_of_eight(model: LoadedModel, cases: list[Case]) -> None:
    engine = guessing(model)
    outputs = together(engine, *(case.request for case in cases))
    assert [output.tokens for output in outputs] == [case.expected for case in cases]
    assert engine.stats().accepted_tokens > 0
    assert_idle(engine)


def test_preemptions_and_an_abort(model: LoadedModel, cases: list[Case]) -> None:
    """Memory for about half of what they come to need."""
    engine, cases = guessing(model, pages=20), cases[4:] * 2
    live = [(sink := Collected(), engine.add(case.request, sink)) for case in cases]
    while not live[2][0].tokens:
        engine.step()
    engine.abort(live[2][1])
    finish(engine)
    assert engine.stats().preemptions > 0 and engine.stats().accepted_tokens > 0
    for (sink, _), case in zip(live, cases, strict=True):
        assert_as_far(sink, case.expected)
    assert_idle(engine)
