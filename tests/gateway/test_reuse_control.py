"""Policies, the controller and the gate together on a tiny engine, and the gate's figures in /metrics."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, PrefillWork, Result
from promptsluice.gateway.backends.reuse_control import Decided, ReuseControl
from promptsluice.gateway.blend_metrics import BlendCollector
from promptsluice.kv_reuse import RamStore, Reuser
from promptsluice.kv_reuse.checking import Checker
from promptsluice.kv_reuse.controller import Way
from promptsluice.kv_reuse.gate import LADDER, Bounds, Sample
from promptsluice.policies import Policy
from promptsluice.policies.schema import QualitySpec, ReuseSpec

CHUNKS = [tuple(range(10, 200)), tuple(range(210, 400))]
IDS = (5, 6, 7, *CHUNKS[0], 8, *CHUNKS[1], 9, 4, 3)
SPANS = [(3, 190), (194, 190)]
BLEND = Policy(reuse=ReuseSpec(mode="blend"), quality=QualitySpec(sample=1.0))
UNCHECKED = Policy(reuse=ReuseSpec(mode="blend"), quality=QualitySpec(sample=0.0))
FAST, SLOW = 1e-3, 1.0


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32")


@pytest.fixture
def service(model: LoadedModel) -> Iterator[EngineService]:
    running = EngineService(Engine(model, options=EngineOptions(pages=256, stall=None)))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def reuser(service: EngineService, model: LoadedModel) -> Reuser:
    reuser = Reuser(service, RamStore(1 << 26), spec=model.spec, fingerprint=model.fingerprint)
    reuser.warm(CHUNKS)
    return reuser


@pytest.fixture
def control(service: EngineService, model: LoadedModel, tmp_path: Path) -> ReuseControl:
    return ReuseControl(service, fingerprint=model.fingerprint, folder=tmp_path)


def taught(control: ReuseControl, row_seconds: float) -> ReuseControl:
    for rows in (10, 100, 400):
        control.controller.ran(PrefillWork(steps=1, rows=rows, pairs=rows * rows // 2, seconds=row_seconds * rows))
    return control


def decide(control: ReuseControl, reuser: Reuser, policy: Policy = BLEND, *, ids: tuple[int, ...] = IDS) -> Decided:
    plan = reuser.plan(ids, SPANS, mode="blend", ratio=policy.reuse.least_ratio)
    return control.decided(
        ids,
        plan.hits,
        plan.reuse,
        policy,
        tenant="",
        collection="docs",
        again=lambda: reuser.plan(ids, SPANS, mode="blend").reuse,
    )


def request(decided: Decided, ids: tuple[int, ...] = IDS) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=1)
    return GenerationRequest(ids=ids, sampling=params, reuse=decided.reuse, blending=decided.blending)


def as_predicted(result: Result, decided: Decided) -> Result:
    """How fast this machine is does not matter."""
    assert decided.choice.seconds is not None
    return replace(result, work=replace(result.work, seconds=decided.choice.seconds))


def test_what_gains_nothing_is_not_even_looked_up(control: ReuseControl) -> None:
    taught(control, FAST)
    about = {"tenant": "", "collection": "docs"}
    assert control.promising(IDS, SPANS, BLEND, **about)
    assert not control.promising(IDS, SPANS, Policy(), **about), "the policy does not reuse chunks"
    control.loaded([], wanted=380, seconds=SLOW)
    assert not control.promising(IDS, SPANS, BLEND, **about)


def test_a_blend_is_predicted_run_compared_and_checked(
    control: ReuseControl, reuser: Reuser, service: EngineService
) -> None:
    decided = decide(taught(control, FAST), reuser)
    assert decided.choice.way is Way.BLEND and decided.tiers == {"ram": 380} and decided.check is not None
    assert decided.reuse is not None and decided.reuse.ratio == decided.choice.ratio >= 0.15
    assert "blend at" in decided.note and "predicted" in decided.note
    control.start()
    control.finished(service.run(request(decided)), decided)
    while not control.standings():
        pass
    control.close()
    standing = control.standings()["docs"]
    assert (standing.checked, standing.dropped) == (1, 0)
    assert standing.samples[0].ratio == decided.choice.ratio and standing.samples[0].kl > 0
    assert control.readings()["reuse_real_s_blend"] > 0


def test_a_follow_up_turn_goes_on_from_the_blended_prompt_and_is_checked_as_a_blend(
    control: ReuseControl, reuser: Reuser, service: EngineService
) -> None:
    taught(control, FAST)
    first = decide(control, reuser)
    control.finished(as_predicted(service.run(request(first)), first), first)
    turn = (*IDS, *range(20, 40))
    second = decide(control, reuser, ids=turn)
    assert second.choice.way is Way.KEPT and second.reuse is None and second.check is not None
    assert second.tiers["kept"] > 300 and "tokens of a blended prompt" in second.note
    result = as_predicted(service.run(request(second, turn)), second)
    assert result.blended_tokens > 300 and result.reused_tokens == 0
    control.start()
    control.finished(result, second)
    while not control.standings():
        pass
    control.close()
    standing = control.standings()["docs"]
    assert (standing.checked, standing.dropped) == (1, 0) and standing.samples[0].kl > 0
    off = decide(control, reuser, Policy(reuse=ReuseSpec(mode="prefix")), ids=turn)
    assert off.choice.way is Way.FULL and off.blending is None
    higher = BLEND.model_copy(update={"reuse": ReuseSpec(mode="blend", ratio=0.5)})
    assert decide(control, reuser, higher, ids=turn).choice.way is not Way.KEPT
    assert decide(control, reuser, ids=(*IDS[:-3], 70, 71, 72)).choice.way is Way.BLEND, "another question"


def test_a_follow_up_of_a_blend_that_is_gone_is_not_checked(
    control: ReuseControl, reuser: Reuser, service: EngineService
) -> None:
    taught(control, FAST)
    first = decide(control, reuser)
    service.run(request(first))
    second = decide(control, reuser, ids=(*IDS, *range(20, 40)))
    service.engine.tree.evict(1000)
    assert second.check is not None
    checker = Checker(service, control.gate)
    assert checker.compared(replace(second.check, again=lambda: None, reused=0)) is None


def test_a_document_that_is_asked_about_again_is_prefilled_once_for_the_prefix_tree(
    control: ReuseControl, reuser: Reuser, service: EngineService
) -> None:
    taught(control, FAST)
    policy = UNCHECKED.model_copy(update={"reuse": ReuseSpec(mode="blend", ratio=0.5)})
    asked = [(*IDS[:-3], *range(turn, turn + 20)) for turn in (20, 120, 220)]
    first = decide(control, reuser, policy, ids=asked[0])
    assert first.choice.way is Way.BLEND
    control.finished(as_predicted(service.run(request(first, asked[0])), first), first)
    second = decide(control, reuser, policy, ids=asked[1])
    assert second.choice.way is Way.FULL and second.reuse is None and "so that the prefix tree has it" in second.note
    control.finished(as_predicted(service.run(request(second, asked[1])), second), second)
    about = {"tenant": "", "collection": "docs"}
    assert not control.promising(asked[2], SPANS, policy, **about), "the tree has all of its chunks"
    assert service.run(request(second, asked[2])).cached_tokens >= len(IDS) - 3
    service.engine.tree.evict(1000)
    assert decide(control, reuser, policy, ids=asked[2]).choice.way is Way.BLEND, "the tree let go of it"
    other = (1, *IDS[1:])
    assert decide(control, reuser, policy, ids=other).choice.way is Way.BLEND, "another prompt of the same chunks"


def test_the_gate_raises_the_ratio_and_in_the_end_only_checks_are_blended(
    control: ReuseControl, reuser: Reuser
) -> None:
    taught(control, FAST)
    bounds = Bounds(1.0, BLEND.quality.max_kl, 0.0)
    ratios = []
    while (least := control.gate.least("docs")) is not None:
        decided = decide(control, reuser)
        assert decided.reuse is not None
        ratios.append(decided.reuse.ratio)
        for kl in (0.8, 0.9) * 4:
            control.gate.record("docs", Sample(max(0.15, least), kl, 0.5), bounds)
    assert ratios == sorted(ratios) and ratios[-1] == LADDER[-1]
    decided = decide(control, reuser)
    assert decided.reuse is None and decided.choice.way is Way.FULL and decided.tiers == {"ram": 380}
    assert decided.check is not None
    again = decided.check.again()
    assert again is not None and again.ratio == LADDER[-1]
    assert not control.promising(IDS, SPANS, UNCHECKED, tenant="", collection="docs")
    assert control.promising(IDS, SPANS, UNCHECKED, tenant="", collection="another")


def test_a_given_ratio_is_kept_and_plain_reuse_is_not_checked(control: ReuseControl, reuser: Reuser) -> None:
    taught(control, FAST)
    given = decide(control, reuser, BLEND.model_copy(update={"reuse": ReuseSpec(mode="blend", ratio=0.4)}))
    assert given.reuse is not None and given.reuse.ratio == 0.4
    plain = decide(control, reuser, BLEND.model_copy(update={"reuse": ReuseSpec(mode="reuse")}))
    assert plain.choice.way is Way.REUSE and plain.check is None
    assert plain.reuse is not None and plain.reuse.ratio == 0.0


def test_standings_are_metrics_with_bounded_labels(control: ReuseControl) -> None:
    for kl in (0.1, 0.3):
        control.gate.record("docs", Sample(0.15, kl, 0.75), Bounds(1.0, 0.25, 0.0))
    registry, collector = CollectorRegistry(), BlendCollector()
    registry.register(collector)
    collector.show({"local": control.standings()})
    labels = {"backend": "local", "collection": "docs"}
    assert registry.get_sample_value("promptsluice_blend_kl", {**labels, "bound": "mean"}) == pytest.approx(0.2)
    assert registry.get_sample_value("promptsluice_blend_agreement", {**labels, "bound": "mean"}) == 0.75
    assert registry.get_sample_value("promptsluice_blend_checks_total", {**labels, "outcome": "checked"}) == 2
    assert registry.get_sample_value("promptsluice_blend_off", labels) == 0
    control.gate.record("few", Sample(0.15, 0.1, 1.0), Bounds(1.0, 0.25, 0.0))
    collector.show({"local": control.standings()})
    assert b'collection="few",bound="low"' not in generate_latest(registry), "one sample has no interval"
