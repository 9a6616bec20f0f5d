"""Native steps against the same decoder in float64: every kind of layer, page layouts, windows, lengths, threads."""

import gc
import mmap
import platform
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine import KVPool
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from promptsluice.backend_engine.linear import PlainLinear, PlainTable
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.native import (
    Library,
    Unavailable,
    checked,
    compiling,
    move_to_large_pages,
    native_library,
)
from promptsluice.backend_engine.native.bindings import MOST_ROWS, functions
from promptsluice.backend_engine.native.library import openmp
from promptsluice.backend_engine.quant import int8_forms
from promptsluice.backend_engine.rope import NONE, RopeSpec
from promptsluice.backend_engine.spec import ModelSpec
from promptsluice.backend_engine.weights import LayerWeights, Weights, expected_shapes, load_weights
from torch import Tensor

PAGE = 4
BASE: dict[str, Any] = {
    "family": "LlamaForCausalLM", "vocab": 100, "hidden": 96, "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 16,
    "ffn": 160, "activation": "silu", "norm_eps": 1e-5, "norm_offset": False, "sandwich": False, "tied": True,
    "qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": False, "scale": 0.25, "embedding_scale": 1.0,
    "max_context": 4096,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": False, "vocab": 101},
    "one key head of seven": {"heads": 14, "kv_heads": 2, "head_dim": 32, "hidden": 64, "ffn": 96},
    "a key head each": {"heads": 2, "kv_heads": 2, "head_dim": 48, "qk_norm": True},
    "wide heads": {"heads": 4, "kv_heads": 1, "head_dim": 128, "hidden": 128, "scale": 0.1},
    "widest heads": {"heads": 5, "kv_heads": 1, "head_dim": 256, "hidden": 64, "scale": 0.06, "layers": 2},
    "gemma": {"norm_offset": True, "sandwich": True, "activation": "gelu_tanh", "embedding_scale": 9.8,
              "qk_norm": True, "windows": (7, 7, None), "ropes": (500.0, 500.0, 10000.0)},
    "windows and no positions": {"windows": (9, None, 300), "ropes": (None, 10000.0, None)},
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return native_library()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Two threads, on whatever machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def spec_of(kind: str, **changes: Any) -> ModelSpec:
    fields = BASE | KINDS[kind] | changes
    layers, head_dim = fields["layers"], fields["head_dim"]
    thetas = fields.pop("ropes", (10000.0,) * layers)
    fields.setdefault("windows", (None,) * layers)
    plain = RopeSpec(kind="default", dim=head_dim, theta=10000.0, original_context=4096, attention_factor=1.1)
    ropes = tuple(replace(plain, kind=NONE) if theta is None else replace(plain, theta=theta) for theta in thetas)
    return ModelSpec(**fields, ropes=ropes)


class RandomSource:
    """Every tensor of a model, random."""

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.shapes = expected_shapes(spec)
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}

    def get(self, name: str) -> Tensor:
        value = self._tensors[name]
        return value / value.shape[1] ** 0.5 if value.dim() == 2 else 0.2 * value + ("norm" in name)


def exact(weights: Weights) -> Weights:
    """The weights that native steps read, with their scales, in float64."""

    def whole(matrix: Any) -> Tensor:
        weight, scales, _ = matrix.row_major
        return weight.double() * (1.0 if scales is None else scales.double()[:, None])

    def linear(matrix: Any) -> PlainLinear:
        bias = matrix.row_major[2]
        return PlainLinear(whole(matrix), None if bias is None else bias.double())

    def layer(of: LayerWeights) -> LayerWeights:
        matrices = {name: linear(getattr(of, name)) for name in ("qkv", "out", "gate_up", "down")}
        norms = ("input_norm", "post_norm", "qk_norm", "out_norm", "down_norm")
        doubled = {name: None if getattr(of, name) is None else getattr(of, name).double() for name in norms}
        return replace(of, **matrices, **doubled)

    return Weights(
        dtype=torch.float64,
        embedding=PlainTable(whole(weights.embedding)),
        layers=tuple(map(layer, weights.layers)),
        norm=weights.norm.double(),
        head=linear(weights.head),
    )


