"""Sinks of several lengths: which of them serves a chunk by where it stands, and when it is computed once more."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.types import GenerationRequest
from promptsluice.kv_reuse import ChunkKey, DiskStore, KeySpace, Match, RamStore, ReusePlan, WarmReport
from promptsluice.kv_reuse.anchors import BARE, MOST_TOKENS, Anchors
from promptsluice.kv_reuse.lookup import Lookup
from promptsluice.kv_reuse.sights import Sights
from promptsluice.kv_reuse.tiered import TieredStore
from promptsluice.kv_reuse.warm import PLACES, TOGETHER

from .test_reuser import SPEC, A, B, Prefiller, came, kv_of, make

SHORT, MIDDLE, LONG = (1, 2), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3)
SINKS = (MIDDLE, LONG, SHORT)
OWN = (90, 91, 92)


def at(place: int, *chunks: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt, and the spans in it of the chunks, one behind the other from a place on."""
    ids, spans = [99] * place, list[tuple[int, int]]()
    for chunk in chunks:
        spans.append((len(ids), len(chunk)))
        ids += chunk
    return [*ids, 98], spans


def after(prefiller: Prefiller) -> list[GenerationRequest]:
    """The requests for chunks, not those for anchors alone."""
    return [request for request in prefiller.seen if request.ids not in SINKS]


def known_of(request: GenerationRequest) -> int:
    """How many of its first tokens are given to the engine as KV."""
    return 0 if request.reuse is None else sum(span.kv.tokens for span in request.reuse.spans)


def anchors(plan: ReusePlan) -> list[int]:
    return [hit.anchor for hit in plan.hits]


@pytest.mark.parametrize(
    ("place", "order"),
    [
        (0, [SHORT, MIDDLE, LONG]),
        (4, [SHORT, MIDDLE, LONG]),  # as near to the next one: the shorter one costs less
        (5, [MIDDLE, SHORT, LONG]),
        (8, [MIDDLE, LONG, SHORT]),
        (10, [LONG, MIDDLE, SHORT]),
        (5000, [LONG, MIDDLE, SHORT]),
    ],
)
def test_the_sink_that_is_about_as_long_as_what_stands_before_the_chunk_comes_first(
    place: int, order: list[tuple[int, ...]]
) -> None:
    known = Anchors(SINKS)
    assert known.fitting(place) == (*order, BARE)
    assert known.fitting(place, [OWN, MIDDLE]) == (OWN, MIDDLE, *(sink for sink in order if sink != MIDDLE), BARE)


def test_the_general_sink_is_the_middle_one() -> None:
    generals = [Anchors(sinks).general() for sinks in (SINKS, (LONG, SHORT), (SHORT, ()), ())]
    assert generals == [MIDDLE, LONG, SHORT, BARE]
    assert Anchors(()).fitting(7) == (BARE,)


@pytest.mark.parametrize(
    ("room", "longest", "generals"),
    [
        (50, 99, {1: MIDDLE, 44: MIDDLE, 45: SHORT, 48: SHORT, 49: BARE, 60: BARE}),
        (99, 6, {1: MIDDLE}),
        (99, 5, {1: SHORT}),
        (99, 1, {1: SHORT}),
    ],
)
def test_the_general_sink_is_shorter_where_it_leaves_no_room(
    room: int, longest: int, generals: dict[int, tuple[int, ...]]
) -> None:
    known = Anchors(SINKS, room=room, longest=longest)
    assert {tokens: known.general(tokens) for tokens in generals} == generals
    assert known.sinks == (SHORT, MIDDLE, LONG), "all are looked up"


