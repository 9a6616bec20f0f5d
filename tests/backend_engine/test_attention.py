"""The attention primitive against plain float64 arithmetic: random page tables, visible counts, windows, any rows."""

import importlib
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.attention import attention_backend
from promptsluice.backend_engine.attention.base import AttentionBackend
from promptsluice.backend_engine.attention.sdpa import ROW_BLOCK
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from promptsluice.backend_engine.native import NativeAttention, NativePrefill, Unavailable, native_library
from promptsluice.backend_engine.rounded_kv import RoundedKV, rounded
from promptsluice.prompt.errors import ConfigError
from torch import Tensor

PAGE, KV_HEADS, GROUP, DIM = 4, 2, 3, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which the registry does late
    os.environ["TRITON_INTERPRET"] = "1"


def reference(q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, scale: float, window: int | None = None) -> Tensor:
    """Softmax over exactly the visible keys of each row and head, one by one, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for request in range(batch.requests):
        for row in range(batch.query_start_host[request], batch.query_start_host[request + 1]):
            stop = int(batch.visible[row])
            keys = torch.arange(0 if window is None else max(0, stop - window), stop)
            slots = batch.page_table[request, keys // PAGE].long() * PAGE + keys % PAGE
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[slots, kv_head].double() @ q[row, head].double() * scale
                out[row, head] = scores.softmax(0) @ v[slots, kv_head].double()
    return out


def check(
    parts: list[RequestRows],
    *,
    pages: int,
    seed: int = 0,
    backend: AttentionBackend | str = "sdpa",
    kv_heads: int = KV_HEADS,
    group: int = GROUP,
    dim: int = DIM,
    window: int | None = None,
    unread: int = 0,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    tolerance: float = 2e-6,
) -> None:
    """`unread` is how many of the first request's pages nobody may touch. The reference has the inputs of `dtype`.

    `stored` rounds keys and values, for the reference too.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, scale = build_batch(parts, page_size=PAGE), 0.85 * dim**-0.5
    q = torch.randn(batch.rows, kv_heads * group, dim, generator=generator).to(dtype)
    k, v = (torch.randn(pages * PAGE, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    # Slots of pages that no request has hold NaN: touching them at all would show.
    used = {page for part in parts for page in part.pages} - set(parts[0].pages[:unread])
    for page in set(range(pages)) - used:
        k[page * PAGE : (page + 1) * PAGE] = torch.nan
        v[page * PAGE : (page + 1) * PAGE] = torch.nan
    given = [x.to(DEVICE) for x in (k, v)]
    if stored is not None:
        given = [RoundedKV.of(rounded(x, stored), stored, kv_heads, dim) for x in given]
        k, v = (x[:].cpu() for x in given)
    expected = reference(q, k, v, batch, scale, window)
    made = attention_backend(backend) if isinstance(backend, str) else backend
    batch = build_batch(parts, page_size=PAGE, device=DEVICE)
    out = made.plan(batch, page_size=PAGE, scale=scale, window=window)(q.to(DEVICE), *given)
    assert out.is_contiguous() and out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[RequestRows], int]:
    counts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    total = sum(-(-count // PAGE) for count in counts) + 3
    order = draw(st.permutations(range(total))) if draw(st.booleans()) else list(range(total))
    parts, taken = [], 0
    for count in counts:
        needed = -(-count // PAGE)
        pages, taken = order[taken : taken + needed], taken + needed
        kind = draw(st.sampled_from(["decode", "prefill", "chunk", "scattered"]))
        first = draw(st.integers(0, count - 1))
        scattered = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
        indices = {"decode": [count - 1], "prefill": list(range(count)), "chunk": list(range(first, count))}
        rows = indices.get(kind, scattered)
        visible = None
        if draw(st.booleans()):
            visible = [draw(st.integers(row + 1, count)) for row in rows]
        parts.append(RequestRows(ids=rows, indices=rows, pages=pages, visible=visible, key_count=count))
    return parts, total


WINDOWS = st.none() | st.integers(1, 40)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(drawn=requests(), seed=st.integers(0, 1000), window=WINDOWS)
def test_equals_float64_reference(drawn: tuple[list[RequestRows], int], seed: int, window: int | None) -> None:
    parts, pages = drawn
    check(parts, pages=pages, seed=seed, window=window)


def triton_attention(least_keys: int) -> AttentionBackend:
    return importlib.import_module("promptsluice.backend_engine.attention.paged").TritonAttention(least_keys=least_keys)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(drawn=requests(), seed=st.integers(0, 1000), split=st.booleans(), window=WINDOWS)
def test_triton_equals_float64_reference(
    drawn: tuple[list[RequestRows], int], seed: int, split: bool, window: int | None
) -> None:
    parts, pages = drawn
    check(parts, pages=pages, seed=seed, backend=triton_attention(4 if split else 256), window=window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_triton_with_heads_of_all_sizes(dim: int, window: int | None) -> None:
    """A decode, scattered rows and a prefill over several blocks of keys, split and not."""
    pages = list(range(120))
    random.Random(dim).shuffle(pages)
    parts = [
        RequestRows(ids=[0], indices=[209], pages=pages[:53]),
        RequestRows(ids=range(5), indices=[3, 50, 90, 160, 199], pages=pages[53:103]),
        RequestRows(ids=range(18), indices=range(18), pages=pages[103:108]),
    ]
    check(parts, pages=120, backend=triton_attention(256), kv_heads=1, dim=dim, window=window)
    check(parts[:1], pages=120, backend=triton_attention(32), kv_heads=1, dim=dim, window=window)


@pytest.fixture(scope="module")
def native() -> AttentionBackend:
    if DEVICE == "cuda":
        pytest.skip("native attention is a CPU's")
    try:
        return NativeAttention(NativePrefill(native_library()))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=requests(), seed=st.integers(0, 1000), window=WINDOWS, group=st.integers(1, 9))
def test_native_equals_float64_reference(
    native: AttentionBackend, drawn: tuple[list[RequestRows], int], seed: int, window: int | None, group: int
) -> None:
    parts, pages = drawn
    check(parts, pages=pages, seed=seed, backend=native, window=window, dim=16, group=group)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize(
    ("dim", "group"),
    [(16, 200), (48, 5), (64, 3), (80, 8), (128, 1), (256, 2), (24, 3)],
)
def test_native_over_several_blocks(native: AttentionBackend, dim: int, group: int, window: int | None) -> None:
    """A decode, few scattered rows, many of them, a prefill and its second chunk; 24 is left to torch."""
    pages = list(range(400))
    random.Random(dim).shuffle(pages)
    scattered = [row for row in range(20, 330) if row % 3]
    seen = [random.Random(row).randint(row + 1, 331) for row in scattered]
    parts = [
        RequestRows(ids=[0], indices=[309], pages=pages[:78]),
        RequestRows(ids=range(5), indices=[3, 50, 90, 160, 199], pages=pages[78:128]),
        RequestRows(ids=scattered, indices=scattered, pages=pages[128:211]),
        RequestRows(ids=scattered, indices=scattered, pages=pages[312:395], visible=seen, key_count=331),
        RequestRows(ids=range(101), indices=range(101), pages=pages[211:237]),
        RequestRows(ids=range(150), indices=range(150, 300), pages=pages[237:312]),
    ]
    check(parts, pages=400, backend=native, kv_heads=2 if group < 9 else 1, dim=dim, group=group, window=window)


def test_a_native_row_depends_on_nothing_beside_it(native: AttentionBackend) -> None:
    """The same bits for a row in a prefill, alone, among others, and on any number of threads."""
    generator = torch.Generator().manual_seed(0)
    count, pages = 250, list(range(63))
    k, v = torch.randn(2, 63 * PAGE, 2, 64, generator=generator)
    q = torch.randn(count, 6, 64, generator=generator)

    def attended(rows: list[int], threads: int) -> Tensor:
        torch.set_num_threads(threads)
        batch = build_batch([RequestRows(ids=rows, indices=rows, pages=pages)], page_size=PAGE)
        return native.plan(batch, page_size=PAGE, scale=0.1)(q[rows], k, v)

    before = torch.get_num_threads()
    try:
        whole = attended(list(range(count)), 2)
        for rows in (list(range(100, 250)), list(range(3, 250, 5)), list(range(240, 249))):
            for threads in (1, 3):
                assert torch.equal(attended(rows, threads), whole[rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [[209], [200, 203, 209], list(range(150, 210))])
def test_native_reads_nothing_into_a_window_from_before_it(native: AttentionBackend, rows: list[int]) -> None:
    """What lies before a window may be read with the block that it begins in, but never shows."""
    pages = list(range(60))
    random.Random(1).shuffle(pages)
    unread = (rows[0] - 69) // PAGE
    check(
        [RequestRows(ids=rows, indices=rows, pages=pages)], pages=60, backend=native, dim=16, window=70, unread=unread
    )


def test_native_refuses_places_outside_the_pool(native: AttentionBackend) -> None:
    k = torch.zeros(4 * PAGE, KV_HEADS, 16)
    part = RequestRows(ids=range(20), indices=range(8, 28), pages=[0, 1, 2, 3, 4, 5, 6])
    plan = native.plan(build_batch([part], page_size=PAGE), page_size=PAGE, scale=1.0)
    with pytest.raises(AssertionError, match="outside the pool"):
        plan(torch.zeros(20, KV_HEADS * GROUP, 16), k, k)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("window", [None, 30])
def test_float16(window: int | None, backend: str) -> None:
    """Scores and sums are float32: the error is that of rounding weights and result to float16."""
    parts = [
        RequestRows(ids=[0], indices=[99], pages=list(range(25))),
        RequestRows(ids=range(9), indices=range(31, 40), pages=list(range(40, 24, -1))),
    ]
    check(parts, pages=41, backend=backend, window=window, dim=64, dtype=torch.float16, tolerance=3e-3)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("scattered", [True, False])
def test_keys_before_the_window_are_not_read(scattered: bool, backend: str) -> None:
    pages = list(range(60))
    random.Random(1).shuffle(pages)
    rows = [200, 203, 209] if scattered else [209]
    check([RequestRows(ids=rows, indices=rows, pages=pages)], pages=60, backend=backend, window=70, unread=32)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 70])
def test_keys_and_values_in_8_bits(window: int | None, dtype: torch.dtype, stored: torch.dtype) -> None:
    """A decode, scattered rows and a prefill, over consecutive and scattered pages, split and not."""
    pages = list(range(120))
    random.Random(3).shuffle(pages)
    parts = [
        RequestRows(ids=[0], indices=[209], pages=pages[:53]),
        RequestRows(ids=range(5), indices=[3, 50, 90, 160, 199], pages=pages[53:103]),
        RequestRows(ids=range(18), indices=range(18), pages=pages[103:108]),
        RequestRows(ids=range(2), indices=range(8, 10), pages=[120, 121, 122]),
    ]
    tolerance = 2e-6 if dtype == torch.float32 else 3e-3
    for backend in ("sdpa", triton_attention(256), triton_attention(32)):
        check(
            parts, pages=130, backend=backend, dim=80, window=window, dtype=dtype, stored=stored, tolerance=tolerance
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("group", [1, 7, 71])
def test_triton_with_groups_of_any_size(rows: int, group: int) -> None:
    part = RequestRows(ids=range(rows), indices=range(9 - rows, 9), pages=[2, 0, 1])
    check([part], pages=4, backend=triton_attention(4), kv_heads=1, group=group)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("window", [None, 90])
def test_rows_beyond_one_block(consecutive: bool, backend: str, window: int | None) -> None:
    """More rows than share a mask, in the middle of a request and scattered."""
    count = ROW_BLOCK + 60
    pages = list(range(2, 2 + -(-count // PAGE)))
    if not consecutive:
        pages.reverse()
    rows = [row for row in range(20, count) if row % 7]
    check([RequestRows(ids=rows, indices=rows, pages=pages)], pages=len(pages) + 4, backend=backend, window=window)


def test_a_request_without_rows_is_left_out() -> None:
    parts = [RequestRows(ids=[1, 2], indices=[0, 1], pages=[page]) for page in range(3)]
    batch = build_batch(parts, page_size=PAGE)
    kept = batch.keep(torch.tensor([0, 1, 5]), [2, 0, 1])
    assert kept.query_start_host == (0, 2, 2, 3)
    q, k, v = torch.randn(3, KV_HEADS * GROUP, DIM), *torch.randn(2, 3 * PAGE, KV_HEADS, DIM)
    out = attention_backend("sdpa").plan(kept, page_size=PAGE, scale=0.3)(q, k, v)
    torch.testing.assert_close(out.double(), reference(q, k, v, kept, 0.3), rtol=0, atol=2e-6)


def test_unknown_backend_names_the_known() -> None:
    with pytest.raises(ConfigError, match="sdpa"):
        attention_backend("nope")


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "heads_first"), [(32, True), (64, True), (16, False)])
def test_any_tiling_is_the_same_attention(keys: int, heads_first: bool) -> None:
    module = importlib.import_module("promptsluice.backend_engine.attention.paged")
    tiling = module.Tiling(keys=keys, warps=2, stages=2, heads_first=heads_first)
    parts = [
        RequestRows(ids=[0], indices=[69], pages=range(18)),
        RequestRows(ids=[0] * 5, indices=range(3, 8), pages=(20, 19)),
    ]
    for least_keys in (8, 1 << 20):
        check(parts, pages=21, backend=module.TritonAttention(least_keys=least_keys, tiling=tiling))
