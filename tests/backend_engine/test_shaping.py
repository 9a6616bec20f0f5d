"""Bias, penalties and bans against transformers' processors and float64 numpy, and along whole generations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.shaping import banned, biased, penalized
from promptsluice.backend_engine.token_counts import IN_PROMPT
from promptsluice.backend_engine.types import GenerationRequest
from promptsluice.prompt.errors import BadRequest
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from .driving import Collected, Reference, alone, assert_idle, finish, random_ids, tiny_engine, together

VOCAB = 512


def _counts(prompt: list[int], output: list[int], vocab: int) -> Tensor:
    counts = np.bincount(output, minlength=vocab)
    counts[np.unique(prompt)] += IN_PROMPT
    return torch.from_numpy(counts.astype(np.int32))[None]


def _wanted(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """In float64, token by token."""
    wanted = logits.astype(np.float64)
    for token, value in params.logit_bias:
        wanted[token] += value
    for token in {*prompt, *output}:
        wanted[token] *= params.repetition_penalty if wanted[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        wanted[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    return wanted


tokens = st.lists(st.integers(0, 29), max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), tokens, tokens, st.floats(0.1, 5), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_equal_the_formulas(
    seed: int, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 5
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )  # fmt: skip
    counts = _counts(prompt or [0], output, 30)
    found = penalized(logits, counts, torch.tensor([[repetition, frequency, presence]]))
    wanted = _wanted(logits[0].numpy(), prompt or [0], output, params)
    np.testing.assert_allclose(found[0].double().numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_repetition_and_bias_equal_transformers() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(3, 50, generator=generator) * 4, torch.randint(0, 50, (3, 20), generator=generator)
    pairs = [((3, 5.0), (7, -100.0)), ((49, 100.0),), ()]
    with_bias = biased(logits, pairs)
    for row, own in enumerate(pairs):
        expected = logits[row : row + 1]
        if own:
            processor: Any = SequenceBiasLogitsProcessor([[[token], value] for token, value in own])
            expected = processor(ids[row : row + 1], expected)
        torch.testing.assert_close(with_bias[row : row + 1], expected)
        processor = RepetitionPenaltyLogitsProcessor(1.7)
        found = penalized(with_bias[row : row + 1], _counts(ids[row].tolist(), [], 50), torch.tensor([[1.7, 0.0, 0.0]]))
        torch.testing.assert_close(found, processor(ids[row : row + 1], expected.clone()))


def test_a_ban_that_would_leave_nothing_is_void() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, 1.0, 2.0], [5.0, 6.0, 7.0]])
    found = banned(logits, [[0, 1], [1], []])
    assert found.tolist() == [[0.0, 1.0, -torch.inf], [0.0, -torch.inf, 2.0], [5.0, 6.0, 7.0]]


def shaped_greedy(ids: tuple[int, ...], max_tokens: int = 24, **fields: Any) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | fields)
    return GenerationRequest(ids=ids, sampling=params)


@torch.inference_mode()
def _generated(reference: Reference, request: GenerationRequest) -> list[int]:
    """Greedy with everything recomputed at each token."""
    ids, params = list(request.ids), request.sampling
    for _ in range(params.max_tokens or 0):
        logits = reference.model(torch.tensor([ids])).logits[0, -1].numpy()
        ids.append(int(_wanted(logits, list(request.ids), ids[len(request.ids) :], params).argmax()))
    return ids[len(request.ids) :]


SHAPES = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"frequency_penalty": -1.0, "repetition_penalty": 0.7},
    {"presence_penalty": 2.0, "logit_bias": ((5, 3.0), (9, -100.0), (511, 2.5))},
    {},
]


@pytest.mark.slow
def test_generations_follow_the_formulas_in_a_mixed_batch(model: LoadedModel, reference: Reference) -> None:
    requests = [shaped_greedy(random_ids(5 + 9 * n, n), **fields) for n, fields in enumerate(SHAPES)]
    engine = tiny_engine(model, step_tokens=20)
    outputs = together(engine, *requests)
    assert [output.tokens for output in outputs] == [_generated(reference, request) for request in requests]
    assert outputs[0].tokens != reference.greedy(requests[0].ids, 24), "the penalty must matter for the test to"
    assert_idle(engine)
    assert engine._table.counts.nbytes == 0


def test_repetition_penalty_equals_transformers_generate(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(30, 3)
    expected = reference.greedy(ids, 24, repetition_penalty=1.3, sequence_bias=[[[17], 1.5]])
    request = shaped_greedy(ids, repetition_penalty=1.3, logit_bias=((17, 1.5),))
    assert alone(tiny_engine(model), request).tokens == expected


@pytest.mark.slow
def test_penalties_survive_preemption(model: LoadedModel, reference: Reference) -> None:
    requests = [
        shaped_greedy(random_ids(20, n), 40, frequency_penalty=0.5, repetition_penalty=1.2) for n in range(6)
    ]  # fmt: skip
    engine = tiny_engine(model, pages=30, max_running=6)
    outputs = together(engine, *requests)
    assert engine.stats().preemptions > 0
    assert [output.tokens for output in outputs] == [_generated(reference, request) for request in requests]
    assert_idle(engine)


def test_counts_are_held_only_for_those_who_need_them(model: LoadedModel) -> None:
    engine, sinks = tiny_engine(model), [Collected() for _ in range(5)]
    counts = engine._table.counts
    engine.add(shaped_greedy(random_ids(9, 9), 40), sinks[4])
    sequences = [
        engine.add(shaped_greedy(random_ids(9, n), 40, presence_penalty=1.0), sink) for n, sink in enumerate(sinks[:3])
    ]
    engine.step()
    assert counts.nbytes == 4 * VOCAB * 4, "three rows fit into four"
    engine.abort(sequences[0])
    engine.add(shaped_greedy(random_ids(9, 7), 40, presence_penalty=1.0), sinks[3])
    engine.step()
    assert counts.nbytes == 4 * VOCAB * 4
    for sequence in sequences[1:]:
        engine.abort(sequence)
    finish(engine)
    assert counts.nbytes == 0


def _ending(model: LoadedModel, token: int) -> LoadedModel:
    return replace(model, spec=replace(model.spec, eos_ids=(token,)))


@pytest.mark.slow
def test_min_tokens_keeps_the_end_away(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(20, 1)
    whole = reference.greedy(ids, 20)
    end, other = whole[2], whole[4]
    engine = tiny_engine(_ending(model, end))
    early = alone(engine, shaped_greedy(ids, ignore_eos=False))
    assert early.tokens == whole[:3] and early.result.finish_reason == "stop"
    for fields in ({}, {"stop_token_ids": (other,)}, {"temperature": 1.5, "seed": 3}):
        late = alone(engine, shaped_greedy(ids, 20, ignore_eos=False, min_tokens=12, **fields))
        assert len(late.tokens) >= 12 and not {end, *fields.get("stop_token_ids", ())} & set(late.tokens[:12])
    expected = reference.greedy(ids, 20, min_new_tokens=12, eos_token_id=end)
    assert alone(engine, shaped_greedy(ids, 20, ignore_eos=False, min_tokens=12)).tokens == expected


def test_a_stop_token_ends_the_text(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(20, 1)
    whole = reference.greedy(ids, 12)
    place = next(n for n in range(3, 12) if whole[n] not in whole[:n])
    output = alone(tiny_engine(model), shaped_greedy(ids, 12, stop_token_ids=(whole[place],)))
    assert output.tokens == whole[: place + 1] and output.result.finish_reason == "stop"


@torch.inference_mode()
def test_logprobs_are_the_models_own(model: LoadedModel, reference: Reference) -> None:
    """Of drawn tokens, under penalties, temperature and filters: the raw distribution, whatever its neighbours."""
    fields = {"temperature": 0.8, "top_k": 40, "seed": 5, "frequency_penalty": 0.4, "logit_bias": ((3, 4.0),)}
    requests = [
        shaped_greedy(random_ids(12, 1), 10, logprobs=5, **fields),
        shaped_greedy(random_ids(30, 2), 10),
        shaped_greedy(random_ids(7, 3), 10, logprobs=0),
        shaped_greedy(random_ids(7, 4), 10, logprobs=20),
    ]
    outputs = together(tiny_engine(model, step_tokens=20), *requests)
    for request, output in zip(requests, outputs, strict=True):
        told = [one for delta in output.deltas for one in delta.logprobs]
        if request.sampling.logprobs is None:
            assert told == []
            continue
        scores = reference.model(torch.tensor([[*request.ids, *output.tokens]])).logits[0].log_softmax(-1)
        assert [one.token_id for one in told] == output.tokens
        for place, one in enumerate(told, len(request.ids) - 1):
            values, order = scores[place].topk(max(1, request.sampling.logprobs))
            assert abs(one.logprob - float(scores[place, one.token_id])) < 1e-4
            assert len(one.top) == request.sampling.logprobs
            wanted = dict(zip(order.tolist(), values.tolist(), strict=True))
            assert {token: pytest.approx(value, abs=1e-4) for token, value in one.top} == wanted or not one.top


def test_what_ends_a_text_by_its_id_has_no_logprob(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(20, 1)
    whole = reference.greedy(ids, 12)
    output = alone(tiny_engine(_ending(model, whole[2])), shaped_greedy(ids, ignore_eos=False, logprobs=0))
    assert [one.token_id for delta in output.deltas for one in delta.logprobs] == whole[:2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": (("1", 1.0),)}, "logit_bias"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_bad_parameters_are_refused_by_name(model: LoadedModel, fields: dict[str, Any], param: str) -> None:
    engine: Engine = tiny_engine(model)
    with pytest.raises(BadRequest, match=param) as caught:
        engine.add(GenerationRequest(ids=(5, 6), sampling=SamplingParams(**fields)), Collected())
    assert caught.value.param == param
    assert not engine.has_work
