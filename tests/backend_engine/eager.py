"""Steps that run at once in plain torch: what CUDA graphs do, for engines on any device."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from promptsluice.backend_engine.batch import StepBatch
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.sampling_table import SamplingTable
from promptsluice.backend_engine.sequence import Rows
from promptsluice.backend_engine.steps import Draw, Launched, drawn, single_batch
from torch import Tensor


@dataclass(frozen=True)
class Ran:
    """`places` and `rows` are the step's own."""

    scores: Tensor
    drawn: Tensor
    places: Tensor
    rows: Tensor
    draw: Draw

    def logits(self) -> Tensor:
        return self.scores

    def ids(self) -> list[int]:
        assert self.draw is not Draw.HOST
        return self.drawn.tolist()


class EagerSteps:
    """See SingleRowSteps. `launches` counts what was launched before its ids were known, by how they are drawn."""

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
        self.launches: Counter[Draw] = Counter()

    def run(self, ids: Tensor, places: Tensor, rows: Tensor, *, draw: Draw) -> Ran:
        inputs = torch.stack([each.to(self._pages.device) for each in (ids, places, rows)])
        logits, after = self._logits(inputs), torch.empty_like(inputs[0])
        if draw is not Draw.HOST:
            after = drawn(logits, *inputs[1:], self._sampling, draw=draw)
        return Ran(logits, after, places, rows, draw)

    def again(self, last: Launched, *, drawn: Tensor | None = None) -> Ran:
        assert isinstance(last, Ran) and (last.draw is Draw.HOST) == (drawn is not None)
        self.launches[last.draw] += 1
        fresh = last.drawn if drawn is None else drawn
        return self.run(fresh.clamp(min=0), last.places + 1, last.rows, draw=last.draw)

    def _logits(self, inputs: Tensor) -> Tensor:
        ids, places, owners = inputs
        assert int(places.max()) < self._max_tokens
        batch = single_batch(
            ids, places, owners, self._pages, page_size=self._pool.page_size, max_tokens=self._max_tokens
        )
        own = batch.slots[owners < self._pages.shape[0] - 1]
        assert len(own.unique()) == len(own), "two requests write to one slot"
        return self._decoder.logits(self._decoder.forward(batch, self._pool).hidden)


class EagerMixed:
    """See MixedSteps. `widths` are the rows of each request in the steps that it ran."""

    def __init__(self, decoder: Decoder, pool: KVPool, pages: Tensor, *, most: int, max_tokens: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        self.sizes = [size for size in (4, 16) if size < most] + [most]
        self.widths: list[list[int]] = []

    def run(self, ids: Rows, places: Rows, owners: Rows, widths: Rows) -> Tensor:
        assert len(ids) <= self.sizes[-1] and places.max() < self._max_tokens
        self.widths.append(widths.tolist())
        starts, size = np.append(0, widths.cumsum()), self._pool.page_size
        keys = [int(each.max()) + 1 for each in np.split(places, starts[1:-1])]
        pages = self._pages.cpu().numpy()[owners.repeat(widths), places // size].astype(np.int64)
        batch = StepBatch(
            ids=self._sent(ids),
            positions=self._sent(places),
            slots=self._sent(pages * size + places % size),
            visible=self._sent((places + 1).astype(np.int32)),
            query_start=self._sent(starts.astype(np.int32)),
            page_table=self._pages[self._sent(owners)],
            key_count=self._sent(np.array(keys, dtype=np.int32)),
            logit_rows=self._sent(np.arange(len(ids))),
            query_start_host=tuple(starts.tolist()),
            key_count_host=tuple(keys),
            logit_counts_host=tuple(widths.tolist()),
        )
        return self._decoder.forward(batch, self._pool).hidden

    def _sent(self, numbers: Rows) -> Tensor:
        return torch.from_numpy(numbers).to(self._pages.device)
