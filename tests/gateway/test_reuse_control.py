"""Policies, the controller and the gate together on a tiny engine, and the gate's figures in /metrics."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, PrefillWork, SamplingParams
from promptsluice.gateway.backends.reuse_control import Decided, ReuseControl
from promptsluice.gateway.blend_metrics import BlendCollector
from promptsluice.kv_reuse import RamStore, Reuser
from promptsluice.kv_reuse.controller import Way
from promptsluice.kv_reuse.gate import LADDER, Bounds, Sample
from promptsluice.policies import Policy
from promptsluice.policies.schema import QualitySpec, ReuseSpec

CHUNKS = [tuple(range(10, 200)), tuple(range(210, 400))]
IDS = (5, 6, 7, *CHUNKS[0], 8, *CHUNKS[1], 9, 4, 3)
SPANS = [(3, 190), (194, 190)]
BLEND = Policy(reuse=ReuseSpec(mode="blend"), quality=QualitySpec(sample=1.0))
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


def decide(control: ReuseControl, reuser: Reuser, policy: Policy = BLEND) -> Decided:
    plan = reuser.plan(IDS, SPANS, mode="blend", ratio=policy.reuse.least_ratio)
    return control.decided(
        IDS,
        plan.hits,
        plan.reuse,
        policy,
        tenant="",
        collection="docs",
        again=lambda: reuser.plan(IDS, SPANS, mode="blend").reuse,
    )


def request(decided: Decided) -> GenerationRequest:
    return GenerationRequest(ids=IDS, sampling=SamplingParams(temperature=0, max_tokens=1), reuse=decided.reuse)


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
    unchecked = BLEND.model_copy(update={"quality": QualitySpec(sample=0.0)})
    assert not control.promising(IDS, SPANS, unchecked, tenant="", collection="docs")
    assert control.promising(IDS, SPANS, unchecked, tenant="", collection="another")


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
