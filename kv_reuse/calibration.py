"""A few prefills on the decoder itself, timed: what a controller knows before anything has run."""

import time

import torch

from ..backend_engine.batch import RequestRows, build_batch
from ..backend_engine.model import Decoder
from ..backend_engine.pool import KVPool
from ..backend_engine.types import PrefillWork

_SHAPES = ((16, 0), (128, 0), (48, 960))  # rows, and keys before them, of which nothing but their number matters
_PAGE = 16


@torch.inference_mode()
def measured(decoder: Decoder) -> list[PrefillWork]:
    """Prefills of some shapes, as far as the model's context allows: the faster of two, since noise only adds.

    Takes a second for 135 million parameters on two cores, and KV memory for about a thousand tokens meanwhile.
    """
    shapes = [shape for shape in _SHAPES if sum(shape) <= decoder.spec.max_context]
    pages = -(-max((sum(shape) for shape in shapes), default=1) // _PAGE)
    pool = KVPool(decoder.spec, pages=pages, page_size=_PAGE, dtype=decoder.dtype, device=decoder.device)
    return [_timed(decoder, pool, rows, keys) for rows, keys in shapes]


def _timed(decoder: Decoder, pool: KVPool, rows: int, keys: int) -> PrefillWork:
    pages = range(-(-(rows + keys) // _PAGE))
    part = RequestRows(ids=[0] * rows, indices=range(keys, keys + rows), pages=pages, logits=[rows - 1])
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        batch = build_batch([part], page_size=_PAGE, device=decoder.device)
        decoder.logits(decoder.forward(batch, pool).hidden).argmax(-1).tolist()
        best = min(best, time.perf_counter() - began)
    return PrefillWork(steps=1, rows=rows, pairs=rows * keys + rows * (rows + 1) // 2, seconds=best)
