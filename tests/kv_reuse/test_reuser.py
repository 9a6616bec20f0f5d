"""The planner of reused spans and the warmer, over a prefiller that only counts."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.rope import LayerRopes
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Result
from promptsluice.kv_reuse import (
    AUTO,
    ChunkKey,
    ChunkStore,
    DiskStore,
    EmptyStore,
    KeySpace,
    KVDeviation,
    RamStore,
    Repair,
    ReusePlan,
    Reuser,
    StoredChunk,
    WarmReport,
    repositioned,
)
from promptsluice.kv_reuse.forgotten import Forgotten
from promptsluice.kv_reuse.tiered import TieredStore
from promptsluice.kv_reuse.warm import TOGETHER
from promptsluice.prompt.errors import BadRequest, ConfigError, ContextTooLong, Overloaded

SPEC = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 64,
    }
)
A, B, C = tuple(range(10, 20)), tuple(range(30, 42)), tuple(range(50, 58))


@dataclass
class Prefiller:
    """Stands in for the engine's service: KV that only depends on the ids, and a list of what was asked."""

    seen: list[GenerationRequest] = field(default_factory=list)
    fail_at: int | None = None
    memory: int = 1000
    queue: int = 1000
    batches: list[int] = field(default_factory=list)

    def run_all(self, requests: Sequence[GenerationRequest]) -> list[Result]:
        self.batches.append(len(requests))
        if len(requests) > self.queue:
            raise Overloaded("too many at a time")
        return [self.run(request) for request in requests]

    def run(self, request: GenerationRequest) -> Result:
        if len(request.ids) > self.memory:
            raise ContextTooLong("there is room for fewer")
        if len(self.seen) == self.fail_at:
            raise Overloaded("the queue is full")
        self.seen.append(request)
        return Result(
            finish_reason="length", prompt_tokens=len(request.ids), completion_tokens=0, kv=kv_of(request.ids)
        )


