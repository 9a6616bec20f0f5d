# pyright: reportMissingParameterType=false, reportArgumentType=false
"""The product of one row with a matrix as it was read, as Triton kernels: bound by reading the matrix, once.

With a small matrix a step is bound by its launches: the norm before a product, and the gate behind it, are part of it,
and its programs read their part of the matrix while the kernel before still runs.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early import launch_options, let_next_begin, wait_for_last
from .launch_sizes import cdiv, next_power_of_2

_MANY = 6144  # outputs from which on programs of several outputs keep a card busy
# Inputs up to which a program's part of a matrix is one tile, which it has read before the row is there. A matrix that
# takes long to read by itself is read in a loop, which was measured from so many bytes on.
_ONE_TILE, _LARGE_BYTES = 8192, 32 << 20
_TILE = 16384  # numbers of the tile of a program of 8 warps
# Inputs up to which each program norms all of the row for itself. With more it would read about as much for that as of
# the matrix; 896 were measured.
_NORMED = 1024


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [1, in] times `weight` [out, in] that `serves_one`, of x's dtype, plus `bias` [out]; sums are float32."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    arguments = (x.contiguous(), weight, weight if bias is None else bias, out, inputs, outputs)
    constants: dict[str, Any] = {"BIAS": bias is not None, **launch_options(x.device)}
    if weight.nbytes < _LARGE_BYTES:
        block = next_power_of_2(inputs)
        # The fastest on an H200 with 896 and 4864 inputs.
        columns, warps = (1, 4) if inputs <= _NORMED else (min(4, _TILE // block), 8)
        tiling = {"BLOCK_N": columns, "BLOCK": block, "num_warps": warps}
        _tile_product[(cdiv(outputs, columns),)](*arguments, **constants, **tiling)
        return out
    # The fastest on an H200 of some 24 ways to cut products of 4096 to 128256 outputs.
    columns, block, warps, stages = (8, 512, 4, 4) if outputs >= _MANY else (2, 1024, 2, 2)
    tiling = {
        "EVEN": inputs % block == 0,
        "BLOCK_N": columns,
        "BLOCK_K": block,
        "num_warps": warps,
        "num_stages": stages,
    }
    _product[(cdiv(outputs, columns),)](*arguments, **constants, **tiling)
    return out


def serves_one(weight: Tensor) -> bool:
    """Whether `one_row` takes a contiguous matrix: not a long one of middling size, which the BLAS library reads."""
    return weight.shape[1] <= _ONE_TILE or weight.nbytes >= _LARGE_BYTES


def serves_normed(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `normed_row` takes a matrix for rows of a dtype."""
    return weight.shape[1] <= _NORMED and weight.dtype == dtype and weight.is_contiguous()


def normed_row(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    first: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`FusedOps.joined` behind its first product, for one row and a matrix [out, in] that `serves_normed`.

    Leaves its inputs alone. What the steps would store one by one is rounded to their dtype all the same.
    """
    outputs, inputs = weight.shape
    gated = activation is not None
    outputs //= 1 + gated
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = torch.empty_like(residual)
    columns = 4 if gated else 8  # the fastest on an H200 with 896 inputs
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "FIRST": first is not None,
        "GATED": gated,
        "SILU": activation == "silu",
        "BLOCK_N": columns,
        "BLOCK": next_power_of_2(inputs),
        "num_warps": 4,
        **launch_options(x.device),
    }
    _normed_product[(cdiv(outputs, columns),)](
        x, residual, norm, norm if first is None else first, weight, weight if bias is None else bias, out, total,
        inputs, outputs, eps, **constants,
    )  # fmt: skip
    return out, total


@triton.jit
def activated(gate, SILU: tl.constexpr):
    """silu, or gelu's approximation: gate * (1 + tanh(u)) / 2, which is gate * sigmoid(2 * u)."""
    if SILU:
        active = gate * tl.sigmoid(gate)
    else:
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return active


@triton.jit
def _normed_product(
    x, residual, norm, first, w, bias, out, total_out, IN, OUT, eps,
    BIAS: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each program norms the whole row, which is little beside its part of the matrix, and the first one stores it."""
    let_next_begin(EARLY)
    at = tl.arange(0, BLOCK)
    live = at < IN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < OUT
    rows = w + n[:, None].to(tl.int64) * IN + at[None, :]
    tile = tl.load(rows, mask=there[:, None] & live[None, :], other=0.0)  # on its way while the row is normed
    upper = tile
    if GATED:
        upper = tl.load(rows + OUT.to(tl.int64) * IN, mask=there[:, None] & live[None, :], other=0.0)
    scale = tl.load(norm + at, mask=live, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    total = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    if FIRST:
        total *= tl.rsqrt(tl.sum(total * total, 0) / IN + eps)
        total *= tl.load(first + at, mask=live, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32)
    total += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(total_out + at, rounded, mask=live)
    total = rounded.to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, 0) / IN + eps) * scale
    row = scaled.to(x.dtype.element_ty).to(tl.float32)[None, :]
    result = tl.sum(tile.to(tl.float32) * row, 1)
    if BIAS:
        result += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(upper.to(tl.float32) * row, 1)
        if BIAS:
            up += tl.load(bias + OUT + n, mask=there, other=0.0).to(tl.float32)
        gate = result.to(out.dtype.element_ty).to(tl.float32)
        result = activated(gate, SILU) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _tile_product(
    x, w, bias, out, IN, OUT, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    let_next_begin(EARLY)
    at = tl.arange(0, BLOCK)
    live = at < IN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < OUT
    rows = w + n[:, None].to(tl.int64) * IN + at[None, :]
    tile = tl.load(rows, mask=there[:, None] & live[None, :], other=0.0)
    wait_for_last(EARLY)
    row = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    result = tl.sum(tile.to(tl.float32) * row[None, :], 1)
    if BIAS:
        result += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _product(
    x, w, bias, out, IN, OUT,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < OUT
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    rows = w + n[:, None].to(tl.int64) * IN
    wait_for_last(EARLY)
    for at in range(0, IN, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(rows + k[None, :], mask=live[:, None], other=0.0)
            row = tl.load(x + k)
        else:
            weight = tl.load(rows + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
            row = tl.load(x + k, mask=k < IN, other=0.0)
        total += weight.to(tl.float32) * row.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)
