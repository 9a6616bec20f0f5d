# pyright: reportMissingParameterType=false
"""The likeliest id of each row of scores as Triton kernels: the best of each block, and the best of these.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_sizes import cdiv, next_power_of_2

_BLOCK = 4096  # scores that one program looks at


def likeliest(scores: Tensor) -> Tensor:
    """See likeliest.likeliest. `scores` may have any floating dtype; they are compared as float32."""
    rows, vocab = scores.shape
    assert scores.is_contiguous(), scores.stride()
    blocks = cdiv(vocab, _BLOCK)
    tops = torch.empty((rows, blocks), dtype=torch.float32, device=scores.device)
    places = torch.empty((rows, blocks), dtype=torch.int32, device=scores.device)
    ids = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        block: dict[str, Any] = {"BLOCK": _BLOCK, "num_warps": 4}
        rest: dict[str, Any] = {"BLOCKS_PAD": next_power_of_2(blocks), "num_warps": 1}
        _of_blocks[(rows, blocks)](scores, tops, places, vocab, blocks, **block)
        _of_rows[(rows,)](tops, places, ids, vocab, blocks, **rest)
    return ids


@triton.jit
def _of_blocks(scores, tops, places, vocab, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(score, 0)
    tl.store(tops + row * blocks + block, top)
    tl.store(places + row * blocks + block, tl.min(tl.where(score == top, at, vocab), 0))


@triton.jit
def _of_rows(tops, places, ids, vocab, blocks, BLOCKS_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS_PAD)
    live = at < blocks
    top = tl.load(tops + row * blocks + at, mask=live, other=float("-inf"))
    place = tl.load(places + row * blocks + at, mask=live, other=vocab)
    first = tl.min(tl.where(top == tl.max(top, 0), place, vocab), 0)
    tl.store(ids + row, tl.minimum(first, vocab - 1).to(tl.int64))  # a NaN equals nothing; ids must stay ids