class Pair:
    """The native decoder and its exact twin, on pools that hold the same."""

    def __init__(
        self, library: Library, spec: ModelSpec, *, pages: int = 200, dtype: torch.dtype = torch.float32, **form: Any
    ) -> None:
        self.spec = spec
        weights = load_weights(RandomSource(spec), spec, dtype=dtype, native=True, **form)
        self.native = Decoder(spec, weights, library=library)
        self.exact = Decoder(spec, exact(weights))
        self.pool = KVPool(spec, pages=pages, page_size=PAGE, dtype=dtype)
        self.pool.data.normal_(generator=torch.Generator().manual_seed(1))
        self.exact_pool = KVPool(spec, pages=pages, page_size=PAGE, dtype=torch.float64)
        self.exact_pool.data.copy_(self.pool.data)

    def run(self, *parts: RequestRows) -> Tensor:
        """The native logits of a step's logit rows."""
        batch = build_batch(parts, page_size=PAGE)
        return self.native.logits(self.native.forward(batch, self.pool).hidden)

    def compare(self, *parts: RequestRows, tolerance: float = 2e-4) -> None:
        """Logits and the pool, by the largest difference."""
        got, batch = self.run(*parts), build_batch(parts, page_size=PAGE)
        expected = self.exact.logits(self.exact.forward(batch, self.exact_pool).hidden)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(self.pool.data.double(), self.exact_pool.data, rtol=0, atol=tolerance)


def shuffled(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def rows(first: int, count: int, pages: list[int], *, seed: int = 0, logits: Any = None) -> RequestRows:
    """Rows `first ..` of a request with random ids; what lies before them is whatever the pool holds."""
    ids = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(seed + first)).tolist()
    wanted = range(count) if logits is None else logits
    return RequestRows(ids=ids, indices=range(first, first + count), pages=pages, logits=wanted)


def mixed(pages: list[int]) -> list[RequestRows]:
    """A chunk, a decode of many keys, a first token, and a few guessed rows; 60 pages."""
    return [
        rows(5, 14, pages[:5], logits=[13]),
        rows(130, 1, pages[5:38], seed=1),
        rows(0, 1, pages[38:39], seed=2),
        rows(40, 5, pages[39:51], seed=3),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_float64(library: Library, kind: str) -> None:
    pair, pages = Pair(library, spec_of(kind)), shuffled(200)
    pair.compare(*mixed(pages))
    pair.compare(rows(19, 1, pages[:5]))
    pair.compare(*(rows(2 * number, 1, pages[10 * number : 10 * number + 10], seed=number) for number in range(20)))
    pair.compare(rows(0, MOST_ROWS, pages[:16]))


@pytest.mark.parametrize("form", [{}, {"forms": int8_forms()}], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", ["llama", "biases"])
def test_weights_in_large_pages_are_the_same(kind: str, form: dict[str, Any]) -> None:
    """Values, and that tied embeddings are one matrix in memory."""
    spec = spec_of(kind)
    usual, moved = (load_weights(RandomSource(spec), spec, dtype=torch.float32, native=True, **form) for _ in range(2))
    before: Any = moved.layers[1].down
    place = before.row_major[0].data_ptr()
    move_to_large_pages(moved)
    assert before.row_major[0].data_ptr() != place or not hasattr(mmap, "MADV_HUGEPAGE")
    rows: list[Any] = [[of.embedding, of.head, of.layers[1].down, of.layers[0].gate_up] for of in (usual, moved)]
    for one, other in zip(*rows, strict=True):
        assert torch.equal(one.row_major[0], other.row_major[0]) and other.row_major[0].is_contiguous()
    ends = [end.row_major[0].data_ptr() for end in rows[1][:2]]
    assert (ends[0] == ends[1]) == spec.tied


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "one key head of seven", "gemma", "windows and no positions"])
def test_long_contexts_equal_float64(library: Library, kind: str) -> None:
    """Keys of several parts, which end within a part, at its border and one behind it; windows of one and two."""
    pair, pages = Pair(library, spec_of(kind), pages=400), shuffled(400)
    for keys in (255, 256, 257, 511, 700, 1500):
        pair.compare(rows(keys - 1, 1, pages))
    pair.compare(rows(1000, 20, pages[:260]), rows(520, 1, pages[260:], seed=1))


def test_rows_that_need_no_logits(library: Library) -> None:
    pair, pages = Pair(library, spec_of("llama")), shuffled(30)
    pair.compare(rows(0, 20, pages[:5], logits=[]))
    pair.compare(rows(20, 9, pages[:8], logits=[2, 7]), rows(0, 5, pages[8:10], logits=[]), rows(0, 3, pages[10:11]))


