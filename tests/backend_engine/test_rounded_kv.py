"""KV in 8 bits: the rounding, the pool, the kernel that writes it, and engines: prefixes, tiers, reused spans."""

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.fused import HeadTurn, TorchOps
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.rope import LayerRopes
from promptsluice.backend_engine.rounded_kv import (
    MOST,
    RoundedBlock,
    RoundedKV,
    kv_fingerprint,
    parts,
    pool_dtype,
    rounded,
    row_bytes,
    widened,
)
from promptsluice.backend_engine.span_rows import SpanRows
from promptsluice.backend_engine.tiers.tiered import Tiers
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, KVDtype, Reuse, ReusedSpan, SamplingParams
from promptsluice.kv_reuse import repositioned
from promptsluice.prompt.errors import ConfigError
from torch import Tensor

from .driving import DEVICE, FREE_ROWS, alone, assert_idle, greedy, random_ids, tiny_engine, together
from .eager import EagerSteps

if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"
DTYPES = list(MOST)
NAMES: tuple[KVDtype, ...] = ("int8", "fp8")
IDS = random_ids(100, 11)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32", device=DEVICE)


def heads(*shape: int) -> Tensor:
    """Heads of very different magnitudes."""
    return torch.randn(shape, device=DEVICE) * torch.logspace(-3, 2, shape[-2], device=DEVICE)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 80), (5, 10)])
