"""One engine step as tensors: the rows to compute, grouped by request, and where their keys lie.

Three numbers per row are kept apart: `slots` (where its KV is written), `positions` (its rotary angle) and its
index in the request's key order, which bounds what it may see (`visible`). Key j of request b lies in slot
`page_table[b, j // page_size] * page_size + j % page_size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .probe import Probe
from .tiers.base import Loads
from .tiers.empty import NO_LOADS
from .types import RowSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """At `selector.layer`, `quota` of a request's repairable rows go on; the others keep their loaded KV.

    `repairable` and `required` are row indices within the request, int64, ascending, and together all of its rows.
    """

    request: int
    selector: RowSelector
    repairable: Tensor
    required: Tensor
    quota: int

    @property
    def kept(self) -> int:
        return self.required.shape[0] + self.quota


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Rows of request b are `query_start[b] .. query_start[b + 1] - 1`, in ascending key order.

    Shapes: R rows, B requests, P pages of the longest request, S rows that need logits. A row sees key j of its request
    exactly if `j < visible[row]`, so `visible` is at least 1 (itself). The `*_host` tuples repeat the small tensors
    for code that must know sizes without waiting for a device.
    """

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64
    visible: Tensor  # [R] int32
    query_start: Tensor  # [B + 1] int32
    page_table: Tensor  # [B, P] int32, unused entries are 0
    key_count: Tensor  # [B] int32
    logit_rows: Tensor  # [S] int64, ascending
    query_start_host: tuple[int, ...]
    key_count_host: tuple[int, ...]
    logit_counts_host: tuple[int, ...]  # logit rows per request, [B]
    narrowings: tuple[Narrowing, ...] = ()
    loads: Loads = NO_LOADS  # keys and values that come into the pool from elsewhere, layer by layer
    probes: tuple[Probe, ...] = ()
    newest: bool = False  # known: each row's own key is the last one that it sees
    until: float = 1.0  # the share of the layers that is run: where all rows are probes that look no deeper
    # int32 [1 + T, 3], where attention finds its tiles laid out: the first number is how many of the T there are, and
    # the other lines are as attention.paged cuts them.
    tiles: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.query_start_host[-1]

    @property
    def requests(self) -> int:
        return len(self.key_count_host)

    def __post_init__(self) -> None:
        starts = self.query_start_host
        for narrowing in self.narrowings:
            rows = starts[narrowing.request + 1] - starts[narrowing.request]
            assert narrowing.repairable.shape[0] + narrowing.required.shape[0] == rows, (narrowing, rows)
            assert 0 <= narrowing.quota <= narrowing.repairable.shape[0], narrowing

    def keep(self, rows: Tensor, counts: Sequence[int], *, narrowings: tuple[Narrowing, ...] = ()) -> "StepBatch":
        """The batch with only `rows` (int64, ascending), of which `counts[b]` belong to request b.

        `logit_rows` and the rows of `probes` must all be among `rows`. `narrowings` are those still to come, of
        requests that lost no row now.
        """
        starts = (0, *accumulate(counts))
        assert starts[-1] == rows.shape[0], (counts, rows.shape)
        return replace(
            self,
            ids=self.ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            visible=self.visible[rows],
            query_start=torch.tensor(starts, dtype=torch.int32).to(self.query_start.device, non_blocking=True),
            query_start_host=starts,
            logit_rows=torch.searchsorted(rows, self.logit_rows),
            narrowings=narrowings,
            tiles=None,  # which were of the rows before
            probes=tuple(replace(probe, rows=torch.searchsorted(rows, probe.rows)) for probe in self.probes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """One request's part of a step, on the host. `indices` are its rows' places in key order, ascending.

    `positions` default to `indices`, `visible` to `indices + 1`, `key_count` to the last row's visible keys.
    `pages` hold at least `key_count` keys. `logits` are row numbers within this part. With a selector, `repairable`
    is a bool per row.
    """

    ids: Sequence[int]
    indices: Sequence[int]
    pages: Sequence[int]
    positions: Sequence[int] | None = None
    visible: Sequence[int] | None = None
    key_count: int | None = None
    logits: Sequence[int] = ()
    selector: RowSelector | None = None
    repairable: Sequence[bool] = ()
    quota: int = 0


def build_batch(
    parts: Sequence[RequestRows], *, page_size: int, device: torch.device | str = "cpu", pages: int = 0
) -> StepBatch:
    """Lay out a step. `pages` is the least width of the page table (0: as wide as the longest request)."""
    assert parts, "a step needs at least one request"
    indices = [np.asarray(part.indices, dtype=np.int64) for part in parts]
    visible = [
        np.asarray(part.visible, dtype=np.int32) if part.visible is not None else index.astype(np.int32) + 1
        for part, index in zip(parts, indices, strict=True)
    ]
    key_counts = tuple(
        part.key_count if part.key_count is not None else int(seen[-1])
        for part, seen in zip(parts, visible, strict=True)
    )
    starts = (0, *accumulate(len(index) for index in indices))
    table = np.zeros((len(parts), max(pages, *(-(-count // page_size) for count in key_counts))), dtype=np.int32)
    for row, part, count in zip(table, parts, key_counts, strict=True):
        used = -(-count // page_size)
        assert used <= len(part.pages), (count, len(part.pages))
        row[:used] = part.pages[:used]
    slots = [
        row[index // page_size].astype(np.int64) * page_size + index % page_size
        for row, index in zip(table, indices, strict=True)
    ]
    logit_rows = [start + np.asarray(part.logits, dtype=np.int64) for start, part in zip(starts, parts, strict=False)]
    positions = [
        index if part.positions is None else np.asarray(part.positions, dtype=np.int64)
        for part, index in zip(parts, indices, strict=True)
    ]
    _check(parts, indices, visible, key_counts)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return StepBatch(
        ids=tensor(np.concatenate([np.asarray(part.ids, dtype=np.int64) for part in parts])),
        positions=tensor(np.concatenate(positions)),
        slots=tensor(np.concatenate(slots)),
        visible=tensor(np.concatenate(visible)),
        query_start=tensor(np.asarray(starts, dtype=np.int32)),
        page_table=tensor(table),
        key_count=tensor(np.asarray(key_counts, dtype=np.int32)),
        logit_rows=tensor(np.concatenate(logit_rows)),
        query_start_host=starts,
        key_count_host=key_counts,
        logit_counts_host=tuple(len(part.logits) for part in parts),
        narrowings=tuple(
            _narrowing(number, part, device) for number, part in enumerate(parts) if part.selector is not None
        ),
        newest=all(np.array_equal(seen, index + 1) for seen, index in zip(visible, indices, strict=True)),
    )


def _narrowing(request: int, part: RequestRows, device: torch.device | str) -> Narrowing:
    assert part.selector is not None
    mask = np.asarray(part.repairable, dtype=bool)
    assert mask.shape == (len(part.ids),), (mask.shape, len(part.ids))
    assert not mask[list(part.logits)].any(), "a row that needs logits must not be repairable: it could be dropped"
    repairable, required = np.flatnonzero(mask), np.flatnonzero(~mask)
    return Narrowing(
        request=request,
        selector=part.selector,
        repairable=torch.from_numpy(repairable).to(device),
        required=torch.from_numpy(required).to(device),
        quota=part.quota,
    )


def _check(
    parts: Sequence[RequestRows], indices: list[np.ndarray], visible: list[np.ndarray], key_counts: Sequence[int]
) -> None:
    for part, index, seen, count in zip(parts, indices, visible, key_counts, strict=True):
        assert len(part.ids) == len(index) == len(seen) > 0, (len(part.ids), len(index), len(seen))
        assert (np.diff(index) > 0).all(), "rows must be in ascending key order"
        assert (seen > index).all() and seen.max() <= count, "a row sees at least itself and at most all keys"
        assert list(part.logits) == sorted(set(part.logits)), part.logits
