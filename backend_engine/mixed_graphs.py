"""Whole-step CUDA graphs for steps with guesses or with prefills of few rows: one launch in place of several hundred.

Such a step is bound by the host, and so are the streams that run beside it and the first token of a short prompt. All
that differs between two steps is numbers that the host sends: an id, a place in key order and a row of the running
table for each row, and how attention is cut into tiles. A step between two sizes is padded with rows at the first place
of a spare page. Keys are split as for long prompts: parts that have none end at once.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .attention.paged import cut, tile_size
from .batch import StepBatch
from .capture import SIZES, Record, cuda_record, uncollected
from .launch_sizes import cdiv
from .model import Decoder
from .pool import KVPool
from .sequence import Rows

# The smallest ones verify guesses.
_SIZES = (4, 8, *SIZES)


class MixedGraphs:
    """See steps.MixedSteps. Serves steps of up to so many rows as the largest size has that is not above `most`.

    `pages` is the running table's [rows + 1, width] int32, whose last row names a spare page. `record` makes the
    graphs, by default CUDA's. One step at a time: all of them work in the same memory.
    """

    def __init__(
        self, decoder: Decoder, pool: KVPool, pages: Tensor, *, most: int, max_tokens: int, record: Record | None = None
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        self._spare = pages.shape[0] - 1
        self.sizes = [size for size in _SIZES if size <= most]
        spec, itemsize = decoder.spec, decoder.dtype.itemsize
        heads = {"heads": spec.heads, "kv_heads": spec.kv_heads, "dim": spec.head_dim, "itemsize": itemsize}
        self._tile_rows = {size: tile_size(size, **heads)[0] for size in self.sizes}
        longest = 3 * max(size + 1 + self._tiles(size) for size in self.sizes)
        on_card = pages.device.type == "cuda"
        self._host = torch.zeros(longest, dtype=torch.int32, pin_memory=on_card)
        self._numbers = self._host.numpy()  # the same memory: torch takes ten times as long for a few numbers
        self._inputs = torch.zeros(longest, dtype=torch.int32, device=pages.device)
        self._sent = torch.cuda.Event() if on_card else None
        # Large sizes first: the memory that they work in serves the smaller ones too.
        with uncollected(), torch.inference_mode():
            record = record or cuda_record()
            self._replays = {size: self._recorded(size, record) for size in reversed(self.sizes)}

    def run(self, ids: Rows, places: Rows, owners: Rows, widths: Rows) -> Tensor:
        rows = len(ids)
        size = self.sizes[bisect_left(self.sizes, rows)]
        self._send(size, ids, places, owners, widths)
        return self._replays[size]()[:rows]

    def _recorded(self, size: int, record: Record) -> Callable[[], Tensor]:
        """The step of one size, recorded while nothing but padding is in it."""
        none = np.empty(0, dtype=np.int64)
        self._send(size, none, none, none, none)
        return record(self._work(size))

    def _send(self, size: int, ids: Rows, places: Rows, owners: Rows, widths: Rows) -> None:
        rows, used = len(ids), 3 * (size + 1 + self._tiles(size))
        if self._sent is not None:
            self._sent.synchronize()  # the last step's numbers must have left the pinned memory
        numbers = self._numbers[:used].reshape(-1, 3)
        lines, count, tiles = numbers[:size].reshape(3, size), numbers[size : size + 1], numbers[size + 1 :]
        for line, values, padding in zip(lines, (ids, places, owners.repeat(widths)), (0, 0, self._spare), strict=True):
            line[:rows], line[rows:] = values, padding
        laid = cut((*accumulate(widths.tolist(), initial=0), size), self._tile_rows[size])
        laid[:, 0] = np.append(owners, self._spare)[laid[:, 0]]
        count[:], tiles[: len(laid)] = len(laid), laid
        self._inputs[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _tiles(self, size: int) -> int:
        """At most so many have rows: the last one of each request, and of the padding, may be a part."""
        return cdiv(size, self._tile_rows[size]) + min(size, self._spare + 1)

    def _work(self, size: int) -> Callable[[], Tensor]:
        device, page_size, most = self._pages.device, self._pool.page_size, self._max_tokens
        lines = self._inputs[: 3 * size].view(3, size)
        tiles = self._inputs[3 * size : 3 * (size + 1 + self._tiles(size))].view(-1, 3)
        numbers = torch.arange(size, device=device)
        start = torch.tensor((0, size), dtype=torch.int32, device=device)

        def work() -> Tensor:
            ids, places, owners = lines.long()
            visible = (places + 1).int()
            batch = StepBatch(
                ids=ids,
                positions=places,
                slots=self._pages[owners, places // page_size].long() * page_size + places % page_size,
                visible=visible,
                query_start=start,
                page_table=self._pages,
                key_count=visible.amax(0, keepdim=True),
                logit_rows=numbers,
                query_start_host=(0, size),
                key_count_host=(most,),
                logit_counts_host=(size,),
                newest=True,
                tiles=tiles,
            )
            return self._decoder.forward(batch, self._pool).hidden

        return work