def kv_of(ids: Any) -> KVBlock:
    generator = torch.Generator().manual_seed(hash(tuple(ids)))
    shape = (SPEC.layers, len(ids), SPEC.kv_heads, SPEC.head_dim)
    return KVBlock(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def make(store: ChunkStore | None = None, **options: Any) -> tuple[Reuser, Prefiller]:
    prefiller = Prefiller()
    store = store if store is not None else RamStore(1 << 20)
    return Reuser(prefiller, store, **{"spec": SPEC, "fingerprint": "model", "min_tokens": 4, **options}), prefiller


def came(reuser: Reuser, ids: Sequence[int], spans: Sequence[tuple[int, int]], **options: Any) -> ReusePlan:
    """The plan of a request that ran with it."""
    plan = reuser.plan(ids, spans, **options)
    reuser.saw(plan)
    return plan


def test_warm_computes_only_what_is_missing_and_reports_it():
    reuser, prefiller = make()
    told: list[tuple[int, int]] = []
    assert reuser.warm([A, B, A], progress=lambda done, total: told.append((done, total))) == WarmReport(computed=2)
    assert told == [(1, 2), (2, 2)]
    assert reuser.warm([list(A), C, (1, 2)]) == WarmReport(computed=1, present=1, skipped=1)
    assert [request.ids for request in prefiller.seen] == [A, B, C]
    for request in prefiller.seen:
        assert request.keep_kv and not request.prefix_cache and request.sampling.max_tokens == 0
        assert request.priority < 0 and request.reuse is None


def test_a_chunk_that_the_engine_has_no_room_for_is_no_miss():
    store = RamStore(1 << 20)
    small, _ = make(store, memory=len(A) - 1)
    large, _ = make(store)
    prompt, spans = [*A, *C, 1], [(0, len(A)), (len(A), len(C))]
    assert len(C) < len(A) and small.plan(prompt, spans).misses == (C,)
    assert large.plan(prompt, spans).misses == (A, C)
    large.warm([A])
    assert [hit.tokens for hit in small.plan(prompt, spans).hits] == [len(A)], "but may be found"


def test_the_kv_of_anchors_is_held_in_host_memory():
    class OnCard(KVBlock):
        """What a device computed, which stays there until it is copied."""

        def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVBlock:
            return KVBlock(change(self.k), change(self.v))

    class Card(Prefiller):
        def run(self, request: GenerationRequest) -> Result:
            result = super().run(request)
            assert result.kv is not None
            return replace(result, kv=OnCard(result.kv.k, result.kv.v))

    card = Card()
    reuser = Reuser(card, RamStore(1 << 20), spec=SPEC, fingerprint="model", min_tokens=4)
    reuser.warm([C], anchor=A)
    reuser.warm([C], anchor=(*A, *B))
    held = [request.reuse.spans[0].kv for request in card.seen if request.reuse is not None]
    assert [type(block) for block in held] == [OnCard, KVBlock, OnCard], "the second one: what was held of the first"
    assert torch.equal(held[1].k, kv_of(A).k)


def test_warm_keeps_what_was_done_when_the_engine_refuses():
    """Chunks are stored batch by batch: the first batch is complete when the second one fails."""
    chunks = [(number, *A) for number in range(TOGETHER + 1)]
    reuser, prefiller = make()
    prefiller.fail_at = TOGETHER
    with pytest.raises(Overloaded):
        reuser.warm(chunks)
    prefiller.fail_at = None
    assert reuser.warm(chunks) == WarmReport(computed=1, present=TOGETHER)
    assert prefiller.batches == [TOGETHER, 1, 1]


def test_chunks_that_find_the_queue_too_full_together_are_computed_one_by_one():
    reuser, prefiller = make()
    prefiller.queue = 1
    assert reuser.warm([A, B, C]) == WarmReport(computed=3)
    assert [request.ids for request in prefiller.seen] == [A, B, C]


def test_warm_says_when_the_store_refuses_and_when_a_chunk_is_too_long():
    reuser, _ = make(EmptyStore())
    assert reuser.warm([A, range(65)]) == WarmReport(refused=1, skipped=1)


def test_a_chunk_beyond_the_engines_memory_keeps_no_other_from_being_computed():
    reuser, prefiller = make()
    prefiller.memory = 10
    assert reuser.warm([B, A]) == WarmReport(computed=1, skipped=1)


def test_a_chunk_is_computed_by_one_thread_at_a_time():
    started, go = threading.Event(), threading.Event()

    class Slow(Prefiller):
        def run(self, request: GenerationRequest) -> Result:
            started.set()
            assert go.wait(10)
            return super().run(request)

    slow = Slow()
    reuser = Reuser(slow, RamStore(1 << 20), spec=SPEC, fingerprint="model", min_tokens=4)
    first = threading.Thread(target=reuser.warm, args=([A],))
    first.start()
    assert started.wait(10)
    assert reuser.warm([A]) == WarmReport(present=1)
    go.set()
    first.join()
    assert len(slow.seen) == 1


def test_what_is_forgotten_while_it_waits_or_is_computed_is_not_kept(tmp_path: Path):
    started, go = threading.Event(), threading.Event()

    class Slow(Prefiller):
        def run(self, request: GenerationRequest) -> Result:
            if request.ids == B:
                started.set()
                assert go.wait(10)
            return super().run(request)

    slow = Slow()
    store = TieredStore(DiskStore(tmp_path, 1 << 24), ram_budget=1 << 20)
    reuser = Reuser(slow, store, spec=SPEC, fingerprint="model", min_tokens=4)
    before = reuser.now
    reuser.warm([A])
    assert reuser.forget([A]) == 1
    slow.seen.clear()
    assert reuser.warm([A, C], wanted=before) == WarmReport(computed=1, skipped=1), "a lesson that waited"
    assert [request.ids for request in slow.seen] == [C]
    assert reuser.warm([A], wanted=before, salt="other") == WarmReport(computed=1)
    assert reuser.warm([A], wanted=reuser.now) == WarmReport(computed=1), "it came again"
    reports: list[WarmReport] = []
    computing = threading.Thread(target=lambda: reports.append(reuser.warm([A, B, C])))
    computing.start()
    assert started.wait(10)
    assert reuser.forget([B]) == 0
    go.set()
    computing.join()
    assert reports == [WarmReport(present=2, skipped=1)]
    key = KeySpace("model").key(B)
    assert not store.contains(key) and not list(tmp_path.glob(f"{key.digest}*"))
    assert reuser.plan([*B, 1], [(0, len(B))]).misses == (B,)


def test_who_found_a_chunk_while_it_was_deleted_does_not_compute_it_again():
    class Watched(RamStore):
        def delete_all(self, digests: Collection[str]) -> Counter[str]:
            moments.append(reuser.now)
            return super().delete_all(digests)

    moments: list[float] = []
    reuser, _ = make(Watched(1 << 20))
    reuser.warm([A])
    reuser.forget([A])
    assert reuser.warm([A], wanted=moments[0]) == WarmReport(skipped=1)


def test_what_was_forgotten_too_long_ago_to_be_known_counts_as_forgotten():
    moments = iter([1.0, 2.0, 3.0])
    forgotten = Forgotten(most=2, clock=lambda: next(moments))
    forgotten.add(["a"])
    assert [forgotten.since(name, 0.5) for name in "ab"] == [True, False] and not forgotten.since("a", 1.5)
    forgotten.add("bc")
    assert forgotten.since("d", 0.5) and not forgotten.since("d", 1.5)
    assert forgotten.since("b", 1.5) and forgotten.since("b", 2.0) and not forgotten.since("b", forgotten.now)


def test_plan_places_hits_and_names_misses():
    reuser, _ = make()
    reuser.warm([A, B])
    ids = [*A, 1, 2, *C, *B, *A, 3, *C, 4]
    spans = [(12, 8), (0, 10), (20, 12), (43, 8), (32, 10)]
    plan = reuser.plan(ids, spans)
    assert plan.hits == ((0, 10, "ram", 0), (20, 12, "ram", 0), (32, 10, "ram", 0))
    assert plan.misses == (C,)
    assert plan.reuse is not None and plan.reuse.ratio == 0.15
    assert (plan.reuse.selector, plan.reuse.chooser) == AUTO
    ropes = LayerRopes(SPEC.ropes)
    for span, chunk in zip(plan.reuse.spans, (A, B, A), strict=True):
        moved = repositioned(kv_of(chunk), ropes, old=0, new=span.start)
        assert tuple(ids[span.start : span.stop]) == chunk
        assert torch.equal(span.kv.k, moved.k) and torch.equal(span.kv.v, moved.v)
    assert sum(tier.hits for tier in reuser.stats()) == 2, "a chunk that occurs twice is loaded once"


def test_only_what_is_not_in_memory_is_read_by_other_threads():
    class Slow(RamStore):
        def __init__(self, quick: set[int]) -> None:
            super().__init__(1 << 20)
            self.quick, self.asked = quick, dict[int, bool]()

        def at_hand(self, key: ChunkKey) -> bool:
            return key.tokens in self.quick

        def get(self, key: ChunkKey) -> StoredChunk | None:
            self.asked[key.tokens] = threading.current_thread() is threading.main_thread()
            return super().get(key)

    chunks = [tuple(range(length)) for length in (5, 6, 7, 8)]
    ids = [token for chunk in chunks for token in chunk] + [1]
    spans = [(0, 5), (5, 6), (11, 7), (18, 8)]
    for quick, here in (
        ({5, 6, 7, 8}, {5, 6, 7, 8}),
        ({6, 8}, {6, 8}),
        ({5, 6, 8}, {5, 6, 7, 8}),
        (set[int](), set[int]()),
    ):
        store = Slow(quick)
        reuser, _ = make(store)
        reuser.warm(chunks)
        store.asked.clear()
        assert [hit.start for hit in reuser.plan(ids, spans).hits] == [0, 5, 11, 18]
        assert {length for length, main in store.asked.items() if main} == here


def test_slow_tiers_are_asked_for_no_worse_key_than_is_there():
    class Slow(RamStore):
        asked = 0

        def contains(self, key: ChunkKey) -> bool:
            self.asked += 1
            return super().contains(key)

    slow = Slow(1 << 20)
    store = TieredStore(slow, ram_budget=1 << 20)
    reuser, _ = make(store, sinks=[(1, 2, 3)])
    reuser.warm([A])
    reuser.warm([B], anchor=())
    for chunk, asked, misses in ((A, 0, 0), (B, 1, 0), (C, 2, 1)):
        before, slow.asked = store.stats()[0].misses, 0
        plan = reuser.plan([*chunk, 1], [(0, len(chunk))])
        assert (len(plan.hits), slow.asked) == (1 - misses, asked)
        assert store.stats()[0].misses - before == misses


def test_the_last_token_is_never_loaded():
    reuser, _ = make()
    reuser.warm([A])
    plan = reuser.plan([1, *A], [(1, 10)])
    assert plan.reuse is not None and plan.reuse.spans[0].kv.tokens == 9 and plan.hits == ((1, 9, "ram", 0),)
    reuser, _ = make(min_tokens=1)
    assert reuser.plan([1, 2], [(1, 1)]) == ReusePlan(None, (), ())


def test_modes_decide_what_is_recomputed():
    reuser, _ = make()
    reuser.warm([A])
    ids, spans = [*A, 1], [(0, 10)]
    repairs: dict[str, Repair] = {}
    for mode in ("reuse", "blend"):
        reuse = reuser.plan(ids, spans, mode=mode).reuse
        assert reuse is not None
        repairs[mode] = Repair(reuse.selector, reuse.chooser)
    assert repairs == {"reuse": Repair(), "blend": AUTO}
    for mode in ("off", "prefix"):
        assert reuser.plan(ids, spans, mode=mode) == ReusePlan(None, (), ())
    whole = reuser.plan(ids, spans, repair=Repair(KVDeviation(layer=2, on="k")), ratio=1.0).reuse
    assert whole is not None and (whole.selector, whole.ratio) == (KVDeviation(layer=2, on="k"), 1.0)
    nothing = reuser.plan(ids, spans, ratio=0.0).reuse
    assert nothing is not None and nothing.selector is nothing.chooser is None, (
        "nobody is to be selected, so no layer need be computed"
    )


def test_short_spans_are_neither_hits_nor_misses():
    reuser, _ = make()
    assert reuser.plan([1, 2, 3, *A, 5], [(0, 3), (3, 10)]) == ReusePlan(None, (), (A,))


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"mode": "magic"}, "no reuse mode 'magic'; there are: off, prefix, reuse, blend", "reuse.mode"),
        ({"ratio": 1.5}, r"between 0 and 1, got 1\.5", "reuse.ratio"),
        ({"ratio": float("nan")}, "between 0 and 1, got nan", "reuse.ratio"),
        (
            {"repair": Repair(KVDeviation(layer=3))},
            "layer 3, but the model has 0 to 2",
            "reuse.selector.layer",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str, param: str):
    reuser, _ = make()
    with pytest.raises(BadRequest, match=message) as caught:
        reuser.plan([*A, 1], [(0, 10)], **options)
    assert caught.value.param == param


