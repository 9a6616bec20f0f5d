"""Steps whose joints are recorded give what the decoder gives: padded, chunked, narrowed, side by side.

On a GPU the records are CUDA graphs, elsewhere the work itself, which runs on the same memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.joint_graphs import JointGraphs
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.prompt import ConfigError
from torch import Tensor

from .driving import DEVICE, Reference, assert_idle, greedy, random_ids, tiny_engine, together
from .test_model import FAMILIES, FixedRows

PAGE = 16
WORK = (lambda work: work) if DEVICE == "cpu" else None


@dataclass
class Counted:
    """Joints that count which steps they served."""

    joints: JointGraphs
    rows: list[int] = field(default_factory=list)

    def between(self, layer: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        passed = self.joints.between(layer, attended, residual)
        if passed is not None and layer == 0:
            self.rows.append(attended.shape[0])
        return passed


def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32", device=DEVICE, native=False)


def recorded(model: LoadedModel, most: int) -> Counted:
    return Counted(JointGraphs(model.decoder, most=most, record=WORK))


def spoilt(joints: Counted) -> None:
    """What steps before have left: nothing that a step may read."""
    for buffer in (joints.joints._attended, joints.joints._residual, joints.joints._product):
        buffer.fill_(math.nan)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.getfixturevalue(request.param))


@pytest.fixture
def llama(tiny_llama_dir: Path) -> LoadedModel:
    return loaded(tiny_llama_dir)


def hidden(model: LoadedModel, part: Callable[[], RequestRows], joints: Counted | None) -> tuple[Tensor, Tensor]:
    """Of all logit rows, and what the pool holds then."""
    pool = KVPool(model.spec, pages=8, page_size=PAGE, device=torch.device(DEVICE))
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(3)))
    batch = build_batch([part()], page_size=PAGE, device=DEVICE)
    return model.decoder.forward(batch, pool, joints=joints).hidden, pool.data


def assert_same(model: LoadedModel, part: Callable[[], RequestRows], joints: Counted) -> None:
    spoilt(joints)
    (got, kept), (expected, held) = hidden(model, part, joints), hidden(model, part, None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(kept, held, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [9, 16, 17, 40, 64])
def test_a_padded_step_gives_what_the_decoder_gives(model: LoadedModel, rows: int) -> None:
    joints = recorded(model, 64)
    ids = random_ids(100, rows)
    places = sorted(torch.randperm(100, generator=torch.Generator().manual_seed(rows))[:rows].tolist())
    part = RequestRows(
        ids=[ids[place] for place in places], indices=places, pages=[5, 0, 3, 1, 2, 7, 4], logits=range(rows)
    )
    assert_same(model, lambda: part, joints)
    assert joints.rows == [rows]


@pytest.mark.slow
def test_steps_of_too_few_or_too_many_rows_are_the_decoders(llama: LoadedModel) -> None:
    joints = recorded(llama, 47)
    for rows in (1, 8, 33):
        part = RequestRows(ids=random_ids(rows, 1), indices=range(rows), pages=[1, 0, 2], logits=[rows - 1])
        assert_same(llama, lambda part=part: part, joints)
    assert joints.rows == []


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_rows_may_be_dropped_on_the_way(llama: LoadedModel, layer: int) -> None:
    joints = recorded(llama, 64)

    def part() -> RequestRows:
        return RequestRows(
            ids=random_ids(50, 2), indices=range(50), pages=[3, 1, 0, 2], logits=[45, 49],
            selector=FixedRows(layer, [1, 5, 21]), repairable=[8 <= row < 40 for row in range(50)], quota=3,
        )  # fmt: skip

    assert_same(llama, part, joints)


@pytest.mark.slow
def test_an_engine_with_recorded_joints_gives_the_same_tokens(tiny_llama_dir: Path, llama: LoadedModel) -> None:
    joints = recorded(llama, 96)
    options = EngineOptions(
        pages=200, page_size=4, step_tokens=60, max_running=16, guessed_tokens=0, stall=None, graph_rows=0
    )
    engine = Engine(llama, options=options, joints=joints)
    reference = Reference(tiny_llama_dir)
    prompts = [random_ids(length, length) for length in (12, 30, 47, 70, 150)]
    sinks = together(engine, *(greedy(ids, 10) for ids in prompts))
    for ids, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == reference.greedy(ids, 10)
    assert any(rows % 16 for rows in joints.rows), f"some are padded: {joints.rows}"
    assert_idle(engine)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
def test_an_engine_records_them_where_the_options_say_so(llama: LoadedModel, tiny_llama_dir: Path) -> None:
    prompts = [random_ids(length, length) for length in (12, 60, 90)]
    engines = [tiny_engine(llama, graph_rows=rows) for rows in (0, 64)]
    outputs = [[sink.tokens for sink in together(engine, *(greedy(ids, 10) for ids in prompts))] for engine in engines]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rows", [-1, 8, 513])
def test_sizes_that_no_graph_has_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match="graph_rows must be 0 or from 16 to 512"):
        EngineOptions(graph_rows=rows)
