"""Spans that come in beside the steps, as late as they may: like written at once, and never over anybody's pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promptsluice.backend_engine import span_rows
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.fused import fused_ops
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.rounded_kv import Block, RoundedBlock
from promptsluice.backend_engine.span_loads import SpanLoader
from promptsluice.backend_engine.span_rows import SpanRows
from promptsluice.backend_engine.tiers.empty import NO_LOADS
from promptsluice.backend_engine.tiers.streams import InlineStream, SideStream
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, RowChooser, SamplingParams
from promptsluice.prompt.errors import PromptsluiceError
from torch import Tensor

from .driving import (
    DEVICE,
    FREE_ROWS,
    Collected,
    Reference,
    alone,
    assert_idle,
    finish,
    greedy,
    random_ids,
    tiny_engine,
    together,
)
from .late import LateStream

IDS = random_ids(100, 11)
PLACES = [(7, 30), (30, 61), (70, 95)]


@dataclass(frozen=True)
class MostLooked:
    """Whatever the end looks at most."""

    depth: float = 0.5
    until: float = 1.0

    def choose(self, *, attention: Tensor | None, offsets: Tensor, quota: int) -> Tensor:
        assert attention is not None
        return attention.topk(quota).indices


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Reference:
    return Reference(tiny_llama_dir)


def late_engine(model: LoadedModel, stream: SideStream, *, pages: int = 200, step_tokens: int = 128) -> Engine:
    options = EngineOptions(
        pages=pages, page_size=4, stall=None, step_tokens=step_tokens, max_running=16, guessed_tokens=0
    )
    return Engine(model, options=options, side_stream=stream, step_cost=FREE_ROWS)


def stored(model: LoadedModel, ids: tuple[int, ...] = IDS) -> list[KVBlock]:
    """The chunks' KV, each computed by itself, so that its keys are rotated for the places from 0 on."""
    engine = tiny_engine(model)
    found = []
    for start, stop in PLACES:
        request = GenerationRequest(ids=ids[start:stop], sampling=SamplingParams(max_tokens=0), keep_kv=True)
        kv = alone(engine, request).result.kv
        assert kv is not None
        found.append(KVBlock(kv.k.cpu(), kv.v.cpu()))
    return found


def spans(blocks: Sequence[Block]) -> tuple[ReusedSpan, ...]:
    return tuple(ReusedSpan(start, block, 0) for (start, _), block in zip(PLACES, blocks, strict=True))


def turned(model: LoadedModel, blocks: list[KVBlock]) -> tuple[ReusedSpan, ...]:
    """The same spans, turned before the engine sees them."""
    made = []
    for (start, stop), block in zip(PLACES, blocks, strict=True):
        old = torch.arange(stop - start, device=model.decoder.device)
        k = model.decoder.ropes.move(block.k.to(old.device), old, old + start)
        made.append(ReusedSpan(start, KVBlock(k, block.v)))
    return tuple(made)


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [16, 128])
@pytest.mark.parametrize(
    ("chooser", "ratio"),
    [(None, 0.0), (MostLooked(), 0.3), (MostLooked(until=0.75), 0.3), (MostLooked(0.0, 0.3), 0.3), (MostLooked(), 1.0)],
)
def test_late_spans_are_as_good_as_written_ones(
    model: LoadedModel, chooser: RowChooser | None, ratio: float, step_tokens: int
) -> None:
    blocks, stream = stored(model), LateStream()
    before = Reuse(spans=turned(model, blocks), chooser=chooser, ratio=ratio)
    expected = alone(tiny_engine(model, step_tokens=step_tokens), replace(greedy(IDS), reuse=before))
    engine = late_engine(model, stream, step_tokens=step_tokens)
    late = replace(greedy(IDS), reuse=Reuse(spans=spans(blocks), chooser=chooser, ratio=ratio))
    for _ in range(2):
        found = alone(engine, late)
        assert found.tokens == expected.tokens
        assert found.result.reused_tokens == expected.result.reused_tokens
        assert found.result.recomputed_tokens == expected.result.recomputed_tokens
    assert stream.done > 0, "nothing went over the side stream"
    # Without a stream the engine turns them itself, at once.
    assert alone(tiny_engine(model, step_tokens=step_tokens), late).tokens == expected.tokens
    assert_idle(engine)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rounded_spans_beside_others_are_what_they_stand_for(model: LoadedModel, dtype: torch.dtype) -> None:
    """One request of one step has spans of both kinds, which no single kernel reads."""
    blocks = stored(model)
    kept = [RoundedBlock.of(blocks[0], dtype), blocks[1], RoundedBlock.of(blocks[2], dtype)]
    wide, mixed = (
        [
            replace(greedy(ids), reuse=Reuse(spans=spans(each), chooser=chooser, ratio=0.3))
            for ids, chooser in ((IDS, MostLooked()), (IDS[:96], None))
        ]
        for each in ([block.widened() for block in kept], kept)
    )
    expected = [sink.tokens for sink in together(tiny_engine(model), *wide)]
    stream = LateStream()
    late = late_engine(model, stream)
    assert [sink.tokens for sink in together(late, *mixed)] == expected
    assert [sink.tokens for sink in together(tiny_engine(model), *mixed)] == expected
    assert stream.done > 0
    alone(late, greedy(IDS[:20], max_tokens=1))  # whose prefix then cuts the first span
    cut = [together(engine, *requests) for engine, requests in ((late, mixed), (tiny_engine(model), wide))]
    assert cut[0][0].result.cached_tokens == 20 and cut[0][0].result.reused_tokens < cut[1][0].result.reused_tokens


