"""The KV pool moves whole tokens by slot, and a step's layout finds their slots."""

import importlib
import os
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine import KVBlock, KVPool, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.spec import ModelSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def spec(tiny_llama_dir: Path) -> ModelSpec:
    return load_model(tiny_llama_dir).spec


def test_blocks_come_back_as_written(spec: ModelSpec) -> None:
    pool = KVPool(spec, pages=5, page_size=4)
    slots = torch.tensor([17, 3, 8])
    k, v = torch.randn(2, spec.layers, 3, spec.kv_heads, spec.head_dim)
    pool.write_block(slots, KVBlock(k.double(), v.double()))
    assert torch.equal(pool.read(slots).k, k)
    assert torch.equal(pool.read(slots).v, v)
    assert torch.equal(pool.layer(2)[0][slots], k[2])
    untouched = [slot for slot in range(20) if slot not in (3, 8, 17)]
    assert not pool.data[:, :, untouched].any()
    assert pool.data.nbytes == pool.slots * KVPool.bytes_per_token(spec, torch.float32)


def test_the_start_of_a_page_is_copied_and_nothing_else(spec: ModelSpec) -> None:
    pool = KVPool(spec, pages=5, page_size=4)
    pool.data.copy_(torch.randn_like(pool.data))
    before = pool.data.clone()
    pool.copy(3, 1, tokens=3)
    assert torch.equal(pool.data[:, :, 4:7], before[:, :, 12:15])
    untouched = [slot for slot in range(20) if not 4 <= slot < 7]
    assert torch.equal(pool.data[:, :, untouched], before[:, :, untouched])


def test_the_kernel_copies_what_torch_does() -> None:
    """Through Triton's interpreter where there is no GPU; more numbers than one program copies."""
    copy_slots = importlib.import_module("promptsluice.backend_engine.pool_triton").copy_slots
    data = torch.randn(3, 2, 40, 5, 128, device=DEVICE)
    expected = data.clone()
    expected[:, :, 16:27] = data[:, :, 3:14]
    copy_slots(data, 3, 16, 11)
    assert torch.equal(data, expected)


def test_a_read_is_a_copy(spec: ModelSpec) -> None:
    pool = KVPool(spec, pages=1, page_size=4)
    block = pool.read(torch.tensor([1]))
    pool.data.fill_(3)
    assert not block.k.any()
    assert block.tokens == 1


def test_layout_of_a_step() -> None:
    batch = build_batch(
        [
            RequestRows(ids=[5, 6, 7], indices=[0, 3, 6], pages=[4, 1], positions=[0, 30, 60], logits=[2]),
            RequestRows(ids=[9], indices=[8], pages=[2, 0, 3], key_count=11, visible=[10], logits=[0]),
        ],
        page_size=4,
        pages=5,
    )
    assert batch.ids.tolist() == [5, 6, 7, 9]
    assert batch.slots.tolist() == [16, 19, 6, 12]
    assert batch.positions.tolist() == [0, 30, 60, 8]
    assert batch.visible.tolist() == [1, 4, 7, 10]
    assert batch.query_start.tolist() == list(batch.query_start_host) == [0, 3, 4]
    assert batch.key_count.tolist() == list(batch.key_count_host) == [7, 11]
    assert batch.page_table.tolist() == [[4, 1, 0, 0, 0], [2, 0, 3, 0, 0]]
    assert batch.logit_rows.tolist() == [2, 3]
    assert (batch.rows, batch.requests) == (4, 2)
    kept = batch.keep(torch.tensor([1, 2, 3]), [2, 1])
    assert kept.logit_rows.tolist() == [1, 2]
    assert kept.query_start.tolist() == list(kept.query_start_host) == [0, 2, 3]
