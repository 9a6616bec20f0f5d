"""Steps with guesses or prefills that are recorded whole give what the decoder gives, however requests come together.

On a GPU the records are CUDA graphs, elsewhere the work itself, which runs on the same memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.sequence import Rows
from promptsluice.backend_engine.steps import MixedSteps
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from torch import Tensor

from .driving import DEVICE, Reference, alone, assert_idle, greedy, random_ids, together
from .eager import EagerSteps
from .test_model import FAMILIES

if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"
pytestmark = pytest.mark.slow
PAGE, SPARE_ROW, SPARE_PAGE = 16, 3, 24
WORK = (lambda work: work) if DEVICE == "cpu" else None


@dataclass
class Counted:
    """Steps that note how many rows of each request they served."""

    steps: MixedSteps
    widths: list[list[int]] = field(default_factory=list)

    @property
    def sizes(self) -> Sequence[int]:
        return self.steps.sizes

    def run(self, ids: Rows, places: Rows, owners: Rows, widths: Rows) -> Tensor:
        self.widths.append(widths.tolist())
        return self.steps.run(ids, places, owners, widths)


def mixed_steps(*args: object, **settings: Any) -> Counted:
    made = import_module("promptsluice.backend_engine.mixed_graphs").MixedGraphs
    return Counted(made(*args, **settings, record=WORK))


def loaded(directory: Path, *, least_keys: int) -> LoadedModel:
    """With keys that are split, as those of real prompts are, or not, which the interpreter is faster with."""
    read = load_model(directory, dtype="float32", device=DEVICE, native=False)
    attention = import_module("promptsluice.backend_engine.attention.paged").TritonAttention(least_keys)
    return replace(read, decoder=Decoder(read.spec, read.decoder.weights, attention=attention))


# All families on a card; the interpreter takes seconds a step.
@pytest.fixture(params=["tiny_llama_dir", "tiny_mistral_dir", "tiny_gemma3_dir"] if DEVICE == "cpu" else FAMILIES)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.getfixturevalue(request.param), least_keys=64)


@pytest.fixture(scope="module")
def llama(tiny_llama_dir: Path) -> LoadedModel:
    return loaded(tiny_llama_dir, least_keys=256)


def engine_with(model: LoadedModel, made: list[Counted], *, single_rows: Any = None, **options: Any) -> Engine:
    def mixed(*args: object, **settings: Any) -> Counted:
        made.append(mixed_steps(*args, **settings))
        return made[-1]

    sizes: dict[str, Any] = {"pages": 60, "page_size": 4, "step_tokens": 30, "max_running": 4, "graph_rows": 32}
    chosen = EngineOptions(**{**sizes, "guessed_tokens": 0, "stall": None, **options})
    return Engine(model, options=chosen, mixed=mixed, single_rows=single_rows)


def test_any_step_gives_what_the_decoder_gives(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as few programs as may be, each of which takes several tiles."""
    paged = import_module("promptsluice.backend_engine.attention.paged")
    monkeypatch.setattr(paged, "GIVEN_PROGRAMS", 1)
    assert_same_steps(model, torch.float32, seed=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_over_a_rounded_pool(tiny_llama_dir: Path, seed: int) -> None:
    assert_same_steps(loaded(tiny_llama_dir, least_keys=64), torch.int8, seed=seed)


def assert_same_steps(model: LoadedModel, kv_dtype: torch.dtype, *, seed: int) -> None:
    dice, noise, device = Random(seed), torch.Generator().manual_seed(seed), torch.device(DEVICE)
    sizes: dict[str, Any] = {"pages": SPARE_PAGE + 1, "page_size": PAGE, "dtype": kv_dtype, "device": device}
    recorded, eager = KVPool(model.spec, **sizes), KVPool(model.spec, **sizes)
    table = torch.full((SPARE_ROW + 1, 8), SPARE_PAGE, dtype=torch.int32)
    table[:SPARE_ROW] = torch.randperm(SPARE_PAGE, generator=noise).view(SPARE_ROW, 8)
    steps = mixed_steps(model.decoder, recorded, table.to(device), most=32, max_tokens=8 * PAGE)
    owners = dice.sample(range(SPARE_ROW), dice.randint(1, SPARE_ROW))
    widths = [dice.choice((1, 1, 2, 7, 9)) for _ in owners]
    places = [sorted(dice.sample(range(8 * PAGE), width)) for width in widths]
    ids = [[dice.randrange(3, 512) for _ in range(width)] for width in widths]
    steps.run(np.full(32, 7), np.full(32, 9), np.array([0]), np.array([32]))  # leaves behind what nobody may read
    recorded.data.copy_(held := stored(recorded, noise))
    eager.data.copy_(held)
    got = steps.run(np.concatenate(ids), np.concatenate(places), np.array(owners), np.array(widths))
    parts = [
        RequestRows(ids=row_ids, indices=row_places, pages=table[owner].tolist(), logits=range(len(row_ids)))
        for owner, row_ids, row_places in zip(owners, ids, places, strict=True)
    ]
    batch = build_batch(parts, page_size=PAGE, device=device)
    expected = model.decoder.forward(batch, eager).hidden
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    own = slice(0, SPARE_PAGE * PAGE)
    if kv_dtype is torch.float32:
        torch.testing.assert_close(recorded.data[:, :, own], eager.data[:, :, own], rtol=0, atol=1e-5)


def stored(pool: KVPool, noise: torch.Generator) -> Tensor:
    """Random keys and values as the pool holds them."""
    slots = torch.arange(pool.slots, device=pool.data.device)
    block = pool.read(slots).mapped(lambda part: torch.randn(part.shape, generator=noise).to(part))
    pool.write_block(slots, block)
    return pool.data.clone()


def test_only_the_spare_page_is_written_while_they_are_recorded(llama: LoadedModel) -> None:
    pool = KVPool(llama.spec, pages=9, page_size=4, device=torch.device(DEVICE))
    table = torch.full((3, 8), 8, dtype=torch.int32, device=DEVICE)
    table[:2] = torch.arange(8, device=DEVICE)
    record = None if DEVICE == "cuda" else (lambda work: (work(), work)[1])
    made = import_module("promptsluice.backend_engine.mixed_graphs").MixedGraphs
    made(llama.decoder, pool, table, most=32, max_tokens=32, record=record)
    assert not pool.data[:, :, : 8 * 4].any() and pool.data[:, :, 8 * 4 :].any()


def test_an_engine_gives_the_same_tokens(tiny_llama_dir: Path, llama: LoadedModel) -> None:
    made: list[Counted] = []
    engine, reference = engine_with(llama, made), Reference(tiny_llama_dir)
    prompts = [random_ids(length, length) for length in (12, 30, 47)]
    sinks = together(engine, *(greedy(ids, 5) for ids in prompts))
    for ids, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == reference.greedy(ids, 5)
    widths = made[0].widths
    assert any(1 in each and max(each) > 1 for each in widths), f"decodes and prefills side by side: {widths}"
    assert any(sum(each) % 16 for each in widths), f"some are padded: {widths}"
    assert_idle(engine)


def test_prefix_hits_and_decodes_launched_elsewhere_see_the_same_pages(
    tiny_llama_dir: Path, llama: LoadedModel
) -> None:
    made: list[Counted] = []
    engine = engine_with(llama, made, single_rows=EagerSteps if DEVICE == "cpu" else None)
    reference, head = Reference(tiny_llama_dir), random_ids(20, 1)
    for number in range(2):  # what one request computed is the next one's prefix
        prompts = [(*head, *random_ids(9, 10 * number + part)) for part in range(2)]
        sinks = together(engine, *(greedy(ids, 4) for ids in prompts))
        for ids, sink in zip(prompts, sinks, strict=True):
            assert sink.tokens == reference.greedy(ids, 4)
    assert engine.stats().cached_tokens >= 40 and made[0].widths
    assert_idle(engine)


def test_what_needs_more_than_a_plain_step_is_the_decoders(tiny_llama_dir: Path, llama: LoadedModel) -> None:
    made: list[Counted] = []
    engine, ids = engine_with(llama, made), random_ids(20, 3)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    sinks = together(engine, GenerationRequest(ids=ids, sampling=params, prompt_logprobs=True), greedy(ids[:9], 1))
    assert not any(20 in each for each in made[0].widths)
    assert sinks[0].tokens == Reference(tiny_llama_dir).greedy(ids, 1)
    told = sinks[0].result.prompt_logprobs
    assert told is not None and len(told) == 19
    assert alone(engine_with(llama, made, step_tokens=100), greedy(random_ids(33, 4), 1)).tokens
    assert made[1].widths == []
