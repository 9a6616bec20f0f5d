"""Steps launched before the last ones' tokens are known: the same tokens, and nothing of anybody else's is touched."""

import random
from dataclasses import replace

import pytest
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.types import SamplingParams
from promptsluice.prompt.errors import PromptsluiceError

from .driving import Collected, Reference, assert_as_far, assert_idle, finish, greedy, random_ids, tiny_engine, together
from .eager import EagerSteps, Ran


@pytest.fixture
def steps() -> "Recorder":
    return Recorder()


class Recorder:
    """Makes the engine's steps and keeps them, to see how often they ran ahead."""

    made: EagerSteps

    def __call__(self, *args: object, **fields: object) -> EagerSteps:
        self.made = EagerSteps(*args, **fields)  # pyright: ignore[reportArgumentType]
        return self.made


def test_a_batch_of_different_lengths_equals_transformers(
    model: LoadedModel, reference: Reference, steps: Recorder
) -> None:
    lengths = (1, 2, 15, 16, 17, 100)
    engine = tiny_engine(model, step_tokens=40, single_rows=steps)
    requests = [greedy(random_ids(length, length), 5 + length % 13) for length in lengths]
    outputs = together(engine, *requests)
    expected = [reference.greedy(request.ids, 5 + len(request.ids) % 13) for request in requests]
    assert [output.tokens for output in outputs] == expected
    assert steps.made.launches.total() > 0
    assert_idle(engine)


def test_an_end_of_text_while_the_next_step_runs(model: LoadedModel, reference: Reference, steps: Recorder) -> None:
    """One of two requests ends early: its token too many is dropped, the other one goes on unharmed."""
    first, second = random_ids(9, 1), random_ids(30, 2)
    whole = reference.greedy(first, 20)
    stops = replace(model, spec=replace(model.spec, eos_ids=(whole[6],)))
    engine = tiny_engine(stops, single_rows=steps)
    ended = replace(greedy(first, 20), sampling=SamplingParams(temperature=0.0, max_tokens=20))
    outputs = together(engine, ended, greedy(second, 20))
    assert outputs[0].tokens == whole[: whole.index(whole[6]) + 1]
    assert outputs[0].result.finish_reason == "stop"
    assert outputs[1].tokens == reference.greedy(second, 20)
    assert steps.made.launches.total() > 0
    again = together(engine, greedy(first, 20), greedy(second, 20))
    assert [output.tokens[:7] for output in again] == [whole[:7], outputs[1].tokens[:7]]
    assert again[0].result.cached_tokens > 0
    assert_idle(engine)


@pytest.mark.slow
def test_arrivals_and_aborts_in_between(model: LoadedModel, reference: Reference, steps: Recorder) -> None:
    dice = random.Random(3)
    engine = tiny_engine(model, pages=60, single_rows=steps)
    live = []
    for seed in range(24):
        ids, sink = random_ids(dice.randint(1, 40), seed), Collected()
        live.append((engine.add(greedy(ids, 16), sink), ids, sink))
        for _ in range(dice.randint(0, 6)):
            engine.step()
        if dice.random() < 0.3:
            engine.abort(dice.choice(live)[0])
    finish(engine)
    assert steps.made.launches.total() > 0
    for _, ids, sink in live:
        assert_as_far(sink, reference.greedy(ids, 16))
    assert_idle(engine)


def test_a_pool_that_the_prefix_tree_fills_stops_nothing(
    model: LoadedModel, reference: Reference, steps: Recorder
) -> None:
    """Known prefixes make room for a step ahead, as they do for any other."""
    engine = tiny_engine(model, pages=30, page_size=1, single_rows=steps)
    together(engine, greedy(random_ids(28, 1), 2))
    assert engine.stats().pages_cached >= 29
    ids = random_ids(9, 2)
    assert together(engine, greedy(ids, 20))[0].tokens == reference.greedy(ids, 20)
    assert steps.made.launches.total() >= 17
    assert_idle(engine)


class Failing(Recorder):
    """Steps whose ids cannot be read at one launch, by its number."""

    def __init__(self, error: Exception, *, at: int) -> None:
        self.error, self.at, self.reads = error, at, 0

    def __call__(self, *args: object, **fields: object) -> EagerSteps:
        made, recorder = super().__call__(*args, **fields), self

        class Unread(Ran):
            def ids(self) -> list[int]:
                recorder.reads += 1
                if recorder.reads == recorder.at:
                    raise recorder.error
                return super().ids()

        run = made.run
        made.run = lambda *rows, draw: Unread(**vars(run(*rows, draw=draw)))  # pyright: ignore[reportAttributeAccessIssue]
        return made


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_whose_ids_cannot_be_read_costs_its_requests_and_nothing_else(
    model: LoadedModel, reference: Reference, at: int, again: bool
) -> None:
    """A cached prompt's only row is launched, and the prefix tree is told, before the ids are read."""
    ids = random_ids(48, 5)
    steps = Failing(RuntimeError("lost"), at=at + 10_000)
    engine = tiny_engine(model, single_rows=steps)
    expected = reference.greedy(ids, 6)
    assert together(engine, greedy(ids, 6))[0].tokens == expected
    steps.reads, steps.at = 0, at
    sink = Collected()
    engine.add(greedy(ids, 6), sink)
    with pytest.raises(RuntimeError, match="lost"):
        finish(engine)
    if again:
        engine.relieve()
        finish(engine)
        assert sink.tokens == expected
    else:
        engine.fail(PromptsluiceError("lost"))
        assert sink.error is not None and sink.error.message == "lost"
    assert_idle(engine)
    assert together(engine, greedy(ids, 6))[0].tokens == expected
    assert_idle(engine)
