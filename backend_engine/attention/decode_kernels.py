# pyright: reportMissingParameterType=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
"""The Triton kernels of attention for requests of one row each: rotation, the pool and attention in one launch.

What `fused_triton._rotated_into` and `kernels.attend` do is small here beside beginning and ending them. Each program
turns the few queries of its group for itself, and takes the row's own key from the product, not from the pool. Keys of
former steps are on their way while the product still runs (see early.py).

Arguments are tensors or numbers as Triton passes them, untyped.
"""

import triton
import triton.language as tl

from ..early import let_next_begin, wait_for_last


@triton.jit(
    do_not_specialize=["table_row", "rows", "splits"],
    do_not_specialize_on_alignment=["visible", "table", "slots"],
)
def attend_row(
    qkv, k, v, out, part, lse, visible, table, slots, cos, sin, weight,
    kv_slot, table_row, turn_row, rows, splits, scale_log2, eps,
    GROUP: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, NORM: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of one group of one row against the keys of one of `splits`; the last has the row's own key, too.

    `WINDOW` is how many of its visible keys a row sees, the last ones; 0 is all. `SPLIT`: there are several splits.
    With NORM queries and keys are normed before they are turned, times `weight` [heads + kv_heads, dim].
    """
    let_next_begin(EARLY)
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m, d = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    head, mine, in_dim = kv_head * GROUP + m, m < GROUP, d < DIM
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    HEADS: tl.constexpr = GROUP * KV
    seen = tl.load(visible + row)
    oldest, share = shares(seen, splits, WINDOW, BLOCK_N)
    begin = oldest + split * share
    end = tl.minimum(begin + share, seen - 1)
    last = tl.maximum(seen - 2 - oldest, 0) // share
    # A split behind the last one has no key to load, and nothing else to do.
    c = tl.load(cos + row * turn_row + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * turn_row + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    row_table = table + row * table_row
    head_k, head_v = k + kv_head * DIM, v + kv_head * DIM
    keys, values, live = _stored(head_k, head_v, row_table, begin, end, kv_slot, DIM, DIM_PAD, PAGE, BLOCK_N, True)
    wait_for_last(EARLY)
    if split <= last:
        base = qkv + row * (HEADS + 2 * KV) * DIM
        wanted = mine[:, None] & in_dim[None, :]
        query = _turned(base, weight, head, d, partner, c, s, eps, wanted, DIM, NORM).to(qkv.dtype.element_ty)
        top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
        top, total, acc = _seen(query, keys, values, live, top, total, acc, scale_log2)
        second = begin + BLOCK_N
        plain = second + tl.maximum(end - second, 0) // BLOCK_N * BLOCK_N
        for at in range(second, plain, BLOCK_N):
            keys, values, live = _stored(
                head_k, head_v, row_table, at, end, kv_slot, DIM, DIM_PAD, PAGE, BLOCK_N, False
            )
            top, total, acc = _seen(query, keys, values, live, top, total, acc, scale_log2)
        if plain < end:
            keys, values, live = _stored(
                head_k, head_v, row_table, plain, end, kv_slot, DIM, DIM_PAD, PAGE, BLOCK_N, True
            )
            top, total, acc = _seen(query, keys, values, live, top, total, acc, scale_log2)
        if split == last:
            one = HEADS + kv_head + tl.arange(0, 1)
            key = _turned(base, weight, one, d, partner, c, s, eps, in_dim[None, :], DIM, NORM).to(qkv.dtype.element_ty)
            value = tl.load(base + (one + KV)[:, None] * DIM + d[None, :], mask=in_dim[None, :], other=0.0)
            place = tl.load(slots + row) * kv_slot + d[None, :]
            tl.store(head_k + place, key, mask=in_dim[None, :])
            tl.store(head_v + place, value, mask=in_dim[None, :])
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale_log2
            fresh = tl.maximum(top, score)
            power, shrink = tl.exp2(score - fresh), tl.exp2(top - fresh)
            total = total * shrink + power
            acc = acc * shrink[:, None] + power.to(value.dtype).to(tl.float32)[:, None] * value.to(tl.float32)
            top = fresh
        result = acc / total[:, None]
        target = (row * HEADS + head[:, None]) * DIM + d[None, :]
        if not SPLIT:
            tl.store(out + target, result.to(out.dtype.element_ty), mask=wanted)
        else:
            offset = split.to(tl.int64) * rows
            tl.store(part + offset * (HEADS * DIM) + target, result, mask=wanted)
            tl.store(lse + (offset + row) * HEADS + head, top + tl.log2(total), mask=mine)


@triton.jit
def shares(seen, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that a row looks at, and how many of those before its own a split has: as few as a block."""
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(seen - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(seen - 1 - oldest, splits), BLOCK_N) * BLOCK_N
    return oldest, tl.maximum(share, BLOCK_N)


@triton.jit
def _stored(
    k, v, table, at, end, kv_slot,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A block of keys and values, and which of them are before `end`: all, unless MASKED."""
    key, d = at + tl.arange(0, BLOCK_N), tl.arange(0, DIM_PAD)
    live = key < end
    page = tl.load(table + key // PAGE, mask=live, other=0) if MASKED else tl.load(table + key // PAGE)
    place = (page.to(tl.int64) * PAGE + key % PAGE)[:, None] * kv_slot + d[None, :]
    if MASKED:
        wanted = live[:, None] & (d < DIM)[None, :]
        keys, values = tl.load(k + place, mask=wanted, other=0.0), tl.load(v + place, mask=wanted, other=0.0)
    elif DIM == DIM_PAD:
        keys, values = tl.load(k + place), tl.load(v + place)
    else:
        keys = tl.load(k + place, mask=(d < DIM)[None, :], other=0.0)
        values = tl.load(v + place, mask=(d < DIM)[None, :], other=0.0)
    return keys, values, live


@triton.jit
def _seen(query, keys, values, live, top, total, acc, scale_log2):
    """The running maximum, denominator and weighted sum of values with a block of keys."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2
    scores = tl.where(live[None, :], scores, float("-inf"))
    fresh = tl.maximum(top, tl.max(scores, 1))
    # A split without older keys keeps -inf; subtracting it would give NaN.
    base = tl.where(fresh == float("-inf"), 0.0, fresh)
    powers, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    acc = acc * shrink[:, None] + tl.dot(powers.to(values.dtype), values, input_precision="ieee")
    return fresh, total * shrink + tl.sum(powers, 1), acc


@triton.jit
def _turned(base, weight, head, d, partner, c, s, eps, wanted, DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads of a row, normed and rotated, in float32."""
    at, other = head[:, None] * DIM + d[None, :], head[:, None] * DIM + partner[None, :]
    x = tl.load(base + at, mask=wanted, other=0.0).to(tl.float32)
    y = tl.load(base + other, mask=wanted, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * scale * tl.load(weight + at, mask=wanted, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + other, mask=wanted, other=0.0).to(tl.float32)
    return x * c + y * s


@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=["visible"])
def merge_row(
    part, lse, out, visible, rows, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As kernels.merge, of those splits alone that had keys."""
    let_next_begin(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    seen = tl.load(visible + row)
    oldest, share = shares(seen, splits, WINDOW, BLOCK_N)
    s, d = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    live = s <= tl.maximum(seen - 2 - oldest, 0) // share
    at = (s.to(tl.int64) * rows + row) * HEADS + head
    wait_for_last(EARLY)
    logs = tl.load(lse + at, mask=live, other=float("-inf"))
    mask = live[:, None] & (d < DIM)[None, :]
    parts = tl.load(part + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    share_of = tl.exp2(logs - tl.max(logs, 0))
    merged = tl.sum(parts * (share_of / tl.sum(share_of, 0))[:, None], 0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, merged.to(out.dtype.element_ty), mask=d < DIM)
