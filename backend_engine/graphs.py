"""Whole-step CUDA graphs for decode: from token ids to the next ids, without the host, for a ladder of batch sizes.

A step without prefills sends three numbers a row to the device (id, place in key order, row of the running table);
page tables, lengths, slots and sampling parameters are looked up there. A batch between two sizes is padded with rows
that write to a spare page. A step is two launches: the layers, and behind them one of the ways to draw (see
steps.Draw), which leaves the next step's numbers where the layers read them. All sizes are captured at the start: a
capture in between would stall whoever is served.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from .capture import Recorder, uncollected
from .model import Decoder
from .pool import KVPool
from .sampling_table import SamplingTable
from .steps import Draw, Launched, drawn, single_batch

LADDER = (1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """The layers of a step, and what may come behind them."""

    layers: torch.cuda.CUDAGraph
    hidden: Tensor  # [requests, hidden], after the last norm
    draws: dict[Draw, torch.cuda.CUDAGraph] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """See steps.Launched."""

    decoder: Decoder
    hidden: Tensor
    size: int
    draw: Draw
    drawn: Tensor  # [requests] in pinned memory, once `done`
    done: torch.cuda.Event

    def logits(self) -> Tensor:
        return self.decoder.logits(self.hidden)

    def ids(self) -> list[int]:
        assert self.draw is not Draw.HOST
        self.done.synchronize()
        return self.drawn.tolist()


class DecodeGraphs:
    """See steps.SingleRowSteps.

    `pages` is the running table's [rows + 1, width] int32, whose last row names a spare page.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        pages: Tensor,
        *,
        sampling: SamplingTable,
        max_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._spare = pages.shape[0] - 1
        most = self._spare
        self._sizes = [size for size in LADDER if size < most] + [most]
        self._recorded = Recorder()
        self._host = torch.zeros(3, most, dtype=torch.int64, pin_memory=True)
        self._lines = self._host.numpy()  # the same memory: torch takes ten times as long for a few numbers
        self._inputs = torch.zeros(3, most, dtype=torch.int64, device=pages.device)
        self._sent = torch.cuda.Event()
        # What is drawn goes to two lines of the host's memory in turns, because a step is read while the next one runs.
        # The device counts the turns, as the host does.
        self._read = torch.zeros(2, most, dtype=torch.int64, pin_memory=True)
        self._turn, self._turns = torch.zeros(1, dtype=torch.int64, device=pages.device), 0
        # Large sizes first: the memory that they work in serves the smaller ones too.
        with uncollected():
            self._captured = {size: self._capture(size) for size in reversed(self._sizes)}
        self._turn.zero_()
        self._move_on(self._inputs[0, :1].clone(), read=None)  # compiles it, for a step that the host draws

    def run(self, ids: Tensor, places: Tensor, rows: Tensor, *, draw: Draw) -> Launched:
        count = ids.shape[0]
        size = self._sizes[bisect_left(self._sizes, count)]
        self._sent.synchronize()  # the last step's numbers must have left the pinned memory
        for line, numbers in zip(self._lines, (ids, places, rows), strict=True):
            line[:count] = numbers.numpy()
        self._pad(count, size)
        self._inputs.copy_(self._host, non_blocking=True)
        self._sent.record()
        return self._launched(size, count, draw)

    def again(self, last: Launched, *, drawn: Tensor | None = None) -> Launched:
        assert isinstance(last, _Replayed) and (last.draw is Draw.HOST) == (drawn is not None), last
        count = last.hidden.shape[0]
        if drawn is not None:
            self._move_on(drawn, read=None)
        return self._launched(last.size, count, last.draw)

    def _launched(self, size: int, count: int, draw: Draw) -> Launched:
        captured = self._captured[size]
        captured.layers.replay()
        read, done = self._read[self._turns % 2, :count], torch.cuda.Event()
        if draw is not Draw.HOST:
            captured.draws[draw].replay()
            self._turns += 1
            done.record()
        return _Replayed(
            decoder=self._decoder, hidden=captured.hidden[:count], size=size, draw=draw, drawn=read, done=done
        )

    def _pad(self, start: int, rows: int) -> None:
        self._lines[:2, start:rows] = 0
        self._lines[2, start:rows] = self._spare

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        self._pad(0, size)
        self._inputs.copy_(self._host)
        layers, hidden = self._recorded(lambda: self._layers(size))
        captured = _Captured(layers=layers, hidden=hidden)
        for draw in Draw:
            if draw is not Draw.HOST:
                captured.draws[draw], _ = self._recorded(lambda draw=draw: self._draw(hidden, draw))
        return captured

    def _layers(self, size: int) -> Tensor:
        ids, places, owners = self._inputs[:, :size].unbind()
        batch = single_batch(
            ids, places, owners, self._pages, page_size=self._pool.page_size, max_tokens=self._max_tokens
        )
        return self._decoder.forward(batch, self._pool).hidden

    def _draw(self, hidden: Tensor, draw: Draw) -> Tensor:
        _, places, owners = self._inputs[:, : hidden.shape[0]].unbind()
        fresh = drawn(self._decoder.scores(hidden), places, owners, self._sampling, draw=draw)
        self._move_on(fresh, read=self._read)
        return fresh

    def _move_on(self, fresh: Tensor, *, read: Tensor | None) -> None:
        """Let the first rows go on with their fresh ids [rows]; rows that only pad stay where they are."""
        ids, places, owners = self._inputs[:, : fresh.shape[0]].unbind()
        moved_on = import_module(".steps_triton", __package__).moved_on
        moved_on(fresh, ids, places, owners, spare=self._spare, read=read, turn=self._turn)
