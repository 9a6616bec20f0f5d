"""The element-wise kernels against the same arithmetic in torch: random sizes, strides of a larger pool, head norms."""

import importlib
import os

import pytest
import torch
from promptsluice.backend_engine.fused import FusedOps, TorchOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def triton_ops() -> FusedOps:
    return importlib.import_module("promptsluice.backend_engine.fused_triton").TritonOps()


def close(mine: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 96), (5, 576), (3, 1000), (0, 96)])
def test_add_norm(triton_ops: FusedOps, rows: int, hidden: int) -> None:
    x, residual = torch.randn(2, rows, hidden, device=DEVICE)
    weight = torch.randn(hidden, device=DEVICE)
    expected = TorchOps().add_norm(x, residual.clone(), weight, 1e-5)
    for mine, reference in zip(triton_ops.add_norm(x, residual.clone(), weight, 1e-5), expected, strict=True):
        close(mine, reference)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (9, 3, 64), (4, 4, 80)])
def test_rotated_into(triton_ops: FusedOps, heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    rows, slots = 5, 11
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=DEVICE)
    cos, sin = torch.randn(2, rows, 1, dim, device=DEVICE)
    norm = (torch.randn(heads + kv_heads, dim, device=DEVICE), 1e-6) if normed else None
    places = torch.randperm(slots, device=DEVICE)[:rows]
    pools = [torch.full((2, slots, kv_heads, dim), 7.0, device=DEVICE) for _ in range(2)]
    expected = TorchOps().rotated_into(qkv, (heads, kv_heads), norm, cos, sin, places, *pools[0])
    close(triton_ops.rotated_into(qkv, (heads, kv_heads), norm, cos, sin, places, *pools[1]), expected)
    close(pools[1], pools[0])
    assert (pools[1] == 7.0).all(-1).any(), "slots of other rows are left alone"


@pytest.mark.parametrize(("rows", "ffn"), [(1, 128), (4, 1536), (2, 1025)])
def test_silu_mul(triton_ops: FusedOps, rows: int, ffn: int) -> None:
    gate_up = torch.randn(rows, 2 * ffn, device=DEVICE)
    close(triton_ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up))
