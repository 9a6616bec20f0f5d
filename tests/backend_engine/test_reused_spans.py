"""Reused spans in the engine: what is run, what is counted, what may enter the prefix tree. Blending: see kv_reuse."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.rounded_kv import Block, RoundedBlock
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Reuse, ReusedSpan, SamplingParams
from promptsluice.prompt.errors import BadRequest
from torch import Tensor

from .driving import Collected, Reference, alone, assert_idle, finish, greedy, random_ids, tiny_engine, together
from .rows import FirstRows

IDS = random_ids(100, 11)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[int]:
    return reference.greedy(IDS)


def captured(engine: Engine, ids: tuple[int, ...]) -> KVBlock:
    kv = alone(engine, GenerationRequest(ids=ids, sampling=SamplingParams(max_tokens=0), keep_kv=True)).result.kv
    assert kv is not None and kv.tokens == len(ids)
    return kv


def spans(kv: KVBlock, *places: tuple[int, int]) -> tuple[ReusedSpan, ...]:
    return tuple(ReusedSpan(start, KVBlock(kv.k[:, start:stop], kv.v[:, start:stop])) for start, stop in places)


def garbage(*places: tuple[int, int]) -> tuple[ReusedSpan, ...]:
    return spans(KVBlock(*torch.randn(2, 4, 100, 2, 16, generator=torch.Generator().manual_seed(0))), *places)


def test_kept_kv_equals_transformers(model: LoadedModel, reference: Reference) -> None:
    cache = reference.model(torch.tensor([IDS])).past_key_values
    kv = captured(tiny_engine(model, step_tokens=32), IDS)
    for layer in range(4):
        keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]
        torch.testing.assert_close(kv.k[layer].cpu().transpose(0, 1), keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(kv.v[layer].cpu().transpose(0, 1), values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("step_tokens", [16, 128])
@pytest.mark.parametrize("places", [[(0, 50)], [(7, 30), (30, 61)], [(3, 9), (50, 100)]])
def test_true_kv_gives_the_output_of_a_full_prefill(
    model: LoadedModel, expected: list[int], places: list[tuple[int, int]], step_tokens: int
) -> None:
    engine = tiny_engine(model, step_tokens=step_tokens)
    reuse = Reuse(spans=spans(captured(engine, IDS), *places))
    output = alone(engine, replace(greedy(IDS), reuse=reuse))
    assert output.tokens == expected
    rows = sum(stop - start for start, stop in places) - (places[-1][1] == 100)
    assert (output.result.reused_tokens, output.result.recomputed_tokens) == (rows, 0)


@pytest.mark.parametrize("step_tokens", [16, 128])
def test_repairing_all_rows_is_a_full_prefill_whatever_was_stored(
    model: LoadedModel, expected: list[int], step_tokens: int
) -> None:
    engine = tiny_engine(model, step_tokens=step_tokens)
    reuse = Reuse(spans=garbage((10, 40), (50, 100)), selector=FirstRows(), ratio=1.0)
    output = alone(engine, replace(greedy(IDS), reuse=reuse))
    assert output.tokens == expected
    assert (output.result.reused_tokens, output.result.recomputed_tokens) == (0, 79)


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [128, 16, 1])
@pytest.mark.parametrize(("ratio", "repaired"), [(0.15, 6), (0.01, 1), (0.0, 0), (0.99, 40)])
def test_the_quota_is_the_ratio_of_all_reused_rows_rounded_up(
    model: LoadedModel, step_tokens: int, ratio: float, repaired: int
) -> None:
    reuse = Reuse(spans=garbage((10, 50)), selector=FirstRows(), ratio=ratio)
    engine = tiny_engine(model, step_tokens=step_tokens, max_running=1)
    result = alone(engine, replace(greedy(IDS), reuse=reuse)).result
    assert (result.reused_tokens, result.recomputed_tokens) == (40 - repaired, repaired)


def test_blended_and_plain_requests_share_a_batch(model: LoadedModel, expected: list[int]) -> None:
    blended = replace(greedy(IDS), reuse=Reuse(spans=garbage((20, 60)), selector=FirstRows(), ratio=0.3))
    lone = alone(tiny_engine(model, step_tokens=512), blended)
    engine = tiny_engine(model, step_tokens=512)
    mixed = together(engine, greedy(random_ids(30, 1)), blended, greedy(IDS, namespace="plain"), blended)
    assert mixed[1].tokens == mixed[3].tokens == lone.tokens
    assert mixed[2].tokens == expected
    assert_idle(engine)


@pytest.mark.parametrize("selector", [None, FirstRows()])
def test_nothing_behind_a_span_enters_the_prefix_tree(
    model: LoadedModel, expected: list[int], selector: FirstRows | None
) -> None:
    engine = tiny_engine(model, step_tokens=16)
    alone(engine, replace(greedy(IDS), reuse=Reuse(spans=garbage((30, 60)), selector=selector, ratio=0.2)))
    plain = alone(engine, greedy(IDS))
    assert plain.tokens == expected and plain.result.cached_tokens == 30
    assert_idle(engine)


def test_a_prefix_hit_replaces_the_spans_that_it_covers(model: LoadedModel, expected: list[int]) -> None:
    engine = tiny_engine(model)
    alone(engine, greedy(IDS[:55], 0))
    kv = captured(engine, IDS)
    reuse = Reuse(spans=(*garbage((5, 40)), *spans(kv, (45, 70), (80, 90))))
    output = alone(engine, replace(greedy(IDS), reuse=reuse))
    assert output.tokens == expected
    assert (output.result.cached_tokens, output.result.reused_tokens) == (55, 15 + 10)
    assert alone(engine, greedy(IDS)).result.cached_tokens == 55


def test_spans_are_written_again_after_preemption(model: LoadedModel) -> None:
    prompts = [random_ids(28, seed) for seed in range(5)]
    requests = [replace(greedy(ids, 40), reuse=Reuse(spans=garbage((5, 20)))) for ids in prompts]
    engine = tiny_engine(model, pages=30, max_running=5)
    crowded = together(engine, *requests)
    assert engine.stats().preemptions > 0
    assert [each.tokens for each in crowded] == [alone(tiny_engine(model), each).tokens for each in requests]
    assert {each.result.reused_tokens for each in crowded} == {15}
    assert_idle(engine)


def test_what_is_counted_as_cached_and_as_reused_is_disjoint_after_preemption(model: LoadedModel) -> None:
    engine, output = tiny_engine(model, pages=20), Collected()
    alone(engine, greedy(IDS[:30], 0))
    engine.add(replace(greedy(IDS[:40]), reuse=Reuse(spans=garbage((5, 25)))), output)
    engine.step()
    urgent = Collected()
    engine.add(greedy(random_ids(70, 7), priority=1), urgent)
    finish(engine)
    assert engine.stats().preemptions == 1 and urgent.tokens
    assert (output.result.cached_tokens, output.result.reused_tokens) == (0, 20)


@pytest.mark.parametrize(
    "places", [((20, 10), (0, 5)), ((0, 10), (5, 15)), ((95, 105),)], ids=["descending", "overlapping", "too long"]
)
def test_spans_that_do_not_fit_are_refused(model: LoadedModel, places: tuple[tuple[int, int], ...]) -> None:
    kv = KVBlock(*torch.zeros(2, 4, 10, 2, 16))
    wrong = Reuse(spans=tuple(ReusedSpan(start, kv) for start, _ in places))
    with pytest.raises(BadRequest, match="ascend"):
        tiny_engine(model).add(replace(greedy(IDS), reuse=wrong), Collected())


def test_kv_of_another_model_is_refused(model: LoadedModel) -> None:
    with pytest.raises(BadRequest, match="shape"):
        reuse = Reuse(spans=(ReusedSpan(0, KVBlock(*torch.zeros(2, 3, 10, 2, 16))),))
        tiny_engine(model).add(replace(greedy(IDS), reuse=reuse), Collected())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda kv: replace(kv, k_scales=kv.k_scales[:, :3]), r"float32 \(4, 10, 2\), found torch.float32 \(4, 3, 2\)"),
        (lambda kv: replace(kv, v_scales=kv.v_scales.half()), "found torch.float16"),
        (lambda kv: replace(kv, v=kv.v.view(torch.float8_e4m3fn)), "v is torch.float8_e4m3fn"),
        (lambda kv: replace(kv, v=kv.v[:, :9]), "v is torch.int8"),
        (lambda kv: KVBlock(kv.k, kv.v), "int8 without scales"),
        (lambda kv: replace(kv, k=kv.k.float(), v=kv.v.float()), "float32 with scales"),
        (lambda kv: KVBlock(kv.k_scales, kv.v_scales), "3 dimensions"),
    ],
)
def test_spans_whose_tensors_do_not_belong_together_are_refused(
    model: LoadedModel, change: Callable[[RoundedBlock], Block], reason: str
) -> None:
    kv = RoundedBlock.of(KVBlock(*torch.ones(2, 4, 10, 2, 16)), torch.int8)
    engine = tiny_engine(model)
    engine.add(replace(greedy(IDS), reuse=Reuse(spans=(ReusedSpan(0, kv),))), Collected())
    with pytest.raises(BadRequest, match=f"a reused span is not whole: .*{reason}") as caught:
        engine.add(replace(greedy(IDS), reuse=Reuse(spans=(ReusedSpan(0, change(kv)),))), Collected())
    assert caught.value.param == "reuse"


@pytest.mark.parametrize(("ratio", "layer"), [(1.5, 1), (-0.1, 1), (0.5, 4), (0.5, -1)])
def test_ratio_and_layer_must_exist(model: LoadedModel, ratio: float, layer: int) -> None:
    reuse = Reuse(spans=garbage((0, 10)), selector=FirstRows(layer), ratio=ratio)
    with pytest.raises(BadRequest) as caught:
        tiny_engine(model).add(replace(greedy(IDS), reuse=reuse), Collected())
    assert caught.value.param == "reuse"


class Wrong(FirstRows):
    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        raise ValueError("a selector of the caller's that breaks")


def test_a_selector_that_breaks_leaves_the_engine_sound(model: LoadedModel, expected: list[int]) -> None:
    engine, sink = tiny_engine(model), Collected()
    engine.add(replace(greedy(IDS), reuse=Reuse(spans=garbage((20, 60)), selector=Wrong())), sink)
    with pytest.raises(ValueError, match="breaks"):
        finish(engine)
    engine.fail(BadRequest("selector"))
    assert sink.error is not None
    assert_idle(engine)
    assert alone(engine, greedy(IDS)).tokens == expected
