"""What steps of many rows do between products on a CPU, in float32: attention and the element-wise work."""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..attention.base import AttentionPlan
from ..attention.sdpa import SdpaAttention
from ..batch import StepBatch
from ..fused import HeadTurn, TorchOps
from ..rounded_kv import Stored
from .bindings import DONE, MOST_HEAD_DIM, NO_MEMORY, AttendSpec, TurnSpec, close_with
from .library import Library


class NativePrefill:
    """What the library needs between calls; others wait while one runs."""

    def __init__(self, library: Library) -> None:
        """Raises MemoryError."""
        self.functions = library.functions
        self.lanes = library.lanes
        self.handle = self.functions.promptsluice_open_prefill()
        if not self.handle:
            raise MemoryError("no memory for native prefills")
        close_with(self, self.functions.promptsluice_close_prefill, self.handle)

    def serves(self, *tensors: Tensor | None) -> bool:
        """Whether all of these are contiguous float32, and their rows vectors of this machine."""
        return all(
            x is None or (x.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] % self.lanes == 0)
            for x in tensors
        )


class NativeAttention:
    """See AttentionBackend; in float32 over a pool of float32. Other dtypes are torch's.

    Keys are read block by block for many rows (FlashAttention-2, arXiv:2307.08691), and what no row of a tile may see
    is not computed. A request's few rows are computed one by one. But for that difference, what a row yields depends
    neither on the rows beside it nor on the threads.
    """

    def __init__(self, prefill: NativePrefill) -> None:
        self._prefill = prefill

    def plan(
        self, batch: StepBatch, *, page_size: int, scale: float, window: int | None = None
    ) -> "NativeAttentionPlan":
        return NativeAttentionPlan(self._prefill, batch, page_size, scale, window)


@dataclass(frozen=True)
class NativeAttentionPlan:
    """See AttentionPlan."""

    prefill: NativePrefill
    batch: StepBatch
    page_size: int
    scale: float
    window: int | None

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys that each row sees, where each request's rows begin, and its pages."""
        batch = self.batch
        return batch.visible.contiguous(), batch.query_start.contiguous(), batch.page_table.contiguous()

    @cached_property
    def _others(self) -> AttentionPlan:
        """For what the library does not compute."""
        plan = SdpaAttention().plan
        return plan(self.batch, page_size=self.page_size, scale=self.scale, window=self.window)

    def turned(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor | None:
        return None

    def __call__(self, q: Tensor, k: Stored, v: Stored) -> Tensor:
        rows, heads, dim = q.shape
        if (
            not (isinstance(k, Tensor) and isinstance(v, Tensor) and q.dtype == torch.float32)
            or not self.prefill.serves(k, v)
            or dim > MOST_HEAD_DIM
        ):
            return self._others(q, k, v)
        q = q.contiguous()
        out = torch.empty((rows, heads, dim), dtype=torch.float32)
        visible, query_start, page_table = self._places
        spec = AttendSpec(
            requests=self.batch.requests,
            heads=heads,
            kv_heads=k.shape[1],
            head_dim=dim,
            pages_width=page_table.shape[1],
            page_size=self.page_size,
            window=self.window or 0,
            threads=torch.get_num_threads(),
            slots=k.shape[0],
            visible=visible.data_ptr(),
            query_start=query_start.data_ptr(),
            page_table=page_table.data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            scale=self.scale,
        )
        outcome = self.prefill.functions.promptsluice_attend(self.prefill.handle, ctypes.byref(spec))
        if outcome == NO_MEMORY:
            raise MemoryError("no memory for the step's attention")
        assert outcome == DONE, "a row sees no key, or a page lies outside the pool"
        return out


class NativeOps(TorchOps):
    """See FusedOps: each is one pass over its rows in float32; other dtypes and strides are torch's."""

    def __init__(self, prefill: NativePrefill) -> None:
        self._prefill = prefill

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._prefill.serves(x, residual, weight, first):
            return super().add_norm(x, residual, weight, eps, first=first)
        out = torch.empty_like(x)
        self._prefill.functions.promptsluice_add_norm(
            self._prefill.handle, x.data_ptr(), residual.data_ptr(), None if first is None else first.data_ptr(),
            weight.data_ptr(), eps, *x.shape, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out, residual

    def rotated_into(self, qkv: Tensor, turn: HeadTurn, slots: Tensor, k: Stored, v: Stored) -> Tensor:
        if (
            not (isinstance(k, Tensor) and isinstance(v, Tensor) and self._prefill.serves(qkv, turn.norm, k, v))
            or qkv.shape[2] > MOST_HEAD_DIM
        ):
            return super().rotated_into(qkv, turn, slots, k, v)
        rows, _, dim = qkv.shape
        cosines, sines, slots = turn.cos.contiguous(), turn.sin.contiguous(), slots.contiguous()
        q = torch.empty((rows, turn.heads, dim), dtype=torch.float32)
        spec = TurnSpec(
            rows=rows,
            pool_slots=k.shape[0],
            heads=turn.heads,
            kv_heads=turn.kv_heads,
            head_dim=dim,
            qkv=qkv.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            norm=None if turn.norm is None else turn.norm.data_ptr(),
            slots=slots.data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            eps=turn.eps,
        )
        outcome = self._prefill.functions.promptsluice_turn(
            self._prefill.handle, ctypes.byref(spec), torch.get_num_threads()
        )
        assert outcome == DONE, "a row's slot lies outside the pool"
        return q

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        rows, width = gate_up.shape
        if not self._prefill.serves(gate_up) or width // 2 % self._prefill.lanes:
            return super().gated(gate_up, activation)
        out = torch.empty((rows, width // 2), dtype=torch.float32)
        self._prefill.functions.promptsluice_gated(
            self._prefill.handle, gate_up.data_ptr(), rows, width // 2, activation == "gelu_tanh", out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out
