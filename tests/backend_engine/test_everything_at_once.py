"""All that the engine can do, in one load: a request gets what it gets alone in a plain engine, whatever else runs.

Guesses, tiers with too little room, grammars, penalties, log-probabilities, reused spans, priorities, tenants, aborts,
preemptions, and a device that fails for want of memory now and then, in random mixtures with fixed seeds.
"""

import gc
import json
import random
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.sequence import Sequence
from promptsluice.backend_engine.tiers.tiered import Tiers
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, SamplingParams
from promptsluice.prompt.errors import Overloaded

from .driving import DEVICE, FREE_ROWS, Collected, alone, assert_idle, random_ids, tiny_engine
from .eager import EagerMixed, EagerSteps
from .late import LateStream
from .rows import FirstRows
from .writing import tiny_tokenizer

PAGE = 4
WAIT_S = 60.0
_GRAMMARS = (Grammar.regex("[0-9]{3,12}"), Grammar.regex("(ab|cd){4}"), Grammar.choice(("dot", "dots", "circle")))


def writing(directory: Path, path: Path) -> LoadedModel:
    """A tiny model that can write text."""
    shutil.copytree(directory, path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_model(path, dtype="float32", device=DEVICE)


class Faulty:
    """A decoder on a device that has no memory for one step in `odds`."""

    def __init__(self, decoder: Any, odds: int, seed: int) -> None:
        self.failures = 0
        self._decoder = decoder
        self._odds = odds
        self._dice = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
        if self._odds and self._dice.randrange(self._odds) == 0:
            self.failures += 1
            raise torch.OutOfMemoryError("no memory")
        return self._decoder.forward(batch, pool, **options)


@dataclass
class Asked:
    request: GenerationRequest
    grammar: Grammar | None
    sink: Collected
    sequence: Sequence


@dataclass
class Load:
    """Random requests, and what each of them is answered when it is alone."""

    model: LoadedModel
    dice: random.Random
    plain: Engine = field(init=False)
    talks: list[tuple[int, ...]] = field(init=False)
    kv: list[KVBlock] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = tiny_engine(self.model, pages=100)
        self.talks = [random_ids(self.dice.randrange(70, 110), self.dice.randrange(1 << 20)) for _ in range(4)]
        self.kv = []
        for talk in self.talks:
            request = GenerationRequest(ids=talk, sampling=SamplingParams(max_tokens=0), keep_kv=True)
            kv = alone(self.plain, request).result.kv
            assert kv is not None
            self.kv.append(kv)

    def request(self) -> tuple[GenerationRequest, Grammar | None]:
        """For any engine of the model; the grammar is still to be compiled by it."""
        dice = self.dice
        talk = dice.randrange(len(self.talks))
        ids = self.talks[talk][: dice.choice([dice.randrange(1, 20), dice.randrange(40, 71), dice.randrange(66, 71)])]
        params, kind = self._params(), dice.random()
        fields: dict[str, Any] = {
            "namespace": dice.choice(["", "", "", "a", "b"]),
            "priority": dice.choice([0, 0, 0, 1, 2]),
            "prefix_cache": dice.random() < 0.9,
        }
        if kind < 0.15:
            fields["reuse"] = self._reuse(talk, len(ids))
        elif kind < 0.25:
            fields["prompt_logprobs"] = True
        elif kind < 0.3:
            fields["keep_kv"] = True
        grammar = dice.choice(_GRAMMARS) if 0.3 <= kind < 0.5 else None
        return GenerationRequest(ids=ids, sampling=params, **fields), grammar

    def _params(self) -> SamplingParams:
        dice, most = self.dice, self.dice.choice([1, 4, 12, 30, 60])
        fields: dict[str, Any] = {"max_tokens": most, "ignore_eos": dice.random() < 0.7, "seed": dice.randrange(1000)}
        fields["temperature"] = dice.choice([0.0, 0.0, 0.0, 0.5, 1.0])
        options: list[tuple[str, Callable[[], object]]] = [
            ("top_p", lambda: 0.9),
            ("top_k", lambda: 5),
            ("min_p", lambda: 0.05),
            ("frequency_penalty", lambda: dice.choice([-0.5, 0.7])),
            ("presence_penalty", lambda: 0.5),
            ("repetition_penalty", lambda: 1.3),
            ("logit_bias", lambda: ((3, -2.0), (dice.randrange(10, 512), 2.5))),
            ("min_tokens", lambda: dice.randrange(most + 1)),
            ("stop_token_ids", lambda: (dice.randrange(3, 7),)),
            ("stop", lambda: (chr(dice.randrange(97, 123)),)),
            ("logprobs", lambda: dice.choice([0, 3])),
            ("logprobs", lambda: 2),
        ]
        if dice.random() < 0.6:
            fields |= {name: value() for name, value in dice.sample(options, dice.randrange(1, 4))}
        return SamplingParams(**fields)

    def _reuse(self, talk: int, length: int) -> Reuse | None:
        """True KV, so that nothing may change."""
        start = self.dice.randrange(length)
        stop = self.dice.randrange(start, length) + 1
        kv = self.kv[talk]
        span = ReusedSpan(start, KVBlock(kv.k[:, start:stop], kv.v[:, start:stop]))
        if self.dice.random() < 0.5:
            return Reuse(spans=(span,))
        return Reuse(spans=(span,), selector=FirstRows(), ratio=1.0)

    def expected(self, request: GenerationRequest, grammar: Grammar | None) -> Collected:
        return alone(self.plain, bound(self.plain, replace(request, reuse=None, prefix_cache=False), grammar))


def bound(engine: Engine, request: GenerationRequest, grammar: Grammar | None) -> GenerationRequest:
    return replace(request, grammar=engine.grammars.compile(grammar) if grammar else None)


def crowded(model: LoadedModel, dice: random.Random, *, disk: Path, faults: int, steps: Any, late: bool) -> Engine:
    """Too little room everywhere; guesses always pay, and time goes as the dice say."""
    page_bytes = KVPool.bytes_per_token(model.spec, model.decoder.dtype) * PAGE
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += dice.choice([0.001, 0.01, 0.1])
        return now

    options = EngineOptions(
        pages=dice.choice([45, 70]),
        page_size=PAGE,
        step_tokens=dice.choice([16, 48]),
        least_prefill=4,
        max_running=dice.choice([3, 6]),
        shared_tokens=8,
        guessed_tokens=7,
        host_bytes=dice.choice([0, 30, 90]) * page_bytes,
    )
    if options.host_bytes:
        options = replace(options, disk_bytes=dice.choice([0, 120]) * (page_bytes + 64), disk_path=disk)
    device = Faulty(model.decoder, faults, dice.randrange(1 << 20))
    return Engine(
        replace(model, decoder=device),
        options=options,
        single_rows=steps,
        mixed=steps and EagerMixed,
        side_stream=LateStream() if late else None,
        step_cost=FREE_ROWS,
        clock=clock,
    )


def step(engine: Engine) -> None:
    """As the service does."""
    try:
        engine.step()
    except torch.OutOfMemoryError:
        engine.relieve()


def served(engine: Engine, load: Load, count: int) -> list[Asked]:
    dice, asked = load.dice, list[Asked]()
    for _ in range(count):
        request, grammar = load.request()
        for _ in range(dice.choice([1, 1, 1, 3])):  # some want several answers
            sink = Collected()
            sequence = engine.add(bound(engine, request, grammar), sink)
            asked.append(Asked(request, grammar, sink, sequence))
            request = replace(request, sampling=replace(request.sampling, seed=dice.randrange(1000)))
        for _ in range(dice.randrange(0, 10)):
            step(engine)
        if dice.random() < 0.15:
            one = dice.choice(asked)
            engine.abort(one.sequence)
    for _ in range(5000):
        if not engine.has_work:
            return asked
        step(engine)
    raise AssertionError(f"still at work: {engine.stats()}")


def same(asked: Asked, expected: Collected) -> bool:
    """Whether a request got what it gets alone, as far as it got."""
    sink = asked.sink
    if sink.error is not None:
        assert isinstance(sink.error, Overloaded), sink.error
        return sink.tokens == expected.tokens[: len(sink.tokens)]
    if sink.result.finish_reason == "abort":
        return sink.tokens == expected.tokens[: len(sink.tokens)]
    scores = [[one for delta in each.deltas for one in delta.logprobs] for each in (sink, expected)]
    assert [one.token_id for one in scores[0]] == [one.token_id for one in scores[1]]
    for ours, theirs in zip(*scores, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)
    wanted = expected.result
    if wanted.prompt_logprobs is not None:
        assert sink.result.prompt_logprobs is not None
        torch.testing.assert_close(sink.result.prompt_logprobs, wanted.prompt_logprobs, atol=1e-3, rtol=0)
    if wanted.kv is not None:
        assert sink.result.kv is not None
        torch.testing.assert_close(sink.result.kv.k, wanted.kv.k, atol=1e-4, rtol=1e-4)
    return (sink.tokens, sink.text, sink.result.finish_reason) == (expected.tokens, expected.text, wanted.finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed", "faults", "steps", "late"),
    [
        ("few_words_dir", 1, 20, None, True),  # it repeats itself
        ("few_words_dir", 2, 0, EagerSteps, True),
        ("tiny_mistral_dir", 3, 20, EagerSteps, False),  # it sees the last 20 keys alone
    ],
)
def test_everything_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, seed: int, faults: int, steps: Any, late: bool
) -> None:
    model = writing(request.getfixturevalue(family), tmp_path / "model")
    dice = random.Random(seed)
    load = Load(model, dice)
    engine = crowded(model, dice, disk=tmp_path / "disk", faults=faults, steps=steps, late=late)
    asked = served(engine, load, 14)
    if isinstance(engine.tier, Tiers):
        assert engine.tier.quiet(WAIT_S)
        engine.tier.check()
    assert_idle(engine)
    assert engine.stats().preemptions > 0 and bool(engine.stats().out_of_memory) == bool(faults)
    for each in asked:
        assert same(each, load.expected(each.request, each.grammar)), each.request
    engine.close()


def test_nothing_keeps_a_request_that_has_ended(few_words_dir: Path) -> None:
    """Not even what it was told of guesses that were wrong: it may hold a whole prompt's KV."""
    engine = tiny_engine(load_model(few_words_dir, dtype="float32", device=DEVICE), guessed_tokens=7)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, logprobs=2)
    sink = weakref.ref(alone(engine, GenerationRequest(ids=random_ids(20, 1), sampling=params)))
    gc.collect()
    assert sink() is None
