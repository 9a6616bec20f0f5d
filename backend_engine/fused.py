"""The element-wise work between a layer's matrix products: what it computes, as a contract, and in plain torch.

On a GPU each of these is one kernel (fused_triton.py); launches and trips to memory are what small batches pay for.
"""

from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import rotate


class FusedOps(Protocol):
    """Stateless. Inputs are not changed, but for the pool's slots and, in `add_norm`, the residual where it says so."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(residual + x) * weight, residual + x)`, all [rows, hidden]. May reuse the memory of `residual`."""
        ...

    def rotated(
        self, qkv: Tensor, heads: tuple[int, int], norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `qkv` [rows, heads + 2 * kv_heads, dim], the first two normed and rotated.

        `heads` is (heads, kv_heads); `norm` the weights [heads + kv_heads, dim] and eps of a norm per head; `cos`,
        `sin` are `Rope.angles`.
        """
        ...

    def rotated_into(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """As `rotated`; keys and values go to `slots` of a layer of the pool, queries [rows, heads, dim] come back."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` [rows, ffn] of `gate_up` [rows, 2 * ffn]."""
        ...


class TorchOps:
    """See FusedOps."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps), residual

    def rotated(
        self, qkv: Tensor, heads: tuple[int, int], norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = heads
        turned, v = qkv.split((queries + keys, keys), dim=1)
        if norm is not None:
            turned = F.rms_norm(turned, turned.shape[-1:], None, norm[1]) * norm[0]
        q, k = rotate(turned, cos, sin).split((queries, keys), dim=1)
        return q, k, v

    def rotated_into(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        q, fresh_k, fresh_v = self.rotated(qkv, heads, norm, cos, sin)
        k.index_copy_(0, slots, fresh_k)
        v.index_copy_(0, slots, fresh_v)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def fused_ops(device: torch.device) -> FusedOps:
    """The fastest there are for a device."""
    if device.type != "cuda":
        return TorchOps()
    return import_module(".fused_triton", __package__).TritonOps()
