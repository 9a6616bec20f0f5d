"""Weights moved to memory that the system maps in large pages: reading all of them visits each page once a step."""

import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from ..linear import RowMajor
from ..weights import Weights

_ALIGNMENT = 64  # a cache line
_BLOCK_BYTES = 64 << 20


def move_to_large_pages(weights: Weights) -> None:
    """Give the tensors that native steps read new memory; they stay the same tensors with the same values.

    Only a wish: where the system has no large pages, or none left, the weights are where they would be otherwise.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    block, used = torch.empty(0, dtype=torch.uint8), 0
    for weight in _in_rows(weights):
        if used + weight.nbytes > block.nbytes:
            block, used = _block(max(_BLOCK_BYTES, weight.nbytes)), 0
        moved = block[used : used + weight.nbytes].view(weight.dtype).view(weight.shape)
        moved.copy_(weight)
        weight.data = moved
        used += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_rows(weights: Weights) -> Iterator[Tensor]:
    """Each weight once: embeddings may be tied."""
    holders: list[object] = [weights.embedding, weights.head]
    for layer in weights.layers:
        holders += (layer.qkv, layer.out, layer.gate_up, layer.down)
    seen = set[int]()
    for holder in holders:
        assert isinstance(holder, RowMajor), holder
        weight = holder.row_major[0]
        if id(weight) not in seen:
            seen.add(id(weight))
            yield weight


def _block(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
