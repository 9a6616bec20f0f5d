"""The gate's estimates and what follows from them, its file, and the checks that feed it from a real engine."""

import json
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import scipy.stats
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.generation import Finished
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, Reuse
from promptsluice.kv_reuse import ChunkHeads, RamStore, Repair, Reuser
from promptsluice.kv_reuse.checking import Check, Checker
from promptsluice.kv_reuse.gate import LADDER, OTHERS, Bounds, Gate, Interval, Sample, gate_file, load_standings
from promptsluice.kv_reuse.rounding import chunk_fingerprints

from .reference import Reference
from .test_blend_engine import A, B, prompt, text

BOUNDS = Bounds(sample=0.25, max_kl=0.2, min_agreement=0.0)


def told(gate: Gate, kl: float, *, count: int, ratio: float = 0.15, seed: int = 0, agreement: float = 0.9) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        gate.record("docs", Sample(ratio, kl * rng.uniform(0.5, 1.5), agreement), BOUNDS)


def test_intervals_are_students() -> None:
    rng = random.Random(1)
    for count in (4, 8, 64):
        values = [rng.lognormvariate(0, 1) for _ in range(count)]
        low, high = scipy.stats.t.interval(0.95, count - 1, loc=sum(values) / count, scale=scipy.stats.sem(values))
        mean, lowest, highest = Interval.of(values)
        assert mean == pytest.approx(sum(values) / count)
        assert (lowest - mean, highest - mean) == pytest.approx((low - mean, high - mean), rel=0.01)
    assert Interval.of([1.0]).high == math.inf


def test_the_ratio_is_raised_step_by_step_and_then_blending_is_off() -> None:
    gate = Gate()
    assert gate.least("docs") == 0.0
    told(gate, 0.5, count=7)
    assert gate.least("docs") == 0.0, "too few to tell"
    reached = [gate.least("docs")]
    for _ in range(8):
        told(gate, 0.5, count=8, ratio=max(0.15, reached[-1] or 0.0))
        reached.append(gate.least("docs"))
        if reached[-1] is None:
            break
    assert list(dict.fromkeys(reached)) == [0.0, *(ratio for ratio in LADDER if ratio > 0.15), None]
    assert gate.least("others") == 0.0


def test_what_is_within_the_bound_changes_nothing_and_what_is_off_comes_back() -> None:
    gate = Gate()
    told(gate, 0.15, count=64)
    assert gate.least("docs") == 0.0
    while gate.least("docs") is not None:
        told(gate, 0.9, count=8, ratio=LADDER[-1])
    told(gate, 0.19, count=64, ratio=LADDER[-1])
    assert gate.least("docs") is None, "hardly within the bound is not enough to come back"
    told(gate, 0.05, count=64, ratio=LADDER[-1])
    assert gate.least("docs") is not None
    told(gate, 0.05, count=400, ratio=LADDER[-1])
    assert gate.least("docs") == 0.0


def test_agreement_is_a_bound_of_its_own() -> None:
    gate, strict = Gate(), Bounds(sample=1.0, max_kl=5.0, min_agreement=0.8)
    rng = random.Random(3)
    for _ in range(16):
        gate.record("docs", Sample(0.15, 0.01, rng.choice([0.4, 0.6])), strict)
    assert gate.least("docs") == 0.3


def test_about_the_share_of_requests_is_sampled() -> None:
    gate = Gate(seed=1)
    assert 400 < sum(gate.sampled(BOUNDS) for _ in range(2000)) < 600
    assert not any(gate.sampled(Bounds(0.0, 1.0, 0.0)) for _ in range(100))
    assert all(gate.sampled(Bounds(1.0, 1.0, 0.0)) for _ in range(100))


def test_standings_outlive_the_process_and_hold_no_content(tmp_path: Path) -> None:
    path = gate_file(tmp_path, "0123456789abcdef0123")
    gate = Gate(path)
    told(gate, 0.5, count=12)
    gate.dropped("docs")
    told(gate, 0.5, count=1)
    again = Gate(path)
    assert again.standings() == gate.standings() and again.least("docs") == gate.least("docs") == 0.2
    fields = json.loads(path.read_text())["collections"]["docs"]
    assert set(fields) == {"least", "off", "samples", "checked", "dropped"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing is left of writing"


def test_chunks_that_are_kept_otherwise_lose_otherwise(tmp_path: Path) -> None:
    model = "0123456789abcdef0123"
    kinds = [*chunk_fingerprints(model), *chunk_fingerprints(f"{model}-fp8")]
    names = [gate_file(tmp_path, kind).name for kind in kinds]
    assert len(set(names)) == 6 and names[0] == "blends-0123456789abcdef.json"
    assert names[4] == "blends-0123456789abcdef-fp8-chunks-int8.json"


def standing(**changed: str) -> str:
    fields = {"least": "0.2", "off": "false", "samples": "[]", "checked": "8", "dropped": "0"} | changed
    docs = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f'{{"version": 1, "collections": {{"docs": {{{docs}}}}}}}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"version": 99, "collections": {}}',
        '{"version": 1}',
        "[]",
        '{"version": 1, "collections": {"docs": {}}}',
        standing(least="7.0"),
        standing(least="NaN"),
        standing(checked="Infinity"),
        standing(checked="-1"),
        standing(samples="[[0.15, NaN, 0.5]]"),
        standing(samples="[" * 100_000),
    ],
    ids=range(12),
)
def test_a_file_that_cannot_be_read_is_begun_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "blends-x.json"
    path.write_text(content)
    gate = Gate(path)
    assert gate.standings() == {} and str(path) in caplog.text
    told(gate, 0.1, count=1)
    assert load_standings(path)["docs"].checked == 1


