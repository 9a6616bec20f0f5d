"""Rows that are chosen before the prefill, by their places or after a probe, against the float64 reference."""

import math
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.kv_reuse import QueryAttention, Repair

from .reference import Reference
from .rows import RandomPlaces, RandomRows
from .test_blend_engine import PROMPTS, A, B, C, Runner, check, greedy, loaded_spans, prompt, repaired, text

STEPS = [128, 13]


@pytest.fixture(scope="module", params=["tiny_llama_dir", "tiny_qwen3_dir", "tiny_gemma3_dir"])
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def places_of(spans: list[tuple[int, int]]) -> list[int]:
    return [place for start, length in spans for place in range(start, start + length)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("depth", "until"), [(None, 1.0), (0.5, 1.0), (0.25, 0.5)])
def test_chosen_rows_are_recomputed_and_no_others(
    model: LoadedModel, reference: Reference, depth: float | None, until: float, step: int, name: str
):
    ids, spans = PROMPTS[name]
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    chooser = RandomPlaces(3, depth, until)
    plan = reuser.plan(ids, spans, ratio=0.3, repair=Repair(chooser=chooser))
    (finished,) = runner.together(greedy(ids, plan.reuse))
    spans = loaded_spans(spans, len(ids))
    places, (chosen,) = places_of(spans), chooser.chosen
    check(finished, reference.blended(ids, spans, repaired={places[row] for row in chosen.tolist()}))
    quota = math.ceil(0.3 * len(places) - 1e-9)
    assert (finished.result.recomputed_tokens, finished.result.reused_tokens) == (quota, len(places) - quota)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("until", [1.0, 0.75])
def test_the_probe_measures_how_the_end_looks_at_the_chunks(
    model: LoadedModel, reference: Reference, until: float, step: int
):
    ids, spans = prompt((text(5, 3),), A, (text(6, 2),), B, (text(7, 6),))
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser()
    reuser.warm([A, B])
    chooser = RandomPlaces(0, 0.5, until)
    runner.together(greedy(ids, reuser.plan(ids, spans, repair=Repair(chooser=chooser)).reuse))
    asked = spans[-1][0] + spans[-1][1]
    expected = torch.zeros(asked, dtype=torch.float64)
    layers = slice(model.spec.layers // 2, math.ceil(until * model.spec.layers))
    for weights in reference.blended(ids, spans).weights[layers]:
        looked = weights[:, -6:, :asked]
        # A window may hold none of these keys.
        expected += (looked / looked.sum(-1, keepdim=True)).nan_to_num().sum((0, 1))
    (saw,) = chooser.saw
    assert saw is not None
    torch.testing.assert_close(saw.double(), expected[places_of(spans)], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("depth", [None, 0.5])
def test_choosing_every_row_is_a_full_prefill(model: LoadedModel, reference: Reference, depth: float | None, step: int):
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    for ids, spans in PROMPTS.values():
        plan = reuser.plan(ids, spans, ratio=1.0, repair=Repair(chooser=RandomPlaces(0, depth)))
        (finished,) = runner.together(greedy(ids, plan.reuse))
        check(finished, reference.full(ids))
        assert finished.result.reused_tokens == 0


@pytest.mark.slow
def test_probed_requests_share_steps_with_all_others(model: LoadedModel, reference: Reference):
    runner = Runner(model, step_tokens=512)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    looks = [(0.5, 1.0), (0.0, 0.5), (None, 1.0)]
    choosers = [RandomPlaces(number, depth, until) for number, (depth, until) in enumerate(looks)]
    asked = list(PROMPTS.values())[:3]
    plans = [
        reuser.plan(ids, spans, ratio=0.3, repair=Repair(chooser=chooser))
        for (ids, spans), chooser in zip(asked, choosers, strict=True)
    ]
    narrowed = RandomRows(7, layer=2)
    selecting = reuser.plan(*asked[1], ratio=0.3, repair=Repair(narrowed))
    plain = text(20, 30)
    done = runner.together(
        greedy(plain, None),
        greedy(asked[1][0], selecting.reuse),
        *(greedy(ids, plan.reuse) for (ids, _), plan in zip(asked, plans, strict=True)),
        greedy(plain[:17], None),
    )
    check(done[0], reference.full(plain))
    rows = repaired(*asked[1], narrowed, ratio=0.3, step=512)
    check(done[1], reference.blended(*asked[1], layer=2, repaired=rows))
    for finished, (ids, spans), chooser in zip(done[2:5], asked, choosers, strict=True):
        places, (chosen,) = places_of(spans), chooser.chosen
        check(finished, reference.blended(ids, spans, repaired={places[row] for row in chosen.tolist()}))
    check(done[5], reference.full(plain[:17]))


def test_what_the_question_looks_at_is_repaired_through_the_whole_engine(model: LoadedModel, reference: Reference):
    ids, spans = PROMPTS["one chunk twice"]
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A])
    full = reference.full(ids)
    distance: dict[float, float] = {}
    for ratio in (0.0, 0.8):
        plan = reuser.plan(ids, spans, ratio=ratio, repair=Repair(chooser=QueryAttention()))
        (finished,) = runner.together(greedy(ids, plan.reuse))
        kv = finished.result.kv
        assert kv is not None
        distance[ratio] = float((kv.v.double() - full.v).norm())
    assert distance[0.8] < 0.8 * distance[0.0]
