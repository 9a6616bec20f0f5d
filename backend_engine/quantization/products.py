"""Products with rounded matrices on a GPU: few rows through our kernels, many through the BLAS library's.

Few rows are bound by reading the matrix, which is why it is read as it is stored. Many are bound by arithmetic: the
matrix is widened once, or, of fp8, the rows are rounded too and both go through the card's 8-bit matrix units.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch_sizes import cdiv, next_power_of_2
from .kernels import few_rows, one_row, round_rows, widen
from .rounding import FP8, FP8_MOST, GROUP

# Rows up to which the matrix is read in its few bits; beyond, widening it first costs less than it saves.
FEW_ROWS = 256
# fp8 needs no widening, so its other path begins earlier. Up to here rows of activations keep all their bits.
FEW_ROWS_FP8 = 32
_WIDE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: rows, outputs and inputs of a program, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix [out, in] as it is stored.

    `values` is int8 or e4m3 [out, in] with float32 `scales` [out], or what `rounding.int4_groups` gives, with `least`.
    """

    values: Tensor
    scales: Tensor
    least: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns if self.least is None else 2 * columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.least is None else self.least.nbytes)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix in `dtype`."""
        out, inputs = self.shape
        wide = torch.empty((out, inputs), dtype=dtype, device=self.values.device)
        constants: dict[str, Any] = {"PACKED": self.least is not None, "BLOCK": _WIDE_BLOCK, "num_warps": 4}
        widen[(out, cdiv(inputs, _WIDE_BLOCK))](self.values, self.scales, self._least, wide, inputs, out, **constants)
        return wide

    def product(self, x: Tensor, bias: Tensor | None, tiling: Tiling | None = None) -> Tensor:
        """`x` [rows, in] times the matrix, [rows, out], reading it in its few bits."""
        (rows, inputs), out_columns = x.shape, self.shape[0]
        if tiling is None:
            measured = tiling_of(rows, inputs, out_columns, packed=self.least is not None)
            tiling = fitting(measured, x.element_size(), shared_bytes(x.device))
        out = torch.empty((rows, out_columns), dtype=x.dtype, device=x.device)
        constants: dict[str, Any] = {
            "PACKED": self.least is not None,
            "BIAS": bias is not None,
            "EVEN": inputs % tiling.block_k == 0,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": tiling.block_k,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        matrix = (self.values, self.scales, self._least, self.scales if bias is None else bias)
        tiles = cdiv(out_columns, tiling.block_n)
        if rows == 1 and tiling.block_m == 1:
            one_row[(tiles,)](x, *matrix, out, inputs, out_columns, **constants)
        elif rows:
            constants |= {"BLOCK_M": tiling.block_m, "SWAPPED": tiling.swapped}
            few_rows[(cdiv(rows, tiling.block_m), tiles)](
                x, *matrix, out, rows, inputs, out_columns, x.stride(0), **constants
            )
        return out

    @property
    def _least(self) -> Tensor:
        """A kernel takes a tensor even where it reads none."""
        return self.scales if self.least is None else self.least


def tiling_of(rows: int, inputs: int, outputs: int, *, packed: bool) -> Tiling:
    """How a product is cut; a matrix of few outputs is cut finer, to keep the card busy."""
    wide = outputs >= 8192
    chosen = _wide(rows, packed=packed) if wide else _narrow(rows, packed=packed)
    return replace(chosen, block_k=min(chosen.block_k, _padded(inputs)))


def _wide(rows: int, *, packed: bool) -> Tiling:
    if rows == 1:
        return Tiling(1, 4, 2048, 4, 2) if packed else Tiling(1, 4, 512, 2, 2)
    if rows <= 16:
        return Tiling(16, 64, 128, 4, 3)
    if rows <= 32:
        return Tiling(32, 128, 128, 4, 3)
    if rows <= 64:
        return Tiling(64, 128, 64, 4, 4, swapped=True) if packed else Tiling(64, 128, 128, 4, 3)
    return Tiling(128, 128, 64, 4, 4, swapped=packed)


def _narrow(rows: int, *, packed: bool) -> Tiling:
    if rows == 1:
        return Tiling(1, 4, 512 if packed else 1024, 4, 2)
    if rows <= 16:
        return Tiling(16, 32, 256, 4, 4)
    if rows <= 32:
        return Tiling(32, 64, 128, 4, 5) if packed else Tiling(32, 32, 256, 4, 3)
    if packed:
        return Tiling(64, 64, 128, 4, 4, swapped=True)
    return Tiling(64, 64, 64, 4, 4, swapped=True) if rows <= 64 else Tiling(128, 64, 128, 4, 4, swapped=True)


def fitting(tiling: Tiling, element_size: int, room: int) -> Tiling:
    """The tiling with as few stages, inputs and rows at once as a program's `room` of shared memory [bytes] asks for.

    Tilings were chosen on an H200 with activations of 16 bits: float32 takes more room, and other cards have less.
    """
    while _shared(tiling, element_size) > room:
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        elif tiling.block_k > 2 * GROUP:
            tiling = replace(tiling, block_k=tiling.block_k // 2)
        elif tiling.block_m > 16:
            tiling = replace(tiling, block_m=tiling.block_m // 2)
        else:
            break
    return tiling


def _shared(tiling: Tiling, element_size: int) -> int:
    """Bytes of shared memory: each stage's inputs of both operands, and the weights of one as they are multiplied."""
    if tiling.block_m == 1:
        return 0
    stage = tiling.block_m * element_size + tiling.block_n
    return tiling.block_k * (tiling.stages * stage + tiling.block_n * element_size)


@cache
def shared_bytes(device: torch.device) -> int:
    """What a program may have of a card's shared memory."""
    if device.type != "cuda":
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _padded(inputs: int) -> int:
    return max(2 * GROUP, next_power_of_2(inputs))


@dataclass(frozen=True, slots=True)
class RoundedLinear:
    """See linear.Linear: weight-only int8 or int4, activations as they are."""

    matrix: RoundedMatrix
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS:
            return self.matrix.product(x, self.bias)
        return F.linear(x, self.matrix.widened(x.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """See linear.Linear: e4m3 weights; steps of more than FEW_ROWS_FP8 rows round their activations too, row by row."""

    matrix: RoundedMatrix
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS_FP8:
            return self.matrix.product(x, self.bias)
        rounded, scales = rounded_rows(x)
        out = torch.ops.aten._scaled_mm(
            rounded,
            self.matrix.values.t(),
            scale_a=scales[:, None],
            scale_b=self.matrix.scales[None, :],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class RoundedTable:
    """See linear.Table: rows of an int8 matrix in `dtype`."""

    matrix: RoundedMatrix
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return (self.matrix.values[ids] * self.matrix.scales[ids, None]).to(self.dtype)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rounding.fp8_rows` in one launch."""
    rows, columns = x.shape
    rounded = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(columns)
    constants: dict[str, Any] = {"MOST": FP8_MOST, "BLOCK": block, "num_warps": min(16, max(4, block // 1024))}
    round_rows[(rows,)](x, rounded, scales, columns, x.stride(0), **constants)
    return rounded, scales
