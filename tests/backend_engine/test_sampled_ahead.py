"""Sampled steps launched before the last ones' tokens are known: a request gets what it gets alone, by the host's way.

With a CUDA device the same tests run through the graphs.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.graphs import DecodeGraphs
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.sampling import CANDIDATES, UNDECIDED, SamplingTensors, sample, sample_ahead
from promptsluice.backend_engine.steps import Draw, Launched, SingleRowSteps
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from torch.utils._python_dispatch import TorchDispatchMode

from .driving import DEVICE, Collected, alone, assert_idle, finish, greedy, random_ids, tiny_engine, together
from .eager import EagerSteps, Ran

VOCAB = 3000
NARROW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.5, "top_p": 0.8},
)
WIDE: tuple[dict[str, Any], ...] = (  # on flat distributions, wider than the candidates
    {"temperature": 1.5, "top_k": CANDIDATES + 300},
    {"temperature": 1.5, "top_p": 0.99},
)
FILTERS = NARROW + WIDE


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def flat(tiny_model: Callable[..., Path]) -> LoadedModel:
    """Its distributions are flat over more tokens than the device looks at.

    So flat that the rounding of another batch size may change what is drawn: requests run alone on it.
    """
    return load_model(tiny_model("Llama", vocab_size=VOCAB), dtype="float32", device=DEVICE)


def sampled(
    ids: Sequence[int], seed: int, *, max_tokens: int = 24, logprobs: int | None = None, **fields: Any
) -> GenerationRequest:
    params = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, **fields)
    return GenerationRequest(ids=tuple(ids), sampling=params)


def lone(model: LoadedModel, ids: Sequence[int], seed: int, **fields: Any) -> list[int]:
    """What it gets alone where the host draws every token: it is asked for log-probabilities."""
    return alone(tiny_engine(model), sampled(ids, seed, logprobs=0, **fields)).tokens


class Recorder:
    """Makes the engine's steps, graphs on a GPU, and counts launches before ids were known and ids left to the host."""

    def __init__(self, kind: Callable[..., SingleRowSteps] | None = None) -> None:
        self.kind = kind or (EagerSteps if DEVICE == "cpu" else DecodeGraphs)
        self.ahead: Counter[Draw] = Counter()
        self.undecided = 0

    def __call__(self, *args: Any, **fields: Any) -> "Recorder":
        self.steps = self.kind(*args, **fields)
        return self

    def run(self, *rows: torch.Tensor, draw: Draw) -> "Watched":
        return Watched(self.steps.run(*rows, draw=draw), draw, self)

    def again(self, last: "Watched", *, drawn: torch.Tensor | None = None) -> "Watched":
        self.ahead[last.draw] += 1
        return Watched(self.steps.again(last.launched, drawn=drawn), last.draw, self)


class Watched:
    """See Launched."""

    def __init__(self, launched: Launched, draw: Draw, recorder: Recorder) -> None:
        self.launched, self.draw, self.recorder = launched, draw, recorder

    def logits(self) -> torch.Tensor:
        return self.launched.logits()

    def ids(self) -> list[int]:
        ids = self.launched.ids()
        self.recorder.undecided += ids.count(UNDECIDED)
        return ids


