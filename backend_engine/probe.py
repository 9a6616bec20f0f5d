"""How much the end of a prompt looks at the keys before it, measured while it runs over stored KV."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .spec import ModelSpec

PROBING_ROWS = 32  # at most so many of a prompt's last rows look: the weights are [heads, rows, keys] in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """In layers from the share `depth` of all on, the attention weights of a step's `rows` on the keys at `slots` are
    added to `attention`, summed over rows and heads.

    `rows` are row numbers of the step, int64 [R]; `slots` int64 [K], all visible to all of them; `attention` float32
    [K] is changed in place.
    """

    rows: Tensor
    slots: Tensor
    depth: float
    attention: Tensor

    def look(self, layer: int, q: Tensor, k_pool: Tensor, spec: ModelSpec) -> None:
        """`q` [rows of the step, heads, head_dim] and `k_pool` [slots, kv_heads, head_dim] are rotated."""
        if layer < self.depth * spec.layers:
            return
        grouped = q[self.rows].float().unflatten(1, (spec.kv_heads, -1))
        scores = torch.einsum("rhgd,khd->hgrk", grouped, k_pool[self.slots].float()) * spec.scale
        self.attention.add_(scores.softmax(-1).sum(dim=(0, 1, 2)))
