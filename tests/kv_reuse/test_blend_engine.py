"""From stored chunks to tokens through the engine: what `Reuser` plans is what a dense float64 reference computes."""

import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result, Reuse, SamplingParams
from promptsluice.kv_reuse import ChunkStore, DiskStore, KVDeviation, RamStore, Repair, Reuser
from promptsluice.prompt.errors import PromptsluiceError

from .reference import Outcome, Reference
from .rows import RandomRows

TOLERANCE = 1e-4
STEP = 128


@dataclass
class Sink:
    """Collects what a request produces."""

    tokens: list[int] = field(default_factory=list)
    result: Result | None = None

    def delta(self, delta: Delta) -> None:
        self.tokens += delta.token_ids

    def done(self, result: Result) -> None:
        self.result = result

    def failed(self, error: PromptsluiceError) -> None:
        raise error


class Runner:
    """The engine without its thread, so that a test says what shares a step."""

    def __init__(self, model: LoadedModel, *, step_tokens: int = STEP) -> None:
        self.model = model
        options = EngineOptions(
            pages=128, page_size=4, step_tokens=step_tokens, max_running=8, shared_tokens=8, stall=None
        )
        self.engine = Engine(model, options=options)

    def run(self, request: GenerationRequest) -> Result:
        return self.together(request)[0].result

    def run_all(self, requests: Sequence[GenerationRequest]) -> list[Result]:
        return [finished.result for finished in self.together(*requests)]

    def together(self, *requests: GenerationRequest) -> "list[Finished]":
        sinks = [Sink() for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            self.engine.add(request, sink)
        while self.engine.has_work:
            self.engine.step()
        return [Finished(sink.tokens, sink.result) for sink in sinks if sink.result is not None]

    def reuser(self, store: ChunkStore | None = None, *, sinks: Sequence[Sequence[int]] = ()) -> Reuser:
        store = store if store is not None else RamStore(1 << 24)
        spec, fingerprint = self.model.spec, self.model.fingerprint
        return Reuser(self, store, spec=spec, fingerprint=fingerprint, sinks=sinks, min_tokens=4)


@dataclass(frozen=True)
class Finished:
    tokens: list[int]
    result: Result


def text(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(tokens)]


A, B, C = text(1, 21), text(2, 16), text(3, 9)
Prompt = tuple[list[int], list[tuple[int, int]]]


def prompt(*parts: list[int] | tuple[list[int]]) -> Prompt:
    """Token ids and spans; a part in a tuple is plain text between chunks."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for part in parts:
        tokens = part[0] if isinstance(part, tuple) else part
        if not isinstance(part, tuple):
            spans.append((len(ids), len(tokens)))
        ids += tokens
    return ids, spans


PROMPTS: dict[str, Prompt] = {
    "at the very start, adjacent": prompt(A, B, (text(4, 5),)),
    "one chunk twice": prompt((text(5, 3),), A, (text(6, 2),), A, (text(7, 1),)),
    "twice side by side": prompt((text(8, 6),), C, C, B, (text(9, 4),)),
    "to the very end": prompt((text(10, 6),), B, A),
}


def loaded_spans(spans: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """The last token is never loaded."""
    return [(start, min(length, total - 1 - start)) for start, length in spans]


def repaired(
    ids: list[int], spans: Sequence[tuple[int, int]], selector: RandomRows, *, ratio: float, step: int, cached: int = 0
) -> set[int]:
    """The places that were repaired, given that the prefill ran in steps of `step` rows from `cached` on."""
    inside = {place for start, length in spans for place in range(start, start + length) if place >= cached}
    calls, places, seen = iter(selector.chosen), set[int](), 0
    for first in range(cached, len(ids), step):
        rows = [place for place in range(first, min(first + step, len(ids))) if place in inside]
        quota = math.ceil(ratio * (seen + len(rows)) - 1e-9) - math.ceil(ratio * seen - 1e-9)
        seen += len(rows)
        places |= {rows[row] for row in next(calls).tolist()} if quota < len(rows) else set(rows)
    assert next(calls, None) is None
    return places


def greedy(ids: list[int], reuse: Reuse | None, *, tokens: int = 1, keep_kv: bool = True) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(ids=ids, sampling=sampling, reuse=reuse, keep_kv=keep_kv)


def check(finished: Finished, expected: Outcome) -> None:
    kv = finished.result.kv
    assert kv is not None
    torch.testing.assert_close(kv.k.double(), expected.k, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(kv.v.double(), expected.v, rtol=TOLERANCE, atol=TOLERANCE)
    assert finished.tokens == [int(expected.logits.argmax())]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("step", [STEP, 13])
@pytest.mark.parametrize("mode", ["reuse", "blend"])
def test_stored_chunks_give_what_the_reference_gives(
    model: LoadedModel, reference: Reference, mode: str, step: int, name: str
):
    ids, spans = PROMPTS[name]
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    selector = RandomRows(0, layer=2)
    plan = reuser.plan(ids, spans, mode=mode, ratio=0.3, repair=Repair(selector))
    assert plan.misses == ()
    spans = loaded_spans(spans, len(ids))
    (finished,) = runner.together(greedy(ids, plan.reuse))
    rows = repaired(ids, spans, selector, ratio=0.3, step=step) if mode == "blend" else set()
    check(finished, reference.blended(ids, spans, layer=2 if rows else 0, repaired=rows))
    inside = sum(length for _, length in spans)
    result = finished.result
    assert (result.recomputed_tokens, result.reused_tokens) == (len(rows), inside - len(rows))
    assert (result.cached_tokens, result.prompt_tokens) == (0, len(ids))


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEP, 13])
def test_blending_at_one_is_a_full_prefill(model: LoadedModel, reference: Reference, step: int):
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    for ids, spans in PROMPTS.values():
        plan = reuser.plan(ids, spans, ratio=1.0)
        (finished,) = runner.together(greedy(ids, plan.reuse))
        check(finished, reference.full(ids))
        assert finished.result.reused_tokens == 0


@pytest.mark.slow
def test_blended_requests_share_steps_with_plain_ones(model: LoadedModel, reference: Reference):
    runner = Runner(model, step_tokens=512)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    selectors = [RandomRows(seed, layer=1 + seed) for seed in range(2)]
    (first, first_spans), (second, second_spans), (third, third_spans) = list(PROMPTS.values())[:3]
    plans = [
        reuser.plan(first, first_spans, ratio=0.15, repair=Repair(selectors[0])),
        reuser.plan(second, second_spans, ratio=0.5, repair=Repair(selectors[1])),
        reuser.plan(third, third_spans, mode="reuse"),
    ]
    plain = text(20, 30)
    done = runner.together(
        greedy(plain, None),
        greedy(first, plans[0].reuse),
        greedy(second, plans[1].reuse),
        greedy(plain[:17], None),
        greedy(third, plans[2].reuse),
    )
    rows = [
        repaired(ids, spans, selector, ratio=ratio, step=512)
        for ids, spans, selector, ratio in [
            (first, first_spans, selectors[0], 0.15),
            (second, second_spans, selectors[1], 0.5),
        ]
    ]
    expected = [
        reference.full(plain),
        reference.blended(first, first_spans, layer=1, repaired=rows[0]),
        reference.blended(second, second_spans, layer=2, repaired=rows[1]),
        reference.full(plain[:17]),
        reference.blended(third, third_spans),
    ]
    for finished, outcome in zip(done, expected, strict=True):
        check(finished, outcome)
    assert runner.engine.stats().steps < 10, "they did share their steps"


@pytest.mark.slow
@pytest.mark.parametrize("known", [7, 14, 27, 60])
@pytest.mark.parametrize("mode", ["reuse", "blend"])
def test_a_prefix_hit_that_reaches_into_a_span_wins_there(
    model: LoadedModel, reference: Reference, mode: str, known: int
):
    ids, spans = prompt((text(30, 5),), A, B, (text(31, 3),), A, (text(32, 6),))
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A, B])
    runner.run(greedy([*ids[:known], *text(33, 5)], None, keep_kv=False))  # the prefix tree knows `known` tokens now
    selector = RandomRows(4, layer=1)
    plan = reuser.plan(ids, spans, mode=mode, ratio=0.2, repair=Repair(selector))
    (finished,) = runner.together(greedy(ids, plan.reuse, tokens=5, keep_kv=False))
    result = finished.result
    assert result.cached_tokens == known
    rows = repaired(ids, spans, selector, ratio=0.2, step=STEP, cached=known) if mode == "blend" else set()
    inside = sum(place >= known for start, length in spans for place in range(start, start + length))
    assert result.reused_tokens == inside - len(rows)
    for number, token in enumerate(finished.tokens):
        so_far = [*ids, *finished.tokens[:number]]
        layer = 1 if rows else 0
        expected = reference.blended(so_far, spans, layer=layer, repaired=rows, covered=known)
        assert token == int(expected.logits.argmax())


@pytest.mark.slow
def test_blended_kv_never_answers_a_plain_request(model: LoadedModel, reference: Reference):
    ids, spans = prompt((text(40, 9),), A, (text(41, 4),), B, (text(42, 6),))
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A, B])
    for mode in ("reuse", "blend"):
        plan = reuser.plan(ids, spans, mode=mode)
        runner.run(greedy(ids, plan.reuse, tokens=4, keep_kv=False))
    (finished,) = runner.together(greedy(ids, None, tokens=4, keep_kv=False))
    assert finished.result.cached_tokens == 9, "what stands before the first span was computed in full"
    for number, token in enumerate(finished.tokens):
        assert token == int(reference.full([*ids, *finished.tokens[:number]]).logits.argmax())


@pytest.mark.slow
def test_orders_deletes_and_repeats_change_nothing_but_what_they_must(model: LoadedModel, reference: Reference):
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A, B, C])
    for parts in ([A, B, C], [C, A, B], [B, C, A], [A, B, C]):
        ids, spans = prompt((text(50, 4),), *parts, (text(51, 5),))
        plan = reuser.plan(ids, spans, mode="reuse")
        (finished,) = runner.together(greedy(ids, plan.reuse))
        check(finished, reference.blended(ids, spans))
    reuser.forget([B])
    ids, spans = prompt((text(50, 4),), A, B, C, (text(51, 5),))
    plan = reuser.plan(ids, spans, mode="reuse")
    assert plan.misses == (tuple(B),)
    (finished,) = runner.together(greedy(ids, plan.reuse))
    check(finished, reference.blended(ids, [spans[0], spans[2]]))


def test_a_damaged_file_costs_a_miss_and_nothing_else(model: LoadedModel, reference: Reference, tmp_path: Path):
    ids, spans = PROMPTS["one chunk twice"]
    runner = Runner(model)
    reuser = runner.reuser(DiskStore(tmp_path, 1 << 24))
    reuser.warm([A])
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 4
    path.write_bytes(raw)
    plan = reuser.plan(ids, spans, mode="reuse")
    assert plan.reuse is None and plan.misses == (tuple(A),)
    assert reuser.warm(plan.misses).computed == 1
    (finished,) = runner.together(greedy(ids, reuser.plan(ids, spans, mode="reuse").reuse))
    check(finished, reference.blended(ids, spans))


def test_the_default_selector_repairs_what_differs_most(model: LoadedModel, reference: Reference):
    """At a ratio that leaves out a few rows, the result lies nearer to a full prefill than reuse alone does."""
    ids, spans = PROMPTS["one chunk twice"]
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A])
    full = reference.full(ids)
    distance: dict[str, float] = {}
    for mode, ratio in (("reuse", 0.0), ("blend", 0.8)):
        plan = reuser.plan(ids, spans, mode=mode, ratio=ratio, repair=Repair(KVDeviation()))
        (finished,) = runner.together(greedy(ids, plan.reuse))
        kv = finished.result.kv
        assert kv is not None
        distance[mode] = float((kv.v.double() - full.v).norm())
    assert distance["blend"] < 0.8 * distance["reuse"]


@pytest.mark.slow
def test_threads_warm_and_blend_through_the_running_service(model: LoadedModel, reference: Reference):
    service = EngineService(Runner(model).engine)
    reuser = Reuser(service, RamStore(1 << 24), spec=model.spec, fingerprint=model.fingerprint, min_tokens=4)
    results: dict[str, Result] = {}

    def ask(name: str) -> None:
        ids, spans = PROMPTS[name]
        reuser.warm([ids[start : start + length] for start, length in spans])
        plan = reuser.plan(ids, spans, ratio=1.0)
        results[name] = service.run(greedy(ids, plan.reuse))

    service.start()
    try:
        threads = [threading.Thread(target=ask, args=(name,)) for name in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        service.stop()
    for name, (ids, _) in PROMPTS.items():
        kv = results[name].kv
        assert kv is not None
        torch.testing.assert_close(kv.v.double(), reference.full(ids).v, rtol=TOLERANCE, atol=TOLERANCE)
