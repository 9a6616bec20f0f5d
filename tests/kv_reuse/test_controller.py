"""The costs that are fitted, the work that is counted before it runs, and the way that is chosen by both."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.types import PrefillWork
from promptsluice.kv_reuse import AUTO, ChunkHeads, KVDeviation, QueryAttention, Repair
from promptsluice.kv_reuse.calibration import measured
from promptsluice.kv_reuse.controller import Choice, Controller, Way
from promptsluice.kv_reuse.costs import Fit
from promptsluice.kv_reuse.gate import LADDER
from promptsluice.kv_reuse.repeats import Sight
from promptsluice.kv_reuse.work import Counter, Prompt

from .test_blend_engine import PROMPTS, STEP, A, B, C, Runner, greedy, loaded_spans, text

LONG = Prompt(tokens=2000, prefix=0, spans=((30, 900), (940, 1000)))
SHORT = Prompt(tokens=80, prefix=0, spans=((10, 40),))


def seconds_of(work: dict[str, float], *, step: float = 0.02, row: float = 2e-3, pair: float = 1e-6) -> float:
    return step * work["steps"] + row * work["rows"] + pair * work["pairs"]


def taught(counter: Counter, **costs: float) -> Controller:
    """A controller that has seen some prefills of a machine with these costs."""
    controller = Controller(counter)
    for tokens in (20, 100, 400, 900, 1800):
        work = counter.full(Prompt(tokens=tokens, prefix=0, spans=())).quantities()
        controller.ran(real(work, seconds_of(work, **costs)))
    return controller


def real(work: dict[str, float], seconds: float) -> PrefillWork:
    return PrefillWork(steps=work["steps"], rows=round(work["rows"]), pairs=round(work["pairs"]), seconds=seconds)


COUNTER = Counter(layers=30, step_tokens=512)


def test_costs_are_found_through_noise_and_stalls() -> None:
    rng, fit = random.Random(1), Fit()
    assert fit.seconds({"rows": 3.0}) is None
    for number in range(60):
        rows = rng.randrange(1, 500)
        work = {"steps": 1.0 + rows // 128, "rows": float(rows), "pairs": rng.random() * rows * 1000}
        stalled = 6.0 if number % 10 == 0 else 1.0
        fit.add(work, seconds_of(work) * rng.uniform(0.95, 1.05) * stalled)
    costs = fit.costs()
    assert costs["rows"] == pytest.approx(2e-3, rel=0.1) and costs["pairs"] == pytest.approx(1e-6, rel=0.2)
    assert fit.seconds({"steps": 2.0, "rows": 300.0, "unseen": 5.0}) == pytest.approx(0.64, rel=0.1)


def test_no_cost_is_negative_and_new_measurements_replace_old_ones() -> None:
    fit = Fit()
    fit.pin({"rows": 10.0, "steps": 1.0}, 1.0)
    for rows in (10.0, 20.0, 40.0):  # more rows take less time: only noise can do that
        fit.add({"rows": rows, "steps": 1.0}, 4.0 / rows)
    assert min(fit.costs().values()) >= 0
    for _ in range(70):
        for rows in (10.0, 100.0):
            fit.add({"rows": rows, "steps": 1.0}, 0.5 + 0.01 * rows)
    assert fit.seconds({"rows": 50.0, "steps": 1.0}) == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize(
    "repair",
    [Repair(), Repair(chooser=ChunkHeads()), Repair(chooser=QueryAttention(depth=0.5))],
    ids=["reuse", "chunk heads", "query attention"],
)
def test_the_work_counted_ahead_is_what_the_engine_runs(tiny_llama_dir: Path, repair: Repair, name: str) -> None:
    ids, spans = PROMPTS[name]
    runner = Runner(load_model(tiny_llama_dir, dtype="float32"))
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    ratio = 0.0 if repair == Repair() else 0.3
    mode = "blend" if ratio else "reuse"
    plan = reuser.plan(ids, spans, mode=mode, ratio=ratio, repair=repair)
    (finished,) = runner.together(greedy(ids, plan.reuse))
    counter = Counter(layers=4, step_tokens=STEP)
    asked = Prompt(tokens=len(ids), prefix=0, spans=tuple(loaded_spans(spans, len(ids))))
    counted, work = counter.reused(asked, ratio=ratio, repair=repair), finished.result.work
    assert (counted.steps, counted.rows) == (work.steps, pytest.approx(work.rows, abs=1))
    if not ratio:
        assert counted.pairs == work.pairs  # else it depends on which rows are chosen
    full = counter.full(Prompt(tokens=len(ids), prefix=0, spans=()))
    assert (full.rows, full.pairs) == (len(ids), len(ids) * (len(ids) + 1) / 2)


def test_a_prefix_takes_its_part_of_the_spans() -> None:
    asked = Prompt(tokens=100, prefix=30, spans=((10, 15), (25, 20), (50, 50)))
    assert asked.left == ((30, 15), (50, 49))
    assert COUNTER.reused(asked).rows == 100 - 30 - 15 - 49
    covered = Prompt(tokens=100, prefix=96, spans=((10, 60),))
    assert COUNTER.reused(covered, ratio=0.2, repair=AUTO) == COUNTER.full(covered)


def test_a_selectors_layers_are_counted() -> None:
    deep, early = (
        COUNTER.reused(LONG, ratio=0.1, repair=Repair(selector=KVDeviation(layer=layer))) for layer in (14, 1)
    )
    assert early.rows == pytest.approx(100 + 190 + 1710 * 2 / 30) and deep.rows == pytest.approx(100 + 190 + 1710 / 2)


def test_long_prompts_are_blended_and_short_ones_stay_untouched() -> None:
    controller = taught(COUNTER)
    for tier_seconds in (0.02, 0.021):
        controller.loaded({"ram": 1000}, wanted=1000, seconds=tier_seconds)
    choice = controller.choose(LONG, mode="blend", ratio=0.15, repair=AUTO)
    assert choice.way is Way.BLEND and choice.ratio == 0.15
    assert choice.seconds is not None and choice.full_seconds is not None and choice.seconds < choice.full_seconds / 2
    assert controller.promising(LONG, mode="blend", ratio=0.15, repair=AUTO)
    few = Prompt(tokens=300, prefix=0, spans=((5, 32),))
    assert not controller.promising(few, mode="blend", ratio=0.15, repair=AUTO)
    assert controller.choose(few, mode="blend", ratio=0.15, repair=AUTO).way is Way.FULL
    cached = Prompt(tokens=2000, prefix=1990, spans=LONG.spans)
    assert not controller.promising(cached, mode="blend", ratio=0.15, repair=AUTO)
    assert controller.readings()["reuse_decided_untouched"] == 2


def test_slow_loads_leave_prompts_untouched() -> None:
    controller = taught(COUNTER)
    for _ in range(10):
        controller.loaded({"disk": 1000}, wanted=1000, seconds=4.0)
    assert not controller.promising(LONG, mode="reuse", ratio=0.0, repair=Repair())
    for _ in range(80):
        controller.loaded({"disk": 1000}, wanted=1000, seconds=0.1)
    assert controller.promising(LONG, mode="reuse", ratio=0.0, repair=Repair())


def test_nothing_is_refused_before_anything_is_known() -> None:
    controller = Controller(COUNTER)
    assert controller.promising(SHORT, mode="blend", ratio=0.15, repair=AUTO)
    assert controller.choose(SHORT, mode="blend", ratio=0.3, repair=AUTO) == Choice(way=Way.BLEND, ratio=0.3)


def test_auto_takes_more_rows_where_they_cost_nothing() -> None:
    rows, steps = taught(COUNTER), taught(Counter(layers=30, step_tokens=4096), step=0.05, row=1e-9, pair=0.0)
    assert rows.choose(LONG, mode="blend", ratio=0.15, more=True, repair=AUTO).ratio == 0.15
    assert rows.choose(LONG, mode="blend", ratio=0.2, more=True, repair=AUTO).ratio == 0.2
    # Two steps of a probe and of the chosen rows take as long as one full prefill: only a chooser without a probe pays.
    free = steps.choose(LONG, mode="blend", ratio=0.15, more=True, repair=Repair(chooser=ChunkHeads()))
    assert free.way is Way.FULL
    assert (
        steps._best(LONG, mode="blend", ratio=0.15, more=True, repair=Repair(chooser=ChunkHeads())).ratio == LADDER[-1]
    )


def test_what_goes_on_from_a_blend_is_predicted_by_what_is_behind_it() -> None:
    controller = taught(COUNTER)
    prompt = replace(LONG, prefix=16, kept=LONG.tokens - 30)
    choice = controller.choose(prompt, mode="blend", ratio=0.15, repair=AUTO, seen=[Sight(1984, 9)])
    assert choice.way is Way.KEPT and not choice.repeated
    assert choice.seconds is not None and choice.full_seconds is not None
    assert choice.seconds < 0.1 * choice.full_seconds
    none = controller.choose(replace(prompt, spans=(), kept=16), mode="blend", ratio=0.15, repair=AUTO)
    assert none.way is Way.FULL, "there is nothing to go on from"
    little = controller.choose(replace(prompt, spans=(), kept=40), mode="blend", ratio=0.15, repair=AUTO)
    assert little.way is Way.FULL, "exact rows for hardly more time"
    half = controller.choose(replace(prompt, kept=LONG.spans[1][0]), mode="blend", ratio=0.15, repair=AUTO)
    assert half.way is Way.BLEND, "what is behind it is stored"
    exact = controller.full(prompt)
    assert exact.seconds == pytest.approx(choice.full_seconds)


def test_what_comes_again_is_prefilled_once_when_that_is_cheaper_in_the_end() -> None:
    controller = taught(COUNTER)

    def way(ratio: float, *seen: Sight, mode: str = "blend") -> Way:
        choice = controller.choose(LONG, mode=mode, ratio=ratio, repair=AUTO, seen=seen)
        assert choice.repeated == (choice.way is Way.FULL)
        return choice.way

    assert way(0.3) is Way.BLEND
    assert way(0.3, Sight(1984, 1)) is Way.FULL, "three blends take longer than it"
    assert way(0.3, Sight(320, 50)) is Way.BLEND, "what comes again is too short to save that"
    assert way(0.3, Sight(320, 50), Sight(1984, 1)) is Way.FULL, "the longer beginning saves it"
    assert way(0.0, Sight(1984, 1), mode="reuse") is Way.REUSE
    cheap = controller.choose(LONG, mode="blend", ratio=0.05, repair=AUTO)
    assert cheap.seconds is not None and cheap.full_seconds is not None
    before = next(times for times in range(1, 99) if way(0.05, Sight(1984, times)) is Way.FULL)
    spent = before * cheap.seconds + cheap.full_seconds  # at worst it never comes again
    assert before > 1 and spent < 2 * min((before + 1) * cheap.seconds, cheap.full_seconds)


def test_wrong_predictions_correct_themselves_and_are_forgotten_when_unused() -> None:
    controller = taught(COUNTER)
    work = COUNTER.reused(LONG, ratio=0.15, repair=AUTO).quantities()
    choices: list[Choice] = []
    for _ in range(60):  # scattered rows are six times as slow as counted: a full prefill is faster
        choice = controller.choose(LONG, mode="blend", ratio=0.15, repair=AUTO)
        choices.append(choice)
        if choice.way is Way.BLEND:
            controller.ran(real(work, 6 * seconds_of(work)), choice)
        else:
            full = COUNTER.full(LONG).quantities()
            controller.ran(real(full, seconds_of(full)), choice)
    ways = [choice.way for choice in choices]
    assert ways[0] is Way.BLEND and ways.count(Way.FULL) > ways.count(Way.BLEND)
    later = [controller.choose(LONG, mode="blend", ratio=0.15, repair=AUTO).way for _ in range(80)]
    assert Way.BLEND in later, "what has become faster is tried again"


def test_calibration_measures_the_engine_it_is_given(tiny_llama_dir: Path) -> None:
    model = load_model(tiny_llama_dir, dtype="float32")
    runner, controller = Runner(model), Controller(Counter(layers=4, step_tokens=STEP))
    works = measured(model.decoder)
    assert [(work.rows, work.pairs) for work in works] == [(16, 136), (128, 8256), (48, 48 * 960 + 1176)]
    controller.calibrate(works)
    choice = controller.full(Prompt(tokens=90, prefix=0, spans=()))
    assert choice.seconds is not None and 0 < choice.seconds < 10
    result = runner.run(greedy(text(5, 90), None))
    controller.ran(result.work, choice)
    readings = controller.readings()
    assert readings["reuse_real_s_full"] == pytest.approx(result.work.seconds)
    assert readings["reuse_predicted_s_full"] == pytest.approx(choice.seconds)
    assert torch.isfinite(torch.tensor(list(readings.values()))).all()