def test_salts_and_models_do_not_see_each_other():
    store = RamStore(1 << 20)
    mine, _ = make(store, salt="mine")
    other_model, _ = make(store, salt="mine", fingerprint="other")
    mine.warm([A])
    ids, spans = [*A, 1], [(0, 10)]
    assert mine.plan(ids, spans).reuse is not None
    assert mine.plan(ids, spans, salt="yours").misses == (A,)
    assert other_model.plan(ids, spans).misses == (A,)
    mine.warm([A], salt="yours")
    assert mine.plan(ids, spans, salt="yours").reuse is not None
    assert mine.forget([A, B]) == 1 and mine.plan(ids, spans).misses == (A,)
    assert mine.plan(ids, spans, salt="yours").reuse is not None


def test_a_model_whose_positions_cannot_move_is_refused():
    spec: ModelSpec = replace(SPEC, ropes=(*SPEC.ropes[:2], replace(SPEC.ropes[2], kind="longrope")))
    with pytest.raises(ConfigError, match="'longrope'"):
        make(spec=spec)


SYSTEM, HEADER = (1, 2, 3), (8, 9)


def test_a_chunk_is_computed_after_its_anchor_which_is_dropped():
    reuser, prefiller = make(sinks=[HEADER])
    assert reuser.warm([A, B]) == WarmReport(computed=2)
    assert [request.ids for request in prefiller.seen] == [HEADER, (*HEADER, *A), (*HEADER, *B)]
    known = prefiller.seen[1].reuse
    assert known is not None and known.spans[0].start == 0 and known.spans[0].kv.tokens == len(HEADER)
    ids = [5, *A, 6]
    plan = reuser.plan(ids, [(1, 10)], mode="reuse")
    assert plan.hits == ((1, 10, "ram", 2),) and plan.reuse is not None
    (span,) = plan.reuse.spans
    whole = kv_of((*HEADER, *A))
    moved = repositioned(KVBlock(whole.k[:, 2:], whole.v[:, 2:]), LayerRopes(SPEC.ropes), old=2, new=1)
    assert torch.equal(span.kv.k, moved.k) and torch.equal(span.kv.v, moved.v)