def test_a_chunk_is_computed_after_the_best_anchor_that_leaves_room_for_it() -> None:
    reuser, prefiller = make(sinks=SINKS, spec=replace(SPEC, max_context=60), longest_sink=6)
    chunks = [tuple(range(n)) for n in (20, 48, 55, 57, 59, 60)]
    wanted = [MIDDLE, MIDDLE, SHORT, SHORT, BARE, BARE]
    for n, (chunk, anchor) in enumerate(zip(chunks, wanted, strict=True)):
        missed = reuser.plan(*at(30, chunk), salt=str(n))
        assert missed.by_anchor(missed.misses) == {anchor: [chunk]}
        own = [came(reuser, [*OWN, *chunk, 7], [(3, len(chunk))], anchors=[OWN], salt="own") for _ in range(2)]
        assert own[1].anchors.get(chunk, BARE) == (OWN if len(chunk) <= 57 else BARE)
    assert reuser.warm(chunks) == WarmReport(computed=6)
    behind = [request.ids[: -len(chunk)] for request, chunk in zip(after(prefiller), chunks, strict=True)]
    assert behind == wanted
    again = [reuser.plan(*at(30, chunk)) for chunk in chunks for _ in range(3)]
    assert all(len(plan.hits) == 1 and plan.poorer == () for plan in again), "there is no better one to be had"


def test_an_engine_with_less_memory_computes_long_chunks_after_shorter_sinks() -> None:
    reuser, prefiller = make(sinks=SINKS, memory=24)
    prefiller.memory = 24
    chunks = [tuple(range(n)) for n in (18, 19, 23, 25)]
    assert reuser.warm(chunks) == WarmReport(computed=3, skipped=1)
    assert [len(request.ids) for request in after(prefiller)] == [24, 21, 23]


def test_what_others_computed_after_sinks_that_are_too_long_here_is_found() -> None:
    store = RamStore(1 << 20)
    roomy, _ = make(store, sinks=SINKS)
    small, prefiller = make(store, sinks=SINKS, longest_sink=3, memory=30)
    roomy.warm([A], anchor=LONG)
    roomy.warm([B])
    for _ in range(3):
        plan = small.plan(*at(30, A, B))
        assert (anchors(plan), plan.misses, plan.poorer) == ([12, 6], (), ())
    assert small.warm([A, B]) == WarmReport(present=2) and prefiller.seen == []
    assert came(roomy, *at(1, B)).poorer == ()
    assert roomy.plan(*at(1, B)).anchors == {B: SHORT}


def test_only_what_is_stored_after_no_sink_is_computed_ahead() -> None:
    reuser, prefiller = make(sinks=SINKS)
    for anchor in SINKS:
        assert reuser.warm([A], anchor=anchor, salt=str(anchor)) == WarmReport(computed=1)
        seen = len(prefiller.seen)
        assert reuser.warm([A], salt=str(anchor)) == WarmReport(present=1) and len(prefiller.seen) == seen
    reuser.warm([A], anchor=BARE)
    assert reuser.warm([A]) == WarmReport(computed=1), "bare is worse than any sink"
    assert reuser.warm([A], anchor=LONG) == WarmReport(computed=1), "who names an anchor wants that one"


def test_a_prompts_own_anchors_are_what_it_begins_with_before_its_first_chunk() -> None:
    ids, known = (*OWN, 5, *A), Anchors(SINKS)
    named = [(90,), OWN, (90, 92), (*OWN, 5, A[0]), ()]
    assert known.own(ids, named, before=4) == (OWN, (90,))
    long = (7,) * (MOST_TOKENS + 1)
    assert known.own(long, [long, long[1:]], before=len(long)) == (long[1:],)


def test_chunks_are_computed_ahead_after_the_middle_sink() -> None:
    reuser, prefiller = make(sinks=SINKS)
    reuser.warm([A])
    assert [request.ids for request in prefiller.seen] == [MIDDLE, (*MIDDLE, *A)]
    assert anchors(reuser.plan(*at(40, A))) == [len(MIDDLE)]


