"""Maximal marginal relevance: an order of texts, each next one relevant to the question and unlike those before it
(Carbonell and Goldstein, 1998, "The Use of MMR, Diversity-Based Reranking for Reordering Documents", SIGIR).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# From twice as many rows on they are compared in blocks of about so many: all with all is quadratic.
_BLOCK = 1024


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
    (greatest cosine with a row chosen before)`; equal values go to the earlier row. From some thousand rows on, each is
    compared only with those of its block (see `_alike`), so that time grows with their number and not its square.
    """
    stays = np.zeros(len(vectors), dtype=bool)
    stays[list(taken)] = True
    blocks = (_of_block(rows, vectors, relevance, stays, redundancy) for rows in _alike(vectors))
    order: list[int] = []
    for _, best in heapq.merge(*blocks):
        order.append(best)
        if enough(best):
            break
    return order


def _alike(vectors: Floats) -> list[NDArray[np.intp]]:
    """Rows in blocks, ascending in each. Those with the same greatest component (by words, mostly the rarest word), of
    about the same value, are together, so that most rows have what they are most like in their own block.
    """
    greatest = np.abs(vectors).argmax(axis=1)
    order = np.lexsort((vectors[np.arange(len(vectors)), greatest], greatest))
    return [np.sort(rows) for rows in np.array_split(order, max(1, len(vectors) // _BLOCK))]


def _of_block(
    rows: NDArray[np.intp], vectors: Floats, relevance: Floats, stays: NDArray[np.bool_], redundancy: float
) -> Iterator[tuple[float, int]]:
    """The rows of a block that are not taken, best first, each with its negative value, which never falls."""
    vectors, worth, free = vectors[rows], (1.0 - redundancy) * relevance[rows], ~stays[rows]
    nearest = np.zeros(len(rows), dtype=np.float32)
    (taken,) = np.nonzero(~free)
    for low in range(0, len(taken), 512):
        nearest = np.maximum(nearest, (vectors @ vectors[taken[low : low + 512]].T).max(axis=1))
    while free.any():
        value = np.where(free, worth - redundancy * nearest, -np.inf)
        best = int(value.argmax())
        free[best] = False
        yield -float(value[best]), int(rows[best])
        nearest = np.maximum(nearest, vectors @ vectors[best])
