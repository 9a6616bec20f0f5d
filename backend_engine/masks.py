"""Packed masks of allowed ids: one bit a token, as the grammar libraries (xgrammar, llguidance) fill them."""

import torch
from torch import Tensor

WORD = 32


def mask_words(vocab: int) -> int:
    """How many int32 words hold a bit for each id."""
    return -(-vocab // WORD)


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """`logits` [S, vocab] with the ids at minus infinity that `allowed` (int32 [S, mask_words(vocab)]) does not allow.

    The bit of id i is bit `i % 32` of word `i // 32`. A row of words -1 allows everything; each row must allow
    something. No sync: shapes depend on shapes only.
    """
    vocab = logits.shape[-1]
    assert allowed.dtype == torch.int32 and allowed.shape == (logits.shape[0], mask_words(vocab)), allowed.shape
    places = torch.arange(WORD, dtype=torch.int32, device=allowed.device)
    bits = (allowed[:, :, None] >> places) & 1
    return logits.masked_fill(bits.flatten(1)[:, :vocab] == 0, -torch.inf)
