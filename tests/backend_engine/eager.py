"""Steps of single rows run at once in plain torch: what CUDA graphs do, for engines on any device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.sampling_table import SamplingTable
from promptsluice.backend_engine.steps import Draw, Launched, drawn, even_batch, spread
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
        drafting: bool = False,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._sampling = sampling
        self._max_tokens = max_tokens
        self.drafting = (8, 8) if drafting else (0, 0)
        self.launches: Counter[Draw] = Counter()

    def run(self, ids: Tensor, places: Tensor, rows: Tensor, *, draw: Draw) -> Ran:
        inputs = torch.stack([each.to(self._pages.device) for each in (ids, places, rows)])
        logits, after = self._logits(inputs, width=1), torch.empty_like(inputs[0])
        if draw is not Draw.HOST:
            after = drawn(logits, *inputs[1:], self._sampling, draw=draw)
        return Ran(logits, after, places, rows, draw)

    def again(self, last: Launched, *, drawn: Tensor | None = None) -> Ran:
        assert isinstance(last, Ran) and (last.draw is Draw.HOST) == (drawn is not None)
        self.launches[last.draw] += 1
        fresh = last.drawn if drawn is None else drawn
        return self.run(fresh.clamp(min=0), last.places + 1, last.rows, draw=last.draw)

    def drafted(self, ids: Tensor, places: Tensor, rows: Tensor, widths: Sequence[int]) -> Tensor:
        """As graphs do: with a request too many, and more rows than anybody has."""
        requests, width = self.drafting
        assert len(widths) <= requests and max(widths) <= width, widths
        inputs = torch.zeros(3, requests * width, dtype=torch.int64)
        inputs[2] = self._pages.shape[0] - 1
        into = spread(torch.stack((ids, places, rows)), widths, width=width, out=inputs)
        return self._logits(inputs.to(self._pages.device), width=width)[into]

    def _logits(self, inputs: Tensor, *, width: int) -> Tensor:
        ids, places, owners = inputs
        assert int(places.max()) < self._max_tokens
        batch = even_batch(
            ids, places, owners, self._pages, width=width, page_size=self._pool.page_size, max_tokens=self._max_tokens
        )
        own = batch.slots[owners < self._pages.shape[0] - 1]
        assert len(own.unique()) == len(own), "two requests write to one slot"
        return self._decoder.logits(self._decoder.forward(batch, self._pool).hidden)
