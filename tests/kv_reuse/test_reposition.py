"""Moved keys equal keys that were rotated at the new place, for every rope type that may move."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.rope import (
    INVERSE_FREQUENCIES,
    NONE,
    LayerRopes,
    Rope,
    RopeSpec,
    rope_from_config,
)
from promptsluice.backend_engine.spec import spec_from_config
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import repositioned
from promptsluice.kv_reuse.reposition import MOVABLE, require_movable
from promptsluice.prompt.errors import ConfigError

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    NONE: {},
}
LAYERS = 2

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def rope_of(kind: str, theta: float = 10000.0) -> RopeSpec:
    """What a config with this type gives; a layer without positions comes from no config."""
    parameters = {"rope_type": "default" if kind == NONE else kind, "rope_theta": theta, **TYPES[kind]}
    spec = rope_from_config({"rope_parameters": parameters}, head_dim=32, max_positions=4096)
    return replace(spec, kind=kind)


def ropes_of(kind: str) -> LayerRopes:
    return LayerRopes([rope_of(kind)] * LAYERS)


def assert_moving_equals_computing_there(specs: list[RopeSpec], *, old: int, new: int, dtype: torch.dtype) -> None:
    plain, places = torch.randn(len(specs), 40, 3, 32), torch.arange(40)

    def rotated(start: int) -> torch.Tensor:
        return torch.stack([Rope(spec).apply(layer, places + start) for spec, layer in zip(specs, plain, strict=True)])

    block = KVBlock(rotated(old).to(dtype), torch.randn(plain.shape).to(dtype))
    before = block.k.clone()
    moved = repositioned(block, LayerRopes(specs), old=old, new=new)
    assert moved.k.dtype == dtype and torch.equal(moved.v, block.v) and torch.equal(block.k, before)
    torch.testing.assert_close(moved.k.float(), rotated(new), rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", sorted(MOVABLE))
@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 3000), (2500, 0), (1000, 1700)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moving_equals_computing_there(kind: str, old: int, new: int, dtype: torch.dtype):
    assert_moving_equals_computing_there([rope_of(kind)] * LAYERS, old=old, new=new, dtype=dtype)


@pytest.mark.parametrize(("old", "new"), [(0, 3000), (2500, 0)])
def test_each_layer_moves_by_its_own_angles(old: int, new: int):
    mixed = [rope_of("default"), rope_of(NONE), rope_of("linear", 1e6), rope_of("default"), rope_of("llama3")]
    assert_moving_equals_computing_there(mixed, old=old, new=new, dtype=torch.float32)


def test_gemma_moves_its_two_kinds_of_layers():
    config = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "rope_scaling": {"type": "linear", "factor": 8.0}}
    ropes = list(spec_from_config(config).ropes)
    assert [(rope.theta, rope.kind) for rope in ropes[4:6]] == [(1e4, "default"), (1e6, "linear")]
    assert_moving_equals_computing_there(ropes, old=100, new=4000, dtype=torch.float32)


def test_there_and_back_is_the_same():
    ropes = ropes_of("yarn")
    block = KVBlock(torch.randn(2, 7, 3, 32), torch.randn(2, 7, 3, 32))
    back = repositioned(repositioned(block, ropes, old=0, new=900), ropes, old=900, new=0)
    torch.testing.assert_close(back.k, block.k, rtol=1e-6, atol=1e-6)


def test_a_block_that_stays_is_not_touched():
    block = KVBlock(torch.randn(2, 7, 3, 32), torch.randn(2, 7, 3, 32))
    assert repositioned(block, ropes_of("default"), old=5, new=5).k is block.k


def test_every_type_that_the_engine_runs_is_decided_here():
    assert set(INVERSE_FREQUENCIES) == MOVABLE == set(TYPES)


def test_what_cannot_move_is_refused_by_name():
    with pytest.raises(ConfigError, match="'longrope'"):
        require_movable([rope_of("default"), replace(rope_of("default"), kind="longrope")])
