"""Blended prompts under their own keys: found by what goes on from the whole prompt, and by nothing else."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.kept_blends import KeptBlends, marked
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import Blending, GenerationRequest, KVBlock, Result, Reuse, ReusedSpan

from .driving import Collected, Reference, alone, assert_idle, finish, greedy, random_ids, tiny_engine, together
from .rows import FirstRows
from .test_tiers import forget, settled, tiered

PROMPT = random_ids(70, 3)
TURN = random_ids(9, 4)
BLEND = Blending("first", 0.2)
SPANS = ((10, 30), (33, 60))


def garbage(*places: tuple[int, int]) -> tuple[ReusedSpan, ...]:
    """Stored KV that is far from the true one, so that whoever sees it answers otherwise."""
    k, v = torch.randn(2, 4, 200, 2, 16, generator=torch.Generator().manual_seed(0))
    return tuple(ReusedSpan(start, KVBlock(k[:, start:stop], v[:, start:stop])) for start, stop in places)


def blended(
    ids: tuple[int, ...] = PROMPT,
    tokens: int = 10,
    *,
    places: tuple[tuple[int, int], ...] = SPANS,
    blending: Blending | None = BLEND,
    **fields: Any,
) -> GenerationRequest:
    ratio = 0.0 if blending is None else blending.ratio
    reuse = Reuse(spans=garbage(*places), selector=FirstRows() if ratio else None, ratio=ratio) if places else None
    return replace(greedy(ids, tokens, **fields), reuse=reuse, blending=blending)


def following(first: Collected, **fields: Any) -> GenerationRequest:
    """The next turn of the conversation."""
    return blended((*PROMPT, *first.tokens, *TURN), places=(), **fields)


def cached(result: Result) -> tuple[int, int]:
    return result.cached_tokens, result.blended_tokens


@pytest.fixture
def engine(model: LoadedModel) -> Engine:
    return tiny_engine(model)


def test_a_follow_up_turn_goes_on_from_the_very_rows_of_the_blend(model: LoadedModel, engine: Engine) -> None:
    whole = alone(tiny_engine(model), blended(tokens=20)).tokens
    first = alone(engine, blended())
    assert first.tokens == whole[:10]
    again = alone(engine, blended((*PROMPT, *first.tokens), places=()))
    assert again.tokens == whole[10:]
    assert cached(again.result) == (79, 79 - 8)  # all but the last token; the first page is exact
    assert engine.stats().blended_tokens == 71
    assert_idle(engine)


def test_each_further_turn_computes_only_itself(model: LoadedModel, engine: Engine) -> None:
    ids = PROMPT
    alone(engine, blended())
    for turn in range(4):
        result = alone(engine, blended(ids, 4, places=())).result
        assert result.cached_tokens >= len(ids) - 10 - (4 if turn else 0) - 1, turn
        assert result.reused_tokens == result.recomputed_tokens == 0
        ids = (*ids, *random_ids(10, 50 + turn))
    assert_idle(engine)


def test_plain_requests_get_what_a_full_prefill_gives(engine: Engine, reference: Reference) -> None:
    first = alone(engine, blended())
    ids = (*PROMPT, *first.tokens, *TURN)
    plain = alone(engine, greedy(ids))
    assert plain.tokens == reference.greedy(ids)
    assert cached(plain.result) == (8, 0)
    off = alone(engine, replace(following(first), prefix_cache=False)).result
    assert cached(off) == (0, 0)


@pytest.mark.parametrize(
    ("kept", "wanted", "serves"),
    [
        (Blending("first", 0.3), Blending("first", 0.2), True),
        (Blending("first", 0.2), Blending("first", 0.3), False),
        (Blending("first", 0.2), Blending("other", 0.2), False),
        (Blending("first", 0.2), Blending("other", 0.0), True),
        (Blending("first", 0.0), Blending("first", 0.2), False),
    ],
)
def test_only_what_was_blended_as_well_serves(engine: Engine, kept: Blending, wanted: Blending, serves: bool) -> None:
    first = alone(engine, blended(blending=kept))
    assert (alone(engine, following(first, blending=wanted)).result.blended_tokens > 0) is serves


def test_tenants_do_not_meet(engine: Engine) -> None:
    first = alone(engine, blended(namespace="one"))
    assert cached(alone(engine, following(first, namespace="two")).result) == (0, 0)
    assert alone(engine, following(first, namespace="one")).result.blended_tokens > 0


def test_another_question_about_the_same_documents_does_not_go_on_from_rows_chosen_for_the_first(
    engine: Engine,
) -> None:
    alone(engine, blended())
    for same in (60, 69):  # a question may differ in its last token
        other = alone(engine, blended((*PROMPT[:same], *random_ids(30, 8)), places=()))
        assert cached(other.result)[1] == 0, same


def test_what_is_exact_comes_first(engine: Engine, reference: Reference) -> None:
    first = alone(engine, blended())
    ids = (*PROMPT, *first.tokens, *TURN)
    alone(engine, greedy(ids, 0))
    found = alone(engine, following(first))
    assert cached(found.result) == (len(ids) - 1, 0) and found.tokens == reference.greedy(ids, 10)


def test_a_turn_with_documents_of_its_own_is_kept_as_the_worse_of_both(engine: Engine) -> None:
    first = alone(engine, blended())
    ids = (*PROMPT, *first.tokens, *random_ids(40, 5))
    worse = Blending("first", 0.1)
    second = alone(engine, blended(ids, places=((85, 105),), blending=worse))
    assert cached(second.result) == (79, 71) and second.result.reused_tokens == 18
    third = (*ids, *second.tokens, *TURN)
    assert alone(engine, blended(third, places=(), blending=worse)).result.cached_tokens >= len(ids) + 9
    other = (*ids[:110], *random_ids(30, 6))  # another question about the second turn's documents
    assert alone(engine, blended(other, places=(), blending=worse)).result.cached_tokens < 85
    better = alone(engine, blended(third, places=())).result
    assert better.cached_tokens == 110  # the first turn was that good, and `other` computed all behind it
    assert_idle(engine)


def test_whoever_asks_the_same_meanwhile_waits_for_the_one_blend(engine: Engine) -> None:
    first, second, plain = together(engine, blended(), blended(), greedy(PROMPT))
    assert first.tokens == second.tokens
    assert first.result.reused_tokens > 0 and second.result.reused_tokens == 0
    assert second.result.blended_tokens >= 60 and plain.result.blended_tokens == 0
    assert_idle(engine)


def test_what_is_not_kept_is_not_found(engine: Engine) -> None:
    first = alone(engine, blended(blending=None))
    assert cached(alone(engine, following(first)).result) == (10, 0)


def test_an_abort_in_the_middle_of_a_prefill_keeps_nothing(model: LoadedModel) -> None:
    engine, sink = tiny_engine(model, step_tokens=16), Collected()
    sequence = engine.add(blended(), sink)
    engine.step()
    engine.abort(sequence)
    assert cached(alone(engine, blended((*PROMPT, *TURN), places=())).result) == (10, 0)
    assert_idle(engine)


def test_an_abort_in_the_middle_of_an_answer_keeps_the_prompt(engine: Engine) -> None:
    sequence = engine.add(blended(), Collected())
    while sequence.generated < 3:
        engine.step()
    engine.abort(sequence)
    assert alone(engine, blended((*PROMPT, *TURN), places=())).result.cached_tokens == len(PROMPT)
    assert_idle(engine)


def test_who_is_preempted_goes_on_from_its_own_rows(model: LoadedModel) -> None:
    lone = alone(tiny_engine(model), blended(tokens=30))
    engine, sink = tiny_engine(model, max_running=1), Collected()
    sequence = engine.add(blended(tokens=30), sink)
    while sequence.generated < 10:
        engine.step()
    other = alone(engine, greedy(random_ids(40, 7), priority=1))
    assert engine.stats().preemptions == 1 and other.result.blended_tokens == 0
    assert sink.tokens == lone.tokens
    assert sink.result.work.rows <= lone.result.work.rows + 5  # its last page, and the newest token
    counts = ("cached_tokens", "blended_tokens", "reused_tokens", "recomputed_tokens")
    assert [getattr(sink.result, one) for one in counts] == [getattr(lone.result, one) for one in counts]
    assert_idle(engine)


def test_who_is_preempted_where_blends_are_evicted_blends_again(model: LoadedModel) -> None:
    requests = [blended(random_ids(28, seed), 40, places=((5, 20),)) for seed in range(5)]
    engine = tiny_engine(model, pages=30, max_running=5)
    crowded = together(engine, *requests)
    assert engine.stats().preemptions > 0
    assert {len(one.tokens) for one in crowded} == {40}
    assert all(one.result.reused_tokens <= 12 and one.result.cached_tokens == 0 for one in crowded)
    assert_idle(engine)


@pytest.mark.parametrize("gone", [1, 5, 1000])
def test_what_was_evicted_of_a_blend_is_computed(engine: Engine, gone: int) -> None:
    first = alone(engine, blended())
    engine.tree.evict(gone)
    second = alone(engine, following(first))
    assert second.result.cached_tokens <= max(0, 80 - 4 * (gone - 1))
    assert len(second.tokens) == 10
    assert_idle(engine)


@pytest.mark.parametrize("disk", [False, True])
def test_blends_come_back_from_tiers_for_whom_they_are(
    model: LoadedModel, reference: Reference, tmp_path: Path, disk: bool
) -> None:
    def away(name: str) -> Engine:
        """An engine whose pool has let go of a blended prompt."""
        engine = tiered(model, disk=tmp_path / name if disk else None)
        assert alone(engine, blended()).tokens == whole[:10]
        forget(engine)
        settled(engine)
        return engine

    whole = alone(tiny_engine(model), blended(tokens=20)).tokens
    ids = (*PROMPT, *whole[:10])
    engine = away("one")
    back = alone(engine, blended(ids, places=()))
    assert back.tokens == whole[10:]
    assert back.result.blended_tokens >= 64 and back.result.loaded_tokens >= 64
    assert_idle(engine)
    engine = away("two")
    plain, other = together(engine, greedy(ids), blended(ids, places=(), namespace="other"))
    assert plain.tokens[:10] == other.tokens == reference.greedy(ids, 10)
    assert plain.result.blended_tokens == other.result.cached_tokens == 0
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_in_any_mixture_plain_requests_are_exact(model: LoadedModel, reference: Reference, seed: int) -> None:
    """Conversations that grow by plain and blended turns, tenants, aborts and a pool too small for all of them."""
    dice = random.Random(seed)
    engine = tiny_engine(model, pages=90, max_running=6, step_tokens=32)
    talks = [random_ids(dice.randrange(30, 60), 100 * seed + number) for number in range(3)]
    for _ in range(12):
        requests = []
        for _ in range(dice.randrange(1, 4)):
            ids, space = dice.choice(talks), dice.choice(("", "other"))
            if dice.random() < 0.4:
                requests.append(greedy(ids, 6, namespace=space))
                continue
            start = dice.randrange(2, len(ids) - 12)
            places = ((start, dice.randrange(start + 4, len(ids) - 2)),) if dice.random() < 0.7 else ()
            blending = dice.choice((BLEND, Blending("first", 0.5), Blending("first", 0.0)))
            requests.append(blended(ids, 6, places=places, blending=blending, namespace=space))
        sinks = [Collected() for _ in requests]
        sequences = [engine.add(request, sink) for request, sink in zip(requests, sinks, strict=True)]
        if dice.random() < 0.3:
            for _ in range(dice.randrange(3)):
                engine.step()
            engine.abort(dice.choice(sequences))
        finish(engine)
        assert_idle(engine)
        for request, sink in zip(requests, sinks, strict=True):
            if request.blending is None:
                expected = reference.greedy(request.ids, 6)
                assert sink.tokens == expected[: len(sink.tokens)] and sink.result.blended_tokens == 0
                assert sink.result.finish_reason == "abort" or len(sink.tokens) == 6
        grown = dice.randrange(len(talks))
        if len(talks[grown]) < 120:
            talks[grown] = (*talks[grown], *sinks[0].tokens[:4], *random_ids(8, dice.randrange(10**6)))


def test_other_threads_see_about_how_much_is_known(model: LoadedModel) -> None:
    engine = tiny_engine(model)
    first, service = alone(engine, blended()), EngineService(engine)
    ids = (*PROMPT, *first.tokens, *TURN)
    assert service.known_tokens(ids) == 8
    assert service.known_tokens(ids, blending=BLEND) == 76
    assert service.known_tokens(ids, blending=Blending("first", 0.9)) == 8
    assert service.known_tokens(ids, blending=BLEND, namespace="other") == 0


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(lambda ids: np.array(ids, dtype=np.int64))


def added(blends: KeptBlends, ids: np.ndarray, namespace: str = "", blending: Blending = BLEND, **options: Any):
    digests = blends.digests(ids[:-1], namespace=namespace)
    return blends.add(ids, digests, blending, **({"start": 0, "behind": None} | options))


def found(blends: KeptBlends, ids: np.ndarray, namespace: str = "", blending: Blending = BLEND):
    return blends.find(ids, blends.digests(ids[:-1], namespace=namespace), blending)


@given(IDS, st.integers(0, 40), st.integers(0, 40))
def test_marked_ids_are_no_plain_ids_and_hold_them(ids: np.ndarray, start: int, later: int) -> None:
    blends = KeptBlends(page_size=4)
    first = added(blends, ids, start=start)
    if first is None:
        assert (len(ids) - 1) // 4 <= start // 4
        return
    assert first.exact == start // 4 * 4 < first.tokens < len(ids) == first.tokens + len(first.rest)
    second = added(blends, ids, "x", start=later, behind=first)
    for kept in (first, second):
        if kept is not None:
            keys = marked(ids, kept.marks)
            assert (keys % 2**32 == ids).all()
            assert ((keys >= 2**32) == (np.arange(len(ids)) >= kept.exact)).all()
    assert (marked(ids, ()) == ids).all()


@pytest.mark.slow
@given(st.lists(st.tuples(IDS, st.sampled_from(["", "a"]), st.sampled_from([0.0, 0.1, 0.5])), max_size=12), IDS)
def test_the_longest_good_prompt_is_found(prompts: list[tuple[np.ndarray, str, float]], asked: np.ndarray) -> None:
    blends, there = KeptBlends(page_size=4), []
    for ids, space, ratio in prompts:
        kept = added(blends, ids, space, Blending("way", ratio))
        if kept is not None and space == "a" and ratio >= 0.1:
            there.append(ids.tolist())
    best = found(blends, asked, "a", Blending("way", 0.1))
    fits = [len(ids) for ids in there if asked[: len(ids)].tolist() == ids]
    longest = 0 if best is None else best.tokens
    assert longest == max((length - 1) // 4 * 4 for length in (*fits, 1))


def test_the_least_recently_used_are_forgotten() -> None:
    blends = KeptBlends(page_size=4, most=2)
    prompts = [np.full(9, number, dtype=np.int64) for number in range(3)]
    added(blends, prompts[0])
    added(blends, prompts[1])
    assert found(blends, prompts[0]) is not None
    added(blends, prompts[2])
    assert [found(blends, ids) is not None for ids in prompts] == [True, False, True]


def test_of_prompts_that_differ_at_their_ends_the_newest_are_known() -> None:
    blends = KeptBlends(page_size=4)
    prompts = [np.array([1, 2, 3, 4, 5, end], dtype=np.int64) for end in range(20)]
    marks = {kept.marks for ids in prompts if (kept := added(blends, ids)) is not None}
    assert len(marks) == 20, "each has rows of its own"
    assert [found(blends, ids) is not None for ids in prompts] == [False] * 4 + [True] * 16
