"""Blended prefill in plain torch: float64, a dense mask, one sequence, straight from a checkpoint.

Rope: the default one, and the linear one, by layer type.

Independent of the engine on purpose: chunks are computed at their final positions, so nothing is ever re-rotated here.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """`logits` [vocab] of the last token; `k`, `v` [layers, tokens, kv_heads, head_dim]; `weights`, per layer, [heads,
    rows, tokens] of the rows that ran. All float64."""

    logits: Tensor
    k: Tensor
    v: Tensor
    weights: tuple[Tensor, ...] = ()


class Reference:
    """A Llama, Mistral, Qwen2, Qwen3 or Gemma 3 checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.gemma = self.config["model_type"] == "gemma3_text"
        self.weights = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    def full(self, ids: Sequence[int], *, start: int = 0) -> Outcome:
        """Everything computed, the first token standing at position `start`."""
        return self._run(ids, start=start)

    def blended(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        layer: int = 0,
        repaired: Collection[int] = (),
        covered: int = 0,
        blind_to_order: bool = False,
    ) -> Outcome:
        """Each span (start, length) holds the KV of its tokens alone; from `layer` on only `repaired` are computed.

        The first `covered` tokens are computed whatever the spans say, as a prefix hit was. `blind_to_order`
        lets rows see every key, loaded ones of later places too: a fault that tests must notice.
        """
        loaded = {start: self.full(ids[start : start + length], start=start) for start, length in spans}
        repaired = {*repaired, *range(covered)}
        return self._run(ids, loaded=loaded, layer=layer, repaired=repaired, blind=blind_to_order)

    def _run(
        self,
        ids: Sequence[int],
        *,
        start: int = 0,
        loaded: dict[int, Outcome] | None = None,
        layer: int = 0,
        repaired: Collection[int] = (),
        blind: bool = False,
    ) -> Outcome:
        config, weights, total = self.config, self.weights, len(ids)
        shape = (self.layers, total, config["num_key_value_heads"], config["head_dim"])
        k_all, v_all = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        held = torch.zeros(total, dtype=torch.bool)
        for place, block in (loaded or {}).items():
            stop = place + block.k.shape[1]
            k_all[:, place:stop], v_all[:, place:stop], held[place:stop] = block.k, block.v, True
        rows = torch.arange(total)
        hidden = weights["model.embed_tokens.weight"][torch.tensor(ids)]
        hidden = hidden * config["hidden_size"] ** 0.5 if self.gemma else hidden
        looks: list[Tensor] = []
        for index in range(self.layers):
            if loaded and index == layer:
                going_on = torch.tensor([not held[row] or int(row) in repaired for row in rows])
                rows, hidden = rows[going_on], hidden[going_on]
            name = f"model.layers.{index}."
            q, k, v = self._project(index, self._norm(hidden, name + "input_layernorm"), rows + start)
            k_all[index, rows], v_all[index, rows] = k, v
            visible = torch.ones(len(rows), total, dtype=torch.bool)
            if not blind:
                behind = rows[:, None] - torch.arange(total)
                visible = (behind >= 0) & (behind < self._window(index))
            scale = config.get("query_pre_attn_scalar", config["head_dim"]) ** -0.5
            attended, look = _attend(q * scale, k_all[index], v_all[index], visible)
            looks.append(look)
            added = self._linear(name + "self_attn.o_proj", attended)
            hidden = hidden + (self._norm(added, name + "post_attention_layernorm") if self.gemma else added)
            normed = self._norm(hidden, f"{name}{'pre_feedforward' if self.gemma else 'post_attention'}_layernorm")
            gate, up = (self._linear(f"{name}mlp.{which}_proj", normed) for which in ("gate", "up"))
            gate = F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)
            added = self._linear(name + "mlp.down_proj", gate * up)
            hidden = hidden + (self._norm(added, name + "post_feedforward_layernorm") if self.gemma else added)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return Outcome(self._norm(hidden[-1], "model.norm") @ head.T, k_all, v_all, tuple(looks))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return x * scale * (self.weights[name + ".weight"] + self.gemma)

    def _kind(self, index: int) -> str:
        given = self.config.get("layer_types")
        return given[index] if given else "sliding_attention" if self.config.get("sliding_window") else "full_attention"

    def _window(self, index: int) -> float:
        return self.config["sliding_window"] if self._kind(index) == "sliding_attention" else float("inf")

    def _project(self, index: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, name = self.config["head_dim"], f"model.layers.{index}."
        q, k, v = (self._linear(f"{name}self_attn.{which}_proj", x).unflatten(-1, (-1, dim)) for which in "qkv")
        if name + "self_attn.q_norm.weight" in self.weights:
            q, k = self._norm(q, name + "self_attn.q_norm"), self._norm(k, name + "self_attn.k_norm")
        return self._rotate(q, positions, index), self._rotate(k, positions, index), v

    def _rotate(self, x: Tensor, positions: Tensor, index: int) -> Tensor:
        rope, half = self.config["rope_parameters"], x.shape[-1] // 2
        rope = rope.get(self._kind(index), rope)
        frequencies = rope["rope_theta"] ** -(torch.arange(half).double() / half) / rope.get("factor", 1.0)
        angles = positions.double()[:, None, None] * frequencies
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, heads * dim] of scaled `q` [rows, heads, dim] over `k`, `v` [keys, kv_heads, dim], and the weights.

    `visible` is [rows, keys], the weights [heads, rows, keys].
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(group, dim=1))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, v.repeat_interleave(group, dim=1)).flatten(1), weights
