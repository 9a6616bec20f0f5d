"""Rotation, the pool and attention of lone rows in one launch, against the same in two steps and in float64."""

import importlib
import os
import random

import pytest
import torch
from promptsluice.backend_engine.attention.base import AttentionBackend
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from promptsluice.backend_engine.fused import HeadTurn, TorchOps
from promptsluice.backend_engine.rounded_kv import RoundedKV, rounded
from torch import Tensor

PAGE, SCALE = 4, 0.17
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return importlib.import_module("promptsluice.backend_engine.attention.paged").TritonAttention()


class Step:
    """Requests of one row each, whose keys lie in pages of random order; slots that nobody may read hold NaN."""

    def __init__(
        self, counts: list[int], *, kv_heads: int, group: int, dim: int, normed: bool = False,
        dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-count // PAGE) for count in counts]
        pages = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(pages)
        parts = []
        for count, taken in zip(counts, needed, strict=True):
            parts.append(RequestRows(ids=[0], indices=[count - 1], pages=pages[:taken]))
            del pages[:taken]
        self.batch: StepBatch = build_batch(parts, page_size=PAGE, device=DEVICE)
        shape = (sum(needed) + 3) * PAGE, kv_heads, dim
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for part, count in zip(parts, counts, strict=True):
            places = torch.arange(count - 1)
            slots = torch.tensor(part.pages)[places // PAGE] * PAGE + places % PAGE
            for pool in (self.k, self.v):
                pool[slots] = torch.randn(count - 1, kv_heads, dim, generator=generator).to(dtype)
        self.k, self.v = self.k.to(DEVICE), self.v.to(DEVICE)
        heads, rows = kv_heads * group, len(counts)
        self.qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
        angle = torch.rand(rows, 1, dim // 2, generator=generator).repeat(1, 1, 2).to(DEVICE) * 6
        sine = angle.sin() * torch.cat([-torch.ones(dim // 2), torch.ones(dim // 2)]).to(DEVICE)
        norm = torch.rand(heads + kv_heads, dim, generator=generator).to(DEVICE) + 0.5 if normed else None
        self.turn = HeadTurn(heads, kv_heads, angle.cos().to(dtype), sine.to(dtype), norm, 1e-5)

    def expected(self, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """What comes out in float64, and the pool as it is left."""
        k, v = self.k.clone(), self.v.clone()
        q = TorchOps().rotated_into(self.qkv, self.turn, self.batch.slots, k, v)
        out = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
        for row, stop in enumerate(self.batch.visible.tolist()):
            places = torch.arange(0 if window is None else max(0, stop - window), stop, device=DEVICE)
            slots = self.batch.page_table[row, places // PAGE].long() * PAGE + places % PAGE
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[slots, kv_head].double() @ q[row, head].double() * SCALE
                out[row, head] = scores.softmax(0) @ v[slots, kv_head].double()
        return out, k, v

    def check(self, backend: AttentionBackend, *, window: int | None = None, tolerance: float = 3e-6) -> None:
        expected, k, v = self.expected(window)
        plan = backend.plan(self.batch, page_size=PAGE, scale=SCALE, window=window)
        got = plan.turned(self.qkv, self.turn, self.batch.slots, self.k, self.v)
        assert got is not None and got.dtype == self.qkv.dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
        for mine, reference in ((self.k, k), (self.v, v)):
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 70, 400])
@pytest.mark.parametrize("counts", [[1], [2, 65, 66, 1], [300], [64, 129, 200, 7, 1, 90, 33, 128]])
def test_lengths(backend: AttentionBackend, counts: list[int], window: int | None) -> None:
    """A row without older keys, one behind whole blocks, splits of one block and more splits than there are keys."""
    Step(counts, kv_heads=2, group=3, dim=16).check(backend, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(1, 1, 64), (2, 7, 64), (1, 3, 80), (2, 4, 96), (1, 20, 128)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(backend: AttentionBackend, kv_heads: int, group: int, dim: int, normed: bool) -> None:
    Step([75, 3], kv_heads=kv_heads, group=group, dim=dim, normed=normed).check(backend)


def test_the_largest_heads(backend: AttentionBackend) -> None:
    Step([75, 3], kv_heads=1, group=4, dim=256, normed=True, dtype=torch.float16).check(backend, tolerance=8e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_narrow_numbers(backend: AttentionBackend, dtype: torch.dtype, tolerance: float) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 tiles, not their numbers")
    Step([150, 8], kv_heads=2, group=2, dim=64, dtype=dtype).check(backend, tolerance=tolerance)


@pytest.mark.slow
def test_splits_of_several_blocks(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long contexts have them: here of a card that few programs fill."""
    module = importlib.import_module("promptsluice.backend_engine.attention.paged")
    for programs in (4, 12):  # one split, and three
        tiling = module.RowTiling(keys=64, warps=4, programs=programs)
        monkeypatch.setattr(module, "row_tiling", lambda _bytes, tiling=tiling: tiling)
        Step([500, 321], kv_heads=2, group=2, dim=16).check(backend)


def test_what_it_leaves_to_others(backend: AttentionBackend) -> None:
    """Without having touched anything: requests of more rows, many requests, rounded pools, rows that see more than
    their own key and those before, heads and groups that leave no registers."""
    one, wide = Step([9, 5], kv_heads=2, group=2, dim=16), Step([9, 5], kv_heads=1, group=1, dim=256)
    many, grouped = Step([3] * 9, kv_heads=2, group=2, dim=16), Step([9], kv_heads=1, group=33, dim=16)
    rows = build_batch([RequestRows(ids=[0] * 2, indices=[0, 1], pages=[0])], page_size=PAGE, device=DEVICE)
    ahead = RequestRows(ids=[0], indices=[3], pages=[0, 1], visible=[6], key_count=6)
    small = RoundedKV.of(rounded(torch.zeros(8, 2, 16, device=DEVICE), torch.int8), torch.int8, 2, 16)
    for step, batch, k, v in (
        (one, rows, one.k, one.v),
        (many, many.batch, many.k, many.v),
        (one, one.batch, small, small),
        (one, build_batch([ahead, ahead], page_size=PAGE, device=DEVICE), one.k, one.v),
        (wide, wide.batch, wide.k, wide.v),
        (grouped, grouped.batch, grouped.k, grouped.v),
    ):
        before = step.k.clone()
        plan = backend.plan(batch, page_size=PAGE, scale=SCALE)
        assert plan.turned(step.qkv, step.turn, batch.slots, k, v) is None
        torch.testing.assert_close(step.k, before, rtol=0, atol=0, equal_nan=True)
