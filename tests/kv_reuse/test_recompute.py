"""What a chunk saves, counted and by the formula, and that full stores keep what saves more."""

from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import ChunkKey, ChunkStore, DiskStore, KeySpace, RamStore, StoredChunk
from promptsluice.kv_reuse.chunkfile import encode
from promptsluice.kv_reuse.recompute import Candidate, first_to_go, prefill_flops
from torch.utils.flop_counter import FlopCounterMode

SPACE = KeySpace("model", "salt")


@pytest.mark.parametrize("name", ["tiny_llama_dir", "tiny_qwen3_dir"])
def test_the_formula_counts_what_torch_counts(request: pytest.FixtureRequest, name: str):
    import transformers

    directory, tokens = request.getfixturevalue(name), 37
    spec = load_model(directory, dtype="float32").spec
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(3, 3 + tokens)[None])
    masked = spec.layers * 4 * spec.heads * spec.head_dim * (tokens**2 - tokens * (tokens + 1) / 2)
    assert counted.get_total_flops() == prefill_flops(spec, tokens) + masked
    behind = prefill_flops(spec, 10, before=tokens) + prefill_flops(spec, tokens)
    assert behind == pytest.approx(prefill_flops(spec, tokens + 10))


def test_the_first_to_go_saves_least_for_its_bytes_and_its_age():
    def first(*candidates: tuple[float, float, int]) -> int:
        return first_to_go((number, Candidate(*one)) for number, one in enumerate(candidates))

    assert first((5, 10, 1), (3, 10, 1), (4, 10, 1)) == 0, "equal ones by age"
    assert first((5, 100, 1), (3, 10, 1)) == 1 and first((50, 100, 1), (3, 10, 1)) == 0
    assert first((5, 100, 100), (3, 10, 1)) == 0, "a dear one may be large"
    assert first((9, 10, 1), (1, 0, 1), (2, 0, 1)) == 2, "what nobody knows of goes first"
    assert first((3, 10, 1), (3, 10, 1)) == 0


def make(number: int, flops: float) -> tuple[ChunkKey, StoredChunk]:
    ids = (number, *range(1, 9))
    return SPACE.key(ids), StoredChunk(ids, KVBlock(*torch.ones(2, 1, 9, 1, 1).unbind(0)), flops=flops)


SIZE = len(encode(*make(0, 1.0)))


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_full_store_keeps_what_is_dear_until_it_went_unused_for_much_longer(tmp_path: Path, kind: str):
    room = 3 * make(0, 1)[1].nbytes if kind == "ram" else 3 * SIZE + 20
    store: ChunkStore = RamStore(room) if kind == "ram" else DiskStore(tmp_path, room)
    dear = make(0, 1e30)[0]
    store.put(*make(0, 1e30))
    for number in range(1, 30):
        assert store.put(*make(number, 1.0))
    assert store.contains(dear) and store.stats()[0].entries == 3
    assert [number for number in range(1, 30) if store.contains(make(number, 1.0)[0])] == [28, 29]
    for number in range(30, 34):
        store.put(*make(number, 1e30))
    assert not store.contains(dear), "among equals the least recently used one goes"


def test_a_restart_forgets_no_costs(tmp_path: Path):
    store = DiskStore(tmp_path, 3 * SIZE + 20)
    store.put(*make(0, 1e30))
    for number in (1, 2):
        store.put(*make(number, 1.0))
    DiskStore(tmp_path, 3 * SIZE + 20).put(*make(3, 1.0))
    assert [number for number in range(4) if store.contains(make(number, 0)[0])] == [0, 2, 3]
    got = store.get(make(0, 0)[0])
    assert got is not None and got.flops == 1e30
