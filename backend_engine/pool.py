"""The paged KV pool: one tensor for all layers, addressed by slot. It knows neither requests nor ownership."""

import torch
from torch import Tensor

from .spec import ModelSpec
from .types import KVBlock


class KVPool:
    """`pages * page_size` slots, each with one token's key and value in every layer.

    `data` is [layers, 2, slots, kv_heads, head_dim]; index 0 of the second axis is keys, 1 values. Slots start as
    zeros: a never-written slot may be gathered (and masked away), so it must not hold NaN.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        """`pinned`: memory of a host from and to which a GPU copies on its own; torch takes the next power of two."""
        assert pages > 0 and page_size > 0, (pages, page_size)
        self.pages = pages
        self.page_size = page_size
        shape = (spec.layers, 2, pages * page_size, spec.kv_heads, spec.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        return spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [slots, kv_heads, head_dim]."""
        return self._layers[index]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows `k`, `v` [rows, kv_heads, head_dim] at `slots` [rows] int64, which must be distinct."""
        self.data[layer, 0].index_copy_(0, slots, k)
        self.data[layer, 1].index_copy_(0, slots, v)

    def read(self, slots: Tensor) -> KVBlock:
        """A copy of the tokens at `slots` for all layers."""
        block = self.data.index_select(2, slots)
        return KVBlock(block[:, 0], block[:, 1])

    def write_block(self, slots: Tensor, block: KVBlock) -> None:
        """Store a block's tokens at `slots` [block.tokens] int64 for all layers; dtype and device are converted."""
        assert slots.shape[0] == block.tokens, (slots.shape, block.tokens)
        self.data[:, 0].index_copy_(1, slots, block.k.to(self.data))
        self.data[:, 1].index_copy_(1, slots, block.v.to(self.data))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the tokens at slots `source` to slots `target` for all layers (a page's copy-on-write)."""
        self.data.index_copy_(2, target, self.data.index_select(2, source))
