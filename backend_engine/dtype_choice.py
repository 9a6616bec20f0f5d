"""float32 or bfloat16 on a CPU, by a short measurement: instruction sets do not tell how fast products are."""

import time
from functools import cache

import torch

from .linear import Linear, float_forms

PROMPT, ANSWER = 2048, 64  # tokens of the request that is weighed
MARGIN = 1.5  # bfloat16 must be this much faster: it is less exact
_OUT, _IN, _MATRICES, _ROUNDS = 2048, 1024, 8, 3  # 64 MB in float32, more than a core's caches hold
_ROWS = 256


@cache
def fastest_dtype() -> torch.dtype:
    """The dtype that serves a request of PROMPT tokens in and ANSWER out sooner; measured once a process, in 0.2 s."""
    forms = {dtype: _matrices(dtype) for dtype in (torch.float32, torch.bfloat16)}
    rounds = [{dtype: _request_seconds(dtype, forms[dtype]) for dtype in forms} for _ in range(_ROUNDS)]
    return preferred(*(min(taken[dtype] for taken in rounds) for dtype in forms))


def preferred(float32: float, bfloat16: float) -> torch.dtype:
    """The dtype to take where a request takes these times: float32 unless the other is clearly faster."""
    return torch.bfloat16 if bfloat16 * MARGIN < float32 else torch.float32


def _matrices(dtype: torch.dtype) -> list[Linear]:
    make = float_forms(dtype, torch.device("cpu")).linear
    return [make(torch.ones(_OUT, _IN, dtype=dtype), None) for _ in range(_MATRICES)]


@torch.inference_mode()
def _request_seconds(dtype: torch.dtype, matrices: list[Linear]) -> float:
    """What one matrix takes over a whole request: products of many rows for its prompt, of one row for each answer."""
    many, one = torch.ones(_ROWS, _IN, dtype=dtype), torch.ones(1, _IN, dtype=dtype)
    began = time.perf_counter()
    matrices[0](many)
    prefilled = time.perf_counter()
    for matrix in matrices:
        matrix(one)
    decoded = time.perf_counter()
    return (prefilled - began) * PROMPT / _ROWS + (decoded - prefilled) * ANSWER / len(matrices)
