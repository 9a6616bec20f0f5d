"""The decoder of every family: a step's rows in, the hidden states of the rows that need logits out."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import attention_backend, default_backend
from .attention.base import AttentionBackend
from .batch import Narrowing, StepBatch
from .fused import fused_ops
from .pool import KVPool
from .rope import Rope
from .spec import ModelSpec
from .weights import Weights


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`hidden` is [logit rows, hidden], after the last norm; `recomputed` has the repaired rows of each narrowing."""

    hidden: Tensor
    recomputed: tuple[int, ...]


class Decoder:
    """A pre-norm transformer decoder over a paged KV pool. Holds weights and no request state; safe for one thread."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, attention: AttentionBackend | None = None) -> None:
        self.spec = spec
        self.weights = weights
        self.attention = attention or attention_backend(default_backend(weights.embedding.device.type))
        self.rope = Rope(spec.rope, weights.embedding.device)
        self._ops = fused_ops(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @torch.inference_mode()
    def forward(self, batch: StepBatch, pool: KVPool) -> StepOutput:
        """Run all layers, writing every computed row's keys and values to its slot.

        Rows that a narrowing drops write nothing from its selector's layer on: what was loaded into their slots
        stays. No value is read back from the device.
        """
        ops, spec, weights = self._ops, self.spec, self.weights
        heads, last = (spec.heads, spec.kv_heads), spec.layers - 1
        residual = F.embedding(batch.ids, weights.embedding)
        normed = F.rms_norm(residual, (spec.hidden,), weights.layers[0].input_norm, spec.norm_eps)
        cos, sin = self.rope.angles(batch.positions, self.dtype)
        plan = self.attention.plan(batch, page_size=pool.page_size, scale=spec.scale)
        recomputed = tuple(narrowing.quota for narrowing in batch.narrowings)
        for index, layer in enumerate(weights.layers):
            k_pool, v_pool = pool.layer(index)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(batch.rows, -1, spec.head_dim)
            norm = None if layer.qk_norm is None else (layer.qk_norm, spec.norm_eps)
            due = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer == index)
            if due:
                q, k, v = ops.rotated(qkv, heads, norm, cos, sin)
                rows, counts = _surviving(due, batch, k, v, k_pool, v_pool)
                later = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer > index)
                batch = batch.keep(rows, counts, narrowings=later)
                residual, q, k, v, cos, sin = (tensor[rows] for tensor in (residual, q, k, v, cos, sin))
                if batch.rows == 0:  # a chunk of repairable rows alone, none of which is chosen
                    return StepOutput(residual, recomputed)
                plan = self.attention.plan(batch, page_size=pool.page_size, scale=spec.scale)
                pool.write(index, batch.slots, k, v)
            else:
                q = ops.rotated_into(qkv, heads, norm, cos, sin, batch.slots, k_pool, v_pool)
            if index == last and batch.logit_rows.shape[0] < batch.rows:  # nobody needs the others any more
                rows = batch.logit_rows
                assert not batch.narrowings, "a selector's layer must be one of the model's"
                batch = batch.keep(rows, batch.logit_counts_host)
                residual, q = residual[rows], q[rows]
                plan = self.attention.plan(batch, page_size=pool.page_size, scale=spec.scale)
            attended = F.linear(plan(q, k_pool, v_pool).flatten(1), layer.out, layer.out_bias)
            normed, residual = ops.add_norm(attended, residual, layer.post_norm, spec.norm_eps)
            inner = ops.silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias))
            following = weights.norm if index == last else weights.layers[index + 1].input_norm
            normed, residual = ops.add_norm(
                F.linear(inner, layer.down, layer.down_bias), residual, following, spec.norm_eps
            )
        return StepOutput(normed, recomputed)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores, float32 [rows, vocab], of hidden states [rows, hidden]."""
        return F.linear(hidden, self.weights.head).float()


def _surviving(
    due: tuple[Narrowing, ...], batch: StepBatch, k: Tensor, v: Tensor, pool_k: Tensor, pool_v: Tensor
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