def test_the_longest_anchor_that_the_prompt_begins_with_is_taken_then_a_sink_then_the_bare_chunk():
    reuser, _ = make(sinks=[HEADER])
    ids, spans, anchors = [*SYSTEM, *A, 7], [(3, 10)], [(1,), (1, 2), SYSTEM, (1, 2, 4), (*SYSTEM, A[0])]

    def taken() -> list[int]:
        return [hit.anchor for hit in reuser.plan(ids, spans, anchors=anchors).hits]

    assert taken() == []
    for anchor in ((1, 2, 4), (*SYSTEM, A[0])):
        reuser.warm([A], anchor=anchor)
        assert taken() == [], "the prompt does not begin so, or the anchor reaches into the chunk"
    for anchor, longest in [((), 0), (HEADER, 2), ((1,), 1), (SYSTEM, 3), ((1, 2), 3)]:
        reuser.warm([A], anchor=anchor)
        assert taken() == [longest]


def test_a_prompts_own_anchor_is_worth_computing_from_its_second_sight_on():
    reuser, _ = make(sinks=[HEADER])
    ids, spans = [*SYSTEM, *A, 7], [(3, 10)]
    for _ in range(3):
        reuser.plan(ids, spans, anchors=[SYSTEM])  # for requests that are refused, or served another way
    first = came(reuser, ids, spans, anchors=[SYSTEM])
    assert (first.anchors, first.misses, first.poorer) == ({A: HEADER}, (A,), ())
    reuser.warm(first.misses, anchor=first.anchors[A])
    second = came(reuser, ids, spans, anchors=[SYSTEM])
    assert (second.anchors, second.misses, second.poorer) == ({A: SYSTEM}, (), (A,))
    assert [hit.anchor for hit in second.hits] == [2], "what there is serves meanwhile"
    other = came(reuser, ids, spans, anchors=[SYSTEM], salt="tenant")
    assert other.anchors == {A: HEADER}, "a tenant's prompts are no sights of another's"
    reuser.warm(second.poorer, anchor=second.anchors[A])
    third = came(reuser, ids, spans, anchors=[SYSTEM])
    assert (third.anchors, third.misses, third.poorer) == ({}, (), ())
    assert reuser.plan([8, *A, 7], [(1, 10)]).poorer == (), "without an anchor of its own a sink is the best"


