"""Chunks that were computed after an anchor, through the real engine, against the float64 reference and on a disk."""

from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.kv_reuse import DiskStore, RamStore

from .reference import Reference
from .test_blend_engine import TOLERANCE, A, B, Prompt, Runner, check, greedy, prompt, text

SYSTEM, SINK = text(60, 7), text(61, 4)


@pytest.fixture(scope="module")
def directory(tiny_qwen2_dir: Path) -> Path:
    return tiny_qwen2_dir


def asked() -> Prompt:
    return prompt((SYSTEM,), A, (text(62, 3),), B, (text(63, 5),))


@pytest.mark.slow
@pytest.mark.parametrize("anchor", [SYSTEM, SINK, []])
def test_loaded_chunks_are_as_computed_after_their_anchor(model: LoadedModel, reference: Reference, anchor: list[int]):
    ids, spans = asked()
    runner = Runner(model)
    reuser = runner.reuser(sinks=[SINK])
    assert reuser.warm([A, B], anchor=anchor).computed == 2
    plan = reuser.plan(ids, spans, mode="reuse", anchors=[SYSTEM])
    assert [hit.anchor for hit in plan.hits] == [len(anchor)] * 2
    (finished,) = runner.together(greedy(ids, plan.reuse))
    kv = finished.result.kv
    assert kv is not None
    for start, length in spans:
        alone = reference.full([*anchor, *ids[start : start + length]], start=start - len(anchor))
        for got, expected in ((kv.k, alone.k), (kv.v, alone.v)):
            found = got[:, start : start + length].double()
            torch.testing.assert_close(found, expected[:, len(anchor) :], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("order", [(2, 4), (4, 2)])
def test_anchors_that_begin_each_other_share_their_kv(
    model: LoadedModel, reference: Reference, order: tuple[int, ...]
) -> None:
    for length in order:
        runner = Runner(model)
        reuser = runner.reuser(RamStore(1 << 24))
        for one in order:
            reuser.warm([A], anchor=SINK[:one])
        plan = reuser.plan([*SINK[:length], *A, 1], [(length, len(A))], mode="reuse", anchors=[SINK[:length]])
        (finished,) = runner.together(greedy([*SINK[:length], *A, 1], plan.reuse))
        check(finished, reference.full([*SINK[:length], *A, 1]))
        assert finished.result.reused_tokens == len(A)


def test_a_chunk_right_after_its_own_anchor_loses_nothing(model: LoadedModel, reference: Reference):
    ids, spans = prompt((SYSTEM,), A, (text(64, 6),))
    runner = Runner(model)
    reuser = runner.reuser()
    reuser.warm([A], anchor=SYSTEM)
    plan = reuser.plan(ids, spans, mode="reuse", anchors=[SYSTEM])
    (finished,) = runner.together(greedy(ids, plan.reuse))
    check(finished, reference.full(ids))
    assert finished.result.reused_tokens == len(A)


@pytest.mark.parametrize("step", [128, 13])
def test_repairing_every_row_of_anchored_chunks_is_a_full_prefill(model: LoadedModel, reference: Reference, step: int):
    ids, spans = asked()
    runner = Runner(model, step_tokens=step)
    reuser = runner.reuser(sinks=[SINK])
    reuser.warm([A])
    reuser.warm([B], anchor=SYSTEM)
    plan = reuser.plan(ids, spans, ratio=1.0, anchors=[SYSTEM])
    assert [hit.anchor for hit in plan.hits] == [len(SINK), len(SYSTEM)]
    (finished,) = runner.together(greedy(ids, plan.reuse))
    check(finished, reference.full(ids))


def test_a_damaged_entry_falls_back_to_the_next_anchor(model: LoadedModel, tmp_path: Path):
    ids, spans = asked()
    runner = Runner(model)
    reuser = runner.reuser(DiskStore(tmp_path, 1 << 24), sinks=[SINK])
    reuser.warm([A, B])
    before = set(tmp_path.iterdir())
    reuser.warm([A, B], anchor=SYSTEM)
    fresh = set(tmp_path.iterdir()) - before
    assert len(before) == len(fresh) == 2
    for path in fresh:
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 4
        path.write_bytes(raw)
    plan = reuser.plan(ids, spans, mode="reuse", anchors=[SYSTEM])
    assert [hit.anchor for hit in plan.hits] == [len(SINK)] * 2 and plan.misses == ()
    assert set(tmp_path.iterdir()) == before, "what is damaged is removed"


def test_an_entry_that_poses_as_another_anchors_is_a_miss(model: LoadedModel, tmp_path: Path):
    ids, spans = asked()
    runner = Runner(model)
    reuser = runner.reuser(DiskStore(tmp_path, 1 << 24))
    reuser.warm([A], anchor=SYSTEM)
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(f"{path.name[:64]}-bare.safetensors"))
    plan = reuser.plan(ids, spans, mode="reuse", anchors=[SYSTEM])
    assert plan.reuse is None and plan.misses == (tuple(A), tuple(B))


def test_files_of_the_format_before_anchors_are_misses_that_still_count(model: LoadedModel, tmp_path: Path):
    store = DiskStore(tmp_path, 1 << 24)
    old = tmp_path / f"{'a' * 64}.safetensors"
    old.write_bytes(bytes(1000))
    assert store.stats()[0].bytes == 1000
    assert Runner(model).reuser(store).plan(*asked()).misses == (tuple(A), tuple(B))
    small = DiskStore(tmp_path, 20_000)
    Runner(model).reuser(small).warm([A])
    assert small.stats()[0].bytes <= 20_000