def test_of_sinks_that_begin_each_other_the_kv_is_computed_once() -> None:
    for order in ((SHORT, MIDDLE, LONG), (LONG, SHORT, MIDDLE)):
        reuser, prefiller = make(sinks=SINKS)
        for anchor in (*order, *order):
            reuser.warm([A, B], anchor=anchor)
        alone = [(request.ids, known_of(request)) for request in prefiller.seen if request.ids in SINKS]
        before = [0, *(len(sink) for sink in order[:-1])]
        wanted = list(zip(order, before, strict=True)) if order[0] is SHORT else [(LONG, 0)]
        assert alone == wanted
        for request in after(prefiller):
            assert request.ids[known_of(request) :] in (A, B)


def test_what_is_missing_is_computed_after_the_sink_that_is_nearest_to_its_place() -> None:
    reuser, _ = make(sinks=SINKS)
    plan = reuser.plan(*at(1, A, B))
    assert plan.misses == (A, B) and plan.anchors == {A: SHORT, B: LONG}
    assert plan.by_anchor(plan.misses) == {SHORT: [A], LONG: [B]}
    for anchor, chunks in plan.by_anchor(plan.misses).items():
        reuser.warm(chunks, anchor=anchor)
    again = reuser.plan(*at(1, A, B))
    assert anchors(again) == [2, 12] and again.poorer == ()


def test_the_nearest_sink_is_taken_of_those_that_are_stored() -> None:
    reuser, _ = make(sinks=SINKS)
    for anchor, taken in ((BARE, [0, 0, 0]), (LONG, [12, 12, 12]), (SHORT, [2, 2, 12]), (MIDDLE, [2, 6, 12])):
        reuser.warm([A], anchor=anchor)
        assert [anchors(reuser.plan(*at(place, A), sight=False)) for place in (0, 6, 30)] == [[one] for one in taken]


def test_a_nearer_sink_is_worth_computing_for_from_the_second_sight_at_such_a_place_on() -> None:
    reuser, _ = make(sinks=SINKS)
    reuser.warm([A, B])
    places = (30, 0, 7, 1, 29)
    plans = [came(reuser, *at(place, A)) for place in places]
    assert [anchors(plan) for plan in plans] == [[len(MIDDLE)]] * 5, "what is stored serves meanwhile"
    assert [plan.poorer for plan in plans] == [(), (), (), (A,), (A,)]
    assert [plan.anchors for plan in plans[3:]] == [{A: SHORT}, {A: LONG}]
    assert came(reuser, *at(30, A), salt="tenant").misses == (A,)
    reuser.warm([A], salt="tenant")
    assert came(reuser, *at(30, A), salt="tenant").poorer == (A,), "a tenant's own second sight"
    assert came(reuser, *at(30, B)).poorer == (), "of another chunk it is the first one"
    reuser.warm(plans[3].poorer, anchor=SHORT)
    served = came(reuser, *at(1, A))
    assert anchors(served) == [2] and served.poorer == () and served.anchors == {}


def test_a_look_that_is_no_sight_counts_for_nothing() -> None:
    reuser, _ = make(sinks=SINKS)
    reuser.warm([A])
    for _ in range(3):
        assert reuser.plan(*at(30, A), sight=False).poorer == ()
        assert reuser.plan([*OWN, *at(30, A)[0]], [(33, 10)], anchors=[OWN], sight=False).poorer == ()
    assert came(reuser, *at(30, A)).poorer == ()
    for _ in range(3):
        assert reuser.plan(*at(30, A), sight=False).poorer == ()
        assert reuser.plan(*at(30, A)).poorer == (A,), "no look counts but that of a request that ran"


def test_a_chunk_that_was_computed_bare_is_worth_a_sink_at_once() -> None:
    reuser, _ = make(sinks=SINKS)
    reuser.warm([A], anchor=BARE)
    plan = reuser.plan(*at(30, A))
    assert anchors(plan) == [0] and plan.poorer == (A,) and plan.anchors == {A: LONG}


