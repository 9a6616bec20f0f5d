# pyright: reportMissingParameterType=false, reportArgumentType=false
"""Triton kernels that multiply by a rounded matrix where it lies: weights are read as stored and widened in registers.

`PACKED` matrices are those of `rounding.int4_groups`; the others have one number a byte (int8 or e4m3) and a scale for
each output, which is applied to the finished sum. Sums are float32. Arguments are tensors or numbers as Triton passes
them, untyped.
"""

import triton
import triton.language as tl

from .rounding import GROUP as _GROUP

GROUP = tl.constexpr(_GROUP)
HALF = tl.constexpr(_GROUP // 2)


@triton.jit
def one_row(
    x, w, scales, least, bias, out, IN, OUT,
    PACKED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out` [OUT] of one row `x` [IN], on plain arithmetic units: a matrix unit would be idle for 15 of its 16 rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < OUT
    if PACKED:
        total = tl.zeros((BLOCK_N, BLOCK_K // GROUP), tl.float32)
        j = tl.arange(0, HALF)[None, :]
        base = w + n[:, None, None].to(tl.int64) * (IN // 2) + j[None, :, :]
        for at in range(0, IN, BLOCK_K):
            g = at // GROUP + tl.arange(0, BLOCK_K // GROUP)
            inside = g < (IN // GROUP)
            some, whole = live[:, None] & inside[None, :], live[:, None, None] & inside[None, :, None]
            pair = tl.load(base + g[None, :, None] * HALF, mask=whole, other=0)
            low_x = tl.load(x + g[:, None] * GROUP + j, mask=inside[:, None], other=0.0).to(tl.float32)
            high_x = tl.load(x + g[:, None] * GROUP + HALF + j, mask=inside[:, None], other=0.0).to(tl.float32)
            step = tl.load(scales + g[None, :] * OUT + n[:, None], mask=some, other=0.0).to(tl.float32)
            start = tl.load(least + g[None, :] * OUT + n[:, None], mask=some, other=0.0).to(tl.float32)
            levels = (pair & 15).to(tl.float32) * low_x[None, :, :] + (pair >> 4).to(tl.float32) * high_x[None, :, :]
            total += step * tl.sum(levels, 2) + start * tl.sum(low_x + high_x, 1)[None, :]
        result = tl.sum(total, 1)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        base = w + n[:, None].to(tl.int64) * IN
        for at in range(0, IN, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            if EVEN:
                weight = tl.load(base + k[None, :], mask=live[:, None], other=0.0)
                row = tl.load(x + k)
            else:
                weight = tl.load(base + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
                row = tl.load(x + k, mask=k < IN, other=0.0)
            total += weight.to(tl.float32) * row.to(tl.float32)[None, :]
        result = tl.sum(total, 1) * tl.load(scales + n, mask=live, other=0.0)
    if BIAS:
        result += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def few_rows(
    x, w, scales, least, bias, out, rows, IN, OUT, x_row,
    PACKED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of `out` [rows, OUT] from `x` [rows, IN]; programs beside each other share their part of the matrix.

    `SWAPPED` computes the transpose: widened weights are then the operand that a Hopper matrix unit takes from
    registers.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, live = m < rows, n < OUT
    row_x = x + m[:, None].to(tl.int64) * x_row
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAPPED else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, IN, BLOCK_K):
        if PACKED:
            g = at // GROUP + tl.arange(0, BLOCK_K // GROUP)
            inside = g < (IN // GROUP)
            j = tl.arange(0, HALF)
            some, whole = live[:, None] & inside[None, :], live[:, None, None] & inside[None, :, None]
            place = n[:, None, None].to(tl.int64) * (IN // 2) + g[None, :, None] * HALF + j[None, None, :]
            pair = tl.load(w + place, mask=whole, other=0)
            step = tl.load(scales + g[None, :] * OUT + n[:, None], mask=some, other=0.0).to(tl.float32)[:, :, None]
            start = tl.load(least + g[None, :] * OUT + n[:, None], mask=some, other=0.0).to(tl.float32)[:, :, None]
            low = tl.reshape((pair & 15).to(tl.float32) * step + start, (BLOCK_N, BLOCK_K // 2)).to(x.dtype.element_ty)
            high = tl.reshape((pair >> 4).to(tl.float32) * step + start, (BLOCK_N, BLOCK_K // 2)).to(x.dtype.element_ty)
            b = tl.arange(0, BLOCK_K // 2)
            k = at + b // HALF * GROUP + b % HALF
            wanted = in_rows[:, None] & (k < IN)[None, :]
            low_x = tl.load(row_x + k[None, :], mask=wanted, other=0.0)
            high_x = tl.load(row_x + k[None, :] + HALF, mask=wanted, other=0.0)
            total = _added(total, low_x, low, SWAPPED)
            total = _added(total, high_x, high, SWAPPED)
        else:
            k = at + tl.arange(0, BLOCK_K)
            place = n[:, None].to(tl.int64) * IN + k[None, :]
            if EVEN:
                weight = tl.load(w + place, mask=live[:, None], other=0.0)
                part = tl.load(row_x + k[None, :], mask=in_rows[:, None], other=0.0)
            else:
                weight = tl.load(w + place, mask=live[:, None] & (k < IN)[None, :], other=0.0)
                part = tl.load(row_x + k[None, :], mask=in_rows[:, None] & (k < IN)[None, :], other=0.0)
            total = _added(total, part, weight.to(x.dtype.element_ty), SWAPPED)
    result = tl.trans(total) if SWAPPED else total
    if not PACKED:
        result *= tl.load(scales + n, mask=live, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)[None, :]
    target = out + m[:, None].to(tl.int64) * OUT + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_rows[:, None] & live[None, :])


@triton.jit
def _added(total, x, w, SWAPPED: tl.constexpr):
    """`total` with the product of `x` [rows, k] and `w` [outputs, k] added to it."""
    if SWAPPED:
        added = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        added = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return added


@triton.jit
def widen(w, scales, least, wide, IN, OUT, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """One row of the matrix in the dtype of `wide` [OUT, IN]. A program writes `BLOCK` of its numbers."""
    n = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = k < IN
    if PACKED:
        g, j = k // GROUP, k % GROUP
        pair = tl.load(w + n.to(tl.int64) * (IN // 2) + g * HALF + j % HALF, mask=live, other=0)
        level = tl.where(j < HALF, pair & 15, pair >> 4).to(tl.float32)
        step = tl.load(scales + g * OUT + n, mask=live, other=0.0).to(tl.float32)
        value = level * step + tl.load(least + g * OUT + n, mask=live, other=0.0).to(tl.float32)
    else:
        value = tl.load(w + n.to(tl.int64) * IN + k, mask=live, other=0.0).to(tl.float32) * tl.load(scales + n)
    tl.store(wide + n.to(tl.int64) * IN + k, value.to(wide.dtype.element_ty), mask=live)


@triton.jit
def round_rows(x, rounded, scales, IN, x_row, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """See rounding.fp8_rows: one row a program. `BLOCK` is at least `IN`."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + k, mask=k < IN, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / MOST, 1e-30)
    # The quotient of the largest may come out above the format's largest number, which it has no infinity for.
    shrunk = tl.minimum(tl.maximum(value / scale, -MOST), MOST)
    tl.store(rounded + row * IN + k, shrunk.to(rounded.dtype.element_ty), mask=k < IN)
    tl.store(scales + row, scale)
