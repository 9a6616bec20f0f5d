"""The element-wise kernels against the same arithmetic in torch: random sizes, strides of a larger pool, head norms."""

import importlib
import os

import pytest
import torch
from promptsluice.backend_engine.fused import FusedOps, HeadTurn, Joint, TorchOps
from promptsluice.backend_engine.linear import Linear, PlainLinear
from promptsluice.backend_engine.native import NativeOps, NativePrefill, Unavailable, native_library
from promptsluice.backend_engine.probe import Probe
from promptsluice.backend_engine.rounded_kv import RoundedBlock, RoundedKV, Stored
from promptsluice.backend_engine.rounded_kv import rounded as in_rows
from promptsluice.backend_engine.span_rows import SpanRows
from promptsluice.backend_engine.types import KVBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def triton_ops() -> FusedOps:
    return importlib.import_module("promptsluice.backend_engine.fused_triton").TritonOps()


@pytest.fixture(scope="module", params=["triton", "native"])
def any_ops(request: pytest.FixtureRequest, triton_ops: FusedOps) -> FusedOps:
    if request.param == "triton":
        return triton_ops
    if DEVICE == "cuda":
        pytest.skip("native operations are a CPU's")
    try:
        return NativeOps(NativePrefill(native_library()))
    except Unavailable as error:
        pytest.skip(str(error))


def close(mine: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 96), (5, 576), (3, 1000), (0, 96)])
def test_add_norm(any_ops: FusedOps, rows: int, hidden: int, sandwich: bool) -> None:
    x, residual = torch.randn(2, rows, hidden, device=DEVICE)
    weight, other = torch.randn(2, hidden, device=DEVICE)
    first = other if sandwich else None
    expected = TorchOps().add_norm(x, residual.clone(), weight, 1e-5, first=first)
    got = any_ops.add_norm(x, residual.clone(), weight, 1e-5, first=first)
    for mine, reference in zip(got, expected, strict=True):
        close(mine, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_with_float32_weights_round_once(triton_ops: FusedOps, dtype: torch.dtype) -> None:
    """Weights like these are 1 in bfloat16; the norms see what they add. One more rounding would show."""
    x, residual = torch.randn(2, 7, 96, device=DEVICE).to(dtype)
    weight, first = 1.0 + torch.randn(2, 96, device=DEVICE) * 1e-3
    cut = 1.01 if DEVICE == "cpu" else 0.51  # Triton's interpreter cuts bfloat16 off instead of rounding it
    for ops, most in ((triton_ops, cut), (TorchOps(), 0.51)):
        normed, total = ops.add_norm(x, residual.clone(), weight, 1e-6, first=first)
        assert (normed.dtype, total.dtype) == (dtype, dtype)
        added = (rms(x.double()) * first.double()).to(dtype)
        torch.testing.assert_close(total, residual + added, rtol=0, atol=4 * torch.finfo(dtype).eps)
        expected = rms(total.double()) * weight.double()
        error = (normed.double() - expected).abs() / expected.abs().clamp_min(1e-3)
        assert error.max() <= torch.finfo(dtype).eps * most, error.max()


def joint(
    before: Linear,
    weight: torch.Tensor,
    after: Linear,
    first: torch.Tensor | None = None,
    activation: str | None = None,
) -> Joint:
    return Joint(before=before, first=first, weight=weight, eps=1e-5, after=after, activation=activation)


def random_linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> PlainLinear:
    return PlainLinear((torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype))


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("hidden", "outputs", "biased"),
    [(96, 10, False), (576, 6, True), pytest.param(1000, 4098, False, marks=pytest.mark.slow)],
)
def test_joint_of_one_row(
    triton_ops: FusedOps, hidden: int, outputs: int, biased: bool, activation: str | None, sandwich: bool
) -> None:
    x, residual = torch.randn(1, 40, device=DEVICE), torch.randn(1, hidden, device=DEVICE)
    weight, other = torch.randn(2, hidden, device=DEVICE)
    bias = torch.randn(outputs, device=DEVICE) if biased else None
    after = PlainLinear(torch.randn(outputs, hidden, device=DEVICE) / hidden**0.5, bias)
    between = joint(random_linear(hidden, 40), weight, after, other if sandwich else None, activation)
    expected = TorchOps().joined(x, residual.clone(), between)
    before = residual.clone()
    got = triton_ops.joined(x, residual, between)
    assert torch.equal(residual, before), "every program reads it, whichever comes last"
    assert got[0].shape == (1, outputs // (2 if activation else 1))
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_joint_of_one_row_rounds_as_its_steps_do(triton_ops: FusedOps, dtype: torch.dtype) -> None:
    """With float32 weights of the norm, too; only the product's sums may be added up in another order."""
    x, residual = torch.randn(2, 1, 320, device=DEVICE).to(dtype)
    weight = 1.0 + torch.randn(320, device=DEVICE) * 1e-3
    first, linear = random_linear(320, 320, dtype), random_linear(24, 320, dtype)
    normed, total = triton_ops.add_norm(first(x), residual.clone(), weight, 1e-5)
    product, other_total = triton_ops.joined(x, residual, joint(first, weight, linear))
    assert torch.equal(total, other_total)
    exact = normed.double() @ linear.weight.double().T
    torch.testing.assert_close(product.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("rows", "inputs", "hidden"), [(2, 1100, 96), (8, 96, 320), (5, 2100, 1200), (9, 1100, 96)])
def test_joint_of_few_rows(
    triton_ops: FusedOps, rows: int, inputs: int, hidden: int, activation: str | None, sandwich: bool
) -> None:
    """A sum of parts or a whole product before, a gated one behind; more rows and inputs than the kernels take."""
    dtype = torch.float16
    x, residual = (torch.randn(rows, size, device=DEVICE).to(dtype) for size in (inputs, hidden))
    weight, other = 1 + 0.1 * torch.randn(2, hidden, device=DEVICE)
    between = joint(
        random_linear(hidden, inputs, dtype), weight, random_linear(44, hidden, dtype), other if sandwich else None,
        activation,
    )  # fmt: skip
    expected = TorchOps().joined(x, residual.clone(), between)
    for mine, reference in zip(triton_ops.joined(x, residual.clone(), between), expected, strict=True):
        assert mine.shape == reference.shape and mine.dtype == reference.dtype
        torch.testing.assert_close(mine, reference, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("what", ["rows", "inputs", "strides", "dtype", "form"])
@pytest.mark.parametrize("rows", [1, 2])
def test_joint_of_what_the_kernels_do_not_take(
    triton_ops: FusedOps, rows: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that they would take but for one thing."""

    def refused(*_args: object, **_fields: object) -> None:
        raise AssertionError("the kernel was given what it does not take")

    module, dtype = importlib.import_module("promptsluice.backend_engine.fused_triton"), torch.float16
    for name in ("normed_row", "parts", "whole"):
        monkeypatch.setattr(module, name, refused)
    rows, inputs = 9 if what == "rows" else rows, 1100 if what == "inputs" else 96
    matrix = random_linear(8, inputs, dtype).weight
    if what == "strides":
        matrix = matrix.T.contiguous().T
    x, residual = torch.randn(rows, 40, device=DEVICE).to(dtype), torch.randn(rows, inputs, device=DEVICE).to(dtype)
    weight, before = torch.randn(inputs, device=DEVICE).to(dtype), random_linear(inputs, 40, dtype)
    linear: Linear = PlainLinear(matrix)
    if what == "dtype":
        linear = Widened(matrix.double())
    elif what == "form":
        linear = Wrapped(linear)
    expected = TorchOps().joined(x, residual.clone(), joint(before, weight, PlainLinear(matrix), activation="silu"))
    got = triton_ops.joined(x, residual.clone(), joint(before, weight, linear, activation="silu"))
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-2, atol=1e-2)


class Wrapped:
    """A form of a matrix that has a product of its own."""

    def __init__(self, inner: PlainLinear) -> None:
        self.nbytes, self._inner = inner.nbytes, inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x)


class Widened(PlainLinear):
    """A matrix of another dtype than its rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.double() @ self.weight.T).to(x.dtype)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 80)])
