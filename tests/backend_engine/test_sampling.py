"""Sampling against a float64 reference that handles one row at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.sampling import CANDIDATES, SamplingTensors, sample, uniform
from torch import Tensor


def _params(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
    drawn: int = 0,
) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int64),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.arange(first_seed, first_seed + rows, dtype=torch.int64),
        drawn=torch.full((rows,), drawn, dtype=torch.int64),
    )


def _reference(logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filtered distribution in float64, token by token."""
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")[: top_k or None]
    within, reached, kept = probs[order].sum(), 0.0, []
    for token in order:
        if reached >= top_p * within:
            break
        reached += probs[token]
        if probs[token] >= min_p * probs[order[0]]:
            kept.append(token)
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def _deviation(observed: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square, as standard deviations above its mean."""
    freedom = max(1, len(expected) - 1)
    return (((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


FILTERS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 7, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.8, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS)
def test_samples_follow_the_reference_distribution(filters: dict) -> None:
    logits, rows = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2, 40_000
    expected = _reference(logits, **filters)
    counts = np.bincount(sample(logits.expand(rows, -1), _params(rows, **filters)).numpy(), minlength=50)
    assert counts[expected == 0].sum() == 0
    common = expected * rows >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * rows
    assert _deviation(observed[wanted > 0], wanted[wanted > 0]) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0, "top_k": 0, "top_p": 0.999, "min_p": 0.0},
        {"temperature": 1.0, "top_k": CANDIDATES + 500, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": CANDIDATES, "top_p": 0.99, "min_p": 0.0},
        {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    ],
)
def test_wide_filters_keep_exactly_the_reference_set(filters: dict) -> None:
    logits, rows = torch.randn(1800, generator=torch.Generator().manual_seed(5)), 12_000
    expected = _reference(logits, **filters)
    parts = [_params(2000, **filters, first_seed=first) for first in range(0, rows, 2000)]
    drawn = torch.cat([sample(logits.expand(2000, -1), part) for part in parts])
    seen = np.bincount(drawn.numpy(), minlength=1800) > 0
    assert not (seen & (expected == 0)).any()
    assert seen[expected * rows > 30].all()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0.1, 2.0),
    st.integers(0, 40),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
)
def test_no_sample_lies_outside_the_filters(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # A filter that falls within rounding of a token's edge may go either way.
    loose = _reference(logits, temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=min_p * 0.9999)
    drawn = sample(logits.expand(500, -1), _params(500, **filters, first_seed=seed))
    assert (loose[drawn.numpy()] > 0).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.8, 1.0, 1.5, 1.0]),
        top_k=torch.tensor([0, 0, 50, 0, 2000, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.9999, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.02]),
        seed=torch.tensor([1, -(1 << 63), (1 << 63) - 1, 4, 5, 6]),
        drawn=torch.tensor([0, 1, 2, 3, 100_000, 5]),
    )
    together = sample(logits, params)
    for order in (torch.tensor([5, 3, 1, 0, 4, 2]), *torch.arange(6)[:, None]):
        assert sample(logits[order], params.rows(order)).tolist() == together[order].tolist()


def test_greedy_takes_the_largest_logit_whatever_the_filters() -> None:
    logits = torch.randn(20, 100)
    for temperature in (0.0, 1e-30):
        greedy = sample(logits, _params(20, temperature=temperature, top_k=3, top_p=0.5))
        assert greedy.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [100, 2 * CANDIDATES])
def test_the_narrowest_filters_leave_the_likeliest_token(vocab: int) -> None:
    logits = torch.randn(20, vocab)
    for top_k, top_p, min_p in ((1, 1.0, 0.0), (0, 1e-50, 0.0), (0, 1.0, 1.0), (5, 1e-50, 1.0)):
        params = _params(20, top_k=top_k, top_p=top_p, min_p=min_p)
        assert sample(logits, params).tolist() == logits.argmax(-1).tolist()


def test_tokens_with_no_probability_are_never_drawn() -> None:
    logits = torch.full((5000, 8), -torch.inf)
    logits[:, 3] = 0.0
    logits[:, 5] = 0.0
    for top_p in (1.0, 0.9):
        assert set(sample(logits, _params(5000, top_p=top_p)).tolist()) == {3, 5}


def test_uniform_numbers_are_uniform_in_both_arguments() -> None:
    many = torch.arange(100_000)
    fixed = torch.full_like(many, 42)
    for seed, drawn in ((many, fixed), (fixed, many), (-many, fixed)):
        numbers = uniform(seed, drawn)
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers.numpy(), bins=100, range=(0, 1))[0]
        assert _deviation(counts, np.full(100, 1000.0)) < 5
        assert abs(np.corrcoef(numbers[1:].numpy(), numbers[:-1].numpy())[0, 1]) < 0.02
