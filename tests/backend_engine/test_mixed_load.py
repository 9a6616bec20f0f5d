"""500 mixed requests on a pool that is far too small: nothing is lost, leaked or doubled."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.sequence import Sequence
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, SamplingParams

from .driving import DEVICE, Collected, alone, assert_as_far, assert_idle, random_ids, tiny_engine
from .eager import EagerMixed, EagerSteps
from .rows import LastRows

REQUESTS = 500


@dataclass
class Load:
    """A random stream of requests, and of aborts between the steps."""

    dice: random.Random
    prefixes: list[tuple[int, ...]]
    live: list[tuple[Sequence, Collected]] = field(default_factory=list)
    plain: list[tuple[GenerationRequest, Collected]] = field(default_factory=list)
    sinks: list[Collected] = field(default_factory=list)

    def request(self) -> GenerationRequest:
        dice = self.dice
        ids = (
            *dice.choice(self.prefixes)[: dice.randrange(60)],
            *random_ids(dice.randrange(1, 50), dice.getrandbits(30)),
        )
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 1.0]),
            top_p=dice.choice([1.0, 0.9]),
            seed=dice.getrandbits(20),
            max_tokens=dice.choice([0, 1, 5, 30]),
        )
        return GenerationRequest(
            ids=ids,
            sampling=params,
            namespace=dice.choice(["", "", "tenant"]),
            priority=dice.choice([0, 0, 0, 1]),
            prefix_cache=dice.random() < 0.9,
            reuse=self.reuse(len(ids)) if dice.random() < 0.25 else None,
            keep_kv=dice.random() < 0.05,
        )

    def reuse(self, length: int) -> Reuse:
        cuts = sorted(self.dice.sample(range(length + 1), min(4, length + 1) // 2 * 2))
        kv = [KVBlock(*torch.randn(2, 4, b - a, 2, 16)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        spans = tuple(ReusedSpan(start, block) for start, block in zip(cuts[::2], kv, strict=True))
        return Reuse(spans=spans, selector=self.dice.choice([None, LastRows()]), ratio=self.dice.random())

    def submit(self, engine: Engine) -> None:
        request, sink = self.request(), Collected()
        self.sinks.append(sink)
        self.live.append((engine.add(request, sink), sink))
        if request.reuse is None:
            self.plain.append((request, sink))

    def abort_one(self, engine: Engine) -> None:
        self.live = [(sequence, sink) for sequence, sink in self.live if not sink.ended]
        if self.live:
            engine.abort(self.dice.choice(self.live)[0])


@pytest.fixture(scope="module")
def model(few_words_dir: Path) -> LoadedModel:
    return load_model(few_words_dir, dtype="float32", device=DEVICE)


def check_counts(engine: Engine) -> None:
    """Every page is free, or held by as many as its count says: the tree and each running request that lists it."""
    held = torch.zeros(engine.allocator.pages, dtype=torch.int32).numpy()
    for sequence in engine.sequences:
        held[sequence.pages] += 1
    refs = engine.allocator.refs(torch.arange(engine.allocator.pages, dtype=torch.int32).numpy())
    in_tree = refs - held
    assert ((in_tree == 0) | (in_tree == 1)).all()
    assert in_tree.sum() == engine.tree.pages
    engine.tree.check()
    engine.allocator.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "single_rows", "guessed"), [(0, None, 0), (1, None, 7), (2, EagerSteps, 0), (3, EagerSteps, 7)]
)
def test_all_pages_come_back_and_the_counts_agree(
    model: LoadedModel, seed: int, single_rows: type[EagerSteps] | None, guessed: int
) -> None:
    dice = random.Random(seed)
    load = Load(dice, [random_ids(60, each) for each in range(4)])
    engine = tiny_engine(
        model,
        pages=70,
        step_tokens=48,
        max_running=8,
        guessed_tokens=guessed,
        single_rows=single_rows,
        mixed=single_rows and EagerMixed,
    )
    for number in range(REQUESTS):
        load.submit(engine)
        while len(engine.sequences) > 12:
            engine.step()
        if dice.random() < 0.2:
            load.abort_one(engine)
        if number % 25 == 0:
            check_counts(engine)
    while engine.has_work:
        engine.step()
    check_counts(engine)
    assert_idle(engine)
    reasons = [sink.result.finish_reason for sink in load.sinks]
    assert len(reasons) == REQUESTS and reasons.count("abort") > 20
    stats = engine.stats()
    assert (stats.accepted_tokens > 0) == (stats.drafted_tokens > 0) == (guessed > 0)
    assert stats.preemptions > 0 and stats.finished == REQUESTS
    for request, sink in dice.sample(load.plain, 40):
        lone = alone(tiny_engine(model), replace(request, prefix_cache=False, keep_kv=False))
        assert_as_far(sink, lone.tokens)
    engine.tree.evict(engine.tree.pages)
    assert engine.allocator.free == engine.allocator.pages