def test_rounded_spans_that_are_all_repaired_change_nothing(model: LoadedModel, reference: Reference) -> None:
    kept = [RoundedBlock.of(block, torch.int8) for block in stored(model)]
    reuse = Reuse(spans=spans(kept), chooser=MostLooked(), ratio=1.0)
    for engine in (late_engine(model, LateStream()), tiny_engine(model)):
        assert alone(engine, replace(greedy(IDS), reuse=reuse)).tokens == reference.greedy(IDS)


def test_a_prefix_hit_cuts_a_span_that_is_turned_on_the_way(model: LoadedModel, reference: Reference) -> None:
    engine = late_engine(model, LateStream())
    alone(engine, greedy(IDS[:20], max_tokens=1))
    reuse = Reuse(spans=spans(stored(model)), chooser=MostLooked(), ratio=1.0)
    found = alone(engine, replace(greedy(IDS), reuse=reuse))
    assert found.result.cached_tokens == 20 and found.tokens == reference.greedy(IDS)
    reuse = replace(reuse, ratio=0.0, chooser=None)
    cut = alone(engine, replace(greedy(IDS), reuse=reuse))
    whole = tiny_engine(model)
    alone(whole, greedy(IDS[:20], max_tokens=1))
    before = replace(reuse, spans=turned(model, stored(model)))
    assert cut.tokens == alone(whole, replace(greedy(IDS), reuse=before)).tokens


@pytest.mark.slow
@pytest.mark.parametrize("chooser", [MostLooked(), MostLooked(0.2, 0.6)])
def test_requests_beside_each_other_get_their_own(model: LoadedModel, chooser: MostLooked) -> None:
    others = [random_ids(100, seed) for seed in (1, 2, 3)]
    requests = []
    for ids in others:
        reuse = Reuse(spans=spans(stored(model, ids)), chooser=chooser, ratio=0.2)
        requests += [replace(greedy(ids), reuse=reuse), greedy(ids[:50])]
    expected = [alone(tiny_engine(model), request).tokens for request in requests]
    found = together(late_engine(model, LateStream(), step_tokens=32), *requests)
    assert [one.tokens for one in found] == expected


def test_spans_of_an_aborted_request_go_nowhere(model: LoadedModel, reference: Reference) -> None:
    """It ends between its admission and its first step's loads; its pages are the next one's at once."""
    stream = LateStream()
    engine = late_engine(model, stream, pages=30)
    doomed, other = Collected(), Collected()
    sequence = engine.add(replace(greedy(IDS), reuse=Reuse(spans=spans(stored(model)))), doomed)
    engine._scheduler.schedule()
    engine.abort(sequence)
    ids = random_ids(90, 5)
    engine.add(greedy(ids), other)
    finish(engine)
    stream.reach(stream.done + len(stream.waiting))
    assert doomed.result.finish_reason == "abort" and other.tokens == reference.greedy(ids)
    assert_idle(engine)


