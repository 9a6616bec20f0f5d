"""Maximal marginal relevance: an order of texts, each next one relevant to the question and unlike those before it
(Carbonell and Goldstein, 1998, "The Use of MMR, Diversity-Based Reranking for Reordering Documents", SIGIR).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def normalized(vectors: Floats) -> Floats:
    """Rows `[n, dim]` scaled to length 1; a row of zeros, or with values that are not finite, becomes zeros."""
    clean = np.nan_to_num(np.asarray(vectors, dtype=np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    norms = np.linalg.norm(clean, axis=1, keepdims=True)
    return np.divide(clean, norms, out=np.zeros_like(clean), where=norms > 0)


def mmr_order(
    vectors: Floats,
    relevance: Floats,
    *,
    taken: Sequence[int],
    redundancy: float,
    enough: Callable[[int], bool],
) -> list[int]:
    """Indices of rows not in `taken`, best first, until `enough(index)` says so of the one just added.

    `vectors` `[n, dim]` normalized, `relevance` `[n]`. A row's value is `(1 - redundancy) * relevance - redundancy *
    (greatest cosine with a row chosen before)`; equal values go to the earlier row.
    """
    nearest = np.full(len(vectors), 0.0, dtype=np.float32)
    if taken:
        for low in range(0, len(taken), 512):
            nearest = np.maximum(nearest, (vectors @ vectors[list(taken[low : low + 512])].T).max(axis=1))
    free = np.ones(len(vectors), dtype=bool)
    free[list(taken)] = False
    order: list[int] = []
    while free.any():
        value = np.where(free, (1.0 - redundancy) * relevance - redundancy * nearest, -np.inf)
        best = int(value.argmax())
        order.append(best)
        free[best] = False
        if enough(best):
            break
        nearest = np.maximum(nearest, vectors @ vectors[best])
    return order
