"""Chunks of 8 bits: kept, found and deleted under names of their own, and as good as what they stand for."""

from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.rounded_kv import ROUNDED, RoundedBlock
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import KVDeviation, RamStore, Repair, Reuser, open_store
from promptsluice.kv_reuse.rounding import ChunkDtype, chosen_dtype, chunk_fingerprint, chunk_fingerprints, kept
from promptsluice.prompt.errors import ConfigError

from .test_blend_engine import A, B, Runner, greedy, prompt, text

IDS, SPANS = prompt((text(5, 3),), A, (text(6, 2),), B, (text(7, 6),))
DTYPES: tuple[ChunkDtype, ...] = ("int8", "fp8")


@pytest.fixture(scope="module")
def directory(tiny_llama_dir: Path) -> Path:
    return tiny_llama_dir


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32")


def reuser_of(runner: Runner, store: RamStore | None = None, *, dtype: ChunkDtype) -> Reuser:
    model = runner.model
    store = store or RamStore(1 << 24)
    return Reuser(runner, store, spec=model.spec, fingerprint=model.fingerprint, min_tokens=4, dtype=dtype)


def test_names() -> None:
    assert chosen_dtype("auto", "cpu") == "model" and chosen_dtype("auto", "cuda") == "int8"
    assert chosen_dtype("fp8", "cpu") == "fp8" and chosen_dtype("model", "cuda") == "model"
    names = [chunk_fingerprint("m", dtype) for dtype in ("model", "int8", "fp8")]
    assert names == list(chunk_fingerprints("m")) and len(set(names)) == 3 and names[0] == "m"
    with pytest.raises(ConfigError, match="chunk_dtype 'int4' is not known; known: auto, model, int8, fp8"):
        chosen_dtype("int4", "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_rounded_once_and_read_as_it_is(model: LoadedModel, dtype: ChunkDtype) -> None:
    runner, plain, kept = Runner(model), RamStore(1 << 24), RamStore(1 << 24)
    exact = reuser_of(runner, plain, dtype="model")
    rounded = reuser_of(runner, kept, dtype=dtype)
    for reuser in (exact, rounded):
        assert reuser.warm([A, B], anchor=text(9, 5)).computed == 2
    assert kept.stats()[0].bytes < plain.stats()[0].bytes / 2
    plans = [reuser.plan(IDS, SPANS, mode="reuse", anchors=[text(9, 5)]) for reuser in (exact, rounded)]
    assert plans[0].reuse is None, "the prompt does not begin with this anchor"
    for reuser in (exact, rounded):
        reuser.warm([A, B], anchor=())
    plans = [reuser.plan(IDS, SPANS, mode="reuse") for reuser in (exact, rounded)]
    assert plans[0].hits == plans[1].hits and len(plans[0].hits) == 2
    for one, other in zip(*(plan.reuse.spans for plan in plans if plan.reuse), strict=True):
        for x, y in zip(one.kv.tensors, other.kv.tensors, strict=True):
            bound = x.abs().amax(-1, keepdim=True) * (0.01 if dtype == "int8" else 0.07)
            assert x.dtype == y.dtype and not torch.equal(x, y) and ((x - y).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_repaired_is_a_full_prefill(model: LoadedModel, dtype: ChunkDtype) -> None:
    runner = Runner(model)
    reuser = reuser_of(runner, dtype=dtype)
    reuser.warm([A, B])
    full = runner.run(greedy(IDS, None)).kv
    for repair in (Repair(KVDeviation()), None):
        plan = reuser.plan(IDS, SPANS, ratio=1.0, **({"repair": repair} if repair else {}))
        found = runner.run(greedy(IDS, plan.reuse)).kv
        assert plan.reuse is not None and full is not None and found is not None
        torch.testing.assert_close(found.k, full.k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.v, full.v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["model", *DTYPES])
def test_what_is_kept_is_the_block_and_owns_its_memory(dtype: ChunkDtype) -> None:
    """Rounded layer by layer, which gives what rounding all at once does."""
    block = KVBlock(*torch.randn(2, 3, 12, 2, 8)).part(4)
    found, expected = kept(block, dtype), RoundedBlock.of(block, ROUNDED[dtype]) if dtype in ROUNDED else block
    assert type(found) is type(expected)
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.float(), theirs.float())
        assert mine.is_contiguous() and mine.untyped_storage().nbytes() == mine.nbytes


def test_no_kind_is_taken_for_another(model: LoadedModel, tmp_path: Path) -> None:
    """Through files: a setting that was changed makes misses, not other answers; a document goes in all kinds."""
    runner = Runner(model)
    kinds: tuple[ChunkDtype, ...] = ("model", *DTYPES)
    for dtype in kinds:
        store = open_store(disk=1 << 24, path=tmp_path)
        reuser = Reuser(runner, store, spec=model.spec, fingerprint=model.fingerprint, min_tokens=4, dtype=dtype)
        assert reuser.plan(IDS, SPANS).hits == ()
        assert reuser.warm([A, B]).computed == 2
        assert len(reuser.plan(IDS, SPANS).hits) == 2
        store.flush()
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    last = Reuser(
        runner, open_store(disk=1 << 24, path=tmp_path), spec=model.spec, fingerprint=model.fingerprint, dtype="model"
    )
    assert last.forget([A]) == 1 and len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_block_on_its_way_through_memory_stays_one(model: LoadedModel) -> None:
    runner, store = Runner(model), RamStore(1 << 24)
    reuser = reuser_of(runner, store, dtype="int8")
    reuser.warm([A])
    (listed,) = store.catalogue()
    assert listed.read() == tuple(A)
    (chunk,) = store._chunks.values()
    assert isinstance(chunk.kv, RoundedBlock) and chunk.kv.k.dtype == torch.int8
    assert store.stats()[0].bytes == chunk.kv.nbytes + 4 * len(A)
