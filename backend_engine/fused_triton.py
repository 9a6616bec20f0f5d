# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""The work between matrix products as Triton kernels, with few rows the products, too. Arithmetic is float32 inside.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early import launch_options, let_next_begin, wait_for_last
from .few_rows_triton import parts, serves_parts, serves_whole, whole
from .fused import HeadTurn, Joint, LayerKV, TorchOps
from .launch_sizes import cdiv, next_power_of_2
from .linear import MOST_FEW_ROWS, PlainLinear
from .one_row_triton import activated, normed_row, serves_normed
from .probe import Probe
from .probe_triton import look
from .rounded_kv import MOST, RoundedKV, Stored
from .span_rows import SpanRows

_POINTED = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
_HEADS = 8  # that one program rotates
_COLUMNS = 1024  # that one program multiplies
# Programs that read stored rows, and rows of each at a time; then the same for rounded ones: enough bytes on their way
# to fill the bus to the host's memory, and few enough to leave the card to the step beside them.
_PLACING, _PLACING_ROUNDED = (32, 4), (48, 8)


class TritonOps(TorchOps):
    """See FusedOps. `rotated`, which only narrowed layers call, and `norm`, called once a step, stay torch's."""

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._add_norm(x[None], residual, weight, eps, first)

    def _add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`x` [parts, rows, hidden] is a sum that was not made yet."""
        count, rows, hidden = x.shape
        normed = torch.empty_like(residual)
        block = next_power_of_2(hidden)
        constants: dict[str, Any] = {
            "PARTS": count,
            "BLOCK": block,
            "FIRST": first is not None,
            "num_warps": 8 if count > 1 else min(16, max(4, block // 512)),
            **launch_options(x.device),
        }
        if rows:
            _add_norm[(rows,)](
                x, residual, weight, weight if first is None else first, normed, rows, hidden, eps, **constants
            )
        return normed, residual

    def rotated_into(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor:
        rows, total, dim = qkv.shape
        q = torch.empty((rows, turn.heads, dim), dtype=qkv.dtype, device=qkv.device)
        weight = turn.cos if turn.norm is None else turn.norm
        constants: dict[str, Any] = {
            "Q": turn.heads,
            "KV": turn.kv_heads,
            "DIM": dim,
            "DIM_PAD": next_power_of_2(dim),
            "HEADS": _HEADS,
            "NORM": turn.norm is not None,
            "num_warps": 4,
            **_rounding(k),
        }
        (k, k_scales), (v, v_scales) = numbers_of(k), numbers_of(v)
        if rows:
            _rotated_into[(rows, cdiv(total, _HEADS))](
                qkv, q, k, v, k_scales, v_scales, slots, turn.cos, turn.sin, weight,
                k.stride(0), k_scales.stride(0), turn.eps, **constants,
            )  # fmt: skip
        return q

    def placed(
        self, rows: SpanRows, layers: range, turn: tuple[Tensor, Tensor], slots: Tensor, pools: Sequence[LayerKV]
    ) -> None:
        count, (k, v) = len(slots), pools[0]
        _, heads, dim = k.shape
        placers, together = _PLACING_ROUNDED if rows.rounded else _PLACING
        constants: dict[str, Any] = {
            "KV": heads,
            "KV_PAD": next_power_of_2(heads),
            "HALF": dim // 2,
            "HALF_PAD": next_power_of_2(dim // 2),
            "ROWS": together,
            "SOURCE": _POINTED[rows.dtype],
            "SCALED": rows.rounded,
            "num_warps": 8,
            **_rounding(k),
        }
        bytes_on = _apart(pools)
        (k, k_scales), (v, v_scales) = numbers_of(k), numbers_of(v)
        if count:
            grid = (min(placers, cdiv(count, together) * len(layers)),)
            _placed[grid](
                rows.owners, rows.origins, count, layers.start, len(layers), k, v, k_scales, v_scales, slots, *turn,
                k.stride(0), k_scales.stride(0), bytes_on // k.itemsize, bytes_on // k_scales.itemsize, **constants,
            )  # fmt: skip

    def looked(self, probe: Probe, q: Tensor, k: Stored, visible: Tensor, *, scale: float, window: int | None) -> None:
        look(probe, q, *numbers_of(k), visible, scale=scale, window=window)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        constants: dict[str, Any] = {"BLOCK": _COLUMNS, "SILU": activation == "silu", "num_warps": 4}
        if rows:
            _gated[(rows, cdiv(width // 2, _COLUMNS))](gate_up, out, width // 2, **constants)
        return out

    def joined(self, x: Tensor, residual: Tensor, joint: Joint) -> tuple[Tensor, Tensor]:
        before, after, (rows, dtype) = joint.before, joint.after, (x.shape[0], x.dtype)
        if rows == 1 and isinstance(after, PlainLinear) and serves_normed(after.weight, dtype):
            return normed_row(
                before(x), residual, joint.weight, joint.eps, after.weight, after.bias,
                first=joint.first, activation=joint.activation,
            )  # fmt: skip
        if not 1 < rows <= MOST_FEW_ROWS:
            return super().joined(x, residual, joint)
        if isinstance(before, PlainLinear) and before.bias is None and serves_parts(before.weight, dtype):
            added = parts(x, before.weight)
        else:
            added = before(x)[None]
        normed, residual = self._add_norm(added, residual, joint.weight, joint.eps, joint.first)
        if isinstance(after, PlainLinear) and serves_whole(after.weight, dtype):
            return whole(normed, after.weight, after.bias, activation=joint.activation), residual
        if after is None:
            return normed, residual
        product = after(normed)
        return product if joint.activation is None else self.gated(product, joint.activation), residual


def _apart(pools: Sequence[LayerKV]) -> int:
    """How many bytes farther the next layer is."""
    if len(pools) == 1:
        return 0
    (first, _), (second, _) = ((numbers_of(part)[0].data_ptr() for part in pool) for pool in pools[:2])
    return second - first


def _rounding(stored: Stored) -> dict[str, Any]:
    """How a kernel rounds what it stores, as constants."""
    if not isinstance(stored, RoundedKV):
        return {"MOST": 0, "WHOLE": False}
    return {"MOST": MOST[stored.numbers.dtype], "WHOLE": stored.numbers.dtype == torch.int8}


def numbers_of(stored: Stored) -> tuple[Tensor, Tensor]:
    """A layer's keys or values and their scales, as kernels take them. Where there are none, nothing reads them."""
    return (stored.numbers, stored.scales) if isinstance(stored, RoundedKV) else (stored, stored)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x, residual, weight, first, normed, rows, hidden, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row; `x` is the sum of `PARTS`, each [rows, hidden]; with FIRST, it is normed before it is added.

    What a norm or a sum yields is rounded to the tensors' dtype before it is used, as it is when it is stored.
    """
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, BLOCK)
    live = at < hidden
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    total = tl.load(x + row + at, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * rows.to(tl.int64) * hidden + row + at, mask=live, other=0.0)
    if PARTS > 1:
        total = total.to(normed.dtype.element_ty).to(tl.float32)
    if FIRST:
        total *= tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
        total *= tl.load(first + at, mask=live, other=0.0).to(tl.float32)
        total = total.to(normed.dtype.element_ty).to(tl.float32)
    total += tl.load(residual + row + at, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row + at, rounded, mask=live)
    total = rounded.to(tl.float32)
    scaled = total * tl.rsqrt(tl.sum(total * total, 0) / hidden + eps) * scale
    tl.store(normed + row + at, scaled.to(normed.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotated_into(
    qkv, q, k, v, k_scales, v_scales, slots, cos, sin, weight, slot_stride, scale_stride, eps,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: norm, rotate, and store queries to `q`, keys and values to the row's slot.

    With `MOST`, the largest number of the pool's dtype, they are rounded to steps of a scale for each head; `WHOLE`
    says that these are whole numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM_PAD)
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    here = (head < Q + 2 * KV)[:, None] & (d < DIM)[None, :]
    base = qkv + (row * (Q + 2 * KV) + head[:, None]) * DIM
    raw = tl.load(base + d[None, :], mask=here, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(base + partner[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        turned = here & (head < Q + KV)[:, None]
        x = x * scale * tl.load(weight + head[:, None] * DIM + d[None, :], mask=turned, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + head[:, None] * DIM + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + row * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    rotated = (x * c + y * s).to(q.dtype.element_ty)
    tl.store(q + (row * Q + head[:, None]) * DIM + d[None, :], rotated, mask=here & (head < Q)[:, None])
    slot = tl.load(slots + row)
    place, key = slot * slot_stride, head - Q
    is_key, is_value = (key >= 0) & (key < KV), (key >= KV) & (key < 2 * KV)
    if MOST > 0:
        wide = tl.where(is_key[:, None], rotated, raw).to(tl.float32)
        scale = _scale(wide, 1, MOST)
        fresh_k = _steps(wide, scale, MOST, WHOLE).to(k.dtype.element_ty)
        fresh_v = fresh_k
        at = slot * scale_stride
        tl.store(k_scales + at + key, scale, mask=is_key)
        tl.store(v_scales + at + key - KV, scale, mask=is_value)
    else:
        fresh_k = rotated
        fresh_v = raw
    tl.store(k + place + key[:, None] * DIM + d[None, :], fresh_k, mask=here & is_key[:, None])
    tl.store(v + place + (key - KV)[:, None] * DIM + d[None, :], fresh_v, mask=here & is_value[:, None])


@triton.jit
def _scale(x, AXIS: tl.constexpr, MOST: tl.constexpr):
    """What makes the largest magnitude along the last axis, `AXIS`, the pool's largest number."""
    return tl.maximum(tl.max(tl.abs(x), AXIS) / MOST, 1e-30)