def test_rows_anywhere_with_positions_of_their_own(library: Library) -> None:
    """As after reuse and token dropping: gaps between rows, and positions that are no indices."""
    pair, pages = Pair(library, spec_of("llama")), shuffled(30)
    part = RequestRows(ids=[5, 6, 7], indices=[3, 17, 40], pages=pages, positions=[9, 60, 61], visible=[4, 30, 41],
                       logits=[1, 2])  # fmt: skip
    pair.compare(part)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86's instruction sets")
@pytest.mark.parametrize("machine", ["x86-64", "haswell"])
def test_other_instruction_sets(library: Library, machine: str, tmp_path: Path) -> None:
    """Without AVX, and with AVX2; whoever runs this on an older machine has tested one of them already."""
    if machine == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("this machine has no AVX2")
    flags = [f"-march={machine}" if flag.startswith("-march") else flag for flag in compiling.flags()]
    path = compiling.compiled(folder=tmp_path, compiler=compiling.compiler(), flags=flags)
    loaded = functions(path)
    other = Library(loaded, loaded.promptsluice_lanes())
    assert other.lanes == (8 if machine == "haswell" else 4)
    for kind in KINDS:
        pair = Pair(other, spec_of(kind))
        pair.compare(*mixed(shuffled(60)))
        pair.compare(*many(shuffled(120)))
    Pair(other, spec_of("llama"), forms=int8_forms()).compare(*mixed(shuffled(60)), tolerance=3e-3)
    pair = Pair(other, spec_of("llama"), dtype=torch.bfloat16)
    assert torch.isfinite(pair.run(*mixed(shuffled(60)))).all()


