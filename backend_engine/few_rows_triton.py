# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""Products of a few rows with small matrices, as Triton kernels: what a step of a small model with few requests is.

Such a product takes a few microseconds, as long as the BLAS library takes to begin and to end. Here each program
reads its part of the matrix at once, before the rows are there, and one warp multiplies one slice of the inputs.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early import launch_options, let_next_begin, wait_for_last
from .launch_sizes import cdiv, next_power_of_2
from .linear import MOST_FEW_ROWS
from .one_row_triton import activated

_WHOLE = 1024  # inputs that one program reads
_MOST_PARTS = 8  # that a sum of parts is worth; the 4,864 inputs that were measured are five
_MOST_BYTES = 32 << 20  # beyond, reading the matrix takes so long that the BLAS library loses nothing
_WARPS = 4  # the fastest on an H200, by far: more of them wait for each other, fewer have too few bytes on their way
_COLUMNS = 16  # outputs of a program, or gates and ups together: of the least size that a matrix unit takes


def serves_whole(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `whole` takes a matrix for rows of a dtype."""
    return weight.shape[1] <= _WHOLE and _serves(weight, dtype)


def serves_parts(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `parts` takes a matrix for rows of a dtype."""
    return _WHOLE < weight.shape[1] <= _WHOLE * _MOST_PARTS and _serves(weight, dtype)


def _serves(weight: Tensor, dtype: torch.dtype) -> bool:
    narrow = dtype.itemsize == 2 and weight.dtype == dtype
    return narrow and weight.nbytes < _MOST_BYTES and weight.is_contiguous()


def whole(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None = None) -> Tensor:
    """`x` [rows, in] times `weight` [out, in], plus `bias` [out]: [rows, out], or, gated, [rows, out / 2].

    Sums are float32; what a gate reads is rounded as if it had been stored.
    """
    rows, inputs = x.shape
    assert 0 < rows <= MOST_FEW_ROWS, rows
    gated = activation is not None
    outputs = weight.shape[0] // (1 + gated)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    columns = _COLUMNS // (1 + gated)
    blocks = cdiv(outputs, columns)
    constants: dict[str, Any] = {
        "BIAS": bias is not None,
        "GATED": gated,
        "SILU": activation == "silu",
        "COLUMNS": columns,
        "BLOCKS": 1 + gated,  # of gates and ups, which are many, two blocks a program are faster
        **_slices(inputs, x.device),
    }
    _whole[(cdiv(blocks, 1 + gated),)](
        x.contiguous(), weight, weight if bias is None else bias, out, rows, inputs, outputs, **constants
    )
    return out


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """Float32 [parts, rows, out], whose sum over the first axis is `x` [rows, in] times `weight` [out, in]."""
    rows, inputs = x.shape
    assert 0 < rows <= MOST_FEW_ROWS, rows
    outputs, count = weight.shape[0], cdiv(inputs, _WHOLE)
    out = torch.empty((count, rows, outputs), dtype=torch.float32, device=x.device)
    constants: dict[str, Any] = {"COLUMNS": _COLUMNS, **_slices(_WHOLE, x.device)}
    _part[(cdiv(outputs, _COLUMNS), count)](x.contiguous(), weight, out, rows, inputs, outputs, **constants)
    return out


def _slices(inputs: int, device: torch.device) -> dict[str, Any]:
    return {
        "ROWS": MOST_FEW_ROWS,
        "SLICES": _WARPS,
        "SLICE": max(16, next_power_of_2(inputs) // _WARPS),
        "num_warps": _WARPS,
        **launch_options(device),
    }


@triton.jit
def _whole(
    x, w, bias, out, rows, IN, OUT,
    BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some blocks of outputs, all inputs. A block with gates has their columns first, then those they multiply."""
    let_next_begin(EARLY)
    TILE: tl.constexpr = COLUMNS * 2 if GATED else COLUMNS
    k = tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, TILE) % COLUMNS
    ahead = tl.where(tl.arange(0, TILE) < COLUMNS, 0, OUT)  # where the block's columns lie in the matrix
    step = tl.num_programs(0) * COLUMNS
    tile = _tile(w, column, ahead, k, IN, OUT)
    wait_for_last(EARLY)
    row = tl.arange(0, ROWS)[None, :, None]
    taken = tl.trans(tl.load(x + row * IN + k, mask=(row < rows) & (k < IN), other=0.0), 0, 2, 1)
    _put(tile, taken, bias, out, column, ahead, rows, OUT, BIAS, GATED, SILU, COLUMNS, ROWS)
    for block in tl.range(1, BLOCKS, num_stages=2):
        at = column + block * step
        tile = _tile(w, at, ahead, k, IN, OUT)
        _put(tile, taken, bias, out, at, ahead, rows, OUT, BIAS, GATED, SILU, COLUMNS, ROWS)


@triton.jit
def _tile(w, column, ahead, k, IN, OUT):
    line = (column + ahead).to(tl.int64)[None, :, None] * IN
    return tl.load(w + line + k, mask=(column < OUT)[None, :, None] & (k < IN), other=0.0)


@triton.jit
def _put(
    tile, taken, bias, out, column, ahead, rows, OUT,
    BIAS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The outputs of one block: `tile` [slices, columns, slice] times `taken` [slices, slice, rows], summed up."""
    result = tl.sum(tl.dot(tile, taken), 0)
    if BIAS:
        result += tl.load(bias + column + ahead, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (2, COLUMNS, ROWS)), (1, 2, 0)))
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        result = activated(gate, SILU) * up.to(out.dtype.element_ty).to(tl.float32)
        column, _ = tl.split(tl.permute(tl.reshape(column, (2, COLUMNS)), (1, 0)))
    row = tl.arange(0, ROWS)[None, :]
    wanted = (row < rows) & (column < OUT)[:, None]
    tl.store(out + row * OUT + column[:, None], result.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _part(
    x, w, out, rows, IN, OUT,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of outputs, one part of the inputs."""
    let_next_begin(EARLY)
    part = tl.program_id(1)
    k = (part * SLICES + tl.arange(0, SLICES)[:, None, None]) * SLICE + tl.arange(0, SLICE)[None, None, :]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = _tile(w, column, tl.zeros_like(column), k, IN, OUT)
    wait_for_last(EARLY)
    row = tl.arange(0, ROWS)[None, :, None]
    taken = tl.load(x + row * IN + k, mask=(row < rows) & (k < IN), other=0.0)
    result = tl.sum(tl.dot(tile, tl.trans(taken, 0, 2, 1)), 0)
    row = tl.arange(0, ROWS)[None, :]
    wanted = (row < rows) & (column < OUT)[:, None]
    tl.store(out + (part * rows + row) * OUT + column[:, None], result, mask=wanted)
