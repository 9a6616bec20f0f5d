"""The one attention primitive, as a contract: query rows grouped by request, each seeing its own number of keys.

Chunked prefill (consecutive rows), decode (one row), speculation (a few) and blended prefill (any rows) are all
this call.
"""

from typing import Protocol

from torch import Tensor

from ..batch import StepBatch
from ..fused import HeadTurn
from ..rounded_kv import Stored


class AttentionPlan(Protocol):
    """Attention for the rows of one batch; called once a layer. It keeps no results.

    It writes only its own output and, where it is asked to turn rows, their slots of the pool.
    """

    def __call__(self, q: Tensor, k: Stored, v: Stored) -> Tensor:
        """Attend from `q` [rows, heads, dim] over one layer of the pool, `k` and `v` [slots, kv_heads, dim].

        Returns [rows, heads, dim] in q's dtype, contiguous. Query head h reads key/value head `h * kv_heads //
        heads`. The rows' own keys must have been written before. Of a rounded pool it sees what is stored, with sums in
        float32. A slot that no row may see is never allowed to
        influence the result.
        """
        ...

    def turned(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor | None:
        """The same of rows as they come out of their product: `FusedOps.rotated_into` and the call in one.

        `qkv` is [rows, heads + 2 * kv_heads, dim]. None where a backend leaves it at the two, having done nothing.
        """
        ...


class AttentionBackend(Protocol):
    """Prepares attention for a batch: `plan` once a step (again after rows were dropped), its result once a layer."""

    def plan(self, batch: StepBatch, *, page_size: int, scale: float, window: int | None = None) -> AttentionPlan:
        """Row r of request b sees exactly the keys `j < batch.visible[r]` of b's key order; scores are times `scale`.

        With a sliding `window` (at least 1) it sees the last `window` of them: `j >= batch.visible[r] - window`.
        A request may have no rows in the batch. The batch's tensors are read, never changed.
        """
        ...
