"""How much the end of a prompt looks at the keys before it, measured while it runs over stored KV."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .rounded_kv import Stored
from .spec import ModelSpec

PROBING_ROWS = 32  # at most so many of a prompt's last rows look: the weights are [heads, rows, keys] in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """In layers from the share `depth` of all on, up to the share `until`, the attention weights of a step's `rows` on
    the keys at `slots` are added to `attention`, summed over rows and heads.

    `rows` are row numbers of the step, int64 [R]; `slots` int64 [K] hold the request's first keys, which all lie before
    these rows; `attention` float32 [K] is changed in place. Under a sliding window a row looks at what is inside.
    """

    rows: Tensor
    slots: Tensor
    depth: float
    until: float = 1.0
    attention: Tensor

    def looks_at(self, layer: int, spec: ModelSpec) -> bool:
        """Whether this layer is one of them."""
        return self.depth * spec.layers <= layer < layers_until(self.until, spec)

    def look(self, q: Tensor, k: Stored, visible: Tensor, *, scale: float, window: int | None) -> None:
        """See FusedOps.looked, in plain torch."""
        grouped = q[self.rows].float().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rhgd,khd->hgrk", grouped, k[self.slots].float()) * scale
        if window is not None:
            places = torch.arange(self.slots.shape[0], device=q.device)
            scores.masked_fill_(places < visible[self.rows][:, None] - window, float("-inf"))
        weights = scores.softmax(-1).nan_to_num_(0.0)  # a row whose window holds none of the keys looks at none
        self.attention.add_(weights.sum(dim=(0, 1, 2)))


def layers_until(share: float, spec: ModelSpec) -> int:
    """How many layers lie within this share of the depth, the last one in part."""
    return math.ceil(share * spec.layers - 1e-9)
