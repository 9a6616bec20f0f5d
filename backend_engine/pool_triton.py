# pyright: reportMissingParameterType=false
"""The copy of some slots of the pool for all layers as one Triton kernel: torch splits one so large into many.

Kernel arguments are tensors or numbers as Triton passes them, untyped.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch_sizes import cdiv

_BLOCK = 4096  # numbers that one program copies


def copy_slots(data: Tensor, source: int, target: int, tokens: int) -> None:
    """Copy `tokens` slots from `source` on to `target` on. `data` is [layers, 2, slots, ...], without gaps; the two
    runs of slots must not overlap."""
    assert data.is_contiguous(), data.stride()
    row, count = data.stride(2), tokens * data.stride(2)
    block: dict[str, Any] = {"BLOCK": _BLOCK, "num_warps": 8}
    grid = (data.shape[0] * 2, cdiv(count, _BLOCK))
    _copied[grid](data, data.stride(1), source * row, target * row, count, **block)


@triton.jit(do_not_specialize=["source", "target", "count"])
def _copied(data, half, source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = data + tl.program_id(0).to(tl.int64) * half
    tl.store(first + target + at, tl.load(first + source + at, mask=at < count), mask=at < count)
