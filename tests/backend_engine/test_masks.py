"""Packed masks of allowed ids, alone and before everything else that a draw does."""

import numpy as np
import pytest
import torch
from promptsluice.backend_engine.masks import mask_words, masked
from promptsluice.backend_engine.sampling import SamplingTensors, sample
from torch import Tensor


def packed(allowed: Tensor) -> Tensor:
    """A bool mask [S, vocab] as words, bit by bit."""
    words = torch.zeros(len(allowed), mask_words(allowed.shape[1]), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


@pytest.mark.parametrize("vocab", [31, 32, 33, 1000])
def test_only_allowed_ids_are_left(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    allowed = torch.rand(6, vocab, generator=generator) < 0.2
    allowed[:, -1] = True
    allowed[5] = True
    before, left = logits.clone(), masked(logits, packed(allowed))
    assert torch.equal(left, logits.masked_fill(~allowed, -torch.inf))
    assert torch.equal(masked(logits, torch.full((6, mask_words(vocab)), -1, dtype=torch.int32)), logits)
    assert torch.equal(logits, before), "the model's logits are needed unmasked for log-probabilities"
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 1.0, 1.5, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 3, 0, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
        seed=torch.arange(6),
        drawn=torch.zeros(6, dtype=torch.int64),
    )
    assert allowed.gather(1, sample(left, params)[:, None]).all()
