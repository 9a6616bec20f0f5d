"""A small model's function at a large model's cost: its weights amid zeros, in matrices of the large one's shape.

A model of random weights says nothing that could be foretold, and a small one's step is as short as a launch. Here each
greedy token is the small model's (but for rounding), and each step reads and multiplies what the large one's would.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.spec import ModelSpec, eos_ids, spec_from_config
from promptsluice.backend_engine.tokenizer import ChatTokenizer
from promptsluice.backend_engine.weights import SafetensorsSource, expected_shapes, load_weights
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """The large model's tensors, made on the device.

    Heads stay in their groups, whose new members nobody listens to. Each rotary pair goes where the large model has
    its frequency: the dimension of heads must be a multiple of the small one's. The mean of squares that a norm divides
    by counts the zeros, which its weight and epsilon make good. New layers add nothing, and new ids of the vocabulary
    have the first one's scores, and come behind it.
    """

    small: ModelSpec
    large: ModelSpec
    source: SafetensorsSource
    device: torch.device

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_shapes(self.large)

    def get(self, name: str) -> Tensor:
        made = torch.zeros(self.shapes[name], device=self.device)
        kept = "model.embed_tokens.weight" if name == "lm_head.weight" and self.small.tied else name
        if kept not in self.source.shapes:
            return made  # of a new layer
        part = self.source.get(kept).to(self.device, torch.float32)
        if part.ndim == 1:
            made[: len(part)] = part * (self.small.hidden / self.large.hidden) ** 0.5
        elif kept == "model.embed_tokens.weight":
            made[:, : part.shape[1]] = part[0]
            made[: len(part), : part.shape[1]] = part
        elif "self_attn" in kept:
            self._headed(made, part, kept)
        else:
            made[: part.shape[0], : part.shape[1]] = part
        return made

    def _headed(self, made: Tensor, part: Tensor, name: str) -> None:
        small, large = self.small, self.large
        heads = torch.arange(small.kv_heads, device=self.device)
        if "k_proj" not in name and "v_proj" not in name:
            members = torch.arange(small.group, device=self.device)
            heads = (heads[:, None] * large.group + members).flatten()
        dims = torch.arange(small.head_dim, device=self.device) * (large.head_dim // small.head_dim)
        places = (heads[:, None] * large.head_dim + dims).flatten()
        if "o_proj" in name:
            made[: small.hidden, places] = part
        else:
            made[places, : small.hidden] = part


def widened(directory: Path, shape: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The Llama model in `directory`, which has tied embeddings and no biases, in the `shape` of a config.json."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    small = spec_from_config(config)
    taken = {key: config[key] for key in ("rope_parameters", "max_position_embeddings")}
    eps = small.norm_eps * small.hidden / shape["hidden_size"]
    large = spec_from_config({**shape, **taken, "rms_norm_eps": eps})
    assert large.head_dim % small.head_dim == 0 and large.kv_heads >= small.kv_heads and large.group >= small.group
    generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    large = replace(large, scale=small.scale, eos_ids=eos_ids(generation) or small.eos_ids)
    source = Widened(small=small, large=large, source=SafetensorsSource(directory), device=device)
    weights = load_weights(source, large, dtype=dtype, device=device)
    return LoadedModel(
        spec=large, decoder=Decoder(large, weights), tokenizer=ChatTokenizer(directory), fingerprint="widened"
    )
