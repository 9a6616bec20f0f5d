"""Which tokens are guessed, and that guessing changes no token: greedy or sampled, whatever happens in between."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promptsluice.backend_engine.drafter import Drafter
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.sampling_table import SamplingTable
from promptsluice.backend_engine.speculation import Speculator
from promptsluice.backend_engine.step_cost import StepCost, measured, measured_mixed, measured_singles
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, SamplingParams
from promptsluice.prompt.errors import ConfigError

from .driving import (
    DEVICE,
    Collected,
    Reference,
    alone,
    assert_as_far,
    assert_idle,
    finish,
    greedy,
    random_ids,
    tiny_engine,
    together,
)
from .eager import EagerMixed, EagerSteps
from .writing import tiny_tokenizer

# One row as much as the other: guesses never pay.
DEAR_ROWS = StepCost(rows=(1,), seconds=(1.0,))


@pytest.fixture(scope="module")
def model(few_words_dir: Path) -> LoadedModel:
    return load_model(few_words_dir, dtype="float32", device=DEVICE)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def test_guesses_follow_the_earlier_place_and_go_round() -> None:
    drafter = Drafter(array([1, 2, 3, 4, 5, 1, 2, 3]))
    assert drafter.draft(array([1, 2, 3, 4, 5, 1, 2, 3]), 7).tolist() == [4, 5, 1, 2, 3, 4, 5]
    assert len(Drafter(array([1, 2, 3, 4])).chances(5)) == 0


def test_what_came_true_is_expected_again_and_what_did_not_is_not() -> None:
    prompt = [*range(10, 60), 10, 11, 12]
    before = Drafter(array(prompt)).chances(8)
    assert (np.diff(before) <= 0).all() and 0 < before[-1] < before[0] < 1
    right = Drafter(array(prompt))
    right.observe(array([*prompt, *range(13, 60)]))
    assert right.chances(8)[-1] > before[0]
    wrong, ids = Drafter(array(prompt)), prompt
    for other in range(100, 110):
        ids = [*ids, other, 10, 11, 12]
        wrong.observe(array(ids))
    assert wrong.chances(1)[0] < 0.5 * before[0]


def test_what_a_drafter_knows_follows_from_the_tokens_alone() -> None:
    ids = array([3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5, 9, 3, 4, 5, 6, 3])
    steps, once = Drafter(ids[:5]), Drafter(ids[:5])
    for length in range(6, len(ids) + 1):
        steps.observe(ids[:length])
    once.observe(ids)
    assert (steps.chances(6) == once.chances(6)).all() and len(once.chances(6)) == 6


def test_a_cost_is_linear_between_its_points_and_proportional_beyond() -> None:
    cost = StepCost(rows=(1, 2, 8), seconds=(1.0, 2.0, 5.0))
    assert cost.at(array([1, 2, 5, 8, 16])).tolist() == [1.0, 2.0, 3.5, 5.0, 10.0]


def test_a_measured_cost_never_falls(model: LoadedModel) -> None:
    cost = measured(model.decoder, rows=(1, 2, 8))
    assert cost.rows == (1, 2, 8) and 0 < cost.seconds[0] <= cost.seconds[1] <= cost.seconds[2]


def test_whole_steps_are_measured_where_nobody_looks(model: LoadedModel) -> None:
    pool = KVPool(model.spec, pages=5, page_size=4, device=DEVICE)
    pages = torch.tensor([[0, 1], [2, 3], [4, 4]], dtype=torch.int32, device=DEVICE)
    steps = EagerSteps(model.decoder, pool, pages, sampling=SamplingTable(3, pages.device), max_tokens=8)
    mixed = EagerMixed(model.decoder, pool, pages, most=64, max_tokens=8)
    single = measured_singles(steps, spare=2, most=5)
    assert single.rows == (1, 2, 4) and min(single.seconds) > 0
    cost = measured_mixed(model.decoder, mixed, spare=2, most=40)
    assert cost.rows == (1, 4, 5, 16, 17, 40)
    assert cost.seconds[::2] == cost.seconds[1::2], "a step between two sizes takes as long as the larger one"
    assert measured_mixed(model.decoder, mixed, spare=2, most=5).rows == (1, 4, 5)
    assert not pool.data[:, :, :16].any() and pool.data[:, :, 16:].any()


def test_what_steps_with_guesses_take_is_learned(model: LoadedModel) -> None:
    """Four rows for the price of one, but the host takes longer: it pays no more, and is tried again later."""
    ids = array([1, 2, 3, 4, 5] * 9)
    engine = tiny_engine(model)
    sequence = engine.prepare(greedy(ids.tolist(), 60), Collected())
    cost = StepCost(rows=(1, 4), seconds=(1.0, 1.0))
    speculator = Speculator(cost, most=3, plain=cost)
    assert len(speculator.drafts([sequence], room=9)[0]) == 3
    for _ in range(60):
        speculator.ran(rows=4, seconds=99.0)
    assert speculator.drafts([sequence], room=9) == []
    again = next(count for count in range(5000) if speculator.drafts([sequence], room=9))
    assert again > 20, "one slow moment ends nothing for good, but it is not tried at once either"
    assert len(speculator.drafts([sequence], room=9)[0]) == 3
    assert speculator.drafts([sequence], room=0) == []


def test_guesses_are_looked_for_while_a_step_runs(model: LoadedModel) -> None:
    """Where whole steps are known, for no more sequences than the host has the time for meanwhile."""
    ids = [1, 2, 3, 4, 5] * 9
    sequences = [tiny_engine(model).prepare(greedy(ids, 60), Collected()) for _ in range(4)]
    cost = StepCost(rows=(1, 64), seconds=(0.001, 0.001))
    speculator = Speculator(cost, most=7, plain=cost)
    assert speculator.drafts(sequences[:2], room=99) and not speculator.drafts(sequences, room=99)
    assert Speculator(cost, most=7).drafts(sequences, room=99)


def test_guesses_stay_within_what_the_steps_take(model: LoadedModel) -> None:
    ids = [1, 2, 3, 4, 5] * 9
    sequences = [tiny_engine(model).prepare(greedy(ids, 60), Collected()) for _ in range(3)]
    speculator = Speculator(StepCost(rows=(1, 64), seconds=(1.0, 1.0)), most=7, sequences=2, rows=8)
    assert speculator.drafts(sequences, room=99) == []
    assert sum(map(len, speculator.drafts(sequences[:2], room=99))) == 6
    assert sum(map(len, speculator.drafts(sequences[:2], room=4))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_greedy_batches_equal_transformers(model: LoadedModel, few_words_dir: Path, recorded: bool) -> None:
    """Of different lengths, with blocks of the prefill, over page borders."""
    reference, lengths = Reference(few_words_dir), (1, 2, 15, 16, 17, 100)
    steps: dict[str, Any] = {"single_rows": EagerSteps, "mixed": EagerMixed} if recorded else {}
    engine = tiny_engine(model, step_tokens=40, guessed_tokens=7, **steps)
    requests = [greedy(random_ids(length, length), 50 + length % 13) for length in lengths]
    outputs = together(engine, *requests)
    expected = [reference.greedy(request.ids, 50 + len(request.ids) % 13) for request in requests]
    assert [output.tokens for output in outputs] == expected
    stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 30
    assert stats.steps < stats.generated_tokens
    assert_idle(engine)
    again = together(engine, *requests)
    assert [output.tokens for output in again] == expected
    assert all(output.result.cached_tokens > 0 for output in again[1:])
    assert_idle(engine)


def test_guesses_cost_no_step_of_its_run_ahead(model: LoadedModel) -> None:
    """Whoever has nothing to guess goes on ahead of the host; guesses have recorded steps."""
    made: list[EagerSteps] = []
    guessing: list[EagerMixed] = []

    def steps(*args: object, **fields: object) -> EagerSteps:
        made.append(EagerSteps(*args, **fields))  # pyright: ignore[reportArgumentType]
        return made[0]

    def mixed(*args: object, **fields: object) -> EagerMixed:
        guessing.append(EagerMixed(*args, **fields))  # pyright: ignore[reportArgumentType]
        return guessing[0]

    engine = tiny_engine(model, guessed_tokens=7, single_rows=steps, mixed=mixed)
    output = alone(engine, greedy(random_ids(40, 40), 60))
    stats = engine.stats()
    assert stats.accepted_tokens > 0 and made[0].launches.total() > 0
    assert sum(width - 1 for [width] in guessing[0].widths if width <= 8) == stats.drafted_tokens
    assert output.tokens == alone(tiny_engine(model), greedy(random_ids(40, 40), 60)).tokens


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_sampled_tokens_are_those_of_the_seed(model: LoadedModel, recorded: bool) -> None:
    """Cold enough to repeat itself, warm enough to stray from it."""
    steps: dict[str, Any] = {"single_rows": EagerSteps, "mixed": EagerMixed} if recorded else {}
    engine = tiny_engine(model, guessed_tokens=7, **steps)
    params = [
        SamplingParams(temperature=0.5, seed=1, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.4, top_p=0.9, seed=2, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.6, top_k=5, seed=3, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.3, min_p=0.1, seed=4, max_tokens=60, ignore_eos=True),
    ]
    requests = [GenerationRequest(ids=random_ids(20, each.seed or 0), sampling=each) for each in params]
    outputs = together(engine, *requests)
    assert engine.stats().drafted_tokens > engine.stats().accepted_tokens > 0
    assert [output.tokens for output in outputs] == [alone(tiny_engine(model), each).tokens for each in requests]


@pytest.mark.slow
def test_an_end_of_text_among_the_guesses_ends_the_request(model: LoadedModel, few_words_dir: Path) -> None:
    """Each token of a repetition in turn is the end of text: nothing is said or kept beyond it."""
    ids, lengths = random_ids(40, 40), set()
    whole = Reference(few_words_dir).greedy(ids, 60)
    for end in sorted(set(whole[20:])):
        stops = replace(model, spec=replace(model.spec, eos_ids=(end,)))
        engine = tiny_engine(stops, guessed_tokens=7)
        params = SamplingParams(temperature=0.0, max_tokens=60)
        output = alone(engine, replace(greedy(ids), sampling=params))
        assert output.tokens == whole[: whole.index(end) + 1]
        assert output.result.finish_reason == "stop"
        assert output.result.completion_tokens == len(output.tokens)
        lengths.add(len(output.tokens))
        assert_idle(engine)
        assert alone(engine, greedy(ids, 60)).tokens == whole
    assert lengths


@pytest.mark.slow
def test_max_tokens_is_never_passed(model: LoadedModel, few_words_dir: Path) -> None:
    whole = Reference(few_words_dir).greedy(random_ids(40, 40), 60)
    for most in range(40, 60, 3):
        engine = tiny_engine(model, guessed_tokens=7)
        output = alone(engine, greedy(random_ids(40, 40), most))
        assert output.tokens == whole[:most] and output.result.finish_reason == "length"
        assert_idle(engine)


@pytest.mark.slow
def test_guesses_take_no_page_from_anybody(model: LoadedModel, few_words_dir: Path) -> None:
    """Arrivals, aborts and preemptions on a pool that is too small; known prefixes are not evicted for a guess."""
    reference, dice = Reference(few_words_dir), random.Random(3)
    engine = tiny_engine(model, pages=70, guessed_tokens=7)
    live = []
    for seed in range(16):
        ids, sink = random_ids(dice.randint(1, 40), seed), Collected()
        live.append((engine.add(greedy(ids, 40), sink), ids, sink))
        for _ in range(dice.randint(0, 6)):
            engine.step()
            for sequence in engine.sequences:
                assert len(sequence.pages) <= -(-sequence.length // 4)
        if dice.random() < 0.2:
            engine.abort(dice.choice(live)[0])
    finish(engine)
    assert engine.stats().preemptions > 0 and engine.stats().accepted_tokens > 0
    for _, ids, sink in live:
        assert_as_far(sink, reference.greedy(ids, 40))
    assert_idle(engine)


def test_a_pool_that_the_prefix_tree_fills_leaves_nothing_to_guess_with(model: LoadedModel) -> None:
    engine = tiny_engine(model, pages=60, page_size=1, guessed_tokens=7)
    ids = random_ids(20, 40)
    expected = alone(tiny_engine(model), greedy(ids, 30)).tokens
    alone(engine, greedy(random_ids(58, 1), 2))
    cached = engine.stats().pages_cached
    assert cached >= 59
    output = alone(engine, greedy(ids, 30))
    assert output.tokens == expected
    assert_idle(engine)


def test_blended_requests_guess_too(model: LoadedModel) -> None:
    ids = random_ids(40, 40)
    kv = KVBlock(*torch.randn(2, 4, 10, 2, 16, generator=torch.Generator().manual_seed(5)))
    request = replace(greedy(ids, 60), reuse=Reuse(spans=(ReusedSpan(5, kv),)))
    engine = tiny_engine(model, guessed_tokens=7)
    assert alone(engine, request).tokens == alone(tiny_engine(model), request).tokens
    assert engine.stats().accepted_tokens > 0
    assert_idle(engine)


def test_nothing_is_guessed_where_rows_are_dear_or_the_option_says_so(model: LoadedModel) -> None:
    for most, cost in ((7, DEAR_ROWS), (0, None)):
        options = EngineOptions(pages=200, page_size=4, guessed_tokens=most)
        engine = Engine(model, options=options, step_cost=cost)
        alone(engine, greedy(random_ids(40, 40), 60))
        assert engine.stats().drafted_tokens == 0
    with pytest.raises(ConfigError, match="guessed_tokens"):
        EngineOptions(guessed_tokens=-1)
    assert EngineOptions(graph_rows=0).guessed("cpu") == EngineOptions().guessed("cuda") == 15
    with pytest.raises(ConfigError, match=r"guessed_tokens needs .* graph_rows"):
        EngineOptions(guessed_tokens=8, graph_rows=0).guessed("cuda")


@pytest.mark.slow
def test_beside_a_request_with_a_grammar(few_words_dir: Path, tmp_path: Path) -> None:
    """Whose next token cannot be drawn before its mask is known: it is not guessed for, the other one is."""
    shutil.copytree(few_words_dir, tmp_path / "writing")
    tiny_tokenizer().save(str(tmp_path / "writing" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "writing" / "tokenizer_config.json").write_text(json.dumps(config))
    writing = load_model(tmp_path / "writing", dtype="float32", device=DEVICE)
    engine = tiny_engine(writing, guessed_tokens=7)
    grammar = engine.grammars.compile(Grammar.regex("(ab|cd){20}"))
    bound = replace(greedy(random_ids(9, 1), 60), grammar=grammar, sampling=SamplingParams(temperature=1.0, seed=5))
    outputs = together(engine, bound, greedy(random_ids(40, 40), 60))
    assert re.fullmatch("(ab|cd){20}", outputs[0].text)
    assert outputs[1].tokens == alone(tiny_engine(writing), greedy(random_ids(40, 40), 60)).tokens
    assert engine.stats().accepted_tokens > 0
    assert_idle(engine)


def test_a_batch_bound_by_its_products_is_not_even_looked_at(model: LoadedModel) -> None:
    """Guesses stop with the batch that one more row no longer comes free for, and begin again below it."""
    options = EngineOptions(pages=400, page_size=4, max_running=16, guessed_tokens=7)
    engine = Engine(model, options=options, step_cost=StepCost(rows=(1, 8), seconds=(1.0, 1.0)))
    for seed in range(12):
        engine.add(greedy(random_ids(9, seed), 20), Collected())
    while len(engine.sequences) == 12:
        assert all(sequence.drafter is None for sequence in engine.sequences)
        engine.step()
    finish(engine)
    assert engine.stats().drafted_tokens == 0
    alone(engine, greedy(random_ids(40, 40), 60))
    assert engine.stats().accepted_tokens > 0