def test_rounding(kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    x = heads(2, 7, kv_heads, dim)
    x[0, 3] = 0.0
    rows = rounded(x, dtype)
    assert rows.shape == (2, 7, row_bytes(kv_heads, dim)) and rows.shape[-1] % 16 == 0
    numbers, scales = parts(rows, dtype, kv_heads, dim)
    torch.testing.assert_close(scales, x.abs().amax(-1).clamp_min(1e-28) / MOST[dtype], rtol=1e-6, atol=1e-30)
    error = (widened(numbers, scales) - x).abs()
    step = scales[..., None] * 1.001
    most = step / 2 if dtype == torch.int8 else torch.maximum(x.abs() * 2**-4, step * 2**-10)
    assert (error <= most).all()
    again = rounded(widened(numbers, scales), dtype)
    assert torch.equal(parts(again, dtype, kv_heads, dim)[0].float(), numbers.float()), "rounding twice is once"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_off_by_half_a_step(dtype: torch.dtype) -> None:
    """Against float64, whatever dtype it was computed in."""
    for computed in (torch.float32, torch.bfloat16):
        block = KVBlock(heads(3, 9, 4, 80).to(computed), heads(3, 9, 4, 80).to(computed))
        kept = RoundedBlock.of(block, dtype)
        assert (kept.k.dtype, kept.k.shape, kept.tokens) == (dtype, block.k.shape, 9)
        assert kept.nbytes == 2 * 3 * 9 * 4 * (80 + 4)
        for x, found in zip(block.tensors, kept.widened().tensors, strict=True):
            exact = x.double()
            largest = exact.abs().amax(-1, keepdim=True)
            most = largest / 254 if dtype == torch.int8 else torch.maximum(exact.abs() / 16, largest / 448 / 1024)
            assert ((found.double() - exact).abs() <= most * 1.001).all()
        part = kept.part(2, 6)
        assert part.tokens == 4 and part.k.data_ptr() == kept.k[:, 2:].data_ptr()
        assert torch.equal(part.widened().k, kept.widened().k[:, 2:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pool(model: LoadedModel, dtype: torch.dtype) -> None:
    spec = model.spec
    pool = KVPool(spec, pages=5, page_size=4, dtype=dtype, device=DEVICE, wide=torch.bfloat16)
    assert pool.data.nbytes == pool.slots * KVPool.bytes_per_token(spec, dtype)
    slots = torch.tensor([17, 3, 8], device=DEVICE)
    k, v = heads(2, spec.layers, 3, spec.kv_heads, spec.head_dim)
    pool.write_block(slots, KVBlock(k, v))
    expected = [widened(*parts(rounded(x, dtype), dtype, spec.kv_heads, spec.head_dim)) for x in (k, v)]
    block = pool.read(slots)
    assert block.k.dtype == torch.bfloat16
    for got, their in zip((block.k, block.v), expected, strict=True):
        assert torch.equal(got, their.bfloat16())
    assert torch.equal(pool.layer(2)[1][slots], expected[1][2])
    pool.write(1, slots[:2], k[0, :2], v[0, :2])
    assert torch.equal(pool.layer(1)[0][slots[:2]], expected[0][0, :2])
    pool.copy(4, 0, tokens=2)
    assert torch.equal(pool.read(torch.tensor([1], device=DEVICE)).v[0], block.v[0, :1])
    untouched = [slot for slot in range(20) if slot not in (0, 1, 3, 8, 17)]
    assert not pool.data[:, :, untouched].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "placed"), [(False, False), (True, False), (False, True)])
def test_the_kernels_round_as_torch_does(dtype: torch.dtype, normed: bool, placed: bool) -> None:
    rows, slots, q_heads, kv_heads, dim = 5, 11, 9, 3, 80
    qkv = heads(rows, q_heads + 2 * kv_heads, dim)
    qkv[2, q_heads:] = 0.0
    cos, sin = torch.randn(2, rows, 1, dim, device=DEVICE)
    norm = torch.randn(q_heads + kv_heads, dim, device=DEVICE) if normed else None
    turn = HeadTurn(q_heads, kv_heads, cos, sin, norm, 1e-6)
    places = torch.randperm(slots, device=DEVICE)[:rows]
    triton_ops = importlib.import_module("promptsluice.backend_engine.fused_triton").TritonOps()
    stored = []
    span = heads(2, 1, rows, kv_heads, dim)
    spans = SpanRows.readable([KVBlock(span[0], span[1])], device=qkv.device, dtype=torch.float32)
    if placed:  # a rotation is the same for both halves of a head
        sin[..., : dim // 2] = -sin[..., dim // 2 :]
        cos[..., : dim // 2] = cos[..., dim // 2 :]
    for ops in (TorchOps(), triton_ops):
        bytes_ = torch.full((2, slots, row_bytes(kv_heads, dim)), 7, dtype=torch.uint8, device=DEVICE)
        layer = [RoundedKV.of(half, dtype, kv_heads, dim) for half in bytes_]
        if placed:
            ops.placed(spans, range(1), (cos, sin), places, [(layer[0], layer[1])])
        else:
            ops.rotated_into(qkv, turn, places, *layer)
        stored.append(layer)
        others = [slot for slot in range(slots) if slot not in places.tolist()]
        assert (bytes_[:, others] == 7).all(), "slots of other rows are left alone"
    for theirs, mine in zip(*stored, strict=True):
        torch.testing.assert_close(mine.scales[places], theirs.scales[places], rtol=1e-5, atol=0)
        numbers, expected = mine.numbers[places].float(), theirs.numbers[places].float()
        # Where float32 sums end on either side of a border, the numbers beside it.
        near = torch.ones_like(expected) if dtype == torch.int8 else expected.abs() / 8 + 2**-9
        if dtype != torch.int8 and DEVICE == "cpu":
            # Triton's interpreter loses the carry of a mantissa that is rounded up to the next power of two.
            near[expected.abs().log2() % 1 == 0] = torch.inf
        assert ((numbers - expected).abs() <= near).all()
        assert (numbers == expected).float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", NAMES)
@pytest.mark.parametrize("eager", [False, True])
def test_the_same_tokens_however_they_are_batched(model: LoadedModel, kv_dtype: KVDtype, eager: bool) -> None:
    """Alone, together, in small chunks, after prefix hits, and preempted: each row sees what is stored, never more."""
    requests = [greedy(random_ids(length, length), 10) for length in (3, 17, 40, 66)]
    requests.append(greedy((*requests[3].ids[:50], 7, 8, 9), 10))
    steps = EagerSteps if eager and DEVICE == "cpu" else None
    engine = rounded_engine(model, kv_dtype, single_rows=steps)
    expected = [alone(engine, replace(request, prefix_cache=False)).tokens for request in requests]
    assert [sink.tokens for sink in together(engine, *requests)] == expected
    hits = [alone(engine, request) for request in requests]
    assert [hit.tokens for hit in hits] == expected and all(hit.result.cached_tokens for hit in hits)
    assert_idle(engine)
    small = rounded_engine(model, kv_dtype, pages=30, step_tokens=16, single_rows=steps)
    assert [sink.tokens for sink in together(small, *requests)] == expected
    assert_idle(small)


def rounded_engine(model: LoadedModel, kv_dtype: KVDtype, **options: object) -> Engine:
    settings: dict[str, object] = {"pages": 200, "step_tokens": 64, "max_running": 16, "page_size": 4} | options
    steps = settings.pop("single_rows", None)
    chosen = EngineOptions(kv_dtype=kv_dtype, stall=None, guessed_tokens=0, shared_tokens=8, **settings)
    return Engine(model, options=chosen, single_rows=steps, step_cost=FREE_ROWS)


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.05), ("fp8", 0.35)])
def test_logits_are_near_the_exact_ones(model: LoadedModel, kv_dtype: KVDtype, most: float) -> None:
    request = GenerationRequest(ids=IDS, sampling=SamplingParams(max_tokens=0), prompt_logprobs=True)
    scores = []
    for engine in (tiny_engine(model), rounded_engine(model, kv_dtype)):
        logprobs = alone(engine, request).result.prompt_logprobs
        assert logprobs is not None
        scores.append(logprobs)
    difference = (scores[0] - scores[1]).abs().mean()
    assert 0 < difference < most


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", NAMES)
def test_evicted_pages_come_back(model: LoadedModel, kv_dtype: KVDtype, tmp_path: Path) -> None:
    """Through host memory and files, in this engine and in another; never where pages are stored otherwise."""
    sizes = {"host_bytes": 1 << 20, "disk_bytes": 1 << 22, "disk_path": tmp_path}
    first, ids = rounded_engine(model, kv_dtype, **sizes), random_ids(101, 1)
    expected = alone(first, greedy(ids)).tokens
    for _ in range(2):
        first.tree.evict(first.tree.pages)
        sink = alone(first, greedy(ids))
        assert (sink.tokens, sink.result.loaded_tokens) == (expected, 100)
    assert isinstance(first.tier, Tiers) and first.tier.quiet(60.0)
    first.close()
    others: tuple[KVDtype, ...] = (kv_dtype, "auto")
    for other, loaded in zip(others, (100, 0), strict=True):
        second = rounded_engine(model, other, **sizes)
        sink = alone(second, greedy(ids))
        assert sink.result.loaded_tokens == loaded
        assert not loaded or sink.tokens == expected
        second.close()