def test_rotated_into(any_ops: FusedOps, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    rows, slots = 5, 11
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=DEVICE)
    cos, sin = torch.randn(2, rows, 1, dim, device=DEVICE)
    norm = torch.randn(heads + kv_heads, dim, device=DEVICE) if normed else None
    turn = HeadTurn(heads, kv_heads, cos, sin, norm, 1e-6)
    places = torch.randperm(slots, device=DEVICE)[:rows]
    pools = [torch.full((2, slots, kv_heads, dim), 7.0, device=DEVICE) for _ in range(2)]
    expected = TorchOps().rotated_into(qkv, turn, places, *pools[0])
    close(any_ops.rotated_into(qkv, turn, places, *pools[1]), expected)
    close(pools[1], pools[0])
    assert (pools[1] == 7.0).all(-1).any(), "slots of other rows are left alone"


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (9, 64), (4, 80)])
def test_placed(triton_ops: FusedOps, heads: int, dim: int) -> None:
    """Blocks of any length lie anywhere: strided, on the device or in pinned memory of the host."""
    layers, slots = 3, 300
    k, v = torch.randn(2, layers, 131, heads, dim).to(DEVICE)
    pinned = [torch.randn(layers, 70, heads, dim) for _ in range(2)]
    if DEVICE == "cuda":
        pinned = [part.pin_memory() for part in pinned]
    both = torch.randn(layers, 2, 9, heads, dim)
    blocks = KVBlock(k[:, :100], v[:, :100]), KVBlock(pinned[0], pinned[1]), KVBlock(both[:, 0], both[:, 1])
    rows = SpanRows.readable(blocks, device=k.device, dtype=torch.float32)
    turn = cos, sin = torch.randn(2, 179, 1, dim, device=DEVICE)
    sin[..., : dim // 2] = -sin[..., dim // 2 :]
    cos[..., : dim // 2] = cos[..., dim // 2 :]
    places = torch.randperm(slots, device=DEVICE)[:179]
    for layer in range(layers):
        pools = [torch.full((2, slots, heads, dim), 7.0, device=DEVICE) for _ in range(2)]
        for ops, pool in zip((TorchOps(), triton_ops), pools, strict=True):
            ops.placed(rows, range(layer, layer + 1), (turn[0], turn[1]), places, [(pool[0], pool[1])])
        close(pools[1], pools[0])
        stored = torch.cat([block.v[layer].to(DEVICE) for block in blocks])
        assert torch.equal(pools[1][1, places], stored) and (pools[1] == 7.0).all(-1).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (9, 64), (4, 80)])
