"""The likeliest ids by our kernels against torch's: ties, borders of blocks, rows of minus infinity, every dtype."""

import importlib
import os

import pytest
import torch
from promptsluice.backend_engine.likeliest import likeliest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when the kernels are first imported, which happens below
    os.environ["TRITON_INTERPRET"] = "1"


def kernel(scores: torch.Tensor) -> list[int]:
    return importlib.import_module("promptsluice.backend_engine.likeliest_triton").likeliest(scores).tolist()


def first_of_the_largest(scores: torch.Tensor) -> list[int]:
    return [int((row == row.max()).nonzero()[0]) for row in scores.double()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (3, 4096), (2, 4097), (5, 12345), (0, 7)])
def test_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype) -> None:
    scores = (torch.randn(rows, vocab) * 4).to(dtype).to(DEVICE)
    assert kernel(scores) == likeliest(scores).tolist() == first_of_the_largest(scores)


def test_ties_go_to_the_smaller_id_wherever_they_lie() -> None:
    scores = torch.zeros(4, 9000, device=DEVICE)
    scores[0, [8999, 4097, 4096]] = 1.0
    scores[1, [8191, 8192]] = 2.0
    scores[2] = -torch.inf
    assert kernel(scores) == [4096, 8191, 0, 0]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's numpy
def test_a_row_that_is_not_a_number_still_names_an_id() -> None:
    """As before a graph has ever run: what it is warmed up on is anything, and ids are looked up."""
    scores = torch.full((2, 5000), torch.nan, device=DEVICE)
    scores[1, 4999] = 1.0
    assert all(0 <= place < 5000 for place in kernel(scores))
