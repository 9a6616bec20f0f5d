# pyright: reportMissingParameterType=false, reportArgumentType=false
"""What surrounds the layers of a step without prefills, as Triton kernels: one launch before them and one behind.

In torch these are some twenty operations of a few numbers each, which take as long as two layers of a small model.
Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_sizes import cdiv, next_power_of_2

_PAGES = 1024  # of a table, that one program copies
_LEAST_DRAWN = 512  # rows that are moved on by one kernel, whatever their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What StepBatch needs of single rows."""

    slots: Tensor  # int64 [rows]
    visible: Tensor  # int32 [rows]
    page_table: Tensor  # int32 [rows, pages]
    query_start: Tensor  # int32 [rows + 1]
    numbers: Tensor  # int64 [rows]


def single_rows(places: Tensor, owners: Tensor, pages: Tensor, *, page_size: int) -> Rows:
    """See steps.single_batch."""
    count, width, device = places.shape[0], pages.shape[1], pages.device
    rows = Rows(
        slots=torch.empty(count, dtype=torch.int64, device=device),
        visible=torch.empty(count, dtype=torch.int32, device=device),
        page_table=torch.empty((count, width), dtype=torch.int32, device=device),
        query_start=torch.empty(count + 1, dtype=torch.int32, device=device),
        numbers=torch.empty(count, dtype=torch.int64, device=device),
    )
    constants: dict[str, Any] = {"PAGE": page_size, "BLOCK": _PAGES, "num_warps": 4}
    _single_rows[(count, cdiv(width, _PAGES))](
        places, owners, pages, rows.slots, rows.visible, rows.page_table, rows.query_start, rows.numbers,
        count, width, pages.stride(0), **constants,
    )  # fmt: skip
    return rows


def moved_on(
    fresh: Tensor, ids: Tensor, places: Tensor, owners: Tensor, *, spare: int, read: Tensor | None, turn: Tensor
) -> None:
    """Let rows go on with their fresh ids [rows], all int64 on the device; rows of the table's `spare` line stay.

    `read` [2, most] is pinned memory of the host: its two lines take the ids in turns, and `turn` [1] counts them.
    """
    rows = fresh.shape[0]
    constants: dict[str, Any] = {
        "READ": read is not None,
        "BLOCK": max(_LEAST_DRAWN, next_power_of_2(rows)),
        "num_warps": 4,
    }
    into = turn if read is None else read
    _moved_on[(1,)](fresh, ids, places, owners, into, turn, rows, into.shape[-1], spare, **constants)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["places", "owners"])
def _single_rows(
    places, owners, pages, slots, visible, page_table, query_start, numbers, rows, width, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some pages of one row; the first program of a row has its numbers, too."""
    row = tl.program_id(0).to(tl.int64)
    line = pages + tl.load(owners + row) * table_stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(page_table + row * width + at, tl.load(line + at, mask=at < width, other=0), mask=at < width)
    if tl.program_id(1) == 0:
        place = tl.load(places + row)
        tl.store(slots + row, tl.load(line + place // PAGE).to(tl.int64) * PAGE + place % PAGE)
        tl.store(visible + row, (place + 1).to(tl.int32))
        tl.store(numbers + row, row)
        tl.store(query_start + row, row.to(tl.int32))
        if row == rows - 1:
            tl.store(query_start + rows, rows)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["fresh", "ids", "places", "owners"])
def _moved_on(fresh, ids, places, owners, read, turn, rows, most, spare, READ: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    live = row < rows
    drawn = tl.load(fresh + row, mask=live, other=0)
    if READ:
        now = tl.load(turn)
        tl.store(read + (now % 2) * most + row, drawn, mask=live)
        tl.debug_barrier()  # every thread has read the turn
        tl.store(turn, now + 1)
    tl.store(ids + row, tl.maximum(drawn, 0), mask=live)
    mine = tl.load(owners + row, mask=live, other=0)
    place = tl.load(places + row, mask=live, other=0)
    tl.store(places + row, place + (mine != spare).to(tl.int64), mask=live)
