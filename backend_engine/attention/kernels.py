# pyright: reportMissingParameterType=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
"""The Triton kernels of attention over paged KV. Arguments are tensors or numbers as Triton passes them, untyped.

A tile is some rows of one request, each with all query heads of one key/value group, so that keys and values are read
once per group. It goes over its keys block by block with an online softmax in float32 (FlashAttention,
arXiv:2205.14135). Keys may be split over programs, whose parts `merge` puts together.

What differs from step to step is a number, not a constant, and says nothing to the compiler: a request that met a step
of a new kind would wait for it, for seconds.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["table_row", "rows", "splits", "heads_first"],
    do_not_specialize_on_alignment=["lse", "tiles", "count", "visible", "table"],
)
def attend(
    q, k, v, k_scales, v_scales, out, part, lse, tiles, count, visible, table,
    q_row, q_head, kv_slot, kv_head_stride, scale_slot, table_row, rows, splits, heads_first, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, ROUNDED: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One tile against the keys of one of `splits`. `scale_log2` turns scores into base-2 logarithms.

    `WINDOW` is how many of its visible keys a row sees, the last ones; 0 is all. `ROUNDED` keys and values are numbers
    of 8 bits, with scales for each slot and head. With `heads_first` neighbouring programs have the heads of one tile,
    whose keys lie side by side, else the tiles of one head. `SPLIT`: there are several splits.

    `COUNTED`: the number of tiles is read on the device, and programs take one after another. A program for each tile
    that there may be would be launched in vain for most, and that takes as long as a tile of few keys.
    """
    fast, slow, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile = tl.where(heads_first != 0, slow, fast)
    kv_head = tl.where(heads_first != 0, fast, slow)
    if COUNTED:
        step = tl.where(heads_first != 0, tl.num_programs(1), tl.num_programs(0))
        for each in range(tile, tl.load(count), step):
            _tile(
                q, k, v, k_scales, v_scales, out, part, lse, tiles, visible, table, each, kv_head, split,
                q_row, q_head, kv_slot, kv_head_stride, scale_slot, table_row, rows, splits, scale_log2,
                GROUP, HEADS, DIM, DIM_PAD, PAGE, WINDOW, ROUNDED, TILE_ROWS, BLOCK_M, BLOCK_N, SPLIT,
            )  # fmt: skip
    else:
        _tile(
            q, k, v, k_scales, v_scales, out, part, lse, tiles, visible, table, tile, kv_head, split,
            q_row, q_head, kv_slot, kv_head_stride, scale_slot, table_row, rows, splits, scale_log2,
            GROUP, HEADS, DIM, DIM_PAD, PAGE, WINDOW, ROUNDED, TILE_ROWS, BLOCK_M, BLOCK_N, SPLIT,
        )  # fmt: skip


