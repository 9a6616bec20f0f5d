# pyright: reportMissingParameterType=false, reportArgumentType=false
"""A probe's look at a layer as two Triton kernels: the softmax's denominators over parts of the keys, then the weights.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_sizes import cdiv, next_power_of_2
from .probe import Probe

# The same for all prompts, so that none of them has to wait for a compiler; so what differs is a number, no constant.
_KEYS = 64  # that one program looks at together
_ROWS = 128  # rows and heads of a group that one product has
_PARTS = 16  # of the keys, for each of which one program sums a denominator
_LOG2_E = math.log2(math.e)  # softmax with powers of two


def look(
    probe: Probe, q: Tensor, k: Tensor, k_scales: Tensor, visible: Tensor, *, scale: float, window: int | None
) -> None:
    """See FusedOps.looked. `k` are numbers of 8 bits where they are of another dtype than `q`, with their scales."""
    count, keys = probe.rows.shape[0], probe.slots.shape[0]
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    if not count or not keys:
        return
    tiles = cdiv(count * group, _ROWS)
    tops, sums = torch.empty((2, _PARTS, kv_heads, tiles * _ROWS), dtype=torch.float32, device=q.device)
    constants: dict[str, Any] = {
        "KV": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": max(16, next_power_of_2(dim)),
        "BLOCK_M": _ROWS,
        "BLOCK_N": _KEYS,
        "PARTS": _PARTS,
        "WINDOW": window or 0,
        "ROUNDED": k.dtype != q.dtype,
        "num_warps": 4,
    }
    shared = (q, k, k_scales, probe.rows, probe.slots, visible, tops, sums)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), k_scales.stride(0))
    numbers = (*strides, count, keys, tiles, scale * _LOG2_E)
    _denominators[(_PARTS, kv_heads, tiles)](*shared, *numbers, **constants)
    _weights[(cdiv(keys, _KEYS),)](*shared, probe.attention, *numbers, **constants)


@triton.jit
def _scores(
    q, k, k_scales, rows, slots, visible, q_row, q_head, k_slot, k_head, scale_slot, count, keys, scale_log2, head,
    tile, at, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] as base-2 logarithms of one key/value head, -inf for what is not looked at."""
    m, n, d = tile * BLOCK_M + tl.arange(0, BLOCK_M), at + tl.arange(0, BLOCK_N), tl.arange(0, DIM_PAD)
    live, there = m < count * GROUP, n < keys
    row = tl.load(rows + m // GROUP, mask=live, other=0)
    place = row * q_row + (head * GROUP + m % GROUP) * q_head
    query = tl.load(q + place[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    slot = tl.load(slots + n, mask=there, other=0)
    stored = k + slot[:, None] * k_slot + head * k_head + d[None, :]
    key = tl.load(stored, mask=there[:, None] & (d < DIM)[None, :], other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if ROUNDED:
        scores *= tl.load(k_scales + slot * scale_slot + head, mask=there, other=0.0)[None, :]
    looked = live[:, None] & there[None, :]
    if WINDOW:
        looked &= n[None, :] >= (tl.load(visible + row, mask=live, other=0) - WINDOW)[:, None]
    return tl.where(looked, scores, float("-inf"))


@triton.jit(do_not_specialize=["count", "keys", "tiles"], do_not_specialize_on_alignment=["rows", "slots", "visible"])
def _denominators(
    q, k, k_scales, rows, slots, visible, tops, sums, q_row, q_head, k_slot, k_head, scale_slot, count, keys, tiles,
    scale_log2, KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Of one part of the keys the largest score of each row, and the sum of the others' powers beside it."""
    part, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(tl.cdiv(keys, PARTS), BLOCK_N) * BLOCK_N
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(part * share, tl.minimum((part + 1) * share, keys), BLOCK_N):
        scores = _scores(
            q, k, k_scales, rows, slots, visible, q_row, q_head, k_slot, k_head, scale_slot, count, keys, scale_log2,
            head, tile, at, GROUP, DIM, DIM_PAD, BLOCK_M, BLOCK_N, WINDOW, ROUNDED,
        )  # fmt: skip
        fresh = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(fresh == float("-inf"), 0.0, fresh)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        top = fresh
    place = (part * KV + head) * (tiles * BLOCK_M) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(tops + place, top)
    tl.store(sums + place, total)


@triton.jit(do_not_specialize=["count", "keys", "tiles"], do_not_specialize_on_alignment=["rows", "slots", "visible"])
def _weights(
    q, k, k_scales, rows, slots, visible, tops, sums, attention, q_row, q_head, k_slot, k_head, scale_slot, count, keys,
    tiles, scale_log2, KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Add the weights of some keys, over all rows and heads, to `attention`; nobody else has these keys."""
    at = tl.program_id(0) * BLOCK_N
    added = tl.zeros((BLOCK_N,), tl.float32)
    for number in range(KV * tiles):
        head = number // tiles
        tile = number - head * tiles
        place = head * (tiles * BLOCK_M) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        top = tl.load(tops + place)
        for part in range(1, PARTS):
            top = tl.maximum(top, tl.load(tops + part * (KV * tiles * BLOCK_M) + place))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for part in range(PARTS):
            ahead = part * (KV * tiles * BLOCK_M) + place
            total += tl.load(sums + ahead) * tl.exp2(tl.load(tops + ahead) - base)
        scores = _scores(
            q, k, k_scales, rows, slots, visible, q_row, q_head, k_slot, k_head, scale_slot, count, keys, scale_log2,
            head, tile, at, GROUP, DIM, DIM_PAD, BLOCK_M, BLOCK_N, WINDOW, ROUNDED,
        )  # fmt: skip
        # A row whose window holds none of the keys looks at none.
        weights = tl.exp2(scores - base[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
        added += tl.sum(weights, 0)
    n = at + tl.arange(0, BLOCK_N)
    tl.store(attention + n, tl.load(attention + n, mask=n < keys, other=0.0) + added, mask=n < keys)