class Doubtful(EagerSteps):
    """As if some rows' nuclei were too wide: whoever runs on such a token runs on a wrong one."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._dice = random.Random(7)

    def run(self, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, *, draw: Draw) -> Ran:
        ran = super().run(ids, places, rows, draw=draw)
        doubted = torch.tensor([self._dice.random() < 0.1 for _ in ran.drawn], device=DEVICE)
        return replace(ran, drawn=ran.drawn.masked_fill(doubted, UNDECIDED))


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_alone(flat: LoadedModel, filters: dict[str, Any]) -> None:
    recorder = Recorder()
    engine = tiny_engine(flat, single_rows=recorder)
    for seed, length in enumerate((1, 16, 33)):
        ids = random_ids(length, length)
        assert alone(engine, sampled(ids, seed, **filters)).tokens == lone(flat, ids, seed, **filters)
    assert recorder.ahead.total() > 0
    assert (recorder.undecided > 0) == (filters in WIDE)
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("doubtful", [False, True])
def test_rows_of_every_kind_share_a_step(model: LoadedModel, doubtful: bool) -> None:
    """Greedy rows beside sampled and filtered ones; who has to be drawn by the host stops nobody for long."""
    recorder = Recorder(Doubtful if doubtful else None)
    engine = tiny_engine(model, single_rows=recorder)
    prompts = [random_ids(5 + 3 * number, number) for number in range(len(NARROW))]
    rows = list(enumerate(zip(prompts, NARROW, strict=True)))
    outputs = together(engine, *(sampled(ids, seed, **filters) for seed, (ids, filters) in rows))
    for (seed, (ids, filters)), output in zip(rows, outputs, strict=True):
        assert output.tokens == lone(model, ids, seed, **filters), filters
    assert recorder.ahead[Draw.FILTERED] > 0 and (recorder.undecided > 0) == doubtful
    assert_idle(engine)


def test_the_kind_follows_who_runs(model: LoadedModel) -> None:
    """A greedy request that outlives a sampled one goes on as a greedy step."""
    recorder = Recorder()
    engine = tiny_engine(model, single_rows=recorder)
    first, second = random_ids(9, 1), random_ids(12, 2)
    outputs = together(engine, greedy(first, 40), sampled(second, 5, max_tokens=10))
    assert outputs[0].tokens == alone(tiny_engine(model), greedy(first, 40)).tokens
    assert outputs[1].tokens == lone(model, second, 5, max_tokens=10)
    assert recorder.ahead[Draw.SAMPLED] > 0 and recorder.ahead[Draw.LIKELIEST] > 0
    assert recorder.ahead[Draw.FILTERED] == 0


HOST: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "logprobs": 3},
    {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": ((5, 4.0), (9, -100.0))},
    {"temperature": 0.8, "min_p": 0.1, "min_tokens": 6},
)


@pytest.mark.slow
@pytest.mark.parametrize("doubtful", [False, True])
def test_what_the_host_draws_runs_ahead_too(model: LoadedModel, doubtful: bool) -> None:
    """Each step's layers are launched behind the drawing of the last one, beside others of every kind."""
    recorder = Recorder(Doubtful if doubtful else None)
    engine = tiny_engine(model, single_rows=recorder)
    kinds = [*HOST, *NARROW]
    prompts = [random_ids(4 + 5 * number, number) for number in range(len(kinds))]
    rows = list(enumerate(zip(prompts, kinds, strict=True)))
    requests = [sampled(ids, seed, max_tokens=20 + seed, **kind) for seed, (ids, kind) in rows]
    outputs = together(engine, *requests)
    for request, output in zip(requests, outputs, strict=True):
        expected = alone(tiny_engine(model), request)
        assert output.tokens == expected.tokens, request.sampling
        told, wanted = (
            [(one.token_id, one.top) for delta in each.deltas for one in delta.logprobs] for each in (output, expected)
        )
        assert [one[0] for one in told] == [one[0] for one in wanted] and len(told) in (0, len(output.tokens))
    assert recorder.ahead[Draw.HOST] > 10
    assert_idle(engine)


def test_wide_filters_beside_log_probabilities(flat: LoadedModel) -> None:
    """What the candidates do not suffice for is drawn in the next step, with what that tells of it."""
    recorder = Recorder()
    engine = tiny_engine(flat, single_rows=recorder)
    ids, wide = random_ids(9, 5), WIDE[1]
    request = sampled(ids, 2, logprobs=2, **wide)
    output, expected = alone(engine, request), alone(tiny_engine(flat), request)
    assert output.tokens == expected.tokens
    assert [delta.logprobs for delta in output.deltas] == [delta.logprobs for delta in expected.deltas]
    assert recorder.ahead[Draw.HOST] > 0
    assert_idle(engine)