def test_an_abort_behind_a_probe_that_stopped_early(model: LoadedModel, reference: Reference) -> None:
    """Half of the layers have not come yet; its pages are the next one's at once."""
    stream = LateStream()
    engine = late_engine(model, stream, pages=30)
    doomed, other = Collected(), Collected()
    reuse = Reuse(spans=spans(stored(model)), chooser=MostLooked(0.0, 0.5), ratio=0.2)
    sequence = engine.add(replace(greedy(IDS), reuse=reuse), doomed)
    engine.step()
    assert stream.waiting, "the later layers are still to come"
    engine.abort(sequence)
    assert not stream.waiting
    ids = random_ids(90, 5)
    engine.add(greedy(ids), other)
    finish(engine)
    assert doomed.result.finish_reason == "abort" and other.tokens == reference.greedy(ids)
    assert_idle(engine)


@pytest.mark.parametrize("wanted", [False, True])
def test_only_what_is_still_wanted_is_brought(model: LoadedModel, wanted: bool) -> None:
    pool = KVPool(model.spec, pages=30, page_size=4, device=DEVICE)
    loader = SpanLoader(pool, model.decoder.ropes, fused_ops(model.decoder.device), LateStream())
    (span, *_), slots = spans(stored(model)), np.arange(40, 63)
    loader.add((span,), slots, wanted=lambda: wanted)
    loader.loads().settle()
    written = pool.data.abs().sum(dim=(0, 1, 3, 4)) > 0
    assert written.nonzero().flatten().tolist() == slots.tolist() if wanted else not written.any()
    loader.loads().settle()  # each is brought once


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("where", ["copies", "tables", "first layers", "last layers"])
def test_a_device_without_memory_forgets_nobodys_spans(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str, times: int
) -> None:
    """Of the requests that were admitted, only some are in the step that fails, which says why it did."""
    last, failures = model.spec.layers - 1, iter([f"no memory, the {nth}." for nth in range(1, times + 1)])
    ops = type(fused_ops(model.decoder.device))
    owner, name, there = {
        "copies": (SpanRows, "readable", lambda *args: True),
        "tables": (span_rows, "carried", lambda *args: True),
        "first layers": (ops, "placed", lambda *args: 0 in args[2]),
        "last layers": (ops, "placed", lambda *args: last in args[2]),
    }[where]
    real = getattr(owner, name)

    def without_memory(*args: Any, **about: Any) -> Any:
        failure = next(failures, None) if there(*args) else None
        if failure is not None:
            raise torch.OutOfMemoryError(failure)
        return real(*args, **about)

    others, requests = [random_ids(100, seed) for seed in (1, 2, 3)], list[GenerationRequest]()
    for ids in others:
        requests.append(replace(greedy(ids), reuse=Reuse(spans=spans(stored(model, ids)))))
    expected = [alone(tiny_engine(model), request).tokens for request in requests]
    engine, sinks = late_engine(model, InlineStream(), step_tokens=16), [Collected() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.add(request, sink)
    monkeypatch.setattr(owner, name, without_memory)
    for nth in range(1, times + 1):
        with pytest.raises(torch.OutOfMemoryError, match=f"the {nth}."):
            engine.step()
        assert engine._plan is not None and len(engine._plan.sequences) < engine.stats().running
        engine.relieve()
    finish(engine)
    assert [sink.tokens for sink in sinks] == expected
    loader = engine._pages._spans
    assert isinstance(loader, SpanLoader) and loader.loads() is NO_LOADS and not loader._reading
    assert_idle(engine)


def test_spans_of_a_failed_step_come_before_anybody_else_writes(model: LoadedModel, reference: Reference) -> None:
    class Failing:
        broken = True

        def __getattr__(self, name: str) -> Any:
            return getattr(model.decoder, name)

        def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
            if self.broken:
                batch.loads.wait(0)
                raise RuntimeError("broken")
            return model.decoder.forward(batch, pool, **options)

    device, stream = Failing(), LateStream()
    device.broken = False  # while graphs, if any, are captured
    engine = late_engine(replace(model, decoder=device), stream, pages=30)
    device.broken = True
    sink, other, ids = Collected(), Collected(), random_ids(90, 5)
    engine.add(replace(greedy(IDS), reuse=Reuse(spans=spans(stored(model)))), sink)
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail(PromptsluiceError("broken"))
    device.broken = False
    engine.add(greedy(ids), other)
    finish(engine)
    stream.reach(stream.done + len(stream.waiting))
    assert sink.error is not None and other.tokens == reference.greedy(ids)
    assert_idle(engine)