@pytest.mark.parametrize("kind", ["llama", "gemma", "one key head of seven"])
def test_int8_weights(library: Library, kind: str) -> None:
    """Exact but for activations, of which 15 bits are kept."""
    pair = Pair(library, spec_of(kind), forms=int8_forms())
    pair.compare(*mixed(shuffled(60)), tolerance=3e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma", "biases"])
def test_bfloat16_weights_and_pages(library: Library, kind: str) -> None:
    """What is read and written is bfloat16; all between is not."""
    pair, parts = Pair(library, spec_of(kind), dtype=torch.bfloat16), mixed(shuffled(60))
    got, batch = pair.run(*parts), build_batch(parts, page_size=PAGE)
    expected = pair.exact.logits(pair.exact.forward(batch, pair.exact_pool).hidden)
    assert (got - expected).norm() < 0.02 * expected.norm()
    assert (pair.pool.data.double() - pair.exact_pool.data).norm() < 0.004 * pair.exact_pool.data.norm()


@pytest.mark.parametrize(
    "form", [{}, {"forms": int8_forms()}, {"dtype": torch.bfloat16}], ids=["float32", "int8", "bf16"]
)
def test_a_row_depends_neither_on_its_neighbours_nor_on_threads(library: Library, form: dict[str, Any]) -> None:
    """Bit for bit, also where alone its keys are cut into parts for several threads, and in company are not."""
    pair, pages = Pair(library, spec_of("llama"), pages=400, **form), shuffled(400)
    one = rows(800, 1, pages[:210])
    alone = pair.run(one)
    others = [rows(7 * number, 2, pages[210 + 8 * number :], seed=number) for number in range(1, 13)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(pair.run(one), alone)
        for count in (1, 3, 12):
            assert torch.equal(pair.run(*others[:count], one)[-1:], alone)


def many(pages: list[int]) -> list[RequestRows]:
    """More rows than a native step has: a prefill, a second chunk, rows anywhere, and a decode beside them."""
    scattered = [row for row in range(5, 130) if row % 3]
    return [
        rows(0, 110, pages[:28]),
        rows(37, 70, pages[28:55], seed=1),
        RequestRows(ids=[row % 90 for row in scattered], indices=scattered, pages=pages[55:88], logits=[0, 82]),
        rows(90, 1, pages[88:111], seed=2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_many_rows(library: Library, kind: str) -> None:
    Pair(library, spec_of(kind)).compare(*many(shuffled(120)))


def test_steps_of_many_rows_with_int8_weights(library: Library) -> None:
    Pair(library, spec_of("llama"), forms=int8_forms()).compare(*many(shuffled(120)), tolerance=3e-3)


def test_a_default_dtype_that_others_have_set_changes_nothing(library: Library) -> None:
    """transformers sets one for the whole process while it makes a model, in whatever thread."""
    pair, parts = Pair(library, spec_of("llama")), many(shuffled(120))
    expected = pair.run(*parts)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(pair.run(*parts), expected)
    finally:
        torch.set_default_dtype(before)


def test_what_is_not_a_native_step(library: Library) -> None:
    pair = Pair(library, spec_of("llama"))
    for count in (MOST_ROWS, MOST_ROWS + 1):
        pair.compare(rows(0, count, list(range(20)), logits=[count - 1]))
        pair.compare(rows(0, count, list(range(20))))


def test_places_that_do_not_exist_are_refused(library: Library) -> None:
    pair = Pair(library, spec_of("llama"), pages=4)
    for wrong in (-1, 100):
        with pytest.raises(IndexError, match="vocabulary of 100"):
            pair.run(RequestRows(ids=[wrong], indices=[0], pages=[0], logits=[0]))
    with pytest.raises(AssertionError, match="pool"):
        pair.run(RequestRows(ids=[1], indices=[5], pages=[0, 4], logits=[0]))
    count = MOST_ROWS + 1
    batch = build_batch(
        [RequestRows(ids=[1] * count, indices=range(count), pages=range(17), logits=[0])], page_size=PAGE
    )
    with pytest.raises(AssertionError, match="pool"):
        pair.native.forward(batch, pair.pool)

    def changed(**fields: Any) -> StepBatch:
        return replace(build_batch([rows(0, 1, [0])], page_size=PAGE), **fields)

    for batch in (
        changed(slots=torch.tensor([16])),
        changed(visible=torch.tensor([0], dtype=torch.int32)),
        changed(visible=torch.tensor([5], dtype=torch.int32)),
        changed(logit_rows=torch.tensor([1])),
        changed(logit_rows=torch.tensor([-1])),
    ):
        with pytest.raises(AssertionError, match="pool"):
            pair.native.forward(batch, pair.pool)


def test_sizes_that_are_not_computed_are_named(library: Library) -> None:
    for kind, changes, message in (
        ("llama", {"hidden": 97}, "hidden size 97"),
        ("llama", {"ffn": 161}, "feed-forward size 161"),
        ("llama", {"head_dim": 22}, "head"),
        ("llama", {"head_dim": 512}, "head size 512"),
    ):
        with pytest.raises(Unavailable, match=message):
            checked(library, spec_of(kind, **changes), torch.float32)
    with pytest.raises(Unavailable, match="float16"):
        checked(library, spec_of("llama"), torch.float16)


@pytest.fixture
def own_threads(library: Library) -> Iterator[None]:
    """Teams have threads of their own, as where torch's are not to be had."""
    library.functions.promptsluice_share_threads(None)
    yield
    library.functions.promptsluice_share_threads(openmp())


@pytest.mark.parametrize("shared", [True, False])
def test_models_at_work_at_the_same_time(library: Library, request: pytest.FixtureRequest, shared: bool) -> None:
    """Two models, each used by two threads at once on pages of their own; more threads than there are cores."""
    if not shared:
        request.getfixturevalue("own_threads")
    pairs, wrong = [Pair(library, spec_of(kind)) for kind in ("llama", "gemma")], []
    torch.set_num_threads(3)
    cases = [(pair, rows(10, 3, shuffled(10, seed))) for seed in range(2) for pair in pairs]
    cases[2:] = [(pair, rows(20, 2, list(range(100, 110)), seed=9)) for pair in pairs]
    expected = [pair.run(part) for pair, part in cases]

    def repeat(number: int) -> None:
        torch.set_num_threads(3)
        pair, part = cases[number]
        wrong.extend(number for _ in range(50) if not torch.equal(pair.run(part), expected[number]))

    workers = [threading.Thread(target=repeat, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux lists them")
@pytest.mark.usefixtures("own_threads")
def test_a_model_lets_its_threads_go(library: Library) -> None:
    def running() -> int:
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    before = running()
    pair = Pair(library, spec_of("llama"))
    torch.set_num_threads(4)
    pair.run(rows(0, 1, [0]))
    assert running() == before + 3
    del pair
    assert running() == before
