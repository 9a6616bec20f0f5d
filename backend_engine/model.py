"""The decoder of every family: a step's rows in, the hidden states of the rows that need logits out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from .attention import attention_backend, default_backend
from .attention.base import AttentionBackend, AttentionPlan
from .batch import Narrowing, StepBatch
from .fused import FusedOps, HeadTurn, Joint, fused_ops
from .native import Library, NativeAttention, NativeOps, NativePrefill, NativeSteps
from .native.bindings import MOST_ROWS
from .pool import KVPool
from .probe import layers_until
from .rope import LayerRopes
from .rounded_kv import Stored
from .spec import ModelSpec
from .weights import Weights


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`hidden` is [logit rows, hidden], after the last norm; `recomputed` has the repaired rows of each narrowing.

    `complete`: all layers were run.
    """

    hidden: Tensor
    recomputed: tuple[int, ...]
    complete: bool = True


class Joints(Protocol):
    """`Decoder.between` in another way, for the steps that it serves."""

    def between(self, layer: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """None where it does not serve a step of so many rows. What comes back is overwritten by the next call."""
        ...


class Decoder:
    """A pre-norm transformer decoder over a paged KV pool. Holds weights and no request state; safe for one thread."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        attention: AttentionBackend | None = None,
        ops: FusedOps | None = None,
        library: Library | None = None,
    ) -> None:
        """With a `library`, steps of few rows are native: see NativeSteps for what it needs.

        So is what other steps do between products, unless `attention` or `ops` are given.
        """
        self.spec = spec
        self.weights = weights
        prefill = NativePrefill(library) if library else None
        if attention is None:
            attention = NativeAttention(prefill) if prefill else attention_backend(default_backend(self.device.type))
        self.attention = attention
        self.ropes = LayerRopes(spec.ropes, self.device)
        # Rounded as the embedding is, whose family multiplies the two in its dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self.dtype))
        self._ops = ops or (NativeOps(prefill) if prefill else fused_ops(self.device))
        # Of each layer: between attention and the feed-forward, and between that and what follows it.
        self._inner, self._outer = _joints(spec, weights)
        self.library = library
        self._native = NativeSteps(library, spec, weights, self.ropes) if library else None

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.norm.device

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: KVPool, *, joints: Joints | None = None) -> StepOutput:
        """Run all layers, or as many as the batch says, writing every computed row's keys and values to its slot.

        Rows that a narrowing drops write nothing from its selector's layer on: what was loaded into their slots
        stays. No value is read back from the device. `joints`, if any, are asked first for what stands between two
        layers' attention.
        """
        if self._native is not None and self._native.takes(batch, pool):
            return StepOutput(self._native.forward(batch, pool), ())
        ops, spec, weights = self._ops, self.spec, self.weights
        last, depth = spec.layers - 1, layers_until(batch.until, spec)
        # Before the first product: that may be launched early, and what it follows must be none of these.
        angles, plan = self.ropes.angles(batch.positions, self.dtype), self._plans(batch, pool)
        residual = weights.embedding(batch.ids)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        product = weights.layers[0].qkv(ops.norm(residual, weights.layers[0].input_norm, spec.norm_eps))
        recomputed = tuple(narrowing.quota for narrowing in batch.narrowings)
        for index, layer in enumerate(weights.layers):
            batch.loads.wait(index)
            k_pool, v_pool = pool.layer(index)
            qkv = product.view(batch.rows, -1, spec.head_dim)
            turn = HeadTurn(spec.heads, spec.kv_heads, *angles[index], layer.qk_norm, spec.norm_eps)
            due = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer == index)
            cut = index == last and batch.logit_rows.shape[0] < batch.rows  # nobody needs the others any more
            attended = None
            if not (due or batch.probes or cut):
                attended = plan(spec.windows[index]).turned(qkv, turn, batch.slots, k_pool, v_pool)
            if attended is None:
                if due:
                    q, k, v = ops.rotated(qkv, turn)
                    rows, counts = _surviving(due, batch, k, v, k_pool, v_pool)
                    later = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer > index)
                    batch = batch.keep(rows, counts, narrowings=later)
                    residual, q, k, v = (tensor[rows] for tensor in (residual, q, k, v))
                    if batch.rows == 0:  # a chunk of repairable rows alone, none of which is chosen
                        return StepOutput(residual, recomputed, complete=False)
                    angles, plan = self.ropes.angles(batch.positions, self.dtype), self._plans(batch, pool)
                    pool.write(index, batch.slots, k, v)
                else:
                    q = ops.rotated_into(qkv, turn, batch.slots, k_pool, v_pool)
                for probe in batch.probes:
                    if probe.looks_at(index, spec):
                        window = spec.windows[index]
                        ops.looked(probe, q, k_pool, batch.visible, scale=spec.scale, window=window)
                if cut:
                    rows = batch.logit_rows
                    assert not batch.narrowings, "a selector's layer must be one of the model's"
                    batch = replace(batch, probes=()).keep(rows, batch.logit_counts_host)
                    residual, q = residual[rows], q[rows]
                    plan = self._plans(batch, pool)
                attended = plan(spec.windows[index])(q, k_pool, v_pool)
            if index + 1 == depth < spec.layers:
                return StepOutput(residual[:0], recomputed, complete=False)
            attended = attended.flatten(1)
            passed = joints.between(index, attended, residual) if joints and index < last else None
            product, residual = passed or self.between(index, attended, residual)
        return StepOutput(product, recomputed)

    def between(self, layer: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From what a layer's attention yields [rows, heads * head_dim] to the next one's queries, keys and values
        [rows, (heads + 2 * kv_heads) * head_dim], before they are turned (behind the last layer to what its norm yields
        [rows, hidden]), and the sum with the residual [rows, hidden], whose memory may be used again."""
        inner, residual = self._ops.joined(attended, residual, self._inner[layer])
        return self._ops.joined(inner, residual, self._outer[layer])

    def _plans(self, batch: StepBatch, pool: KVPool) -> Callable[[int | None], AttentionPlan]:
        """Attention for the batch by window, made when a layer first asks."""
        return cache(
            lambda window: self.attention.plan(batch, page_size=pool.page_size, scale=self.spec.scale, window=window)
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores, float32 [rows, vocab], of hidden states [rows, hidden]."""
        if self._native is not None and hidden.shape[0] <= MOST_ROWS:
            return self._native.logits(hidden)
        return self.scores(hidden).float()

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """The same as they come out of the product, in the model's dtype: half of the bytes where that is narrow."""
        return self.weights.head(hidden.to(self.dtype))


def _joints(spec: ModelSpec, weights: Weights) -> tuple[list[Joint], list[Joint]]:
    """What stands between each layer's attention and its feed-forward, and between that and what follows it."""
    inner = [
        Joint(
            before=layer.out, first=layer.out_norm, weight=layer.post_norm, eps=spec.norm_eps, after=layer.gate_up,
            activation=spec.activation,
        )
        for layer in weights.layers
    ]  # fmt: skip
    following = [(layer.input_norm, layer.qkv) for layer in weights.layers[1:]] + [(weights.norm, None)]
    outer = [
        Joint(before=layer.down, first=layer.down_norm, weight=norm, eps=spec.norm_eps, after=product)
        for layer, (norm, product) in zip(weights.layers, following, strict=True)
    ]
    return inner, outer


def _surviving(
    due: tuple[Narrowing, ...], batch: StepBatch, k: Tensor, v: Tensor, pool_k: Stored, pool_v: Stored
) -> tuple[Tensor, list[int]]:
    """The rows that go on after this layer's narrowings, ascending, and how many each request has of them.

    `k`, `v` are the fresh rows; what the pool holds at the rows' slots is what was stored for them.
    """
    named = Counter(narrowing.request for narrowing in batch.narrowings)
    assert max(named.values()) == 1, f"a request may be narrowed once: {named}"
    starts = batch.query_start_host
    kept = [torch.arange(start, stop, device=k.device) for start, stop in pairwise(starts)]
    for narrowing in due:
        start = starts[narrowing.request]
        rows = start + narrowing.repairable
        slots = batch.slots[rows]
        chosen = narrowing.selector.select(
            fresh_k=k[rows], fresh_v=v[rows], stored_k=pool_k[slots], stored_v=pool_v[slots], quota=narrowing.quota
        )
        assert chosen.shape == (narrowing.quota,), (chosen.shape, narrowing.quota)
        kept[narrowing.request] = torch.cat([start + narrowing.required, rows[chosen]]).sort().values
    return torch.cat(kept), [len(rows) for rows in kept]
