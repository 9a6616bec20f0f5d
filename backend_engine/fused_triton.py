# pyright: reportMissingParameterType=false
"""The element-wise work between matrix products as Triton kernels: one launch each. Arithmetic is float32 inside.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused import TorchOps

_HEADS = 8  # that one program rotates
_COLUMNS = 1024  # that one program multiplies


class TritonOps(TorchOps):
    """See FusedOps. `rotated`, which only narrowed layers call, stays torch's."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, hidden = x.shape
        normed = torch.empty_like(x)
        block = triton.next_power_of_2(hidden)
        constants: dict[str, Any] = {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}
        if rows:
            _add_norm[(rows,)](x, residual, weight, normed, hidden, eps, **constants)
        return normed, residual

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
        rows, total, dim = qkv.shape
        queries, keys = heads
        q = torch.empty((rows, queries, dim), dtype=qkv.dtype, device=qkv.device)
        weight, eps = (cos, 0.0) if norm is None else norm
        constants: dict[str, Any] = {
            "Q": queries,
            "KV": keys,
            "DIM": dim,
            "DIM_PAD": triton.next_power_of_2(dim),
            "HEADS": _HEADS,
            "NORM": norm is not None,
            "num_warps": 4,
        }
        if rows:
            _rotated_into[(rows, triton.cdiv(total, _HEADS))](
                qkv, q, k, v, slots, cos, sin, weight, k.stride(0), eps, **constants
            )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        constants: dict[str, Any] = {"BLOCK": _COLUMNS, "num_warps": 4}
        if rows:
            _silu_mul[(rows, triton.cdiv(width // 2, _COLUMNS))](gate_up, out, width // 2, **constants)
        return out


@triton.jit
def _add_norm(x, residual, weight, normed, hidden, eps, BLOCK: tl.constexpr):
    """One row.

    The sum is rounded to the residual's dtype before it is normed, as it is when the next layer reads it.
    """
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    live = at < hidden
    total = tl.load(x + row + at, mask=live, other=0.0).to(tl.float32)
    total += tl.load(residual + row + at, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row + at, rounded, mask=live)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
    scaled = total * scale * tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + row + at, scaled.to(normed.dtype.element_ty), mask=live)


@triton.jit
def _rotated_into(
    qkv, q, k, v, slots, cos, sin, weight, slot_stride, eps,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr, NORM:
    tl.constexpr,
):  # fmt: skip
    """Some heads of one row: norm, rotate, and store queries to `q`, keys and values to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM_PAD)
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    here = (head < Q + 2 * KV)[:, None] & (d < DIM)[None, :]
    base = qkv + (row * (Q + 2 * KV) + head[:, None]) * DIM
    raw = tl.load(base + d[None, :], mask=here, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(base + partner[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        turned = here & (head < Q + KV)[:, None]
        x = x * scale * tl.load(weight + head[:, None] * DIM + d[None, :], mask=turned, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + head[:, None] * DIM + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + row * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    rotated = (x * c + y * s).to(q.dtype.element_ty)
    tl.store(q + (row * Q + head[:, None]) * DIM + d[None, :], rotated, mask=here & (head < Q)[:, None])
    place = tl.load(slots + row) * slot_stride
    key = head - Q
    tl.store(k + place + key[:, None] * DIM + d[None, :], rotated, mask=here & ((key >= 0) & (key < KV))[:, None])
    tl.store(v + place + (key - KV)[:, None] * DIM + d[None, :], raw, mask=here & (key >= KV)[:, None])


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)
