"""A model's steps of few rows through the library: what it takes, and the tensors that it reads and writes."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import StepBatch
from ..linear import RowMajor
from ..pool import KVPool
from ..rope import LayerRopes
from ..spec import ModelSpec
from ..tiers.empty import NO_LOADS
from ..weights import LayerWeights, Weights
from . import bindings
from .bindings import BFLOAT16, FLOAT32, INT8, MOST_HEAD_DIM, MOST_ROWS, close_with
from .library import Library, Unavailable

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
# So that the parts of one row's attention are far fewer than the tasks that a stage may have.
MOST_KEYS = 1 << 20


class NativeSteps:
    """Steps of at most MOST_ROWS rows. What a row yields depends neither on the rows beside it nor on the threads.

    Activations are float32 with float32 and bfloat16 weights; with int8 weights a row that enters a product is rounded
    to 16 bits or a little less. One call at a time; others wait.
    """

    def __init__(self, library: Library, spec: ModelSpec, weights: Weights, ropes: LayerRopes) -> None:
        """The weights must be in rows (`load_weights`), of a model that `checked` lets pass. Raises MemoryError."""
        self._functions = library.functions
        self._spec = spec
        self._dtype = weights.dtype
        self._kept: list[object] = []  # what the library points to
        self._weights = _row_major(weights.head)[0].dtype
        checked(library, spec, self._weights)
        layers = (bindings.LayerSpec * spec.layers)(
            *(self._layer(spec, layer, ropes, index) for index, layer in enumerate(weights.layers))
        )
        described = bindings.ModelSpec(
            **{name: getattr(spec, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")},
            vocab=spec.vocab,
            kind=KINDS[self._weights],
            gelu=spec.activation == "gelu_tanh",
            eps=spec.norm_eps,
            scale=spec.scale,
            embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=weights.dtype)),
            embedding=self._matrix(weights.embedding),
            head=self._matrix(weights.head),
            norm=self._floats(weights.norm),
            layer=layers,
        )
        self._handle = self._functions.promptsluice_open(ctypes.byref(described))
        if not self._handle:
            raise MemoryError("no memory for the rows of native steps")
        close_with(self, self._functions.promptsluice_close, self._handle)

    def takes(self, batch: StepBatch, pool: KVPool) -> bool:
        """Whether a step is one of these: few rows that all run through all layers, unobserved, over KV as computed."""
        return (
            0 < batch.rows <= MOST_ROWS
            and pool.dtype == self._dtype
            and not batch.narrowings
            and not batch.probes
            and max(batch.key_count_host) < MOST_KEYS
        )

    def forward(self, batch: StepBatch, pool: KVPool) -> Tensor:
        """As Decoder.forward: the hidden states of the logit rows, float32 [logit rows, hidden]."""
        assert pool.dtype == self._dtype and pool.data.is_contiguous(), pool.dtype
        if batch.loads is not NO_LOADS:
            for index in range(self._spec.layers):
                batch.loads.wait(index)
        rows = sum(batch.logit_counts_host)
        hidden = torch.empty((rows, self._spec.hidden), dtype=torch.float32)
        held = _Contiguous(*(getattr(batch, name).contiguous() for name in _Contiguous._fields))
        step = bindings.StepSpec(
            rows=batch.rows,
            requests=batch.requests,
            logit_rows=rows,
            pages_width=batch.page_table.shape[1],
            page_size=pool.page_size,
            threads=torch.get_num_threads(),
            slots=pool.slots,
            ids=held.ids.data_ptr(),
            positions=held.positions.data_ptr(),
            row_slots=held.slots.data_ptr(),
            logit_row=held.logit_rows.data_ptr(),
            visible=held.visible.data_ptr(),
            query_start=held.query_start.data_ptr(),
            page_table=held.page_table.data_ptr(),
            pool=pool.data.data_ptr(),
            hidden=hidden.data_ptr(),
        )
        _check(self._functions.promptsluice_step(self._handle, ctypes.byref(step)), self._spec)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores, float32 [rows, vocab], of hidden states [rows, hidden]; at most MOST_ROWS."""
        assert hidden.shape[0] <= MOST_ROWS, hidden.shape
        hidden = hidden.float().contiguous()
        out = torch.empty((hidden.shape[0], self._spec.vocab), dtype=torch.float32)
        if hidden.shape[0]:
            arguments = (hidden.data_ptr(), hidden.shape[0], out.data_ptr(), torch.get_num_threads())
            _check(self._functions.promptsluice_logits(self._handle, *arguments), self._spec)
        return out

    def _layer(self, spec: ModelSpec, layer: LayerWeights, ropes: LayerRopes, index: int) -> bindings.LayerSpec:
        rope = ropes.of(index)
        names = ("input_norm", "post_norm", "qk_norm", "out_norm", "down_norm")
        return bindings.LayerSpec(
            **{name: self._matrix(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")},
            **{name: self._floats(getattr(layer, name)) for name in names},
            inverse_frequencies=self._floats(rope.inv_freq),
            rope_scaling=rope.scaling,
            window=spec.windows[index] or 0,
        )

    def _matrix(self, holder: object) -> bindings.Matrix:
        weight, scales, bias = _row_major(holder)
        assert weight.dtype == self._weights, (weight.dtype, self._weights)
        self._kept.append(weight)
        return bindings.Matrix(weight=weight.data_ptr(), scales=self._floats(scales), bias=self._floats(bias))

    def _floats(self, tensor: Tensor | None) -> int | None:
        """Where a tensor's values lie as float32."""
        if tensor is None:
            return None
        values = tensor.float().contiguous()
        self._kept.append(values)
        return values.data_ptr()


class _Contiguous(NamedTuple):
    ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    visible: Tensor
    query_start: Tensor
    page_table: Tensor


def checked(library: Library, spec: ModelSpec, dtype: torch.dtype) -> Library:
    """The library, if it computes a model with weights of `dtype`. Raises Unavailable naming what it does not."""
    if dtype not in KINDS:
        raise Unavailable(f"weights of {dtype} are not computed")
    whole, lanes = library.lanes if dtype == torch.float32 else 2 * library.lanes, library.lanes
    for name, size, unit in (
        ("hidden size", spec.hidden, whole),
        ("feed-forward size", spec.ffn, whole),
        ("width of all heads", spec.heads * spec.head_dim, whole),
        ("head size", spec.head_dim, lanes),
    ):
        if size % unit:
            raise Unavailable(f"the {name} {size} is no multiple of {unit}")
    if spec.head_dim > MOST_HEAD_DIM:
        raise Unavailable(f"the head size {spec.head_dim} is above {MOST_HEAD_DIM}")
    return library


def _row_major(holder: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert isinstance(holder, RowMajor), f"native steps need weights in rows, not {type(holder).__name__}"
    weight, scales, bias = holder.row_major
    assert weight.is_contiguous(), "native steps need weights in rows"
    return weight, scales, bias


def _check(outcome: int, spec: ModelSpec) -> None:
    if outcome == bindings.WRONG_ID:
        raise IndexError(f"an id is not in the vocabulary of {spec.vocab}")
    if outcome == bindings.NO_MEMORY:
        raise MemoryError("no memory for the step's attention")
    assert outcome == bindings.DONE, "a row sees no key, is no row, or lies outside the pool"