@triton.jit
def _steps(x, scale, MOST: tl.constexpr, WHOLE: tl.constexpr):
    """`x` in steps of `scale`, which has all axes but the last."""
    steps = tl.minimum(tl.maximum(x / tl.expand_dims(scale, -1), -MOST), MOST)
    if WHOLE:
        steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no bits left for a fraction
    return steps


@triton.jit
def _first_bytes(origin, ahead, layer, live):
    """Where rows begin, `ahead` rows behind what an origin names, in a layer."""
    first = tl.load(origin, mask=live, other=0)
    step = tl.load(origin + 1, mask=live, other=0)
    return first + ahead * step + layer * tl.load(origin + 2, mask=live, other=0)


@triton.jit(
    do_not_specialize=["rows", "first_layer", "layers"], do_not_specialize_on_alignment=["owners", "origins", "slots"]
)
def _placed(
    owners, origins, rows, first_layer, layers, k, v, k_scales, v_scales, slots, cos, sin, slot_stride, scale_stride,
    layer_stride, scale_layer_stride,
    KV: tl.constexpr, KV_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, ROWS: tl.constexpr,
    SOURCE: tl.constexpr, SCALED: tl.constexpr, MOST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows in blocks, each program some, layer by layer: turn the keys, store keys and values at the rows' slots.

    `owners` and `origins` are SpanRows', of numbers of `SOURCE`; `SCALED` says that these count steps of a scale for
    each row and head. `k` to `v_scales` are the first layer's. `MOST` and `WHOLE` as for `_rotated_into`.
    """
    head, d = tl.arange(0, KV_PAD)[None, :, None], tl.arange(0, HALF_PAD)[None, None, :]
    at = head * 2 * HALF + d
    blocks = tl.cdiv(rows, ROWS)
    for number in range(tl.program_id(0), blocks * layers, tl.num_programs(0)):
        ahead_layer = number // blocks
        layer = first_layer + ahead_layer
        row = (number - ahead_layer * blocks) * ROWS + tl.arange(0, ROWS)
        live = row < rows
        origin = origins + tl.load(owners + row, mask=live, other=0) * (13 if SCALED else 7)
        ahead = row - tl.load(origin, mask=live, other=0)
        key = _first_bytes(origin + 1, ahead, layer, live)
        value = _first_bytes(origin + 4, ahead, layer, live)
        here = live[:, None, None] & (head < KV) & (d < HALF)
        keys = key.to(tl.pointer_type(SOURCE))[:, None, None] + at
        values = value.to(tl.pointer_type(SOURCE))[:, None, None] + at
        x = tl.load(keys, mask=here, other=0.0).to(tl.float32)
        y = tl.load(keys + HALF, mask=here, other=0.0).to(tl.float32)
        low = tl.load(values, mask=here, other=0.0)
        high = tl.load(values + HALF, mask=here, other=0.0)
        if SCALED:
            scales = _first_bytes(origin + 7, ahead, layer, live).to(tl.pointer_type(tl.float32))[:, None, None] + head
            scaled = live[:, None, None] & (head < KV)
            scale = tl.load(scales, mask=scaled, other=0.0)
            x, y = x * scale, y * scale
            scales = _first_bytes(origin + 10, ahead, layer, live).to(tl.pointer_type(tl.float32))[:, None, None] + head
            scale = tl.load(scales, mask=scaled, other=0.0)
            low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale
        angle = row[:, None, None] * 2 * HALF + d
        turned = live[:, None, None] & (d < HALF)
        c = tl.load(cos + angle, mask=turned, other=0.0)
        s = tl.load(sin + HALF + angle, mask=turned, other=0.0)
        slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
        place = ahead_layer.to(tl.int64) * layer_stride + slot[:, None, None] * slot_stride + at
        first_k, second_k = x * c - y * s, y * c + x * s
        if MOST > 0:
            first_v, second_v = low.to(tl.float32), high.to(tl.float32)
            scale_k = tl.maximum(_scale(first_k, 2, MOST), _scale(second_k, 2, MOST))
            scale_v = tl.maximum(_scale(first_v, 2, MOST), _scale(second_v, 2, MOST))
            kv_head = tl.arange(0, KV_PAD)[None, :]
            scale_at = ahead_layer.to(tl.int64) * scale_layer_stride + slot[:, None] * scale_stride + kv_head
            head_there = live[:, None] & (kv_head < KV)
            tl.store(k_scales + scale_at, scale_k, mask=head_there)
            tl.store(v_scales + scale_at, scale_v, mask=head_there)
            first_k, second_k = _steps(first_k, scale_k, MOST, WHOLE), _steps(second_k, scale_k, MOST, WHOLE)
            first_v, second_v = _steps(first_v, scale_v, MOST, WHOLE), _steps(second_v, scale_v, MOST, WHOLE)
        else:
            first_v, second_v = low, high
        tl.store(k + place, first_k.to(k.dtype.element_ty), mask=here)
        tl.store(k + place + HALF, second_k.to(k.dtype.element_ty), mask=here)
        tl.store(v + place, first_v.to(v.dtype.element_ty), mask=here)
        tl.store(v + place + HALF, second_v.to(v.dtype.element_ty), mask=here)


@triton.jit
def _gated(gate_up, out, width, BLOCK: tl.constexpr, SILU: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (activated(gate, SILU) * up).to(out.dtype.element_ty), mask=live)
