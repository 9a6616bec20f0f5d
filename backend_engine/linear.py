"""What a step's rows are multiplied by: matrices behind one interface, each in the form whose products are fastest."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows that oneDNN's blocked layout is made for. It serves other counts as well; made for one row it is slow for all.
PACKED_ROWS = 64
# Rows that our kernels for small matrices take on a GPU.
MOST_FEW_ROWS = 8
# Up to this many bytes of float32 weights are held in both layouts; of a larger model nobody expects twice its size.
BOTH_LAYOUTS_BYTES = 2 << 30


class Linear(Protocol):
    """A matrix [out, in] with or without a bias [out]. `x` is [rows, in], the result [rows, out] of x's dtype."""

    @property
    def nbytes(self) -> int:
        """Memory that a product of one row reads."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class RowMajor(Protocol):
    """A matrix, or a table, that has its weight in rows too: what native steps read."""

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weight [out, in], contiguous; float32 scales of its rows [out], if it has any; a bias [out], if any."""
        ...


class Table(Protocol):
    """The rows of a matrix by their numbers: int64 [n] to [n, hidden] in the dtype of activations."""

    def __call__(self, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Forms:
    """How matrices are held: `linear` takes a weight [out, in] and a bias [out] as they were read.

    `ends` takes the embedding and the head [vocab, hidden], None where embeddings are tied.
    """

    linear: Callable[[Tensor, Tensor | None], Linear]
    ends: Callable[[Tensor, Tensor | None], tuple[Table, Linear]]


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The matrix as it was read; the BLAS library's product."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, None, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class StreamedLinear(PlainLinear):
    """The same on a GPU, where our own kernels read the matrix faster for a few rows than the BLAS library does."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            one = import_module(".one_row_triton", __package__)
            if one.serves_one(self.weight):
                return one.one_row(x, self.weight, self.bias)
        elif 0 < x.shape[0] <= MOST_FEW_ROWS:
            few = import_module(".few_rows_triton", __package__)
            if few.serves_whole(self.weight, x.dtype):
                return few.whole(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """oneDNN's blocked copy, which saves the packing that BLAS does anew in each call; `single` serves a lone row."""

    packed: Tensor
    bias: Tensor | None = None
    single: Tensor | None = None

    @property
    def nbytes(self) -> int:
        rows, columns = self.packed.shape
        return rows * columns * self.packed.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        if self.single is not None and x.shape[0] == 1:
            return F.linear(x, self.single, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class TwofoldLinear:
    """oneDNN's blocked copy for many rows, and the matrix in rows, which native steps read."""

    packed: PackedLinear
    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, None, self.packed.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed(x)


@dataclass(frozen=True, slots=True)
class PlainTable:
    """Rows of a matrix as it was read."""

    weight: Tensor

    @property
    def row_major(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, None, None

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def streamed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The form for a GPU in 16 bits."""
    return (StreamedLinear if weight.is_contiguous() else PlainLinear)(weight, bias)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The form for a CPU. float32 keeps both layouts (twice the memory), bfloat16 the blocked one alone."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return PackedLinear(packed, bias, weight if weight.dtype == torch.float32 else None)


def twofold_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The form for a CPU whose steps of few rows are native: twice the memory, as `packed_linear` in float32."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return TwofoldLinear(PackedLinear(packed, bias), weight)


def onednn_serves(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products for a dtype on this CPU: those of bfloat16 need AVX-512 or what came after it."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def float_forms(dtype: torch.dtype, device: torch.device, *, nbytes: int = 0, native: bool = False) -> Forms:
    """The fastest forms of unquantized matrices that there are for a dtype on a device. `nbytes`: of all of them.

    `native`: whether steps of few rows read the matrices in rows.
    """
    both = nbytes <= BOTH_LAYOUTS_BYTES
    packs = dtype in (torch.float32, torch.bfloat16) if both else dtype is torch.bfloat16 and not native
    packed = packs and device.type == "cpu" and onednn_serves(dtype)
    linear = (twofold_linear if native else packed_linear) if packed else PlainLinear
    if device.type == "cuda" and dtype.itemsize == 2:
        linear = streamed_linear

    def ends(embedding: Tensor, head: Tensor | None) -> tuple[Table, Linear]:
        return PlainTable(embedding), linear(embedding if head is None else head, None)

    return Forms(linear=linear, ends=ends)