def test_placed_from_8_bits(triton_ops: FusedOps, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Numbers and scales of each row and head, strided or in pinned memory, become what they stand for."""
    layers, slots, tokens = 3, 300, (90, 43)
    wide = [KVBlock(*(torch.randn(2, layers, count, heads, dim).to(DEVICE) * 7)) for count in tokens]
    blocks = [RoundedBlock.of(wide[0], dtype).part(5, 80), RoundedBlock.of(wide[1], dtype).mapped(in_host_memory)]
    rows = SpanRows.readable(blocks, device=torch.device(DEVICE), dtype=torch.float32)
    assert rows.rounded and rows.dtype == dtype
    angle = torch.randn(118, 1, dim // 2, device=DEVICE)
    turn = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    places = torch.randperm(slots, device=DEVICE)[:118]
    pools = [torch.full((layers, 2, slots, heads, dim), 7.0, device=DEVICE) for _ in range(2)]
    for ops, pool in zip((TorchOps(), triton_ops), pools, strict=True):
        for together in (range(1), range(1, layers)):  # one layer, and two that one kernel reads
            ops.placed(rows, together, turn, places.int(), [(pool[layer, 0], pool[layer, 1]) for layer in together])
    close(pools[1], pools[0])
    stored = torch.cat([block.widened().v.to(DEVICE) for block in blocks], dim=1)
    assert torch.equal(pools[1][:, 1, places], stored) and (pools[1] == 7.0).all(-1).any()


def in_host_memory(part: torch.Tensor) -> torch.Tensor:
    return part.cpu().pin_memory() if DEVICE == "cuda" else part.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rounded", [None, torch.int8])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "kv_heads", "dim"), [(3, 5, 4, 4, 16), (32, 333, 6, 2, 80), (9, 2200, 14, 1, 64)]
)
def test_looked(
    triton_ops: FusedOps, rows: int, keys: int, heads: int, kv_heads: int, dim: int,
    rounded: torch.dtype | None, window: int | None,
) -> None:  # fmt: skip
    """Some of a step's rows, keys anywhere, windows that hold some of them or none; what was there is added to."""
    q, k = torch.randn(40, heads, dim, device=DEVICE), torch.randn(keys + 9, kv_heads, dim, device=DEVICE)
    stored: Stored = k
    if rounded is not None:
        stored = RoundedKV.of(in_rows(k, rounded), rounded, kv_heads, dim)
    visible = torch.arange(keys + 1, keys + 41, dtype=torch.int32, device=DEVICE)
    slots, chosen = torch.randperm(keys + 9, device=DEVICE)[:keys], torch.randperm(40, device=DEVICE)[:rows]
    probes = [
        Probe(rows=chosen, slots=slots, depth=0.0, attention=torch.full((keys,), 0.5, device=DEVICE)) for _ in range(2)
    ]
    for probe, ops in zip(probes, (TorchOps(), triton_ops), strict=True):
        ops.looked(probe, q, stored, visible, scale=0.3, window=window)
    close(probes[1].attention, probes[0].attention)
    looking = rows if window is None else int((visible[chosen] - window < keys).sum())
    assert probes[1].attention.sum().item() == pytest.approx(0.5 * keys + looking * heads, rel=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "ffn"), [(1, 128), (4, 1536), (2, 1025)])
def test_gated(any_ops: FusedOps, rows: int, ffn: int, activation: str) -> None:
    gate_up = torch.randn(rows, 2 * ffn, device=DEVICE) * 1.5
    close(any_ops.gated(gate_up, activation), TorchOps().gated(gate_up, activation))
