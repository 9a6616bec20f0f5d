# pyright: reportMissingParameterType=false, reportArgumentType=false
"""The product of one row with a matrix as it was read, as a Triton kernel: it is bound by reading the matrix, once.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MANY = 6144  # outputs from which on programs of several outputs keep a card busy


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [1, in] times `weight` [out, in], contiguous and of x's dtype, plus `bias` [out]; sums are float32."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # The fastest on an H200 of some 24 ways to cut products of 4096 to 128256 outputs.
    columns, block, warps, stages = (8, 512, 4, 4) if outputs >= _MANY else (2, 1024, 2, 2)
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "EVEN": inputs % block == 0,
        "BLOCK_N": columns,
        "BLOCK_K": block,
        "num_warps": warps,
        "num_stages": stages,
    }
    grid = (triton.cdiv(outputs, columns),)
    _product[grid](x.contiguous(), weight, weight if bias is None else bias, out, inputs, outputs, **constants)
    return out


@triton.jit
def _product(
    x, w, bias, out, IN, OUT, BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < OUT
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    rows = w + n[:, None].to(tl.int64) * IN
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
