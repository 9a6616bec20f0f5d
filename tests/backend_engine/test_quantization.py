"""Rounded matrices and their kernels against float64, the refusals by name, and whole models with them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from promptsluice.backend_engine import KVPool
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.linear import Forms, Linear
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.quantization import Quantization, check_sizes, quantized_forms
from promptsluice.backend_engine.quantization.rounding import (
    FP8_MOST,
    GROUP,
    fp8_rows,
    int4_groups,
    int4_widened,
)
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.weights import expected_shapes, load_weights
from promptsluice.prompt.errors import ConfigError
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"
NAMES = [name for name in get_args(Quantization) if name != "none"]
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16


def room(name: str) -> ModuleType:
    return import_module(f"promptsluice.backend_engine.quantization.{name}")


def linear_of(name: str, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return room("forms").rounded_forms(name, dtype).linear(weight, bias)


def widened(name: str, matrix: Any) -> Tensor:
    """What a stored matrix stands for, by the formulas of rounding.py."""
    if name == "int4":
        return int4_widened(matrix.values, matrix.scales, matrix.least)
    return matrix.values.float() * matrix.scales[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_int4_is_nearest_of_sixteen_steps(shift: float) -> None:
    weight = torch.randn(5, 3 * GROUP) * torch.rand(5, 1) + shift
    weight[1] = 0.0
    packed, steps, least = int4_groups(weight)
    wide = int4_widened(packed, steps, least)
    assert (packed.shape, packed.dtype, steps.shape, least.shape) == ((5, 3 * GROUP // 2), torch.uint8, (3, 5), (3, 5))
    for row in range(5):
        for column in range(3 * GROUP):
            group, place = divmod(column, GROUP)
            byte = int(packed[row, group * GROUP // 2 + place % (GROUP // 2)])
            level = byte >> 4 if place >= GROUP // 2 else byte & 15
            value = level * float(steps[group, row]) + float(least[group, row])
            assert wide[row, column] == pytest.approx(value, abs=1e-6)
            nearest = min((least[group, row].float() + q * steps[group, row].float() for q in range(16)),
                          key=lambda one: abs(float(one - weight[row, column])))  # fmt: skip
            assert abs(value - float(nearest)) < 1e-5
    for row in range(5):
        for group in range(3):
            part = slice(group * GROUP, (group + 1) * GROUP)
            some = weight[row, part]
            step = (some.max() - some.min()) / 15
            plain = ((some - some.min()) / step.clamp_min(1e-30)).round() * step + some.min()
            error, naive = ((one - some).square().sum() for one in (wide[row, part], plain))
            assert error <= naive * 1.2 + some.abs().max() ** 2 * 1e-3, "the range was chosen for less error"


def test_int4_of_its_own_numbers_is_exact() -> None:
    steps, least = (torch.randn(2, 4).bfloat16() for _ in range(2))
    levels = torch.randint(0, 16, (4, 2, GROUP)).float()
    levels[..., :2] = torch.tensor([0.0, 15.0])
    weight = (levels * steps.abs().t()[..., None].float() + least.t()[..., None].float()).flatten(1)
    torch.testing.assert_close(int4_widened(*int4_groups(weight)), weight, rtol=0, atol=0.02)


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    x = torch.randn(6, 200) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0.0
    rounded, scales = fp8_rows(x)
    error = (rounded.float() * scales[:, None] - x).abs()
    # Half of the last bit; below the smallest normal number, 2^-6, half of the smallest step.
    assert (error <= x.abs() * 2**-4 + scales[:, None] * 2**-10).all()
    assert (rounded.float().abs().amax(1) == torch.tensor([FP8_MOST, FP8_MOST, 0, FP8_MOST, FP8_MOST, FP8_MOST])).all()


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 128), (70, 192), (40, 576)])
def test_products_of_few_rows(name: str, outputs: int, inputs: int, biased: bool) -> None:
    weight, bias = torch.randn(outputs, inputs, device=DEVICE), torch.randn(outputs, device=DEVICE).to(WIDE)
    bias = bias if biased else None
    matrix = linear_of(name, weight).matrix
    for dtype, most in ((torch.float32, 1e-6), (WIDE, 3e-4 if torch.float16 == WIDE else 3e-3)):
        for rows in (0, 1, 2, 9, 40, 70):
            x = torch.randn(rows, 2 * inputs, device=DEVICE).to(dtype)[:, :inputs]
            x = x if rows > 1 else x.contiguous()
            out = matrix.product(x, bias)
            expected = x.double() @ widened(name, matrix).double().t() + (0 if bias is None else bias.double())
            assert (out.shape, out.dtype) == ((rows, outputs), dtype)
            assert (out.double() - expected).norm() <= most * expected.norm(), (dtype, rows)


@pytest.mark.parametrize("room_bytes", [101376, 65536])
def test_tilings_fit_into_smaller_cards(room_bytes: int) -> None:
    """In float32, too, which takes twice the room; an H200 runs 16 bits as they were measured."""
    products = room("products")
    for packed in (False, True):
        for rows in (1, 2, 16, 17, 33, 64, 65, 256):
            for outputs in (576, 14336):
                tiling = products.tiling_of(rows, 4096, outputs, packed=packed)
                assert products.fitting(tiling, 2, 232448) == tiling
                for element_size in (2, 4):
                    fits = products.fitting(tiling, element_size, room_bytes)
                    stage = fits.block_m * element_size + fits.block_n
                    needed = fits.block_k * (fits.stages * stage + fits.block_n * element_size)
                    assert needed <= room_bytes or rows == 1, fits
                    assert fits.stages >= 2 and fits.block_k >= 64 and fits.block_m >= min(16, tiling.block_m)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_widening(name: str) -> None:
    matrix = linear_of(name, torch.randn(70, 1152, device=DEVICE)).matrix
    assert torch.equal(matrix.widened(torch.float32), widened(name, matrix))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_many_rows_are_the_same_product(name: str) -> None:
    linear = linear_of(name, torch.randn(48, 64, device=DEVICE), torch.randn(48, device=DEVICE))
    x = torch.randn(room("products").FEW_ROWS + 1, 64, device=DEVICE)
    few = linear(x[:5])
    torch.testing.assert_close(linear(x)[:5], few, rtol=1e-4, atol=1e-4)


def test_fp8_rounds_the_activations_of_many_rows() -> None:
    """torch's product of two e4m3 matrices, against the product of what they stand for."""
    weight, bias = torch.randn(48, 64, device=DEVICE), torch.randn(48, device=DEVICE).bfloat16()
    linear = linear_of("fp8", weight, bias)
    x = (torch.randn(room("products").FEW_ROWS_FP8 + 8, 64, device=DEVICE) * 3).bfloat16()
    x[1] = 0.0
    rounded, scales = room("products").rounded_rows(x)
    rows = rounded.double() * scales[:, None].double()
    expected = rows @ widened("fp8", linear.matrix).double().t() + bias.double()
    out = linear(x)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(out[1], bias)


