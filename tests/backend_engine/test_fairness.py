"""Who is served when: counted in steps of the real engine, never in time."""

import random
from dataclasses import replace

import numpy as np
import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.fair_queue import RESERVED
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.prefill_shares import shares

from .driving import Collected, Reference, assert_idle, finish, greedy, random_ids, tiny_engine
from .eager import EagerSteps
from .test_run_ahead import Recorder


def _steps_until(engine: Engine, sink: Collected, *, first_token: bool = False, most: int = 5000) -> int:
    """Steps until a sink has ended, or has its first token."""
    for steps in range(most):
        if sink.ended or (first_token and sink.tokens):
            return steps
        engine.step()
    raise AssertionError(f"not within {most} steps")


def test_a_tenant_with_a_long_queue_delays_nobody_elses_single_request(model: LoadedModel) -> None:
    engine = tiny_engine(model, max_running=4, step_tokens=16)
    many = [Collected() for _ in range(500)]
    for seed, sink in enumerate(many):
        engine.add(greedy(random_ids(12, seed), 4, namespace="many"), sink)
    for _ in range(20):
        engine.step()
    single = Collected()
    engine.add(greedy(random_ids(12, 999), 4, namespace="one"), single)
    assert _steps_until(engine, single) <= 12  # until a place is free, then its own five
    assert sum(sink.ended for sink in many) < 40
    for sequence in engine.sequences:
        engine.abort(sequence)
    assert_idle(engine)


def test_busy_tenants_get_equal_shares_whatever_they_queue(model: LoadedModel) -> None:
    """One sends many small requests, one few large ones: what they are served stays level."""
    engine = tiny_engine(model, max_running=2, step_tokens=32)
    small, large = [Collected() for _ in range(120)], [Collected() for _ in range(30)]
    for seed, sink in enumerate(small):
        engine.add(greedy(random_ids(10, seed), 5, namespace="small"), sink)
    for seed, sink in enumerate(large):
        engine.add(greedy(random_ids(40, 1000 + seed), 20, namespace="large"), sink)
    for _ in range(200):
        engine.step()
    served = [(10 + 2 * 5) * sum(sink.ended for sink in small), (40 + 2 * 20) * sum(sink.ended for sink in large)]
    assert min(served) > 400 and abs(served[0] - served[1]) <= 3 * 80, served


def test_who_comes_back_has_saved_up_no_claim(model: LoadedModel) -> None:
    engine = tiny_engine(model, max_running=1)
    for seed in range(30):
        engine.add(greedy(random_ids(20, seed), 4, namespace="steady"), Collected())
    while engine.stats().finished < 15:
        engine.step()
    late = [Collected() for _ in range(20)]
    for seed, sink in enumerate(late):
        engine.add(greedy(random_ids(20, 100 + seed), 4, namespace="late"), sink)
    while engine.stats().finished < 25:
        engine.step()
    assert 4 <= sum(sink.ended for sink in late) <= 6


def test_a_low_priority_gets_its_turn_in_a_stream_of_higher_ones(model: LoadedModel) -> None:
    engine, low = tiny_engine(model, max_running=1), Collected()
    engine.add(greedy(random_ids(8, 0), 3, priority=5), Collected())
    engine.step()
    engine.add(greedy(random_ids(8, 1), 3), low)
    high: list[Collected] = []
    while not low.ended and len(high) < 100:
        high.append(Collected())
        engine.add(greedy(random_ids(8, 2 + len(high)), 3, priority=5), high[-1])
        engine.add(greedy(random_ids(8, 200 + len(high)), 3, priority=5), Collected())
        while not high[-1].ended and not low.ended:
            engine.step()
    assert RESERVED <= engine.stats().finished <= RESERVED + 4
    finish(engine)
    assert_idle(engine)


def test_a_short_prompt_does_not_wait_for_a_long_one(model: LoadedModel) -> None:
    engine, long, short = tiny_engine(model, step_tokens=16), Collected(), Collected()
    engine.add(greedy(random_ids(600, 1), 2), long)
    engine.step()
    engine.add(greedy(random_ids(20, 2), 2), short)
    assert _steps_until(engine, short, first_token=True) <= 2
    assert not long.tokens
    finish(engine)
    assert_idle(engine)


