"""Forms of matrices: the float ones equal a float64 product, the 8-bit one is as near as its steps allow."""

import importlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.linear import (
    PackedLinear,
    PlainLinear,
    StreamedLinear,
    float_forms,
    packed_linear,
    streamed_linear,
)
from promptsluice.backend_engine.native import NativeProducts, Unavailable, native_library
from promptsluice.backend_engine.quant import (
    STEPS,
    STEPS_WITHOUT_VNNI,
    Int8Linear,
    Int8Table,
    check_int8,
    int8_forms,
    int8_linear,
    quantized_rows,
)
from promptsluice.prompt import ConfigError
from torch import Tensor

ROWS = [0, 1, 2, 7, 8, 33, 300]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernel is first imported, which happens below
    os.environ.setdefault("TRITON_INTERPRET", "1")
needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM kernels here"
)


def matrix(outputs: int, inputs: int, *, biased: bool) -> tuple[Tensor, Tensor | None]:
    return torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs) if biased else None


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_float_forms_are_the_product(rows: int, biased: bool) -> None:
    weight, bias = matrix(120, 72, biased=biased)
    x = torch.randn(rows, 72)
    for linear in (PlainLinear(weight, bias), packed_linear(weight, bias)):
        got = linear(x)
        assert got.dtype == torch.float32 and got.is_contiguous()
        torch.testing.assert_close(got.double(), exact(x, weight, bias), rtol=0, atol=1e-5)
        assert linear.nbytes == 120 * 72 * 4


def test_rows_that_are_not_contiguous() -> None:
    weight, bias = matrix(40, 24, biased=True)
    for x in (torch.randn(24, 6).T, torch.randn(12, 48)[::2, :24]):
        torch.testing.assert_close(packed_linear(weight, bias)(x).double(), exact(x, weight, bias), rtol=0, atol=1e-5)


def test_the_cpu_packs_what_it_has_products_for() -> None:
    weight, _ = matrix(40, 24, biased=False)
    cpu = torch.device("cpu")
    assert float_forms(torch.float64, cpu).linear is PlainLinear
    assert float_forms(torch.bfloat16, torch.device("cuda")).linear is streamed_linear
    assert float_forms(torch.float32, torch.device("cuda")).linear is PlainLinear
    assert float_forms(torch.float32, cpu, nbytes=3 << 30).linear is PlainLinear
    half = float_forms(torch.bfloat16, cpu).linear(weight.bfloat16(), None)
    packed = isinstance(half, PackedLinear) and half.single is None
    assert packed is torch.ops.mkldnn._is_mkldnn_bf16_supported(), "without them oneDNN refuses at the first product"
    x = torch.randn(3, 24).bfloat16()
    torch.testing.assert_close(half(x).double(), x.double() @ weight.bfloat16().double().T, rtol=1e-2, atol=1e-2)


@needs_fbgemm
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("steps", [STEPS] * torch.cpu._is_vnni_supported() + [STEPS_WITHOUT_VNNI])
def test_int8_is_the_product_with_the_rounded_weights(rows: int, biased: bool, steps: int) -> None:
    """Weights are off by half a step at most, and activations keep 14 bits (12 without VNNI) of a row's largest."""
    weight, bias = matrix(120, 72, biased=biased)
    x = torch.randn(rows, 72) * torch.logspace(-3, 3, rows)[:, None]
    linear = replace(int8_linear(weight, bias), steps=steps)
    rounded = linear.weight * linear.scales[:, None]
    assert ((rounded - weight).abs() <= linear.scales[:, None] / 2 * 1.001).all()
    largest = torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)
    bound = largest / steps**2 / 2 * rounded.abs().sum(1)
    got = linear(x)
    assert got.shape == (rows, 120) and got.dtype == torch.float32
    assert ((got - exact(x, rounded, bias)).abs() <= bound * 1.01 + largest * 1e-6 + 1e-6).all()


@needs_fbgemm
@pytest.mark.parametrize("biased", [False, True])
def test_int8_rows_do_not_depend_on_each_other(biased: bool) -> None:
    weight, bias = matrix(96, 64, biased=biased)
    linear, x = int8_linear(weight, bias), torch.randn(50, 64) * torch.rand(50, 1) * 100
    together = linear(x)
    for row in range(50):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@needs_fbgemm
def test_seven_bits_of_activations_do_not_overflow_without_vnni() -> None:
    """The largest sums of pairs there are; with 8 bits they would leave 16 bits on a CPU without VNNI."""
    linear = replace(int8_linear(torch.ones(16, 256), None), steps=STEPS_WITHOUT_VNNI)
    torch.testing.assert_close(linear(torch.ones(2, 256)), torch.full((2, 16), 256.0))


