"""Matrices of 8-bit integers on a CPU, weight-only in effect: activations keep about 14 bits.

Weights are rounded once, symmetrically: `w[o] ~ scale[o] * q[o]` with q in -127..127. For few rows, a row of
activations becomes two rows of integers, the steps of its largest magnitude and what these leave over, and both go
through an 8-bit product, which costs hardly more than one of them. Sums of integers are exact: what a row yields does
not depend on the rows beside it. Many rows take a float32 product with the dequantized matrix. Where the engine has a
product of its own (native/products.py), that takes all rows, and nothing is packed.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..prompt.errors import ConfigError
from .linear import Forms

FEW_ROWS = 256  # with more, two 8-bit products cost more than one of float32 after dequantizing
STEPS = 127
# Without VNNI instructions the kernel adds pairs of products in 16 bits, which overflow unless activations have 7 bits.
STEPS_WITHOUT_VNNI = 63
_TINY = 1e-30  # a row of zeros must not be divided by zero


def quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out, in] as int8 [out, in] and float32 scales [out]."""
    weight = weight.float()
    scales = (weight.abs().amax(dim=1) / STEPS).clamp_min_(_TINY)
    return (weight / scales[:, None]).round_().to(torch.int8).contiguous(), scales


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A matrix with a copy packed for FBGEMM's 8-bit kernels; float32 in and out.

    A row's largest magnitude becomes `steps`.
    """

    weight: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]
    packed: Any
    bias: Tensor | None
    steps: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.scales, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > FEW_ROWS:
            return F.linear(x, self.weight.float().mul_(self.scales[:, None]), self.bias)
        largest = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).clamp_min_(_TINY)
        parts = torch.empty((2, *x.shape))
        steps = torch.div(x, largest, out=parts[0]) * self.steps
        torch.sub(steps, steps.round(), out=parts[1])
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        # Activations are unsigned there: `steps + 1` stands for zero.
        coarse, fine = product(parts.flatten(0, 1), 1 / self.steps, self.steps + 1, self.packed).chunk(2)
        rows = torch.add(coarse, fine, alpha=1 / self.steps)
        return rows.mul_(largest) if self.bias is None else torch.addcmul(self.bias, rows, largest)


class Product(Protocol):
    """`x` float32 [rows, in] times int8 `weight` [out, in] with `scales` [out], plus `bias` [out] if any."""

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NativeInt8Linear:
    """A matrix that is held once and multiplied by `product`."""

    weight: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]
    bias: Tensor | None
    product: Product

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.scales, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class Int8Table:
    """Rows of a quantized matrix, as float32."""

    weight: Tensor  # int8 [rows, hidden]
    scales: Tensor  # float32 [rows]

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.scales, None

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight[ids] * self.scales[ids, None]


def int8_linear(weight: Tensor, bias: Tensor | None) -> Int8Linear:
    """Quantize and pack a matrix; `check_int8` says where that is possible."""
    rounded, scales = quantized_rows(weight)
    steps = STEPS if torch.cpu._is_vnni_supported() else STEPS_WITHOUT_VNNI
    return Int8Linear(rounded, scales, _packed(rounded, scales), bias, steps)


def int8_forms(product: Product | None = None) -> Forms:
    """Matrices of 8 bits, multiplied by `product` or by torch's kernels."""

    def linear(weight: Tensor, bias: Tensor | None) -> Int8Linear | NativeInt8Linear:
        return (
            int8_linear(weight, bias) if product is None else NativeInt8Linear(*quantized_rows(weight), bias, product)
        )

    def ends(embedding: Tensor, head: Tensor | None) -> tuple[Int8Table, Int8Linear | NativeInt8Linear]:
        """They share memory where embeddings are tied."""
        scoring = linear(embedding if head is None else head, None)
        rows = (scoring.weight, scoring.scales) if head is None else quantized_rows(embedding)
        return Int8Table(*rows), scoring

    return Forms(linear=linear, ends=ends)


def check_int8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError where 8-bit matrices cannot run."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigError("quantize int8 needs device cpu and dtype float32 (or auto); leave quantize at none")
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("quantize int8 needs an x86 CPU (torch's FBGEMM kernels); leave quantize at none")


def _packed(weight: Tensor, scales: Tensor) -> Any:
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # torch deprecates tensors of quantized types, which only this packing still needs, for a moment.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation", category=UserWarning)
        try:
            torch.backends.quantized.engine = "fbgemm"
            tensor = torch.ops.aten._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(tensor, None)
        finally:
            torch.backends.quantized.engine = engine