def test_a_long_prompt_does_not_starve_behind_short_ones(model: LoadedModel) -> None:
    """However many short prompts come, a quarter of every step is its own."""
    engine, long, came = tiny_engine(model, step_tokens=16, max_running=6), Collected(), 0
    engine.add(greedy(random_ids(320, 1), 2, namespace="a"), long)
    while not long.ended and engine.stats().steps < 2000:
        while len(engine.sequences) < 12:
            came += 1
            engine.add(greedy(random_ids(14, 10 + came), 2, namespace="b"), Collected())
        engine.step()
    assert long.ended and engine.stats().steps <= 4 * 320 / 16 + 20
    assert came > 50


def test_the_rows_of_a_step_are_shared_out_whole(model: LoadedModel) -> None:
    dice, engine = random.Random(1), tiny_engine(model)
    for _ in range(200):
        prefills = []
        for order in range(dice.randrange(1, 6)):
            sequence = engine.prepare(greedy((5,), priority=dice.choice([0, 0, 1])), Collected())
            sequence.order, sequence.plan = order, np.arange(dice.randrange(1, 60))
            prefills.append(sequence)
        dice.shuffle(prefills)
        rows = dice.randrange(0, 100)
        given = shares(prefills, rows)
        assert sum(given) == min(rows, sum(sequence.remaining for sequence in prefills))
        assert all(0 <= count <= sequence.remaining for count, sequence in zip(given, prefills, strict=True))
        oldest = min(range(len(prefills)), key=lambda place: prefills[place].order)
        assert given[oldest] >= min(prefills[oldest].remaining, rows / 4)


@pytest.mark.slow
def test_the_order_of_service_changes_no_token(model: LoadedModel, reference: Reference) -> None:
    dice = random.Random(5)
    engine = tiny_engine(model, pages=60, max_running=5, step_tokens=24)
    sent = []
    for seed in range(30):
        ids, sink = random_ids(dice.choice([3, 20, 70]), seed), Collected()
        tenant, priority = dice.choice("abc"), dice.choice([0, 0, 1])
        engine.add(greedy(ids, 10, namespace=tenant, priority=priority), sink)
        sent.append((ids, sink))
        for _ in range(dice.randrange(4)):
            engine.step()
    finish(engine)
    assert [sink.tokens for _, sink in sent] == [reference.greedy(ids, 10) for ids, _ in sent]
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "pages"), [(2, 200), (16, 30)], ids=["no row", "no page"])
def test_steps_run_ahead_while_nobody_who_waits_can_be_admitted(
    model: LoadedModel, reference: Reference, rows: int, pages: int
) -> None:
    steps = Recorder()
    engine = tiny_engine(model, single_rows=steps, max_running=rows, pages=pages)
    prompts = [random_ids(40, seed) for seed in range(4)]
    sinks, sequences = [Collected() for _ in prompts], []
    for ids, sink in zip(prompts, sinks, strict=True):
        sequences.append(engine.add(greedy(ids, 15), sink))
    while engine.stats().waiting:
        engine.step()
        if engine.stats().waiting == 1:
            engine.abort(sequences[2])
    finish(engine)
    made: EagerSteps = steps.made
    assert made.launches.total() > 20
    for ids, sink in zip(prompts, sinks, strict=True):
        expected = reference.greedy(ids, 15)
        assert sink.tokens == expected or (sink is sinks[2] and sink.tokens == expected[: len(sink.tokens)])
    assert_idle(engine)


def test_a_request_that_could_be_admitted_stops_the_steps_ahead(model: LoadedModel) -> None:
    steps = Recorder()
    engine, first, second = tiny_engine(model, single_rows=steps), Collected(), Collected()
    engine.add(greedy(random_ids(10, 1), 100), first)
    for _ in range(10):
        engine.step()
    engine.add(replace(greedy(random_ids(10, 2), 3), priority=1), second)
    assert _steps_until(engine, second, first_token=True) <= 2
    finish(engine)
    assert len(first.tokens) == 100
