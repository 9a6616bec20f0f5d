"""The engine on tiny models: the same tokens as transformers, whatever the schedule; errors, aborts, failures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.sequence import Phase
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, SamplingParams
from promptsluice.prompt.errors import BadRequest, ContextTooLong, PromptsluiceError

from .driving import DEVICE, Collected, Reference, alone, assert_idle, finish, greedy, random_ids, tiny_engine, together


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tiny_llama_dir", "tiny_qwen2_dir", "tiny_qwen3_dir"])
def test_a_mixed_batch_equals_transformers(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    expected, prompts = Reference(directory), [random_ids(length, length) for length in (1, 2, 15, 16, 17, 100)]
    engine = tiny_engine(load_model(directory, dtype="float32", device=DEVICE), step_tokens=40)
    outputs = together(engine, *(greedy(ids) for ids in prompts))
    assert [output.tokens for output in outputs] == [expected.greedy(ids) for ids in prompts]
    assert_idle(engine)


def test_the_second_identical_prompt_is_cached_but_for_its_last_token(model: LoadedModel) -> None:
    engine, ids = tiny_engine(model), random_ids(50, 1)
    first, second = alone(engine, greedy(ids)), alone(engine, greedy(ids))
    assert (first.result.cached_tokens, second.result.cached_tokens) == (0, 49)
    assert first.tokens == second.tokens
    assert alone(engine, greedy(ids, namespace="other")).result.cached_tokens == 0
    assert alone(engine, greedy(ids, prefix_cache=False)).result.cached_tokens == 0


def test_a_conversation_finds_its_earlier_turns_and_answers(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiny_engine(model), random_ids(30, 2)
    answer = alone(engine, greedy(ids)).tokens
    longer = (*ids, *answer, *random_ids(9, 3))
    follow_up = alone(engine, greedy(longer))
    assert follow_up.result.cached_tokens == len(ids) + len(answer) - 1  # the last token's KV was never needed
    assert follow_up.tokens == reference.greedy(longer)


def test_requests_wait_for_the_one_that_computes_their_prefix(model: LoadedModel, reference: Reference) -> None:
    engine, shared = tiny_engine(model, step_tokens=16), random_ids(90, 4)
    prompts = [(*shared, *random_ids(5, seed)) for seed in range(5, 9)]
    outputs = together(engine, *(greedy(ids) for ids in prompts))
    assert outputs[0].result.cached_tokens == 0
    assert all(output.result.cached_tokens >= 88 for output in outputs[1:])
    assert [output.tokens for output in outputs] == [reference.greedy(ids) for ids in prompts]


def test_a_follower_goes_on_when_its_leader_is_aborted(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiny_engine(model, step_tokens=16), random_ids(90, 4)
    leader, follower = engine.add(greedy(ids), Collected()), Collected()
    engine.add(greedy(ids), follower)
    engine.step()
    assert engine.stats().waiting == 1
    engine.abort(leader)
    finish(engine)
    assert follower.tokens == reference.greedy(ids)
    assert_idle(engine)


@pytest.mark.slow
def test_preemption_loses_and_doubles_no_token(model: LoadedModel, reference: Reference) -> None:
    prompts = [random_ids(20 + seed, seed) for seed in range(6)]
    engine = tiny_engine(model, pages=30, max_running=6)
    outputs = together(engine, *(greedy(ids, 40) for ids in prompts))
    assert engine.stats().preemptions > 0
    assert [output.tokens for output in outputs] == [reference.greedy(ids, 40) for ids in prompts]
    assert [output.result.completion_tokens for output in outputs] == [40] * 6
    assert_idle(engine)


def test_a_higher_priority_takes_the_place_of_a_lower_one(model: LoadedModel, reference: Reference) -> None:
    engine = tiny_engine(model, pages=40, max_running=1)
    low, high, ids = Collected(), Collected(), random_ids(60, 7)
    engine.add(greedy(ids, 30), low)
    for _ in range(5):
        engine.step()
    engine.add(greedy(random_ids(60, 8), 30, priority=1), high)
    while not high.ended:
        engine.step()
    assert not low.ended
    finish(engine)
    assert low.tokens == reference.greedy(ids, 30)
    assert engine.stats().preemptions == 1


def test_the_waiting_are_served_by_priority_then_by_arrival(model: LoadedModel) -> None:
    engine, ended = tiny_engine(model, max_running=1), []
    sinks = {name: Collected() for name in ("first", "late", "urgent")}
    engine.add(greedy(random_ids(8, 1)), sinks["first"])
    engine.add(greedy(random_ids(8, 2)), sinks["late"])
    engine.add(greedy(random_ids(8, 3), priority=3), sinks["urgent"])
    while engine.has_work:
        engine.step()
        ended += [name for name, sink in sinks.items() if sink.ended and name not in ended]
    assert ended == ["urgent", "first", "late"]


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_an_abort_in_any_phase_frees_everything(model: LoadedModel, steps: int) -> None:
    engine, sink = tiny_engine(model, step_tokens=16), Collected()
    sequence = engine.add(greedy(random_ids(40, 5), 100), sink)
    for _ in range(steps):
        engine.step()
    engine.abort(sequence)
    engine.abort(sequence)
    assert sink.result.finish_reason == "abort" and sink.deltas[-1].finish_reason == "abort"
    assert not engine.has_work
    assert_idle(engine)


def test_a_preempted_request_can_be_aborted(model: LoadedModel) -> None:
    engine = tiny_engine(model, pages=30, max_running=6)
    sinks = [Collected() for _ in range(6)]
    sequences = [engine.add(greedy(random_ids(20, n), 60), sink) for n, sink in enumerate(sinks)]
    while engine.stats().preemptions == 0:
        engine.step()
    number = next(n for n, each in enumerate(sequences) if each.phase is Phase.WAITING and each.generated)
    engine.abort(sequences[number])
    assert sinks[number].result.finish_reason == "abort" and sinks[number].tokens
    finish(engine)
    assert_idle(engine)


def test_the_same_seed_gives_the_same_tokens_in_any_batch(model: LoadedModel) -> None:
    def sampled(seed: int | None) -> GenerationRequest:
        params = SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True)
        return GenerationRequest(ids=random_ids(12, 1), sampling=params)

    lone = alone(tiny_engine(model), sampled(7)).tokens
    crowd = together(
        tiny_engine(model), sampled(None), greedy(random_ids(30, 2)), sampled(7), sampled(8), sampled(None)
    )
    assert crowd[2].tokens == lone
    assert len({tuple(output.tokens) for output in crowd}) == 5


def test_a_seeded_request_is_the_same_after_preemption(model: LoadedModel) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    requests = [GenerationRequest(ids=random_ids(20, n), sampling=params) for n in range(6)]
    engine = tiny_engine(model, pages=30, max_running=6)
    crowded = together(engine, *requests)
    assert engine.stats().preemptions > 0
    assert [output.tokens for output in crowded] == [alone(tiny_engine(model), each).tokens for each in requests]


def test_generation_ends_at_eos_unless_told_otherwise(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(20, 1)
    expected = reference.greedy(ids)
    place = next(n for n in range(3, 12) if expected[n] not in expected[:n])
    ending = replace(model, spec=replace(model.spec, eos_ids=(expected[place],)))
    request = GenerationRequest(ids=ids, sampling=SamplingParams(temperature=0, max_tokens=12))
    output = alone(tiny_engine(ending), request)
    assert output.tokens == expected[: place + 1] and output.result.finish_reason == "stop"
    assert alone(tiny_engine(ending), greedy(ids)).result.finish_reason == "length"


def test_max_tokens_is_a_cap_and_never_an_error(model: LoadedModel) -> None:
    by_memory = alone(tiny_engine(model, pages=20), greedy(random_ids(70, 1), 10**9))
    assert (by_memory.result.completion_tokens, by_memory.result.finish_reason) == (10, "length")
    by_context = alone(tiny_engine(model, pages=2000, step_tokens=1024), greedy(random_ids(1020, 1), 10**9))
    assert by_context.result.completion_tokens == 4


@pytest.mark.parametrize(
    ("ids", "params", "error", "param"),
    [
        ((), {}, BadRequest, "messages"),
        ((5, 512), {}, BadRequest, "messages"),
        ((5, -1), {}, BadRequest, "messages"),
        ((5,) * 80, {}, ContextTooLong, "messages"),
        ((5,) * 81, {"max_tokens": 0}, ContextTooLong, "messages"),
        ((5,), {"temperature": -1.0}, BadRequest, "temperature"),
        ((5,), {"stop": ("x",)}, BadRequest, "stop"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    model: LoadedModel, ids: tuple[int, ...], params: dict, error: type[PromptsluiceError], param: str
) -> None:
    engine = tiny_engine(model, pages=20)
    with pytest.raises(error) as caught:
        engine.add(GenerationRequest(ids=ids, sampling=SamplingParams(**params)), Collected())
    assert getattr(caught.value, "param", None) == param
    assert not engine.has_work


def test_a_namespace_that_cannot_be_encoded_is_refused(model: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="namespace"):
        tiny_engine(model).add(greedy((5,), namespace="\ud800"), Collected())


def test_a_request_as_large_as_the_pool_runs_beside_cached_pages(model: LoadedModel) -> None:
    engine = tiny_engine(model, pages=20)
    alone(engine, greedy(random_ids(71, 1), 3))
    alone(engine, greedy((*random_ids(70, 1)[:69], 9, 9), 9))
    assert alone(engine, greedy(random_ids(79, 1), 5)).result.completion_tokens == 1
    assert_idle(engine)


def test_prompt_logprobs_equal_transformers(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiny_engine(model, step_tokens=100, max_running=4), random_ids(150, 6)
    params = SamplingParams(max_tokens=0)
    other = greedy(random_ids(40, 1))
    scored, _ = together(engine, GenerationRequest(ids=ids, sampling=params, prompt_logprobs=True), other)
    assert scored.result.finish_reason == "length" and scored.tokens == []
    assert scored.result.prompt_logprobs is not None
    torch.testing.assert_close(scored.result.prompt_logprobs, reference.logprobs(ids), rtol=0, atol=1e-4)
    assert alone(engine, greedy(ids)).result.cached_tokens == 0


def test_scoring_and_generating_go_together(model: LoadedModel, reference: Reference) -> None:
    ids = random_ids(33, 2)
    output = alone(tiny_engine(model, step_tokens=16), replace(greedy(ids), prompt_logprobs=True))
    assert output.tokens == reference.greedy(ids)
    assert output.result.prompt_logprobs is not None and output.result.prompt_logprobs.shape == (32,)
    assert alone(tiny_engine(model), replace(greedy((5,), 0), prompt_logprobs=True)).result.prompt_logprobs is not None


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_the_first_delta_tells_of_the_prompt(model: LoadedModel, reference: Reference, max_tokens: int) -> None:
    engine, ids = tiny_engine(model, step_tokens=20, max_running=4), random_ids(90, 7)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=3)
    output, _ = together(
        engine, GenerationRequest(ids=ids, sampling=params, prompt_logprobs=True), greedy(random_ids(30, 8))
    )
    first, *others = output.deltas
    assert not any(delta.prompt_logprobs for delta in others)
    told = first.prompt_logprobs
    assert [one.token_id for one in told] == list(ids[1:])
    scores = reference.scores(ids)
    expected, order = scores.topk(3, dim=-1)
    torch.testing.assert_close(torch.tensor([one.logprob for one in told]), reference.logprobs(ids), rtol=0, atol=1e-4)
    assert [[token for token, _ in one.top] for one in told] == order.tolist()
    values = torch.tensor([[value for _, value in one.top] for one in told])
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    silent = alone(tiny_engine(model), replace(greedy(ids), prompt_logprobs=True))
    assert not any(delta.prompt_logprobs for delta in silent.deltas)


class Breaking(Collected):
    def delta(self, delta: object) -> None:
        raise ValueError("a sink of the caller's that breaks")


def test_a_broken_sink_fails_its_own_request_only(model: LoadedModel, reference: Reference) -> None:
    engine, sinks, ids = tiny_engine(model), (Breaking(), Breaking(), Breaking(), Collected()), random_ids(20, 1)
    engine.add(greedy(ids, 0), sinks[0])
    engine.abort(engine.add(greedy(ids), sinks[1]))
    engine.add(greedy(ids), sinks[2])
    engine.add(greedy(ids), sinks[3])
    finish(engine)
    assert all(sink.error is not None for sink in sinks[:3])
    assert sinks[3].tokens == reference.greedy(ids)
    assert_idle(engine)


class FragileTokenizer:
    """Decodes nothing, and breaks where the end of a text is decoded."""

    def stream(self) -> "FragileTokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def decode(self, ids: object, **options: object) -> str:
        raise ArithmeticError("broken")


def test_a_tokenizer_that_breaks_at_the_end_fails_its_own_request_only(model: LoadedModel) -> None:
    engine, sinks = tiny_engine(replace(model, tokenizer=FragileTokenizer())), (Collected(), Collected(), Collected())
    engine.add(greedy(random_ids(20, 1), 2), sinks[0])
    aborted = engine.add(greedy(random_ids(20, 2)), sinks[1])
    engine.add(greedy(random_ids(20, 3), 0), sinks[2])
    engine.step()
    engine.abort(aborted)
    finish(engine)
    assert sinks[0].error is not None and sinks[1].error is not None and sinks[2].result
    assert_idle(engine)


def test_a_failed_step_fails_its_requests_and_leaks_nothing(tiny_llama_dir: Path, reference: Reference) -> None:
    # On the CPU, where every step goes through the decoder: on a GPU decode replays a captured graph.
    engine, waiting, running = _failing_engine(load_model(tiny_llama_dir)), Collected(), Collected()
    engine.add(greedy(random_ids(20, 1)), running)
    engine.step()
    engine.model.decoder.broken = True
    with pytest.raises(ArithmeticError):
        engine.step()
    engine.fail(PromptsluiceError("step failed"))
    assert running.error is not None
    assert_idle(engine)
    engine.model.decoder.broken = False
    engine.add(greedy(random_ids(20, 1)), waiting)
    finish(engine)
    assert waiting.tokens == reference.greedy(random_ids(20, 1))


@pytest.mark.parametrize("part", ["copy", "write_block"])
def test_a_failed_admission_leaks_nothing_and_harms_nobody_else(
    model: LoadedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine, ids, running = tiny_engine(model), random_ids(30, 1), Collected()
    alone(engine, greedy(ids[:10], 0))
    engine.add(greedy(random_ids(20, 7)), running)
    engine.step()

    def broken(*args: Any, **settings: Any) -> None:
        raise MemoryError("broken")

    kv = KVBlock(*torch.zeros(2, 4, 5, 2, 16))
    with monkeypatch.context() as patched:
        patched.setattr(engine.pool, part, broken)
        failed = Collected()
        engine.add(greedy(ids, reuse=Reuse(spans=(ReusedSpan(20, kv),))), failed)
        with pytest.raises(MemoryError):
            engine.step()
        engine.fail(PromptsluiceError("step failed"))
    assert failed.error is not None
    finish(engine)
    assert running.tokens == reference.greedy(random_ids(20, 7)), "who was running already is not to blame"
    assert_idle(engine)
    assert alone(engine, greedy(ids)).tokens == reference.greedy(ids)


class FragileDecoder:
    """A decoder that can be told to break."""

    def __init__(self, decoder: Decoder) -> None:
        self.broken = False
        self._decoder = decoder

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)

    def forward(self, *args: Any, **options: Any) -> object:
        if self.broken:
            raise ArithmeticError("broken")
        return self._decoder.forward(*args, **options)


def _failing_engine(model: LoadedModel) -> Engine:
    return tiny_engine(replace(model, decoder=FragileDecoder(model.decoder)))