@triton.jit
def _tile(
    q, k, v, k_scales, v_scales, out, part, lse, tiles, visible, table, tile, kv_head, split,
    q_row, q_head, kv_slot, kv_head_stride, scale_slot, table_row, rows, splits, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, ROUNDED: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """See `attend`."""
    request = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    stop = tl.load(tiles + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    row = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (m < TILE_ROWS * GROUP) & (row < stop)
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    seen = tl.load(visible + row, mask=live, other=0)
    most = tl.max(seen, 0)
    least = tl.min(tl.where(live, seen, most), 0)
    if WINDOW:
        skipped = tl.maximum(least - WINDOW, 0) // BLOCK_N * BLOCK_N  # keys before every row's window
        share = tl.cdiv(tl.cdiv(most - skipped, splits), BLOCK_N) * BLOCK_N
        begin = skipped + split * share
    else:
        share = tl.cdiv(tl.cdiv(most, splits), BLOCK_N) * BLOCK_N
        begin = split * share
    end = tl.minimum(begin + share, most)
    query = tl.load(
        q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None] & in_dim[None, :], other=0.0
    )
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
    row_table = table + request * table_row
    head_k, head_v = k + kv_head * kv_head_stride, v + kv_head * kv_head_stride
    scales_k, scales_v = k_scales + kv_head, v_scales + kv_head
    # Keys that every live row sees need no mask; causal prefill has few blocks that do, at the windows' two ends.
    if WINDOW:
        inner = tl.maximum(begin, tl.cdiv(tl.maximum(most - WINDOW, 0), BLOCK_N) * BLOCK_N)
        for at in range(begin, tl.minimum(inner, end), BLOCK_N):
            top, total, acc = _block(
                query, top, total, acc, at, end, seen, row_table, head_k, head_v, scales_k, scales_v, kv_slot,
                scale_slot, scale_log2, DIM, DIM_PAD, PAGE, WINDOW, ROUNDED, BLOCK_N, True,
            )  # fmt: skip
    else:
        inner = begin
    plain = tl.maximum(inner, tl.minimum(end, least) // BLOCK_N * BLOCK_N)
    for at in range(inner, plain, BLOCK_N):
        top, total, acc = _block(
            query, top, total, acc, at, end, seen, row_table, head_k, head_v, scales_k, scales_v, kv_slot,
            scale_slot, scale_log2, DIM, DIM_PAD, PAGE, WINDOW, ROUNDED, BLOCK_N, False,
        )  # fmt: skip
    for at in range(plain, end, BLOCK_N):
        top, total, acc = _block(
            query, top, total, acc, at, end, seen, row_table, head_k, head_v, scales_k, scales_v, kv_slot,
            scale_slot, scale_log2, DIM, DIM_PAD, PAGE, WINDOW, ROUNDED, BLOCK_N, True,
        )  # fmt: skip
    scaled = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = row[:, None].to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + d[None, :]
    if not SPLIT:
        tl.store(out + target, scaled.to(out.dtype.element_ty), mask=live[:, None] & in_dim[None, :])
    else:
        offset = split.to(tl.int64) * rows
        tl.store(part + offset * (HEADS * DIM) + target, scaled, mask=live[:, None] & in_dim[None, :])
        base = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse + (offset + row) * HEADS + head, base, mask=live)


@triton.jit
def _block(
    query, top, total, acc, at, end, seen, table, k, v, k_scales, v_scales, kv_slot, scale_slot, scale_log2,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the running maximum, denominator and weighted sum of values with it."""
    key = at + tl.arange(0, BLOCK_N)
    d = tl.arange(0, DIM_PAD)
    if MASKED:
        in_keys = key < end
        page = tl.load(table + key // PAGE, mask=in_keys, other=0)
    else:
        page = tl.load(table + key // PAGE)
    slot = page.to(tl.int64) * PAGE + key % PAGE
    place = slot[:, None] * kv_slot + d[None, :]
    if MASKED:
        wanted = in_keys[:, None] & (d < DIM)[None, :]
        keys = tl.load(k + place, mask=wanted, other=0.0)
        values = tl.load(v + place, mask=wanted, other=0.0)
    elif DIM == DIM_PAD:
        keys = tl.load(k + place)
        values = tl.load(v + place)
    else:
        keys = tl.load(k + place, mask=(d < DIM)[None, :], other=0.0)
        values = tl.load(v + place, mask=(d < DIM)[None, :], other=0.0)
    if ROUNDED:
        # Numbers of 8 bits are exact in any dtype of queries. Scales multiply what has no head dimension any more.
        if MASKED:
            key_scale = tl.load(k_scales + slot * scale_slot, mask=in_keys, other=0.0)
            value_scale = tl.load(v_scales + slot * scale_slot, mask=in_keys, other=0.0)
        else:
            key_scale = tl.load(k_scales + slot * scale_slot)
            value_scale = tl.load(v_scales + slot * scale_slot)
        keys = keys.to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (key_scale * scale_log2)[None, :]
    else:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2
    if MASKED:
        visible = in_keys[None, :] & (key[None, :] < seen[:, None])
        if WINDOW:
            visible &= key[None, :] >= seen[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    fresh = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet keeps -inf; subtracting it would give NaN.
    base = tl.where(fresh == float("-inf"), 0.0, fresh) if MASKED else fresh
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    if ROUNDED:
        if query.dtype == tl.float16:  # which has no room below for weights times scales
            values = (values.to(tl.float32) * value_scale[:, None]).to(tl.float16)
        else:
            weight *= value_scale[None, :]
            values = values.to(query.dtype)
    acc = acc * shrink[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return fresh, total, acc


@triton.jit(do_not_specialize=["rows", "splits"])
def merge(
    part, lse, out, rows, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Weigh the splits' results of one row and head by their share of the softmax's denominator."""
    row, head = tl.program_id(0), tl.program_id(1)
    s, d = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    at = (s.to(tl.int64) * rows + row) * HEADS + head
    logs = tl.load(lse + at, mask=s < splits, other=float("-inf"))
    weight = tl.exp2(logs - tl.max(logs, 0))
    weight = weight / tl.sum(weight, 0)
    mask = (s < splits)[:, None] & (d < DIM)[None, :]
    parts = tl.load(part + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    merged = tl.sum(parts * weight[:, None], 0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, merged.to(out.dtype.element_ty), mask=d < DIM)