def test_own_anchors_come_before_sinks_and_count_by_the_prompt() -> None:
    reuser, _ = make(sinks=SINKS)
    reuser.warm([A])
    ids, spans = [*OWN, *A, 7], [(3, 10)]
    first = came(reuser, ids, spans, anchors=[OWN])
    assert (first.poorer, anchors(first)) == ((), [6])
    second = came(reuser, ids, spans, anchors=[OWN])
    assert (second.poorer, second.anchors) == ((A,), {A: OWN})
    reuser.warm([A], anchor=OWN)
    assert anchors(came(reuser, ids, spans, anchors=[OWN])) == [3]
    assert anchors(came(reuser, *at(3, A))) == [6], "not for a prompt that begins otherwise"


def test_a_chunk_that_stands_twice_is_served_by_its_first_place() -> None:
    reuser, _ = make(sinks=SINKS)
    for anchor in (SHORT, LONG):
        reuser.warm([A], anchor=anchor)
    assert anchors(reuser.plan(*at(1, A, B, A))) == [2, 2]


def test_for_a_part_of_a_chunk_counts_what_stood_before_the_chunk() -> None:
    reuser, _ = make(sinks=SINKS)
    for anchor in SINKS:
        reuser.warm([A], anchor=anchor)
    ids = [99] * 14 + [*A[4:], 98]
    for offset, taken in ((4, 12), (8, 6), (9, 6), (0, 12)):
        part = A[offset:]
        plan = reuser.plan([*ids[:14], *part, 98], [], found=[Match(14, len(part), A, offset)])
        assert anchors(plan) == [taken]


@pytest.mark.parametrize("tiers", ["ram", "disk", "both"])
def test_a_chunk_is_forgotten_under_all_sinks_those_of_earlier_versions_too(tmp_path: Path, tiers: str) -> None:
    disk = DiskStore(tmp_path, 1 << 24)
    one = 3 * 2 * 12 * 8 * 4 + 48  # bytes of B: of those that are in both, most are on the disk only
    both = TieredStore(disk, ram_budget=3 * one)
    store = {"ram": RamStore(1 << 20), "disk": disk, "both": both}[tiers]
    reuser, _ = make(store, sinks=SINKS)
    for anchor in (*SINKS, BARE, (1, 2, 3)):
        reuser.warm([A, B], anchor=anchor)
    assert store.stats()[-1].entries == 10
    assert reuser.forget([A]) == 1 and store.stats()[-1].entries == 5
    for place in (0, 6, 30):
        assert reuser.plan(*at(place, A, B)).misses == (A,)
    another, _ = make(store, sinks=SINKS)
    assert another.plan(*at(6, A, B)).misses == (A,)


@pytest.mark.slow
def test_threads_that_look_at_once_while_chunks_come_and_go_get_what_was_stored(tmp_path: Path) -> None:
    store = TieredStore(DiskStore(tmp_path, 1 << 24), ram_budget=1 << 13)  # a few chunks
    reuser, _ = make(store, sinks=SINKS)
    lookup, space = Lookup(store, Anchors(SINKS)), KeySpace("model")
    chunks = [tuple(range(n, n + 12)) for n in range(8)]
    kept, others = chunks[:4], chunks[4:]
    for anchor in (LONG, SHORT):
        reuser.warm(kept, anchor=anchor)
    ended, failures, looks = threading.Event(), list[str](), list[int]()

    def look() -> None:
        count = 0
        while not ended.is_set():
            places = [Match(n * 12, 12, chunk, 0) for n, chunk in enumerate(chunks)]
            for ids, one in lookup.look(places, space, own=(), sight=True).items():
                lookup.saw(one.sights)
                if one.chunk is None:
                    failures.extend(["gone"] if ids in kept else [])
                    continue
                before = next(sink for sink in (*SINKS, BARE) if len(sink) == one.chunk.position)
                same = torch.equal(one.chunk.kv.widened().k, kv_of((*before, *ids)).k[:, len(before) :])
                failures.extend([] if same and one.chunk.ids == ids else ["other"])
            count += 1
        looks.append(count)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for anchor in (MIDDLE, BARE):
            reuser.warm(others, anchor=anchor)
        reuser.forget(others)
    ended.set()
    for thread in threads:
        thread.join()
    assert len(looks) == 4 and min(looks) > 0 and failures == []