@pytest.mark.parametrize("rows", [0, 1, 7, 33, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_native_int8_is_the_product_with_the_rounded_weights(rows: int, biased: bool) -> None:
    """Activations keep at least 14 bits of a row's largest, and a row is the same in any company."""
    try:
        product = NativeProducts(native_library())
    except Unavailable as error:
        pytest.skip(str(error))
    weight, bias = matrix(120, 96, biased=biased)
    x = torch.randn(rows, 96) * torch.logspace(-3, 3, rows)[:, None]
    linear: Any = int8_forms(product).linear(weight, bias)
    rounded = linear.weight * linear.scales[:, None]
    largest = torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True)
    bound = largest / 2**14 / 2 * rounded.abs().sum(1)
    got = linear(x)
    assert got.shape == (rows, 120) and got.dtype == torch.float32
    assert ((got - exact(x, rounded, bias)).abs() <= bound * 1.01 + largest * 1e-6 + 1e-6).all()
    for row in range(0, rows, 11):
        assert torch.equal(linear(x[row : row + 1])[0], got[row])
    assert torch.equal(linear(torch.zeros(2, 96)), torch.zeros(2, 120) if bias is None else bias.expand(2, -1))


@pytest.mark.parametrize("place", [0, 37, 95])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_get_lost_in_native_int8(value: float, place: int) -> None:
    """As little as in float32, wherever in a row it is; other rows do not see it."""
    try:
        product = NativeProducts(native_library())
    except Unavailable as error:
        pytest.skip(str(error))
    linear: Any = int8_forms(product).linear(*matrix(120, 96, biased=False))
    x = torch.randn(3, 96)
    expected = linear(x)
    x[1, place] = value
    got = linear(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[::2], expected[::2])


@needs_fbgemm
def test_int8_of_zeros_is_zero() -> None:
    linear = int8_linear(torch.randn(16, 8), None)
    assert torch.equal(linear(torch.zeros(2, 8)), torch.zeros(2, 16))
    assert torch.equal(int8_linear(torch.zeros(16, 8), None)(torch.randn(2, 8)), torch.zeros(2, 16))


@needs_fbgemm
def test_ends_look_up_and_score_rounded_rows() -> None:
    embedding, head = torch.randn(50, 24) * torch.rand(50, 1), torch.randn(50, 24)
    ids = torch.tensor([3, 3, 49, 0])
    for given, scored in ((None, embedding), (head, head)):
        table, scoring = int8_forms().ends(embedding, given)
        assert isinstance(table, Int8Table) and isinstance(scoring, Int8Linear)
        got, step = table(ids), embedding[ids].abs().amax(1, keepdim=True) / STEPS
        assert got.dtype == torch.float32 and ((got - embedding[ids]).abs() <= step / 2 * 1.001).all()
        assert torch.equal(scoring.weight, quantized_rows(scored)[0])
        assert (table.weight.data_ptr() == scoring.weight.data_ptr()) == (given is None)


def test_int8_is_refused_where_it_cannot_run() -> None:
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.bfloat16)):
        with pytest.raises(ConfigError, match="int8"):
            check_int8(torch.device(device), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 1024), (37, 1000), (5, 1100), (5, 4864)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_by_the_kernel_is_the_product(outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Matrices that its blocks cover, and that they do not; as near as rounding the result lets it be."""
    weight, bias = matrix(outputs, inputs, biased=biased)
    weight, bias = weight.to(DEVICE, dtype), None if bias is None else bias.to(DEVICE, dtype)
    linear = StreamedLinear(weight, bias)
    x = torch.randn(1, inputs, device=DEVICE).to(dtype)
    product = importlib.import_module("promptsluice.backend_engine.one_row_triton").one_row(x, weight, bias)
    assert product.shape == (1, outputs)
    assert torch.allclose(product.double(), exact(x, weight, bias), rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert torch.allclose(linear(x.expand(9, -1))[:1].double(), product.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_one_row_with_a_matrix_of_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is read in a loop, and by how many outputs it has cut in one way or in another."""
    module = importlib.import_module("promptsluice.backend_engine.one_row_triton")
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    for outputs in (5, 6145):
        weight = matrix(outputs, 96, biased=False)[0].to(DEVICE).bfloat16()
        x = torch.randn(1, 96, device=DEVICE).bfloat16()
        assert torch.allclose(module.one_row(x, weight, None).double(), exact(x, weight, None), rtol=2**-7, atol=1e-4)


def test_a_long_matrix_of_middling_size_is_left_to_the_blas_library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("promptsluice.backend_engine.one_row_triton")
    monkeypatch.setattr(module, "one_row", None)
    weight, x = (torch.randn(size, 9000, device=DEVICE).half() for size in (3, 1))
    assert torch.allclose(StreamedLinear(weight)(x), torch.nn.functional.linear(x, weight))
    assert module.serves_one(torch.empty(2048, 9000, dtype=torch.float16, device="meta")), (
        "a large one is read in a loop"
    )


def test_a_matrix_of_other_strides_is_left_to_the_blas_library() -> None:
    weight = torch.empty(4096, 96, dtype=torch.bfloat16)
    assert type(streamed_linear(weight, None)) is StreamedLinear
    assert type(streamed_linear(weight.T, None)) is PlainLinear
