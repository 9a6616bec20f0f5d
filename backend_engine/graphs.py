"""Whole-step CUDA graphs for decode: from token ids to the next ids, one launch a step, for a ladder of batch sizes.

A step without prefills sends three numbers a row to the device (id, place in key order, row of the running table);
page tables, lengths and slots are looked up there. A batch between two sizes is padded with rows that write to a spare
page. All sizes are captured at the start: a capture in between would stall whoever is served. Steps that verify guesses
have more rows a request; what these are worth was not measured on a GPU yet, so they are captured only on demand.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Decoder
from .pool import KVPool
from .steps import Launched, even_batch, spread

LADDER = (1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
# Requests, and rows of each, in steps that verify guesses.
DRAFTED_REQUESTS, DRAFTED_ROWS = (1, 2, 4, 8), (4, 8, 16)
_WARM_UPS = 2

Size = tuple[int, int]  # requests, rows of each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, vocab] float32
    greedy: Tensor  # [rows] int64


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

    def __init__(
        self, decoder: Decoder, pool: KVPool, pages: Tensor, *, max_tokens: int, drafting: bool = False
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        most = pages.shape[0] - 1
        self._sizes = [size for size in LADDER if size < most] + [most]
        drafted = [(requests, rows) for requests in DRAFTED_REQUESTS for rows in DRAFTED_ROWS if requests <= most]
        sizes = [(size, 1) for size in self._sizes] + (drafted if drafting else [])
        sizes.sort(key=lambda size: -size[0] * size[1])
        widest = sizes[0][0] * sizes[0][1]
        self._memory = torch.cuda.graph_pool_handle()
        self._host = torch.zeros(3, widest, dtype=torch.int64, pin_memory=True)
        self._inputs = torch.zeros(3, widest, dtype=torch.int64, device=pages.device)
        self._sent = torch.cuda.Event()
        # Two, because a step is read while the next one runs.
        self._drawn = [torch.zeros(most, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        # Large sizes first: the memory that they work in serves the smaller ones too.
        self._captured = {size: self._capture(size) for size in sizes}
        self.drafting = max(drafted) if drafting else (0, 0)

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

    def drafted(self, ids: Tensor, places: Tensor, rows: Tensor, widths: Sequence[int]) -> Tensor:
        requests = DRAFTED_REQUESTS[bisect_left(DRAFTED_REQUESTS, len(widths))]
        width = DRAFTED_ROWS[bisect_left(DRAFTED_ROWS, max(widths))]
        self._sent.synchronize()
        self._pad(0, requests * width)
        into = spread(torch.stack((ids, places, rows)), widths, width=width, out=self._host)
        self._inputs.copy_(self._host, non_blocking=True)
        self._sent.record()
        captured = self._captured[requests, width]
        captured.graph.replay()
        return captured.logits[into.to(captured.logits.device)]

    def again(self, last: Launched) -> Launched:
        assert isinstance(last, _Replayed), last
        self._inputs[0, : last.count].copy_(self._captured[last.size, 1].greedy[: last.count])
        self._inputs[1, : last.count] += 1
        return self._launched(last.size, last.count)

    def _launched(self, size: int, count: int) -> Launched:
        captured = self._captured[size, 1]
        captured.graph.replay()
        self._drawn.reverse()
        drawn = self._drawn[0][:count]
        drawn.copy_(captured.greedy[:count], non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Replayed(size=size, count=count, logits=captured.logits[:count], drawn=drawn, done=done)

    def _pad(self, start: int, rows: int) -> None:
        self._host[:2, start:rows] = 0
        self._host[2, start:rows] = self._pages.shape[0] - 1

    @torch.inference_mode()
    def _capture(self, size: Size) -> _Captured:
        self._pad(0, size[0] * size[1])
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

    def _step(self, size: Size) -> tuple[Tensor, Tensor]:
        ids, places, owners = self._inputs[:, : size[0] * size[1]].unbind()
        batch = even_batch(
            ids, places, owners, self._pages,
            width=size[1], page_size=self._pool.page_size, max_tokens=self._max_tokens,
        )  # fmt: skip
        logits = self._decoder.logits(self._decoder.forward(batch, self._pool).hidden)
        return logits, logits.argmax(-1)
