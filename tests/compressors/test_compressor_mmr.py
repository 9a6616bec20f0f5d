"""The order by relevance and redundancy: as defined for some hundred rows, in blocks of look-alikes for many."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from promptsluice.compressors.mmr import mmr_order, normalized


def some(n: int, *, dim: int = 32) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Vectors of whole numbers, so that their products are exact, and relevance of `n` rows; some rows are alike."""
    random = np.random.default_rng(n)
    vectors = random.integers(-2, 3, size=(n, dim)).astype(np.float32)
    vectors[n // 2 :: 7] = vectors[0]
    return vectors, 60.0 * random.random(n).astype(np.float32)


def as_defined(vectors: NDArray[np.float32], relevance: NDArray[np.float32], taken: list[int]) -> list[int]:
    order: list[int] = []
    likeness = vectors @ vectors.T
    while len(order) + len(taken) < len(vectors):
        nearest = np.maximum(likeness[:, [*taken, *order]].max(axis=1, initial=0.0), 0.0)
        value = 0.7 * relevance - 0.3 * nearest
        value[[*taken, *order]] = -np.inf
        order.append(int(value.argmax()))
    return order


@pytest.mark.slow
@pytest.mark.parametrize("taken", [[], [3, 4, 200]])
@pytest.mark.parametrize("n", [1, 300, 700])
def test_some_rows_are_compared_with_all_others(n: int, taken: list[int]) -> None:
    vectors, relevance = some(n)
    taken = [row for row in taken if row < n]
    order = mmr_order(vectors, relevance, taken=taken, redundancy=0.3, enough=lambda row: False)
    assert order == as_defined(vectors, relevance, taken)


def test_of_many_rows_the_same_one_is_not_chosen_twice() -> None:
    random = np.random.default_rng(1)
    distinct = random.normal(size=(2000, 32)).astype(np.float32)
    place = random.permutation(4 * len(distinct)) % len(distinct)
    chosen: set[int] = set()

    def enough(row: int) -> bool:
        chosen.add(int(place[row]))
        return next(rows) == len(distinct)

    rows = itertools.count(1)
    relevance = np.ones(len(place), dtype=np.float32)
    mmr_order(normalized(distinct)[place], relevance, taken=[], redundancy=0.5, enough=enough)
    assert len(chosen) > 0.99 * len(distinct)


def test_of_nothing_nothing_is_chosen() -> None:
    nothing = np.zeros((0, 1), dtype=np.float32)
    assert mmr_order(nothing, nothing[:, 0], taken=[], redundancy=0.3, enough=lambda row: False) == []


def test_equal_rows_keep_their_order_however_many() -> None:
    vectors = np.zeros((5000, 4), dtype=np.float32)
    order = mmr_order(
        vectors, np.zeros(5000, dtype=np.float32), taken=[7], redundancy=0.3, enough=lambda row: row == 4000
    )
    assert order == [row for row in range(4001) if row != 7]


class Counted(np.ndarray):
    """Counts the rows that are multiplied by others."""

    rows = 0

    def __matmul__(self, other: Any) -> Any:
        Counted.rows += len(self) * max(1, other.size // self.shape[1])
        return np.asarray(self) @ np.asarray(other)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 2500])
def test_many_rows_are_each_compared_with_few(taken: int) -> None:
    vectors, relevance = some(10_000)
    Counted.rows = 0
    order = mmr_order(vectors.view(Counted), relevance, taken=range(taken), redundancy=0.3, enough=lambda row: False)
    assert sorted(order) == list(range(taken, 10_000))
    assert 0 < Counted.rows <= 2 * 1024 * 10_000
