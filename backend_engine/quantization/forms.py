"""Forms of rounded matrices on a GPU. Embedding and head are int8 in all of them: fewer bits cost most there."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..linear import Forms, Linear, Table
from ..quant import quantized_rows
from .products import Fp8Linear, RoundedLinear, RoundedMatrix, RoundedTable
from .rounding import fp8_rows, int4_groups

_ROWS = 8192  # of a vocabulary that are rounded at a time, in float32


def rounded_forms(quantize: str, dtype: torch.dtype) -> Forms:
    """`quantize` is int8, int4 or fp8; `dtype` is that of activations."""

    def ends(embedding: Tensor, head: Tensor | None) -> tuple[Table, Linear]:
        table = int8_matrix(embedding)
        scoring = table if head is None else int8_matrix(head)
        return RoundedTable(table, dtype), RoundedLinear(scoring)

    return Forms(linear=_LINEARS[quantize], ends=ends)


def int8_matrix(weight: Tensor) -> RoundedMatrix:
    parts = [quantized_rows(rows) for rows in weight.split(_ROWS)]
    return RoundedMatrix(torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts]))


def _int8_linear(weight: Tensor, bias: Tensor | None) -> RoundedLinear:
    return RoundedLinear(int8_matrix(weight), bias)


def _int4_linear(weight: Tensor, bias: Tensor | None) -> RoundedLinear:
    return RoundedLinear(RoundedMatrix(*int4_groups(weight)), bias)


def _fp8_linear(weight: Tensor, bias: Tensor | None) -> Fp8Linear:
    return Fp8Linear(RoundedMatrix(*fp8_rows(weight)), bias)


_LINEARS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {
    "int8": _int8_linear,
    "int4": _int4_linear,
    "fp8": _fp8_linear,
}