def test_a_whole_file_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "blends-x.json"
    path.write_text(standing(samples="[[0.15, 0.1, 0.5]]"))
    assert Gate(path).least("docs") == 0.2


def test_a_folder_that_cannot_be_written_is_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    gate = Gate(blocked / "blends-x.json")
    told(gate, 0.1, count=1)
    assert gate.standings()["docs"].checked == 1 and "were not written" in caplog.text


def test_names_are_bounded() -> None:
    gate = Gate()
    for number in range(100):
        gate.record(f"collection {number}", Sample(0.15, 0.1, 1.0), BOUNDS)
    standings = gate.standings()
    assert len(standings) == 65 and standings[OTHERS].checked == 36


@pytest.fixture
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32")


@pytest.fixture
def service(model: LoadedModel) -> Iterator[EngineService]:
    running = EngineService(Engine(model, options=EngineOptions(pages=128, page_size=4, stall=None)))
    running.start()
    yield running
    running.stop()


def made(service: EngineService, model: LoadedModel, *, ratio: float) -> tuple[Check, list[tuple[int, int]]]:
    """A check of a prompt whose chunks are stored, and their places."""
    ids, spans = prompt((text(5, 6),), A, B, (text(7, 8),))
    reuser = Reuser(service, RamStore(1 << 24), spec=model.spec, fingerprint=model.fingerprint, min_tokens=4)
    reuser.warm([A, B])
    repair = Repair(chooser=ChunkHeads())

    def again() -> Reuse | None:
        return reuser.plan(ids, spans, ratio=ratio, repair=repair).reuse

    reused = sum(length for _, length in spans)
    return Check(ids=tuple(ids), again=again, reused=reused, collection="docs", bounds=BOUNDS), spans


def test_a_check_compares_the_blend_with_full_prefill(
    service: EngineService, model: LoadedModel, tiny_llama_dir: Path
) -> None:
    check, spans = made(service, model, ratio=0.0)
    sample = Checker(service, Gate()).compared(check)
    assert sample is not None and sample.ratio == 0.0
    reference = Reference(tiny_llama_dir)
    full, blend = (
        outcome.logits.log_softmax(-1) for outcome in (reference.full(check.ids), reference.blended(check.ids, spans))
    )
    assert sample.kl == pytest.approx(float((full.exp() * (full - blend)).sum()), rel=1e-3)
    assert 0 <= sample.agreement <= 1
    whole, _ = made(service, model, ratio=1.0)
    same = Checker(service, Gate()).compared(whole)
    assert same is not None and same.kl < 1e-6 and same.agreement == 1


def test_a_blend_whose_chunks_are_gone_is_dropped(service: EngineService, model: LoadedModel) -> None:
    check, _ = made(service, model, ratio=0.3)
    gone = Check(ids=check.ids, again=lambda: None, reused=check.reused, collection="docs", bounds=BOUNDS)
    assert Checker(service, Gate()).compared(gone) is None
    fewer = Check(ids=check.ids, again=check.again, reused=check.reused + 1, collection="docs", bounds=BOUNDS)
    assert Checker(service, Gate()).compared(fewer) is None


class Busy:
    """A service that never has idle time until it is told so."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = threading.Event()

    def run_idle(self, request: GenerationRequest) -> Finished | None:
        self.asked.set()
        assert not self.free.is_set(), "nothing runs in this test"
        return None


def test_checks_beyond_the_queue_and_without_idle_time_are_dropped() -> None:
    gate, busy = Gate(), Busy()
    reuse = Reuse(spans=())
    check = Check(ids=(1, 2, 3), again=lambda: reuse, reused=0, collection="docs", bounds=BOUNDS)
    checker = Checker(busy, gate, patience_s=0.0)
    offered = [checker.offer(check) for _ in range(7)]
    assert offered == [True] * 4 + [False] * 3 and gate.standings()["docs"].dropped == 3
    checker.start()
    assert busy.asked.wait(10)
    while gate.standings()["docs"].dropped < 7:
        pass
    checker.close()
    assert torch.is_inference_mode_enabled() is False and gate.standings()["docs"].checked == 0
