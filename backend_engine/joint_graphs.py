"""CUDA graphs of what stands between one layer's attention and the next one's, for prefills of few rows.

Such a step is bound by the host: of a layer's dozen launches a graph makes one of seven. Attention stays out of it, for
the steps that cannot be one graph (mixed_graphs.py): keys come from elsewhere while they run, a probe looks, rows are
dropped on the way, or a prompt is scored. A step between two sizes is padded with rows that nobody reads.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from .capture import SIZES, Record, cuda_record, uncollected
from .linear import MOST_FEW_ROWS
from .model import Decoder


class JointGraphs:
    """See Joints. Serves steps of up to so many rows as the largest of twelve sizes has that is not above `most`.

    `record` makes the graphs, by default CUDA's.

    One step at a time: all of them work in the same memory. All are recorded at once.
    """

    def __init__(self, decoder: Decoder, *, most: int, record: Record | None = None) -> None:
        self._decoder = decoder
        self._sizes = [size for size in SIZES if size <= most]
        spec = decoder.spec
        widths = (spec.heads * spec.head_dim, spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        self._attended, self._residual, self._product = (
            torch.zeros(self._sizes[-1], width, dtype=decoder.dtype, device=decoder.device) for width in widths
        )
        layers = range(spec.layers - 1)  # the last one's rows are cut to those that need logits
        with uncollected(), torch.inference_mode():
            record = record or cuda_record()
            # Large sizes first: the memory that they work in serves the smaller ones too.
            self._replays = {
                (size, layer): record(self._work(size, layer)) for size, layer in product(reversed(self._sizes), layers)
            }

    def between(self, layer: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        rows = attended.shape[0]
        if not MOST_FEW_ROWS < rows <= self._sizes[-1]:  # kernels of few rows do with fewer launches
            return None
        self._attended[:rows].copy_(attended)
        if residual.data_ptr() != self._residual.data_ptr():  # not left here by the layer before
            self._residual[:rows].copy_(residual)
        self._replays[self._sizes[bisect_left(self._sizes, rows)], layer]()
        return self._product[:rows], self._residual[:rows]

    def _work(self, size: int, layer: int) -> Callable[[], None]:
        attended, residual, product = self._attended[:size], self._residual[:size], self._product[:size]

        def work() -> None:
            made, after = self._decoder.between(layer, attended, residual)
            product.copy_(made)
            if after.data_ptr() != residual.data_ptr():
                residual.copy_(after)

        return work
