"""Attention through our Triton kernels: the GPU backend. Lengths and page tables are read on the device only.

Where a step has too few tiles of rows to fill the card, keys are split over programs, whose parts a second kernel
merges. `TRITON_INTERPRET=1` runs the kernels on a CPU, for tests.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import StepBatch
from ..early import launch_options
from ..fused import HeadTurn
from ..fused_triton import numbers_of
from ..launch_sizes import cdiv, next_power_of_2
from ..rounded_kv import RoundedKV, Stored
from .decode_kernels import attend_row, merge_row
from .kernels import attend, merge

# Programs that keep a large card busy; below it keys are split. At most MOST_SPLITS parts, which one program merges.
PROGRAMS = 512
# Some tiles of a prefill see few keys and some see many. With this many programs, a request's longest beginning first,
# a card ends with all of them at about the same time.
BALANCED_PROGRAMS = 700
# Where there are not many more programs than the card runs at a time, all heads of a tile begin before the next tile.
FEW_PROGRAMS = 1024
MOST_SPLITS = 64
# Parts that one kernel merges at most: three kernels, since each is compiled before the first request.
MERGED = (4, 16, MOST_SPLITS)
# The kernels' softmax works with powers of two.
LOG2_E = math.log2(math.e)
# Requests of at most so many rows are cut into tiles on the device, so that a graph can be captured around it.
FEW_ROWS = 16
# Where tiles are given, for any prompt: more parts would be written and merged for nothing with short ones. And few
# programs, which take one tile after another: one that finds none takes as long to launch as others with few keys.
GIVEN_SPLITS, GIVEN_PROGRAMS = 16, 512
# Up to so many requests of one row each a step is bound by its launches, and rotation, the pool and attention are one.
FEW_REQUESTS = 8
# Of more query heads than this to one of keys, or of longer heads, that kernel has no registers for its blocks.
MOST_GROUP, MOST_HEAD_BYTES = 32, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a program goes over its keys: so many at a time, by so many warps, with so many blocks on their way.

    With `heads_first` programs that run side by side have the heads of one tile, else the tiles of one head.
    """

    keys: int
    warps: int
    stages: int
    heads_first: bool = False


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """See AttentionBackend. A part of split keys has at least `least_keys`, to be worth its launch.

    `tiling` replaces the one that is chosen by shape, for measurements. Neither is for rows that it turns itself.
    """

    least_keys: int = 256
    tiling: Tiling | None = None

    def plan(self, batch: StepBatch, *, page_size: int, scale: float, window: int | None = None) -> "TritonPlan":
        return TritonPlan(
            batch=batch,
            page_size=page_size,
            scale=scale,
            window=window,
            least_keys=self.least_keys,
            tiling=self.tiling,
        )


def _tiling(block_m: int, dim_pad: int, *, itemsize: int, is_rounded: bool) -> Tiling:
    """The fastest ones on an H200 (benchmarks/decode_tilings.py): few warps convert numbers of 8 bits faster.

    Float32 was not tuned: it has no matrix units, and with larger blocks its kernels take the compiler many seconds.
    """
    keys = 64 if dim_pad <= 128 and itemsize < 4 else 32
    if is_rounded and block_m <= 16:
        return Tiling(keys=keys, warps=2, stages=3)
    return Tiling(keys=keys, warps=4, stages=3 if block_m > 64 else 2)


