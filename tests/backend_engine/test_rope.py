"""Rotary types against transformers' own rotary module, and moving rotated keys to other positions."""

from typing import Any

import pytest
import torch
from promptsluice.backend_engine.rope import Rope, rope_from_config
from promptsluice.prompt.errors import ConfigError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-own-factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def _config(**params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 50000.0, **params}, "max_position_embeddings": 2048}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str) -> None:
    config = _config(**KINDS[kind])
    rope = Rope(rope_from_config(config, head_dim=32, max_positions=2048))
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=32, **config))
    positions = torch.randint(0, 2048, (64,))
    x = torch.randn(64, 3, 32)
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rope.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(rope.apply(x, positions), expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [0, 1, -70, 1500])
def test_rotating_on_equals_rotating_there(kind: str, delta: int) -> None:
    rope = Rope(rope_from_config(_config(**KINDS[kind]), head_dim=32, max_positions=2048))
    positions = torch.arange(100, 140)
    k = torch.randn(2, 40, 3, 32)
    old = torch.stack([rope.apply(layer, positions) for layer in k])
    new = torch.stack([rope.apply(layer, positions + delta) for layer in k])
    torch.testing.assert_close(rope.move(old, positions, positions + delta), new, rtol=0, atol=5e-6)


def test_old_style_config_reads_the_same() -> None:
    params = KINDS["llama3"]
    new = rope_from_config(_config(**params), head_dim=32, max_positions=2048)
    scaling = {"type" if key == "rope_type" else key: value for key, value in params.items()}
    old = rope_from_config({"rope_theta": 50000.0, "rope_scaling": scaling}, head_dim=32, max_positions=2048)
    assert old == new
    plain = rope_from_config({"rope_scaling": None}, head_dim=32, max_positions=2048)
    assert (plain.kind, plain.theta) == ("default", 10000.0)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "layer type"),
    ],
)
def test_what_is_not_supported_is_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rope_from_config(_config(**params), head_dim=32, max_positions=2048)
