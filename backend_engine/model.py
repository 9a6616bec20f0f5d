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
from .pool import KVPool
from .rope import Rope, rotate
from .spec import ModelSpec
from .weights import LayerWeights, Weights


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
        hidden = F.embedding(batch.ids, self.weights.embedding)
        cos, sin = self.rope.angles(batch.positions, self.dtype)
        plan = self.attention.plan(batch, page_size=pool.page_size, scale=self.spec.scale)
        recomputed = tuple(narrowing.quota for narrowing in batch.narrowings)
        last = self.spec.layers - 1
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            due = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer == index)
            if due:
                rows, counts = _surviving(due, batch, k, v, *pool.layer(index))
                later = tuple(narrowing for narrowing in batch.narrowings if narrowing.selector.layer > index)
                batch = batch.keep(rows, counts, narrowings=later)
                hidden, q, k, v, cos, sin = (tensor[rows] for tensor in (hidden, q, k, v, cos, sin))
                if batch.rows == 0:  # a chunk of repairable rows alone, none of which is chosen
                    return StepOutput(hidden, recomputed)
                plan = self.attention.plan(batch, page_size=pool.page_size, scale=self.spec.scale)
            pool.write(index, batch.slots, k, v)
            if index == last and batch.logit_rows.shape[0] < batch.rows:  # nobody needs the others any more
                rows = batch.logit_rows
                assert not batch.narrowings, "a selector's layer must be one of the model's"
                batch = batch.keep(rows, batch.logit_counts_host)
                hidden, q = hidden[rows], q[rows]
                plan = self.attention.plan(batch, page_size=pool.page_size, scale=self.spec.scale)
            attended = plan(q, *pool.layer(index)).flatten(1)
            hidden = self._feed_forward(layer, hidden + F.linear(attended, layer.out, layer.out_bias))
        hidden = self._norm(hidden, self.weights.norm)
        return StepOutput(hidden, recomputed)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores, float32 [rows, vocab], of hidden states [rows, hidden]."""
        return F.linear(hidden, self.weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape[-1:], weight, self.spec.norm_eps)

    def _project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [rows, heads, dim], rotated keys and values [rows, kv_heads, dim]."""
        spec = self.spec
        fused = F.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        fused = fused.view(hidden.shape[0], -1, spec.head_dim)
        turned, v = fused.split((spec.heads + spec.kv_heads, spec.kv_heads), dim=1)
        if layer.qk_norm is not None:
            turned = F.rms_norm(turned, (spec.head_dim,), None, spec.norm_eps) * layer.qk_norm
        turned = rotate(turned, cos, sin)
        q, k = turned.split((spec.heads, spec.kv_heads), dim=1)
        return q, k, v

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        fused = F.linear(self._norm(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = fused.chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)


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