@pytest.mark.parametrize("kv_dtype", NAMES)
def test_a_span_that_was_read_is_stored_as_it_was(model: LoadedModel, kv_dtype: KVDtype) -> None:
    engine = rounded_engine(model, kv_dtype)
    expected = alone(engine, greedy(IDS)).tokens
    kv = kept(engine, IDS)
    reuse = Reuse(spans=(ReusedSpan(7, KVBlock(kv.k[:, 7:60], kv.v[:, 7:60])),))
    output = alone(engine, replace(greedy(IDS), reuse=reuse, prefix_cache=False))
    assert (output.tokens, output.result.reused_tokens) == (expected, 53)


def kept(engine: Engine, ids: tuple[int, ...]) -> KVBlock:
    request = GenerationRequest(ids=ids, sampling=SamplingParams(max_tokens=0), keep_kv=True, prefix_cache=False)
    kv = alone(engine, request).result.kv
    assert kv is not None
    return kv


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 0.013), (torch.float8_e4m3fn, 0.038)])
def test_moving_a_chunk_costs_one_more_rounding(model: LoadedModel, dtype: torch.dtype, most: float) -> None:
    """Stored, read, rotated to another place and stored again, against exact keys at that place."""
    spec, slots = model.spec, torch.arange(40, device=DEVICE)
    k, v = torch.randn(2, spec.layers, 40, spec.kv_heads, spec.head_dim, device=DEVICE)
    pool = KVPool(spec, pages=10, page_size=4, dtype=dtype, device=DEVICE)
    ropes = LayerRopes(spec.ropes, torch.device(DEVICE))
    exact = repositioned(KVBlock(k, v), ropes, old=0, new=300)
    errors = []
    for block in (exact, repositioned(stored(pool, slots, KVBlock(k, v)), ropes, old=0, new=300)):
        got = stored(pool, slots, block)
        errors.append(float((got.k - exact.k).norm() / exact.k.norm()))
    once, twice = errors
    assert 0 < once < twice < 1.6 * once < 1.6 * most
    # On a GPU the scale may come out anew in its last bit.
    torch.testing.assert_close(stored(pool, slots, got).v, got.v, rtol=0 if DEVICE == "cpu" else 1e-6, atol=0)


def stored(pool: KVPool, slots: Tensor, block: KVBlock) -> KVBlock:
    pool.write_block(slots, block)
    return pool.read(slots)


def test_kv_of_other_bits_has_another_name() -> None:
    names = {kv_fingerprint("abc", name) for name in ("auto", *NAMES)}
    assert len(names) == 3 and kv_fingerprint("abc", "auto") == "abc"


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match="kv_dtype 'int4' is not known; known: auto, int8, fp8"):
        pool_dtype("int4", torch.float32, torch.device("cpu"))
