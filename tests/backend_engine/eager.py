"""Steps of single rows run at once in plain torch: what CUDA graphs do, for engines on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.steps import Launched, even_batch, spread
from torch import Tensor


@dataclass(frozen=True)
class Ran:
    """`places` and `rows` are the step's own."""

    logits: Tensor
    places: Tensor
    rows: Tensor

    def greedy(self) -> list[int]:
        return self.logits.argmax(-1).tolist()


class EagerSteps:
    """See SingleRowSteps. `launches` counts what was launched before its ids were known."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, pages: Tensor, *, max_tokens: int, drafting: bool = False
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        self.drafting = (8, 8) if drafting else (0, 0)
        self.launches = 0

    def run(self, ids: Tensor, places: Tensor, rows: Tensor) -> Ran:
        logits = self._logits(torch.stack([each.to(self._pages.device) for each in (ids, places, rows)]), width=1)
        return Ran(logits, places, rows)

    def again(self, last: Launched) -> Ran:
        assert isinstance(last, Ran)
        self.launches += 1
        return self.run(last.logits.argmax(-1), last.places + 1, last.rows)

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
