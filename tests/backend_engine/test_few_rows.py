"""Products of a few rows with small matrices, against float64: odd sizes, gates, parts."""

import importlib
import os

import pytest
import torch
from promptsluice.backend_engine.fused import TorchOps
from promptsluice.backend_engine.linear import streamed_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported
    os.environ["TRITON_INTERPRET"] = "1"
# The interpreter multiplies the bits of bfloat16 tiles, not their numbers.
NARROW = [torch.float16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]

few = importlib.import_module("promptsluice.backend_engine.few_rows_triton")


def drawn(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(2, 896, 40), (8, 1024, 16), (5, 100, 33), (3, 24, 7)])
def test_whole(rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(rows, inputs, outputs, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    got = few.whole(x, weight, bias if biased else None)
    torch.testing.assert_close(got.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-4)
    through = streamed_linear(weight, bias if biased else None)(x)
    torch.testing.assert_close(through, got, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(2, 96, 46), (8, 320, 16), (4, 40, 10)])
def test_gates(rows: int, inputs: int, outputs: int, activation: str, dtype: torch.dtype) -> None:
    """Odd numbers of blocks, and of columns in the last one."""
    x, weight, bias = drawn(rows, inputs, 2 * outputs, dtype)
    product = (x.double() @ weight.double().T + bias.double()).to(dtype)
    expected = TorchOps().gated(product.float(), activation)
    got = few.whole(x, weight, bias, activation=activation)
    assert got.shape == (rows, outputs)
    torch.testing.assert_close(got.float(), expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("rows", "inputs", "outputs", "count"), [(2, 1025, 17, 2), (8, 4864, 32, 5), (3, 2048, 5, 2)])
def test_parts(rows: int, inputs: int, outputs: int, count: int, dtype: torch.dtype) -> None:
    x, weight, _ = drawn(rows, inputs, outputs, dtype)
    got = few.parts(x, weight)
    assert got.shape == (count, rows, outputs) and got.dtype == torch.float32
    torch.testing.assert_close(got.double().sum(0), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_more_rows_are_refused() -> None:
    for rows in (0, 9):
        x, weight, _ = drawn(rows, 1100, 16, torch.float16)
        with pytest.raises(AssertionError):
            few.whole(x, weight, None)
        with pytest.raises(AssertionError):
            few.parts(x, weight)


def test_what_is_served() -> None:
    """By the inputs, the bytes, the dtypes and the strides of a matrix."""
    half = torch.float16

    def served(outputs: int, inputs: int, dtype: torch.dtype = half) -> tuple[bool, bool]:
        weight = torch.empty((outputs, inputs), dtype=dtype, device="meta")
        return few.serves_whole(weight, half), few.serves_parts(weight, half)

    assert (served(9728, 896), served(896, 4864)) == ((True, False), (False, True))
    assert served(151936, 896) == (False, False), "a head, which takes long to read"
    assert served(4096, 4096) == served(896, 9000) == (False, False), "too large, too many parts"
    assert served(896, 896, torch.float32) == (False, False)
    assert not few.serves_whole(torch.empty((64, 64), dtype=half, device="meta").T, half)
    assert not few.serves_whole(torch.empty((64, 64), dtype=torch.float32, device="meta"), torch.float32)
