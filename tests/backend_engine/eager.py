"""Steps of single rows run at once in plain torch: what CUDA graphs do, for engines on any device."""

from dataclasses import dataclass

import torch
from promptsluice.backend_engine.batch import StepBatch
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.steps import Launched
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

    def __init__(self, decoder: Decoder, pool: KVPool, pages: Tensor, *, max_tokens: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._pages = pages
        self._max_tokens = max_tokens
        self.launches = 0

    def run(self, ids: Tensor, places: Tensor, rows: Tensor) -> Ran:
        assert int(places.max()) < self._max_tokens
        device = self._pages.device
        ids, places, rows = ids.to(device), places.to(device), rows.to(device)
        table, size, count = self._pages[rows], self._pool.page_size, len(ids)
        slots = table.gather(1, (places // size)[:, None]).squeeze(1).long() * size + places % size
        assert len(slots.unique()) == count, "two requests write to one slot"
        numbers = torch.arange(count + 1, dtype=torch.int32, device=device)
        batch = StepBatch(
            ids=ids,
            positions=places,
            slots=slots,
            visible=(places + 1).int(),
            query_start=numbers,
            page_table=table,
            key_count=(places + 1).int(),
            logit_rows=numbers[:count].long(),
            query_start_host=tuple(range(count + 1)),
            key_count_host=tuple((places + 1).tolist()),
            logit_counts_host=(1,) * count,
        )
        logits = self._decoder.logits(self._decoder.forward(batch, self._pool).hidden)
        return Ran(logits, places, rows)

    def again(self, last: Launched) -> Ran:
        assert isinstance(last, Ran)
        self.launches += 1
        return self.run(last.logits.argmax(-1), last.places + 1, last.rows)