def test_slow_tiers_are_asked_for_a_nearer_sink_from_the_second_sight_on() -> None:
    class Slow(RamStore):
        asked = 0

        def contains(self, key: ChunkKey) -> bool:
            self.asked += 1
            return super().contains(key)

    slow = Slow(1 << 20)
    store = TieredStore(slow, ram_budget=1 << 20)
    reuser, _ = make(store, sinks=SINKS)
    reuser.warm([A])
    other, _ = make(slow, sinks=SINKS)
    other.warm([A], anchor=LONG)
    served: list[tuple[list[int], str, int]] = []
    for _ in range(3):
        slow.asked = 0
        plan = came(reuser, *at(30, A))
        served.append((anchors(plan), plan.hits[0].tier, slow.asked))
        assert plan.poorer == ()
    assert served == [([6], "ram", 0), ([12], "ram", 1), ([12], "ram", 0)]


def test_slow_tiers_that_have_no_nearer_sink_are_not_asked_again_for_a_while() -> None:
    class Slow(RamStore):
        asked = 0

        def contains(self, key: ChunkKey) -> bool:
            self.asked += 1
            return super().contains(key)

    slow, now = Slow(1 << 20), 100.0
    store = TieredStore(slow, ram_budget=1 << 20)
    reuser, _ = make(store, sinks=SINKS)
    reuser.warm([A, B])
    lookup = Lookup(store, Anchors(SINKS), clock=lambda: now)

    def asked(chunk: tuple[int, ...], place: int = 30) -> tuple[int, bool]:
        slow.asked = 0
        match = Match(place, len(chunk), chunk, 0)
        looked = lookup.look([match], KeySpace("model"), own=(), sight=True)[chunk]
        lookup.saw(looked.sights)
        assert looked.chunk is not None and (looked.chunk.position, looked.chunk.tier) == (len(MIDDLE), "ram")
        return slow.asked, looked.sought

    assert [asked(A) for _ in range(4)] == [(0, False), (1, True), (0, False), (0, False)]
    assert [asked(B) for _ in range(3)] == [(0, False), (1, True), (0, False)], "another chunk"
    assert [asked(A, 1) for _ in range(3)] == [(0, False), (1, True), (0, False)], "another sink"
    now = 161.0
    assert [asked(A) for _ in range(2)] == [(1, True), (0, False)]
    reuser.warm([A], anchor=LONG)
    looked = lookup.look([Match(30, len(A), A, 0)], KeySpace("model"), own=(), sight=True)[A]
    assert looked.chunk is not None and looked.chunk.position == len(LONG), "what was stored meanwhile is at hand"


def test_slow_tiers_that_have_no_sink_at_all_are_not_asked_again_for_a_while() -> None:
    class Slow(RamStore):
        asked = 0

        def contains(self, key: ChunkKey) -> bool:
            self.asked += 1
            return super().contains(key)

    slow, now = Slow(1 << 20, tier="disk"), 100.0
    store = TieredStore(slow, ram_budget=1 << 20)
    reuser, _ = make(store, sinks=SINKS)
    lookup = Lookup(store, Anchors(SINKS), clock=lambda: now)
    reuser.warm([A], anchor=BARE)

    def asked() -> tuple[int, int, bool, bool]:
        slow.asked = 0
        looked = lookup.look([Match(30, len(A), A, 0)], KeySpace("model"), own=(), sight=True)[A]
        lookup.saw(looked.sights)
        assert looked.chunk is not None
        return looked.chunk.position, slow.asked, looked.sought, looked.poorer

    assert [asked() for _ in range(3)] == [(0, 3, True, True), (0, 0, False, True), (0, 0, False, True)]
    now = 161.0
    assert [asked() for _ in range(2)] == [(0, 3, True, True), (0, 0, False, True)]
    other, _ = make(slow, sinks=SINKS)  # another process with the same slow tier
    other.warm([A], anchor=SHORT)
    now = 222.0
    assert [asked()[0] for _ in range(2)] == [len(SHORT), len(SHORT)]
    bare = KeySpace("model").key(A)
    store._memory.delete(bare)
    assert store.get(bare) is not None and store.at_hand(bare)
    assert asked()[0] == len(SHORT), "only the two before that sink were not there"