def tile_size(longest: int, *, heads: int, kv_heads: int, dim: int, itemsize: int) -> tuple[int, int]:
    """How many rows of a request are a tile, and with their heads of one group, filled up for the matrix units.

    `longest` is the number of rows of the request that has most, `itemsize` the bytes of a query's number. The sizes
    for heads of 64 and 128 were the fastest on an H200. The accumulator of a larger head leaves registers for fewer
    rows.
    """
    group = heads // kv_heads
    most = 32 if itemsize == 4 else 128 if 64 < dim <= 128 else 64
    block = max(min(most, max(16, next_power_of_2(longest * group))), next_power_of_2(group))
    return max(1, block // group), block


def cut(starts: Sequence[int], tile_rows: int) -> np.ndarray:
    """The tiles of requests whose rows are `starts[b] .. starts[b + 1] - 1`, int32 [tiles, 3]: the request, which is
    its row of the page table, the tile's first row, and the row after its last.

    The last rows of a request see most keys, so they start first: no long tile is left over at the end.
    """
    tiles = [
        (request, first, min(first + tile_rows, stop))
        for request, (start, stop) in enumerate(pairwise(starts))
        for first in reversed(range(start, stop, tile_rows))
    ]
    return np.array(tiles, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiling:
    """How rotation and attention of lone rows are cut: keys of a block, warps, and programs that fill a card."""

    keys: int
    warps: int
    programs: int


def row_tiling(head_bytes: int) -> RowTiling:
    """Among the fastest of twenty on an H200, for 1 to 8 requests of 640 to 16,000 keys, 2 heads of 64 or 8 of 128.

    For short heads 256 programs were the fastest with few keys and 512 with many; this lies between. A longer head
    leaves registers for blocks of fewer keys.
    """
    if head_bytes <= 128:
        return RowTiling(keys=64, warps=4, programs=384)
    return RowTiling(keys=32, warps=2 if head_bytes <= 256 else 4, programs=512)


@dataclass(slots=True)
class TritonPlan:
    """See AttentionPlan. The tiles depend on the heads, which the first call shows."""

    batch: StepBatch
    page_size: int
    scale: float
    window: int | None
    least_keys: int
    tiling: Tiling | None = None
    _tiles: Tensor | None = None
    _count: Tensor | None = None  # of the tiles, where the host does not know it
    _grid: tuple[int, int, int] = (0, 0, 0)  # the last is the parts that keys are split into
    _heads_first: bool = False
    _constants: dict[str, Any] = field(default_factory=dict)  # of both kernels
    _tiling: dict[str, Any] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Stored, v: Stored) -> Tensor:
        rows, heads, dim = q.shape
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
        if rows == 0:
            return out
        if self._tiles is None:
            self._lay_out(heads, k.shape[1], dim, itemsize=q.itemsize, is_rounded=isinstance(k, RoundedKV))
        splits = self._grid[2]
        if splits > 1:
            part = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=q.device)
            lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
        else:
            part, lse = out, self.batch.visible
        table, visible = self.batch.page_table, self.batch.visible
        (k, k_scales), (v, v_scales) = numbers_of(k), numbers_of(v)
        tiles, count = self._tiles, self._count
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), k_scales.stride(0), table.stride(0))
        attend[self._grid](
            q, k, v, k_scales, v_scales, out, part, lse, tiles, tiles if count is None else count, visible, table,
            *strides, rows, splits, self._heads_first, self.scale * LOG2_E,
            **self._constants, **self._tiling,
        )  # fmt: skip
        if splits > 1:
            splits_pad = next(pad for pad in MERGED if splits <= pad)
            merging: dict[str, Any] = {"SPLITS_PAD": splits_pad, "num_warps": 2}
            merge[(rows, heads)](part, lse, out, rows, splits, **self._constants, **merging)
        return out

    def turned(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor | None:
        """See AttentionPlan: for few requests of one row each. Keys of former steps are read before qkv is there."""
        rows, _, dim = qkv.shape
        heads, kv_heads, starts = turn.heads, turn.kv_heads, self.batch.query_start_host
        dim_pad, group_pad = (max(16, next_power_of_2(size)) for size in (dim, heads // kv_heads))
        if (
            not 0 < rows <= FEW_REQUESTS
            or len(starts) != rows + 1
            or not self.batch.newest
            or any(stop - start != 1 for start, stop in pairwise(starts))
            or isinstance(k, RoundedKV)
            or isinstance(v, RoundedKV)
            or dim_pad * qkv.itemsize > MOST_HEAD_BYTES
            or group_pad > MOST_GROUP
        ):
            return None
        tiling = row_tiling(dim_pad * qkv.itemsize)
        keys = min(max(self.batch.key_count_host), self.window or sys.maxsize)
        splits = max(1, min(MOST_SPLITS, -(-tiling.programs // (rows * kv_heads)), keys // tiling.keys))
        out = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
        part, lse = out, out
        if splits > 1:
            part = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=qkv.device)
            lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=qkv.device)
        constants: dict[str, Any] = {
            "DIM": dim,
            "DIM_PAD": dim_pad,
            "WINDOW": self.window or 0,
            "BLOCK_N": tiling.keys,
            **launch_options(qkv.device),
        }
        rotating: dict[str, Any] = {
            "GROUP": heads // kv_heads,
            "KV": kv_heads,
            "PAGE": self.page_size,
            "NORM": turn.norm is not None,
            "GROUP_PAD": group_pad,
            "SPLIT": splits > 1,
            "num_warps": tiling.warps,
        }
        visible, table = self.batch.visible, self.batch.page_table
        attend_row[(rows, kv_heads, splits)](
            qkv, k, v, out, part, lse, visible, table, slots, turn.cos, turn.sin,
            turn.cos if turn.norm is None else turn.norm, k.stride(0), table.stride(0), turn.cos.stride(0), rows,
            splits, self.scale * LOG2_E, turn.eps, **constants, **rotating,
        )  # fmt: skip
        if splits > 1:
            splits_pad = next_power_of_2(splits)
            warps = max(1, splits_pad * dim_pad // 4096)  # with more numbers a warp runs out of registers
            merging: dict[str, Any] = {"HEADS": heads, "SPLITS_PAD": splits_pad, "num_warps": warps}
            merge_row[(rows, heads)](part, lse, out, visible, rows, splits, **constants, **merging)
        return out

    def _lay_out(self, heads: int, kv_heads: int, dim: int, *, itemsize: int, is_rounded: bool) -> None:
        """Cut the requests' rows into tiles, if the batch does not say how.

        What the kernels are launched with is made once for all layers: it costs the host time.
        """
        batch, given = self.batch, self.batch.tiles
        longest = max(stop - start for start, stop in pairwise(batch.query_start_host))
        tile_rows, block_m = tile_size(longest, heads=heads, kv_heads=kv_heads, dim=dim, itemsize=itemsize)
        few = given is None and longest <= FEW_ROWS
        if given is not None:
            self._count, tiles = given[0], given[1:]
        elif few:
            tiles = self._few_tiles(tile_rows, longest)
        else:
            tiles = torch.from_numpy(cut(batch.query_start_host, tile_rows)).to(batch.ids.device, non_blocking=True)
        self._tiles = tiles
        keys = max(batch.key_count_host)
        if self.window is not None:
            keys = min(keys, self.window + tile_rows - 1)
        # Of given tiles so many are full, if they are one request's.
        abreast = len(tiles) if given is None else cdiv(batch.rows, tile_rows)
        programs = abreast * kv_heads
        wanted = (PROGRAMS if few else BALANCED_PROGRAMS) // programs
        splits = max(1, min(MOST_SPLITS if given is None else GIVEN_SPLITS, wanted, keys // self.least_keys))
        if given is not None:
            abreast = min(len(tiles), max(abreast, GIVEN_PROGRAMS // (kv_heads * splits)))
        dim_pad = max(16, next_power_of_2(dim))  # of the least size that a matrix unit takes
        heads_first = not few and programs < FEW_PROGRAMS
        chosen = self.tiling or replace(
            _tiling(block_m, dim_pad, itemsize=itemsize, is_rounded=is_rounded), heads_first=heads_first
        )
        self._grid = (kv_heads, abreast, splits) if chosen.heads_first else (abreast, kv_heads, splits)
        self._heads_first = chosen.heads_first
        self._constants = {"HEADS": heads, "DIM": dim, "DIM_PAD": dim_pad}
        self._tiling = {
            "GROUP": heads // kv_heads,
            "PAGE": self.page_size,
            "WINDOW": self.window or 0,
            "ROUNDED": is_rounded,
            "TILE_ROWS": tile_rows,
            "BLOCK_M": block_m,
            "BLOCK_N": chosen.keys,
            "SPLIT": splits > 1,
            "COUNTED": given is not None,
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }

    def _few_tiles(self, tile_rows: int, longest: int) -> Tensor:
        """As many for each request as the longest one has; a request may have fewer rows, or none."""
        starts = self.batch.query_start
        request = torch.arange(self.batch.requests, dtype=torch.int32, device=starts.device)
        if longest == 1:
            return torch.stack((request, starts[:-1], starts[1:]), dim=1)
        ahead = torch.arange(0, longest, tile_rows, dtype=torch.int32, device=starts.device)
        stop = starts[1:, None].expand(-1, len(ahead))
        first = torch.minimum(starts[:-1, None] + ahead, stop)
        last = torch.minimum(first + tile_rows, stop)
        return torch.stack((request[:, None].expand_as(first), first, last), dim=-1).view(-1, 3)
