"""Attention through torch's scaled_dot_product_attention: the CPU backend, and the reference for faster ones.

Planning reads the batch's small tensors on the host, which on a GPU waits for it. Keys of consecutive pages are
used where they lie; others are gathered page by page. Key/value heads are never repeated: query heads of one group
are packed beside each other.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import StepBatch
from ..fused import HeadTurn
from ..rounded_kv import RoundedKV, Stored

ROW_BLOCK = 256  # rows that share one mask: keys that none of them sees are not touched at all


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `start..stop`, which look at the request's keys `first..keys`, through `mask` [rows, keys] if any."""

    start: int
    stop: int
    first: int
    keys: int
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    """Where the keys that its rows may see lie, slots `first..first + keys` or in `pages`, and the rows in blocks.

    The blocks count keys from the first of these.
    """

    keys: int
    first: int
    pages: Tensor | None  # [pages] int64
    blocks: tuple[_Block, ...]


class SdpaAttention:
    """See AttentionBackend. Stateless."""

    def plan(self, batch: StepBatch, *, page_size: int, scale: float, window: int | None = None) -> "SdpaPlan":
        visible, table = batch.visible.cpu().numpy(), batch.page_table.cpu().numpy()
        starts, requests, device = batch.query_start_host, [], batch.page_table.device
        for number, (start, stop) in enumerate(pairwise(starts)):
            if start == stop:
                continue
            seen = visible[start:stop]
            skipped = _first(seen, window) // page_size  # whole pages before the window
            seen = seen - skipped * page_size
            keys = int(seen.max())
            first, pages = _location(table[number, skipped:][: -(-keys // page_size)], page_size, device)
            requests.append(_Request(keys, first, pages, tuple(_blocks(seen, start, window, device))))
        return SdpaPlan(tuple(requests), page_size, scale)


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """See AttentionPlan."""

    requests: tuple[_Request, ...]
    page_size: int
    scale: float

    def __call__(self, q: Tensor, k: Stored, v: Stored) -> Tensor:
        if not self.requests:
            return torch.empty_like(q)
        rows = q.view(q.shape[0], k.shape[1], -1, k.shape[2])  # [rows, kv_heads, group, dim]
        parts = [
            self._attend(block, rows[block.start : block.stop], keys, values)
            for request in self.requests
            for keys, values in [(self._stored(request, k, q.dtype), self._stored(request, v, q.dtype))]
            for block in request.blocks
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(q.shape)

    def turned(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor | None:
        return None

    def _stored(self, request: _Request, stored: Stored, dtype: torch.dtype) -> Tensor:
        """A request's keys or values [keys, kv_heads, dim] and what may follow them; a view of consecutive pages.

        Of a rounded pool a copy, in `dtype`.
        """
        if isinstance(stored, RoundedKV):
            return stored[self._slots(request)].to(dtype)
        if request.pages is None:
            return stored[request.first :]
        paged = stored.view(-1, self.page_size, *stored.shape[1:])
        return paged.index_select(0, request.pages).flatten(0, 1)

    def _slots(self, request: _Request) -> Tensor | slice:
        """Where a request's keys lie."""
        if request.pages is None:
            return slice(request.first, request.first + request.keys)
        ahead = torch.arange(self.page_size, device=request.pages.device)
        return (request.pages[:, None] * self.page_size + ahead).flatten()[: request.keys]

    def _attend(self, block: _Block, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of a block's rows [rows, kv_heads, group, dim], in that shape and contiguous."""
        keys, values = _heads_first(block, keys), _heads_first(block, values)
        if rows.shape[0] == 1:  # the group's heads are the rows of one product
            return F.scaled_dot_product_attention(rows, keys, values, scale=self.scale).contiguous()
        attended = F.scaled_dot_product_attention(
            rows.permute(1, 2, 0, 3),  # [kv_heads, group, rows, dim]
            keys.transpose(0, 1).expand(-1, rows.shape[2], -1, -1),
            values.transpose(0, 1).expand(-1, rows.shape[2], -1, -1),
            attn_mask=block.mask,
            is_causal=block.causal,
            scale=self.scale,
        )
        return attended.permute(2, 0, 1, 3).contiguous()


def _heads_first(block: _Block, stored: Tensor) -> Tensor:
    """The keys or values that a block looks at as [1, kv_heads, keys, dim], in one operation: decodes are many."""
    (_, heads, dim), (row, head, element) = stored.shape, stored.stride()
    shape = (1, heads, block.keys - block.first, dim)
    return stored.as_strided(shape, (0, head, row, element), stored.storage_offset() + block.first * row)


def _location(pages: np.ndarray, page_size: int, device: torch.device) -> tuple[int, Tensor | None]:
    """The first slot of consecutive pages, or the pages to gather."""
    if (np.diff(pages) == 1).all():
        return int(pages[0]) * page_size, None
    return 0, torch.from_numpy(pages.astype(np.int64)).to(device)


def _first(seen: np.ndarray, window: int | None) -> int:
    """The first key that any of the rows sees."""
    return 0 if window is None else max(0, int(seen.min()) - window)


def _blocks(seen: np.ndarray, offset: int, window: int | None, device: torch.device) -> list[_Block]:
    """Cut a request's rows, which see `seen` keys each, into blocks; `offset` is the first row's place in the batch."""
    rows = len(seen)
    causal = rows > 1 and seen[0] == 1 and bool((np.diff(seen) == 1).all())
    if causal and (window is None or rows <= window):
        return [_Block(offset, offset + rows, 0, rows, causal=True)]
    blocks = []
    for start in range(0, rows, ROW_BLOCK):
        part = seen[start : start + ROW_BLOCK]
        first, keys, begin = _first(part, window), int(part.max()), offset + start
        mask = None
        if part.min() < keys:
            columns, ends = np.arange(first, keys), part[:, None]
            inside = columns < ends if window is None else (columns < ends) & (columns >= ends - window)
            mask = torch.from_numpy(inside).to(device)
        blocks.append(_Block(begin, begin + len(part), first, keys, mask))
    return blocks
