"""Moved keys equal keys that were rotated at the new place, for every rope type that may move."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.rope import INVERSE_FREQUENCIES, Rope, RopeSpec, rope_from_config
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
}

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def rope_of(kind: str) -> Rope:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]}
    return Rope(rope_from_config({"rope_parameters": parameters}, head_dim=32, max_positions=4096))


@pytest.mark.parametrize("kind", sorted(MOVABLE))
@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 3000), (2500, 0), (1000, 1700)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moving_equals_computing_there(kind: str, old: int, new: int, dtype: torch.dtype):
    rope = rope_of(kind)
    plain = torch.randn(2, 40, 3, 32)
    places = torch.arange(40)

    def rotated(start: int) -> torch.Tensor:
        return torch.stack([rope.apply(layer, places + start) for layer in plain])

    block = KVBlock(rotated(old).to(dtype), torch.randn(2, 40, 3, 32).to(dtype))
    before = block.k.clone()
    moved = repositioned(block, rope, old=old, new=new)
    assert moved.k.dtype == dtype and torch.equal(moved.v, block.v) and torch.equal(block.k, before)
    torch.testing.assert_close(moved.k.float(), rotated(new), rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_there_and_back_is_the_same():
    rope = rope_of("yarn")
    block = KVBlock(torch.randn(2, 7, 3, 32), torch.randn(2, 7, 3, 32))
    back = repositioned(repositioned(block, rope, old=0, new=900), rope, old=900, new=0)
    torch.testing.assert_close(back.k, block.k, rtol=1e-6, atol=1e-6)


def test_a_block_that_stays_is_not_touched():
    block = KVBlock(torch.randn(2, 7, 3, 32), torch.randn(2, 7, 3, 32))
    assert repositioned(block, rope_of("default"), old=5, new=5).k is block.k


def test_every_type_that_the_engine_runs_is_decided_here():
    assert set(INVERSE_FREQUENCIES) == MOVABLE == set(TYPES)


def test_what_cannot_move_is_refused_by_name():
    spec: RopeSpec = replace(rope_of("default").spec, kind="longrope")
    with pytest.raises(ConfigError, match="'longrope'"):
        require_movable(spec)