def test_a_known_prompt_is_drawn_at_once(flat: LoadedModel) -> None:
    """A prompt that the prefix tree has whole is one row, whose token may be undecided: it is run again."""
    recorder = Recorder()
    engine = tiny_engine(flat, single_rows=recorder)
    ids, wide = random_ids(33, 8), WIDE[1]
    expected = lone(flat, ids, 3, **wide)
    for again in (False, True):
        output = alone(engine, sampled(ids, 3, **wide))
        assert output.tokens == expected
        assert output.result.cached_tokens == (32 if again else 0)
    assert recorder.undecided > 0
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("doubtful", [False, True])
def test_arrivals_aborts_and_preemptions_in_between(model: LoadedModel, doubtful: bool) -> None:
    recorder, dice = Recorder(Doubtful if doubtful else None), random.Random(3)
    engine = tiny_engine(model, pages=40, single_rows=recorder)
    live = []
    for seed in range(24):
        ids, sink, filters = random_ids(dice.randint(1, 40), seed), Collected(), dice.choice(NARROW)
        live.append((engine.add(sampled(ids, seed, **filters), sink), ids, seed, filters, sink))
        for _ in range(dice.randint(0, 6)):
            engine.step()
        if dice.random() < 0.3:
            engine.abort(dice.choice(live)[0])
    finish(engine)
    assert recorder.ahead.total() > 0 and engine.stats().preemptions > 0
    for _, ids, seed, filters, sink in live:
        expected = lone(model, ids, seed, **filters)
        assert sink.tokens == expected[: len(sink.tokens)], filters
        assert sink.result.finish_reason == "abort" or sink.tokens == expected
    assert_idle(engine)


def everything(rows: int, device: str = "cpu") -> SamplingTensors:
    """Rows of every kind, one after another."""
    fields = [FILTERS[row % len(FILTERS)] for row in range(rows)]
    column = lambda name, default, dtype: torch.tensor(  # noqa: E731
        [each.get(name, default) for each in fields], dtype=dtype, device=device
    )
    return SamplingTensors(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.arange(rows, device=device) - rows // 2,
        drawn=torch.arange(rows, device=device) * 7,
    )


@pytest.mark.parametrize("vocab", [97, 512, VOCAB])
def test_what_is_decided_without_the_host_is_what_the_host_draws(vocab: int) -> None:
    rows = 20 * len(FILTERS)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE) * 1.5
    params = everything(rows, DEVICE)
    ahead, host = sample_ahead(logits, params, filtered=True), sample(logits, params)
    decided = ahead != UNDECIDED
    assert ahead[decided].tolist() == host[decided].tolist()
    assert (vocab <= CANDIDATES) == bool(decided.all())
    narrow = torch.tensor([FILTERS[row % len(FILTERS)] in NARROW for row in range(rows)], device=DEVICE)
    assert bool(decided[narrow].all())


class NothingOfTheHost(TorchDispatchMode):
    """Fails where a value is read back, or a tensor is made that is not on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            assert isinstance(one, torch.Tensor) and one.device.type == "meta", (func, out)
        return out


@pytest.mark.parametrize("filtered", [False, True])
def test_nothing_is_read_back_and_nothing_comes_from_the_host(filtered: bool) -> None:
    """As a graph's capture wants it: without values there is nothing that a shape or a branch could depend on."""
    params = everything(5, "meta")
    with NothingOfTheHost():
        ids = sample_ahead(torch.empty(5, VOCAB, device="meta"), params, filtered=filtered)
    assert ids.shape == (5,) and ids.dtype == torch.int64


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_graphs_of_every_size_draw_what_the_host_draws(model: LoadedModel) -> None:
    """Through the captured graphs, padded and not: each request as if alone, drawn by the host on the same device."""
    recorder = Recorder()
    engine = tiny_engine(model, pages=2000, single_rows=recorder, max_running=40, step_tokens=512)
    for count in (1, 2, 3, 13, 40):
        prompts = [random_ids(3 + seed, seed) for seed in range(count)]
        fields = [NARROW[(seed + count) % len(NARROW)] for seed in range(count)]
        requests = [sampled(ids, seed, **each) for seed, (ids, each) in enumerate(zip(prompts, fields, strict=True))]
        for seed, output in enumerate(together(engine, *requests)):
            assert output.tokens == lone(model, prompts[seed], seed, **fields[seed]), (count, fields[seed])
    assert min(recorder.ahead[draw] for draw in (Draw.SAMPLED, Draw.FILTERED)) > 0
    assert_idle(engine)
