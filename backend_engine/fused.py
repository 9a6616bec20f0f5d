"""The work between a layer's matrix products: what it computes, as a contract, and in plain torch.

On a GPU each of these is a kernel, or few (fused_triton.py); launches and trips to memory are what small batches pay
for, which is why a joint has the products on both of its sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear
from .probe import Probe
from .rope import rotate
from .rounded_kv import Stored
from .span_rows import SpanRows

LayerKV = tuple[Stored, Stored]
"""A layer's keys and values in the pool, each [slots, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """What happens to a layer's queries and keys before attention; values stay as they are.

    `norm` holds the weights [heads + kv_heads, dim] of a norm per head, with `eps`, or None; `cos`, `sin` are
    `Rope.angles` of the rows.
    """

    heads: int
    kv_heads: int
    cos: Tensor
    sin: Tensor
    norm: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What stands between two products of a layer, `before` and `after`: a sum with the residual, and its norm.

    With `first`, the weight of another norm, it is `norm_first(before(x))` that is added. With an `activation` what
    `after` yields is gated. Behind the last layer there is no `after`.
    """

    before: Linear
    first: Tensor | None
    weight: Tensor
    eps: float
    after: Linear | None
    activation: str | None = None


class FusedOps(Protocol):
    """Stateless. Inputs are not changed, but for the pool's slots and the residual, where a method says so.

    Norms are root-mean-square norms over the last axis. Their weights may be float32 where the rest is narrower: then
    the whole norm is float32, and its result is rounded once.
    """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [..., hidden] normed, times `weight`."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(norm(residual + x), residual + x)`, all [rows, hidden]. May reuse the memory of `residual`.

        With `first`, the weight of another norm, it is `norm_first(x)` that is added.
        """
        ...

    def rotated(self, qkv: Tensor, turn: HeadTurn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `qkv` [rows, heads + 2 * kv_heads, dim], the first two normed and rotated."""
        ...

    def rotated_into(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor:
        """As `rotated`; keys and values go to `slots` of a layer of the pool, queries [rows, heads, dim] come back."""
        ...

    def placed(
        self, rows: SpanRows, layers: range, turn: tuple[Tensor, Tensor], slots: Tensor, pools: Sequence[LayerKV]
    ) -> None:
        """The keys of `rows`, turned, and their values go to `slots` [rows] of the pool in each of `layers`.

        `turn` is `Rope.turn` of the rows; `pools` has the layers' parts of one pool. With kernels the rows are read
        while the device's stream gets there: until then they must stay.
        """
        ...

    def looked(self, probe: Probe, q: Tensor, k: Stored, visible: Tensor, *, scale: float, window: int | None) -> None:
        """Add to the probe's `attention` what its rows look at in one layer.

        `q` [rows of the step, heads, head_dim] and `k` [slots, kv_heads, head_dim] are rotated; `visible` is the
        batch's, [rows of the step]; under a `window` a row looks at what is inside.
        """
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """`activation(gate) * up` [rows, ffn] of `gate_up` [rows, 2 * ffn]; the activation is silu or gelu_tanh."""
        ...

    def joined(self, x: Tensor, residual: Tensor, joint: Joint) -> tuple[Tensor, Tensor]:
        """The second product of a joint [rows, out], gated [rows, out / 2], and the sum with the residual.

        Of a joint without a second product it is the norm [rows, hidden] that comes first. `x` [rows, in] is what the
        first product takes. May reuse the memory of `residual` [rows, hidden].
        """
        ...


class TorchOps:
    """See FusedOps."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32 and weight.dtype == torch.float32:
            return _rms_norm(x, weight, eps)
        if x.dtype == weight.dtype:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x if first is None else self.norm(x, first, eps))
        return self.norm(residual, weight, eps), residual

    def rotated(self, qkv: Tensor, turn: HeadTurn) -> tuple[Tensor, Tensor, Tensor]:
        turned, v = qkv.split((turn.heads + turn.kv_heads, turn.kv_heads), dim=1)
        if turn.norm is not None:
            wide = turned.to(turn.norm.dtype)
            turned = (F.rms_norm(wide, wide.shape[-1:], None, turn.eps) * turn.norm).to(qkv.dtype)
        q, k = rotate(turned, turn.cos, turn.sin).split((turn.heads, turn.kv_heads), dim=1)
        return q, k, v

    def rotated_into(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor:
        q, fresh_k, fresh_v = self.rotated(qkv, turn)
        k.index_copy_(0, slots, fresh_k)
        v.index_copy_(0, slots, fresh_v)
        return q

    def placed(
        self, rows: SpanRows, layers: range, turn: tuple[Tensor, Tensor], slots: Tensor, pools: Sequence[LayerKV]
    ) -> None:
        places = slots.long()
        for layer, pool in zip(layers, pools, strict=True):
            k, v = rows.layer(layer)
            dtype = pool[0].dtype
            pool[0].index_copy_(0, places, rotate(k.float(), *turn).to(dtype))
            pool[1].index_copy_(0, places, v.to(dtype))

    def looked(self, probe: Probe, q: Tensor, k: Stored, visible: Tensor, *, scale: float, window: int | None) -> None:
        probe.look(q, k, visible, scale=scale, window=window)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return active.mul_(up)

    def joined(self, x: Tensor, residual: Tensor, joint: Joint) -> tuple[Tensor, Tensor]:
        normed, residual = self.add_norm(joint.before(x), residual, joint.weight, joint.eps, first=joint.first)
        if joint.after is None:
            return normed, residual
        product = joint.after(normed)
        return product if joint.activation is None else self.gated(product, joint.activation), residual


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """F.rms_norm in about half of its operations, each of which takes a microsecond or more for a single row."""
    length = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    return (x * length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)


def fused_ops(device: torch.device) -> FusedOps:
    """The fastest there are for a device."""
    if device.type != "cuda":
        return TorchOps()
    return import_module(".fused_triton", __package__).TritonOps()