def test_a_chunk_is_forgotten_under_all_its_anchors():
    reuser, _ = make(sinks=[HEADER])
    for anchor in ((), HEADER, SYSTEM):
        reuser.warm([A, B], anchor=anchor)
    assert reuser.forget([A]) == 1
    ids = [*SYSTEM, *A, *B, 7]
    assert reuser.plan(ids, [(3, 10), (13, 12)], anchors=[SYSTEM]).misses == (A,)


def test_many_chunks_of_many_tenants_are_forgotten_in_one_pass_over_each_tier(tmp_path: Path):
    class Counted(DiskStore):
        passes = 0

        def _scan(self) -> list[Any]:
            self.passes += 1
            return super()._scan()

    class Seen(OrderedDict[ChunkKey, StoredChunk]):
        passes = 0

        def __iter__(self) -> Iterator[ChunkKey]:
            self.passes += 1
            return super().__iter__()

    disk = Counted(tmp_path, 1 << 24)
    store = TieredStore(disk, ram_budget=1 << 20)
    store._memory._chunks = seen = Seen()
    reuser, _ = make(store)
    chunks, salts = [(n, 5, 6, 7) for n in range(20)], ["a", "b", "c"]
    for salt in salts:
        reuser.warm(chunks, salt=salt)
    disk.passes = seen.passes = 0
    assert reuser.forget([*chunks[1:], C], salts=salts[:2]) == 19
    assert (disk.passes, seen.passes) == (1, 1)
    kept = {KeySpace("model", salt).key(one) for salt in salts for one in (chunks if salt == "c" else chunks[:1])}
    assert set(seen) == kept
    assert all(map(disk.contains, kept)) and disk.stats()[0].entries == len(kept) == 22


