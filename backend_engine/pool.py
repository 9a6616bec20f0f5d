"""The paged KV pool: one tensor for all layers, addressed by slot. It knows neither requests nor ownership."""

from importlib import import_module

import torch
from torch import Tensor

from .rounded_kv import MOST, RoundedKV, Stored, parts, rounded, row_bytes, widened
from .spec import ModelSpec
from .types import KVBlock


class KVPool:
    """`pages * page_size` slots, each with one token's key and value in every layer.

    `data` is [layers, 2, slots, kv_heads, head_dim]; index 0 of the second axis is keys, 1 values. Slots start as
    zeros: a never-written slot may be gathered (and masked away), so it must not hold NaN.

    Of dtype int8 or float8_e4m3fn it is a rounded pool: `data` is uint8 [layers, 2, slots, bytes] (rounded_kv.py), and
    what is written to it is rounded once. `wide` is the dtype of blocks that are read.
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
        wide: torch.dtype | None = None,
    ) -> None:
        """`pinned`: memory of a host from and to which a GPU copies on its own; torch takes the next power of two.

        `wide` is the dtype of blocks that are read from a rounded pool (None: float32).
        """
        assert pages > 0 and page_size > 0, (pages, page_size)
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.wide = (wide or torch.float32) if self._rounds else dtype
        self._token = (spec.kv_heads, spec.head_dim)
        row = (row_bytes(*self._token),) if self._rounds else self._token
        self.data = torch.zeros(
            (spec.layers, 2, pages * page_size, *row),
            dtype=torch.uint8 if self._rounds else dtype,
            device=device,
            pin_memory=pinned,
        )
        self._layers = [(self._stored(layer[0]), self._stored(layer[1])) for layer in self.data]

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        row = spec.kv_heads * spec.head_dim * dtype.itemsize
        return spec.layers * 2 * (row_bytes(spec.kv_heads, spec.head_dim) if dtype in MOST else row)

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    def layer(self, index: int) -> tuple[Stored, Stored]:
        """Views of one layer's keys and values, each [slots, kv_heads, head_dim]."""
        return self._layers[index]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows `k`, `v` [rows, kv_heads, head_dim] at `slots` [rows] int64, which must be distinct."""
        for stored, rows in zip(self._layers[layer], (k, v), strict=True):
            stored.index_copy_(0, slots, rows)

    def read(self, slots: Tensor) -> KVBlock:
        """A copy of the tokens at `slots` for all layers."""
        block = self.data.index_select(2, slots)
        if self._rounds:
            block = widened(*parts(block, self.dtype, *self._token)).to(self.wide)
        return KVBlock(block[:, 0], block[:, 1])

    def write_block(self, slots: Tensor, block: KVBlock) -> None:
        """Store a block's tokens at `slots` [block.tokens] int64 for all layers; dtype and device are converted."""
        assert slots.shape[0] == block.tokens, (slots.shape, block.tokens)
        for half, x in enumerate((block.k, block.v)):
            rows = rounded(x.to(self.data.device), self.dtype) if self._rounds else x.to(self.data)
            self.data[:, half].index_copy_(1, slots, rows)

    def copy(self, source: int, target: int, *, tokens: int) -> None:
        """Copy the first tokens of the page `source` to the page `target` for all layers (its copy-on-write)."""
        assert source != target and 0 < tokens <= self.page_size, (source, target, tokens)
        old, new = source * self.page_size, target * self.page_size
        if self.data.device.type == "cuda":
            import_module(".pool_triton", __package__).copy_slots(self.data, old, new, tokens)
        else:
            self.data.narrow(2, new, tokens).copy_(self.data.narrow(2, old, tokens))

    @property
    def _rounds(self) -> bool:
        return self.dtype in MOST

    def _stored(self, rows: Tensor) -> Stored:
        return RoundedKV.of(rows, self.dtype, *self._token) if self._rounds else rows