def test_rows_are_rounded_as_in_torch() -> None:
    x = torch.randn(5, 200, device=DEVICE) * 7
    rounded, scales = room("products").rounded_rows(x)
    expected, their_scales = fp8_rows(x)
    torch.testing.assert_close(scales, their_scales)
    # Triton's interpreter loses the carry of a mantissa that is rounded up to the next power of two.
    carried = expected.float().abs().log2() % 1 == 0
    assert torch.equal(rounded.float()[~carried], expected.float()[~carried])
    assert DEVICE == "cpu" or torch.equal(rounded.float(), expected.float())


SPEC = spec_from_config({
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
})  # fmt: skip


@dataclass(frozen=True)
class Random:
    """A WeightSource of a model that is its own on every run."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, spec: ModelSpec) -> "Random":
        return cls(spec, {
            name: torch.randn(shape) * 0.2 + (len(shape) == 1) for name, shape in expected_shapes(spec).items()
        })  # fmt: skip

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_shapes(self.spec)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class Spelt:
    """A rounded matrix as a plain one: what the kernels must not differ from."""

    weight: Tensor
    bias: Tensor | None
    nbytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def spelt(name: str, forms: Forms) -> Forms:
    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        made: Any = forms.linear(weight, bias)
        return Spelt(widened(name, made.matrix), bias)

    def ends(embedding: Tensor, head: Tensor | None) -> tuple[Any, Linear]:
        table, scoring = forms.ends(embedding, head)
        made: Any = scoring
        return table, Spelt(widened("int8", made.matrix), None)

    return Forms(linear=linear, ends=ends)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_rounded_matrices(name: str, tied: bool) -> None:
    """A prefill of few rows, with biases: the logits of the same model whose rounded matrices are spelt out."""
    spec = replace(SPEC, tied=tied)
    source, forms = Random.of(spec), room("forms").rounded_forms(name, torch.float32)
    part = RequestRows(ids=range(9), indices=range(9), pages=[0], logits=range(9))
    logits = []
    for some in (forms, spelt(name, forms)):
        weights = load_weights(source, spec, dtype=torch.float32, device=DEVICE, forms=some)
        decoder = Decoder(spec, weights)
        batch = build_batch([part], page_size=16, device=DEVICE)
        logits.append(decoder.logits(decoder.forward(batch, KVPool(spec, pages=1, device=DEVICE)).hidden))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_what_cannot_run_is_named() -> None:
    cpu = torch.device("cpu")
    assert quantized_forms("none", SPEC, dtype=torch.float32, device=cpu) is None
    for name, dtype, device, words in (
        ("int4", torch.float32, "cpu", "int4 needs a GPU.*use int8"),
        ("fp8", torch.float32, "cpu", "fp8 needs a GPU.*use int8"),
        ("int8", torch.bfloat16, "cpu", "int8 needs device cpu and dtype float32"),
        ("int5", torch.float32, "cpu", "'int5' is not known; known: none, int8, int4, fp8"),
        ("int8", torch.float32, "cuda", "needs dtype bfloat16 or float16, not float32"),
        ("fp8", torch.float16, "cuda", "needs dtype bfloat16, not float16"),
    ):
        unchecked: Any = name
        with pytest.raises(ConfigError, match=words):
            quantized_forms(unchecked, SPEC, dtype=dtype, device=torch.device(device))


def test_sizes_that_do_not_fit_are_named() -> None:
    check_sizes("int4", SPEC)
    with pytest.raises(ConfigError, match="feed-forward size is 200, no multiple of 32"):
        check_sizes("int4", replace(SPEC, ffn=200))
    with pytest.raises(ConfigError, match="hidden size is 100, no multiple of 16"):
        check_sizes("fp8", replace(SPEC, hidden=100))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28672, 4096), (4096, 14336), (1152, 896), (131, 4864)])
def test_products_on_a_card(name: str, outputs: int, inputs: int) -> None:
    """Every tiling that rows choose, and what many rows take, in bfloat16."""
    weight = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * 0.02
    linear = linear_of(name, weight[: outputs // 16 * 16] if name == "fp8" else weight)
    wide = widened(name, linear.matrix).double()
    for rows in (1, 2, 8, 16, 17, 32, 48, 64, 100, 256, 300, 1024):
        x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        error = (linear(x).double() - x.double() @ wide.t()).norm() / (x.double() @ wide.t()).norm()
        rounded = name == "fp8" and rows > room("products").FEW_ROWS_FP8
        assert error < (0.05 if rounded else 5e-3), (rows, float(error))