def test_an_anchor_counts_for_the_models_context():
    reuser, _ = make()
    assert reuser.warm([A], anchor=range(55)) == WarmReport(skipped=1)
    assert reuser.warm([A], anchor=range(54)) == WarmReport(computed=1)


def test_what_is_found_is_placed_in_whole_and_in_part():
    store = RamStore(1 << 20)
    reuser, _ = make(store, min_tokens=31)
    chunk = tuple(range(1, 41))
    reuser.warm([chunk])
    ids = [99, 98, *chunk, 97, *chunk[5:], 96]
    found = reuser.finder.find(ids, salt="")
    assert [(match.start, match.length, match.offset) for match in found] == [(2, 40, 0), (43, 35, 5)]
    plan = reuser.plan(ids, [], mode="reuse", found=found)
    assert plan.reuse is not None and plan.misses == ()
    assert [(hit.start, hit.tokens) for hit in plan.hits] == [(2, 40), (43, 35)]
    stored, ropes = kv_of(chunk), LayerRopes(SPEC.ropes)
    for span, offset in zip(plan.reuse.spans, (0, 5), strict=True):
        part = KVBlock(stored.k[:, offset:], stored.v[:, offset:])
        expected = repositioned(part, ropes, old=offset, new=span.start)
        assert torch.equal(span.kv.k, expected.k) and torch.equal(span.kv.v, expected.v)


def test_what_is_found_but_gone_from_the_store_is_found_no_more():
    store = RamStore(1 << 20)
    reuser, _ = make(store, min_tokens=31)
    chunk = tuple(range(1, 41))
    reuser.warm([chunk])
    found = reuser.finder.find(chunk, salt="")
    store.delete(KeySpace("model").key(chunk))
    plan = reuser.plan(chunk, [], found=found)
    assert plan.reuse is None and plan.misses == ()  # its text is cut anew, like any that is not known
    assert reuser.finder.find(chunk, salt="") == []


def test_chunks_that_are_forgotten_are_found_no_more():
    reuser, _ = make(min_tokens=31)
    chunk = tuple(range(1, 41))
    reuser.warm([chunk])
    assert reuser.forget([chunk]) == 1 and reuser.finder.find(chunk, salt="") == []
    assert reuser.warm([chunk, chunk]) == WarmReport(computed=1) and reuser.finder.find(chunk, salt="")
