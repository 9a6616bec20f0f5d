"""Products of int8 matrices with any number of rows through the library, for steps that torch runs."""

import ctypes

import torch
from torch import Tensor

from .bindings import DONE, Matrix, close_with
from .library import Library


class NativeProducts:
    """Weights stay 8 bits, a row of `x` is rounded to 15 bits or a little less, sums are exact: see NativeSteps.

    One product at a time; others wait.
    """

    def __init__(self, library: Library) -> None:
        self._functions = library.functions
        self._handle = self._functions.promptsluice_open_products()
        if not self._handle:
            raise MemoryError("no memory for native products")
        close_with(self, self._functions.promptsluice_close_products, self._handle)

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`x` float32 [rows, in] times int8 `weight` [out, in] with float32 `scales` [out], plus `bias` [out].

        `in` must be a multiple of twice the library's lanes.
        """
        outputs, inputs = weight.shape
        x = x.contiguous()
        out = torch.empty((x.shape[0], outputs), dtype=torch.float32)
        if x.shape[0] == 0:
            return out
        matrix = Matrix(
            weight=weight.data_ptr(), scales=scales.data_ptr(), bias=None if bias is None else bias.data_ptr()
        )
        outcome = self._functions.promptsluice_product(
            self._handle, ctypes.byref(matrix), x.data_ptr(), x.shape[0], inputs, outputs, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        if outcome != DONE:
            raise MemoryError("no memory for a product's rows")
        return out
