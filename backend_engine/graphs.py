"""Whole-step CUDA graphs for decode: from token ids to the next ids, one launch a step, for a ladder of batch sizes.

A step without prefills sends three numbers a request to the device (id, place in key order, row of the running table);
page tables, lengths and slots are looked up there. A batch between two sizes is padded with rows that write to a spare
page. All sizes are captured at the start: a capture in between would stall whoever is served.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import StepBatch
from .model import Decoder
from .pool import KVPool
from .steps import Launched

LADDER = (1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [size, vocab] float32
    greedy: Tensor  # [size] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """See steps.Launched."""

    size: int
    count: int
    logits: Tensor
    drawn: Tensor
    done: torch.cuda.Event

    def greedy(self) -> list[int]:
        self.done.synchronize()
        return self.drawn.tolist()


class DecodeGraphs:
    """See steps.SingleRowSteps.

    `pages` is the running table's [rows + 1, width] int32, whose last row names a spare page.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, pages: Tensor, *, max_tokens: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        most = pages.shape[0] - 1
        self._sizes = [size for size in LADDER if size < most] + [most]
        self._memory = torch.cuda.graph_pool_handle()
        self._host = torch.zeros(3, most, dtype=torch.int64, pin_memory=True)
        self._inputs = torch.zeros(3, most, dtype=torch.int64, device=pages.device)
        self._sent = torch.cuda.Event()
        # Two, because a step is read while the next one runs.
        self._drawn = [torch.zeros(most, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        # Large sizes first: the memory that they work in serves the smaller ones too.
        self._captured = {size: self._capture(size) for size in reversed(self._sizes)}

    def run(self, ids: Tensor, places: Tensor, rows: Tensor) -> Launched:
        count = ids.shape[0]
        size = self._sizes[bisect_left(self._sizes, count)]
        self._sent.synchronize()  # the last step's numbers must have left the pinned memory
        self._host[0, :count] = ids
        self._host[1, :count] = places
        self._host[2, :count] = rows
        self._pad(count, size)
        self._inputs.copy_(self._host, non_blocking=True)
        self._sent.record()
        return self._launched(size, count)

    def again(self, last: Launched) -> Launched:
        assert isinstance(last, _Replayed), last
        self._inputs[0, : last.count].copy_(self._captured[last.size].greedy[: last.count])
        self._inputs[1, : last.count] += 1
        return self._launched(last.size, last.count)

    def _launched(self, size: int, count: int) -> Launched:
        captured = self._captured[size]
        captured.graph.replay()
        self._drawn.reverse()
        drawn = self._drawn[0][:count]
        drawn.copy_(captured.greedy[:count], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Replayed(size=size, count=count, logits=captured.logits[:count], drawn=drawn, done=done)

    def _pad(self, start: int, size: int) -> None:
        self._host[:2, start:size] = 0
        self._host[2, start:size] = self._pages.shape[0] - 1

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        self._pad(0, size)
        self._inputs.copy_(self._host)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._step(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (an embedder, the moving of chunks) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, greedy = self._step(size)
        return _Captured(graph=graph, logits=logits, greedy=greedy)

    def _step(self, size: int) -> tuple[Tensor, Tensor]:
        ids, places, rows = self._inputs[:, :size].unbind()
        page_size = self._pool.page_size
        table = self._pages[rows]
        slots = table.gather(1, (places // page_size)[:, None]).squeeze(1).long() * page_size + places % page_size
        numbers = torch.arange(size + 1, dtype=torch.int32, device=table.device)
        seen = (places + 1).int()
        batch = StepBatch(
            ids=ids,
            positions=places,
            slots=slots,
            visible=seen,
            query_start=numbers,
            page_table=table,
            key_count=seen,
            logit_rows=numbers[:size].long(),
            query_start_host=tuple(range(size + 1)),
            key_count_host=(self._max_tokens,) * size,
            logit_counts_host=(1,) * size,
        )
        logits = self._decoder.logits(self._decoder.forward(batch, self._pool).hidden)
        return logits, logits.argmax(-1)
