"""The decoder's logits against transformers: whole, in chunks, batched, decoding, with rows dropped by a narrowing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from torch import Tensor
from transformers import AutoModelForCausalLM

PAGE = 16
FAMILIES = [
    "tiny_llama_dir",
    "tiny_mistral_dir",
    "tiny_qwen2_dir",
    "tiny_qwen3_dir",
    "tiny_smollm3_dir",
    "tiny_gemma3_dir",
]


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def llama(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(directory: Path, ids: list[int]) -> Tensor:
    """transformers' logits of every row, [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def shuffled_pages(count: int, seed: int = 1) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def run(model: LoadedModel, pool: KVPool, *parts: RequestRows) -> Tensor:
    """Logits of the logit rows of one step."""
    out = model.decoder.forward(build_batch(parts, page_size=pool.page_size), pool)
    return model.decoder.logits(out.hidden)


def whole(ids: list[int], pages: list[int]) -> RequestRows:
    return RequestRows(ids=ids, indices=range(len(ids)), pages=pages, logits=range(len(ids)))


def test_prefill_equals_transformers(directory: Path) -> None:
    model, ids = load_model(directory), random_ids(83)
    pool = KVPool(model.spec, pages=10, page_size=PAGE)
    got = run(model, pool, whole(ids, shuffled_pages(10)))
    torch.testing.assert_close(got, expected_logits(directory, ids), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_chunks_and_decodes_in_one_batch_equal_transformers(directory: Path, native: bool) -> None:
    """Three requests, each at another point of its way, share every step."""
    model = load_model(directory, native=native)
    pool = KVPool(model.spec, pages=30, page_size=PAGE)
    pages = shuffled_pages(30)
    prompts = [random_ids(length, seed) for seed, length in enumerate((70, 33, 48))]
    cuts = [[0, 16, 32, 69, 70], [0, 30, 31, 32, 33], [0, 1, 24, 47, 48]]
    got: list[list[Tensor]] = [[], [], []]
    for step in range(4):
        parts = []
        for number, ids in enumerate(prompts):
            rows = range(cuts[number][step], cuts[number][step + 1])
            mine = pages[number * 8 : number * 8 + 8]
            parts.append(RequestRows(ids=[ids[row] for row in rows], indices=rows, pages=mine, logits=range(len(rows))))
        logits = run(model, pool, *parts).split([len(part.ids) for part in parts])
        for kept, chunk in zip(got, logits, strict=True):
            kept.append(chunk)
    for ids, chunks in zip(prompts, got, strict=True):
        torch.testing.assert_close(torch.cat(chunks), expected_logits(directory, ids), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_greedy_tokens_equal_generate(directory: Path) -> None:
    model, ids = load_model(directory), random_ids(40)
    theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False, eos_token_id=None)
    pool, pages = KVPool(model.spec, pages=6, page_size=PAGE), shuffled_pages(6)
    tokens = list(ids)
    logits = run(model, pool, RequestRows(ids=ids, indices=range(40), pages=pages, logits=[39]))
    for _ in range(48):
        tokens.append(int(logits.argmax()))
        logits = run(model, pool, RequestRows(ids=tokens[-1:], indices=[len(tokens) - 1], pages=pages, logits=[0]))
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=["llama3", "yarn"],
)  # fmt: skip
def test_scaled_rope_equals_transformers(rope: dict[str, float], tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("Llama", rope_parameters={"rope_theta": 10000.0, **rope}, attention_bias=True, mlp_bias=True)
    model, ids = load_model(directory), random_ids(200)
    pool = KVPool(model.spec, pages=13, page_size=PAGE)
    got = run(model, pool, whole(ids, shuffled_pages(13)))
    torch.testing.assert_close(got, expected_logits(directory, ids), rtol=0, atol=1e-4)


def test_qwen_with_windows_in_its_last_layers_equals_transformers(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("Qwen2", use_sliding_window=True, sliding_window=30, max_window_layers=2)
    model, ids = load_model(directory), random_ids(300)
    assert model.spec.windows == (None, None, 30, 30) and model.spec.max_context == 1024
    pool = KVPool(model.spec, pages=19, page_size=PAGE)
    got = run(model, pool, whole(ids, shuffled_pages(19)))
    torch.testing.assert_close(got, expected_logits(directory, ids), rtol=0, atol=1e-4)


class FixedRows:
    """A selector that always picks the same rows, and remembers what it was shown."""

    def __init__(self, layer: int, rows: list[int]) -> None:
        self.layer = layer
        self.rows = rows
        self.seen: dict[str, Tensor] = {}

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        self.seen = {"fresh_k": fresh_k, "fresh_v": fresh_v, "stored_k": stored_k, "stored_v": stored_v}
        assert quota == len(self.rows)
        return torch.tensor(self.rows, dtype=torch.int64)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_narrowing_keeps_loaded_kv_of_dropped_rows_only(llama: LoadedModel, layer: int) -> None:
    """Slots of dropped rows keep what was loaded from the selector's layer on; all others are written."""
    ids = random_ids(40)
    pool = KVPool(llama.spec, pages=4, page_size=PAGE)
    pool.data.normal_()
    loaded = pool.data.clone()
    repairable = [8 <= row < 30 for row in range(40)]
    selector = FixedRows(layer, [1, 5, 21])
    part = RequestRows(ids=ids, indices=range(40), pages=[2, 0, 3, 1], logits=[39], selector=selector,
                       repairable=repairable, quota=3)  # fmt: skip
    batch = build_batch([part], page_size=PAGE)
    out = llama.decoder.forward(batch, pool)
    assert out.recomputed == (3,)
    assert out.hidden.shape == (1, llama.spec.hidden)
    dropped = torch.tensor([row for row in range(8, 30) if row - 8 not in selector.rows])
    kept = torch.tensor([row for row in range(40) if row not in dropped])
    slots = batch.slots
    assert torch.equal(pool.data[layer:, :, slots[dropped]], loaded[layer:, :, slots[dropped]])
    changed = pool.data != loaded
    assert changed[:, :, slots[kept]].all()
    assert changed[:layer, :, slots].all()
    assert torch.equal(selector.seen["stored_k"], loaded[layer, 0, slots[8:30]])
    assert torch.equal(selector.seen["stored_v"], loaded[layer, 1, slots[8:30]])
    assert selector.seen["fresh_k"].shape == selector.seen["fresh_v"].shape == (22, 2, 16)


@pytest.mark.slow
def test_narrowing_to_all_rows_equals_full_prefill(directory: Path) -> None:
    model, ids = load_model(directory), random_ids(50)
    pool = KVPool(model.spec, pages=4, page_size=PAGE)
    pool.data.normal_()
    part = RequestRows(ids=ids, indices=range(50), pages=shuffled_pages(4), logits=range(40, 50),
                       selector=FixedRows(1, list(range(35))), repairable=[row < 35 for row in range(50)],
                       quota=35)  # fmt: skip
    torch.testing.assert_close(run(model, pool, part), expected_logits(directory, ids)[40:], rtol=0, atol=1e-4)


def test_narrowings_do_not_touch_other_requests(llama: LoadedModel) -> None:
    """Two narrowed requests at different layers between plain ones: the plain ones' logits and KV stay the same."""
    pool, alone = (KVPool(llama.spec, pages=16, page_size=PAGE) for _ in range(2))
    pool.data.normal_()
    plain, decode = random_ids(45, 1), random_ids(20, 2)
    run(llama, pool, RequestRows(ids=decode[:19], indices=range(19), pages=[8, 9]))

    def narrowed(layer: int, pages: list[int]) -> RequestRows:
        return RequestRows(ids=random_ids(30, layer), indices=range(30), pages=pages, logits=[28, 29],
                           selector=FixedRows(layer, [0, 3]), repairable=[row < 20 for row in range(30)],
                           quota=2)  # fmt: skip

    got = run(
        llama, pool,
        narrowed(2, [0, 1]),
        RequestRows(ids=plain, indices=range(45), pages=[4, 2, 3], logits=[0, 44]),
        narrowed(1, [7, 6]),
        RequestRows(ids=decode[19:], indices=[19], pages=[8, 9], logits=[0]),
    )  # fmt: skip
    assert got.shape == (7, 512)
    expected = run(llama, alone, RequestRows(ids=plain, indices=range(45), pages=[4, 2, 3], logits=[0, 44]))
    torch.testing.assert_close(got[2:4], expected, rtol=0, atol=1e-4)
    expected = run(llama, alone, RequestRows(ids=decode, indices=range(20), pages=[8, 9], logits=[19]))
    torch.testing.assert_close(got[6:], expected, rtol=0, atol=1e-4)
    slots = torch.cat([torch.arange(64, 80), torch.arange(32, 61)])
    torch.testing.assert_close(pool.read(slots).k, alone.read(slots).k, rtol=0, atol=1e-4)


def test_a_step_without_logits_only_writes_kv(llama: LoadedModel) -> None:
    pool, whole_pool = (KVPool(llama.spec, pages=2, page_size=PAGE) for _ in range(2))
    ids = random_ids(20)
    out = llama.decoder.forward(
        build_batch([RequestRows(ids=ids, indices=range(20), pages=[1, 0])], page_size=16), pool
    )
    assert out.hidden.shape == (0, llama.spec.hidden)
    run(llama, whole_pool, whole(ids, [1, 0]))
    assert torch.equal(pool.data, whole_pool.data)


def test_reused_rows_are_seen_though_not_computed(llama: LoadedModel) -> None:
    """Rows whose KV was loaded before are left out of the batch; the others see them where they lie."""
    ids = random_ids(40)
    source, pool = (KVPool(llama.spec, pages=3, page_size=PAGE) for _ in range(2))
    expected = run(llama, source, whole(ids, [0, 1, 2]))
    span = torch.arange(10, 25)
    pages = torch.tensor([2, 0, 1])
    pool.write_block(pages[span // PAGE] * PAGE + span % PAGE, source.read(span))
    rows = [row for row in range(40) if row not in span]
    part = RequestRows(ids=[ids[row] for row in rows], indices=rows, pages=[2, 0, 1], logits=range(len(rows)))
    torch.testing.assert_close(run(llama, pool, part), expected[rows], rtol=0, atol=1e-5)


def test_a_logit_row_must_not_be_repairable() -> None:
    with pytest.raises(AssertionError, match="logits"):
        build_batch([RequestRows(ids=[1, 2], indices=[0, 1], pages=[0], logits=[1], selector=FixedRows(1, []),
                                 repairable=[False, True])], page_size=PAGE)  # fmt: skip