def test_slow_tiers_are_not_asked_for_sinks_that_are_too_long_here() -> None:
    store = TieredStore(RamStore(1 << 20, tier="disk"), ram_budget=1 << 20)
    reuser, _ = make(store, sinks=SINKS, longest_sink=len(MIDDLE))
    reuser.warm([A])
    for _ in range(3):
        plan = came(reuser, *at(30, A))
        assert anchors(plan) == [len(MIDDLE)] and not plan.sought and plan.poorer == ()


def test_what_slow_tiers_were_asked_for_in_vain_is_told_by_the_plan() -> None:
    reuser, _ = make(TieredStore(RamStore(1 << 20, tier="disk"), ram_budget=1 << 20), sinks=SINKS)
    reuser.warm([A])
    assert [came(reuser, *at(30, A, B)).sought for _ in range(3)] == [False, True, False]
    below = RamStore(1 << 20, tier="disk")
    filling, _ = make(below, sinks=SINKS)
    filling.warm([A])
    reuser, _ = make(TieredStore(below, ram_budget=1 << 20), sinks=SINKS)
    assert not came(reuser, *at(30, A)).sought, "a slow tier had it, and its time counts"


def test_a_nearer_copy_on_a_slow_tier_is_found_when_the_one_in_memory_has_just_left() -> None:
    class Leaving(RamStore):
        def at_hand(self, key: ChunkKey) -> bool:
            return key == KeySpace("model").key(A, anchor=MIDDLE)

    for anchor in (LONG, SHORT, BARE):
        reuser, _ = make(Leaving(1 << 20), sinks=SINKS)
        reuser.warm([A], anchor=anchor)
        plan = reuser.plan(*at(30, A))
        assert anchors(plan) == [len(anchor)] and plan.misses == ()


@pytest.mark.parametrize(
    ("before", "memory", "together"),
    [
        (0, 1 << 20, TOGETHER),
        (PLACES // TOGETHER - 4, 1 << 20, TOGETHER),
        (PLACES // 3, 1 << 20, 2),
        (100, 2496, 6),
        (100, 1000, 2),
        (100, 110, 1),
    ],
)
def test_fewer_chunks_are_computed_together_behind_a_long_anchor_or_in_little_memory(
    before: int, memory: int, together: int
) -> None:
    reuser, prefiller = make(RamStore(1 << 30), spec=replace(SPEC, max_context=before + 100), memory=memory)
    prefiller.memory = before + 100
    reuser.warm([(n, 5, 6, 7) for n in range(TOGETHER)], anchor=[9] * before)
    assert max(prefiller.batches) == together


def test_keys_of_many_chunks_are_those_of_each() -> None:
    space = KeySpace("model", "salt")
    wanted: dict[tuple[int, ...], Sequence[tuple[int, ...]]] = {A: (SHORT, LONG, BARE), B: (LONG, OWN)}
    assert space.keys(wanted) == {ids: [space.key(ids, anchor=one) for one in some] for ids, some in wanted.items()}


def test_sights_are_counted_and_the_longest_unseen_is_forgotten() -> None:
    sights = Sights(most=2)
    assert [sights.add(what) for what in "aababcb"] == [1, 2, 1, 3, 2, 1, 3]
    assert [sights.times(what) for what in "abc"] == [0, 3, 1]
