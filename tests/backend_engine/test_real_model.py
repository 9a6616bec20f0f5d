"""The default model's logits against transformers', on text of several scripts and lengths, whole and in chunks."""

from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from torch import Tensor

from .driving import Reference

TEXTS = [
    "The capital of France is",
    "def quicksort(items: list[int]) -> list[int]:\n    if len(items) < 2:\n        return items\n" * 8,
    "人工智能正在改变我们的生活方式，" * 12,
    " ".join(f"Item {number} costs {number * 7 % 97} euros." for number in range(25)),
]


def last_logits(model: LoadedModel, pool: KVPool, ids: list[int], chunk: int) -> Tensor:
    pages = torch.randperm(pool.pages, generator=torch.Generator().manual_seed(chunk)).tolist()
    logits = torch.empty(0)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        indices = range(start, start + len(part))
        rows = RequestRows(ids=part, indices=indices, pages=pages, logits=[len(part) - 1])
        out = model.decoder.forward(build_batch([rows], page_size=pool.page_size), pool)
        logits = model.decoder.logits(out.hidden)[0]
    return logits


@pytest.mark.slow
def test_logits_equal_transformers(smollm2: LoadedModel, real_reference: Reference) -> None:
    assert smollm2.tokenizer is not None
    pool = KVPool(smollm2.spec, pages=30)
    for text in TEXTS:
        ids = smollm2.tokenizer.encode_plain(text)
        with torch.inference_mode():
            expected = real_reference.model(torch.tensor([ids])).logits[0, -1]
        for chunk in (len(ids), 64):
            got = last_logits(smollm2, pool, ids, chunk)
            torch.testing.assert_close(got, expected, rtol=0, atol=5e-4)
            assert got.argmax() == expected.argmax()


@pytest.mark.slow
@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no FBGEMM kernels here"
)
def test_eight_bits_of_weights_lose_little(smollm2: LoadedModel, smollm2_dir: Path) -> None:
    """In nats a position; benchmarks/quant_loss.py measures more. Chunks of 100 and 200 take the 8-bit products."""
    exact, rounded = smollm2, load_model(smollm2_dir, quantize="int8")
    assert exact.tokenizer is not None
    ids = exact.tokenizer.encode_plain(TEXTS[3])[:200]
    losses = []
    for chunk in (100, 200):
        pool = KVPool(exact.spec, pages=16)
        expected, got = (last_logits(model, pool, ids, chunk).log_softmax(-1) for model in (exact, rounded))
        losses.append(float((expected.exp() * (expected - got)).sum(-1).mean()))
    assert all(0 < loss < 0.02 for loss in losses), losses
