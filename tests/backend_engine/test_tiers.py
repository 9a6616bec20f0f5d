"""Evicted prefixes in host memory and on disk: the same tokens as without, and nothing leaks."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.tiers.streams import SideStream
from promptsluice.backend_engine.tiers.tiered import Tiers
from promptsluice.prompt.errors import ConfigError, PromptsluiceError

from .driving import Collected, Reference, alone, assert_idle, finish, greedy, random_ids, together
from .eager import EagerSteps
from .late import LateStream

PAGE = 4
WAIT_S = 60.0
LONG = random_ids(101, 1)


def tiered(
    model: LoadedModel,
    *,
    pages: int = 60,
    host_pages: int = 400,
    disk: Path | None = None,
    disk_pages: int = 1000,
    side_stream: SideStream | None = None,
    single_rows: Callable[..., EagerSteps] | None = None,
    **sizes: int,
) -> Engine:
    page_bytes = KVPool.bytes_per_token(model.spec, model.decoder.dtype) * PAGE
    options = EngineOptions(
        pages=pages,
        page_size=PAGE,
        host_bytes=host_pages * page_bytes,
        disk_bytes=disk_pages * (page_bytes + 64) if disk else 0,
        disk_path=disk,
        **({"step_tokens": 64, "max_running": 16, "shared_tokens": 8} | sizes),
    )
    return Engine(model, options=options, side_stream=side_stream, single_rows=single_rows)


def tiers(engine: Engine) -> Tiers:
    assert isinstance(engine.tier, Tiers)
    return engine.tier


def forget(engine: Engine) -> None:
    """Push everything out of the pool."""
    engine.tree.evict(engine.tree.pages)
    assert engine.allocator.free == engine.allocator.pages


def settled(engine: Engine) -> None:
    """Nothing is being written any more, and all is in order."""
    assert tiers(engine).quiet(WAIT_S)
    tiers(engine).check()
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("single_rows", [None, EagerSteps])
def test_an_evicted_conversation_comes_back(
    model: LoadedModel, reference: Reference, late: bool, single_rows: type[EagerSteps] | None
) -> None:
    engine = tiered(model, side_stream=LateStream() if late else None, single_rows=single_rows)
    ids = random_ids(101, 1)
    first = alone(engine, greedy(ids))
    forget(engine)
    again = alone(engine, greedy(ids))
    assert first.tokens == again.tokens == reference.greedy(ids)
    assert again.result.cached_tokens == again.result.loaded_tokens == 100
    assert alone(engine, greedy(ids)).result.loaded_tokens == 0  # it is in the pool again
    longer = (*ids, *again.tokens, *random_ids(30, 2))
    forget(engine)
    turn = alone(engine, greedy(longer))
    assert turn.tokens == reference.greedy(longer)
    assert turn.result.cached_tokens == (101 + 11) // PAGE * PAGE
    assert engine.stats().loaded_tokens == 100 + turn.result.loaded_tokens
    settled(engine)


def test_what_the_pool_still_has_is_not_loaded(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiered(model), random_ids(160, 1)
    together(engine, greedy(ids))
    engine.tree.evict(25)
    again = alone(engine, greedy(ids))
    assert again.tokens == reference.greedy(ids)
    assert 64 <= again.result.loaded_tokens < again.result.cached_tokens == 156
    settled(engine)


def test_two_that_want_the_same_pages_load_them_once(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiered(model, side_stream=LateStream()), random_ids(120, 1)
    alone(engine, greedy(ids))
    forget(engine)
    both = together(engine, greedy(ids), greedy(ids))
    assert [sink.tokens for sink in both] == [reference.greedy(ids)] * 2
    assert engine.stats().host_loaded_pages == 29
    settled(engine)


def test_tenants_do_not_see_each_others_pages(model: LoadedModel) -> None:
    engine, ids = tiered(model), random_ids(100, 1)
    alone(engine, greedy(ids, namespace="a"))
    forget(engine)
    assert alone(engine, greedy(ids, namespace="b")).result.cached_tokens == 0
    forget(engine)
    assert alone(engine, greedy(ids, namespace="a")).result.loaded_tokens == 96


def test_a_short_prefix_is_computed(model: LoadedModel) -> None:
    engine, ids = tiered(model), random_ids(50, 1)
    alone(engine, greedy(ids))
    forget(engine)
    assert alone(engine, greedy(ids)).result.cached_tokens == 0


def test_host_memory_keeps_beginnings_and_its_budget(model: LoadedModel, reference: Reference) -> None:
    engine, ids = tiered(model, host_pages=20), random_ids(120, 1)
    alone(engine, greedy(ids))
    forget(engine)
    assert engine.stats().host_pages_cached == engine.stats().host_pages_total == 20
    again = alone(engine, greedy(ids))
    assert again.result.loaded_tokens == 20 * PAGE
    assert again.tokens == reference.greedy(ids)
    settled(engine)


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_before_its_pages_are_there(model: LoadedModel, reference: Reference, late: bool) -> None:
    """The prefill takes several steps; the request goes between them, and others take its pages."""
    engine = tiered(model, side_stream=LateStream() if late else None, step_tokens=16)
    ids, other = random_ids(100, 1), random_ids(150, 2)
    alone(engine, greedy(ids))
    forget(engine)
    sequence = engine.add(greedy((*ids, *random_ids(60, 3))), Collected())
    engine.step()
    engine.abort(sequence)
    assert alone(engine, greedy(other)).tokens == reference.greedy(other)
    assert alone(engine, greedy(ids)).tokens == reference.greedy(ids)
    settled(engine)


def test_a_step_that_fails_before_its_pages_are_there(model: LoadedModel, reference: Reference) -> None:
    """They go to another request, and what was on its way to them has come before that."""

    class Failing:
        broken = False

        def __getattr__(self, name: str) -> Any:
            return getattr(model.decoder, name)

        def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
            if self.broken:
                raise RuntimeError("broken")
            return model.decoder.forward(batch, pool, **options)

    device, stream, ids, other = Failing(), LateStream(), random_ids(103, 1), random_ids(150, 2)
    engine = tiered(replace(model, decoder=device), side_stream=stream)
    alone(engine, greedy(ids))
    forget(engine)
    sinks = Collected(), Collected()
    engine.add(greedy(ids), sinks[0])
    device.broken = True
    with pytest.raises(RuntimeError):
        engine.step()
    engine.fail(PromptsluiceError("broken"))
    device.broken = False
    engine.add(greedy(other), sinks[1])
    while not sinks[1].tokens:
        engine.step()
    stream.reach(stream.done + len(stream.waiting))
    finish(engine)
    assert sinks[0].error is not None and sinks[1].tokens == reference.greedy(other)
    settled(engine)


def test_nobody_waits_for_anothers_disk_while_steps_run_ahead(
    model: LoadedModel, reference: Reference, tmp_path: Path
) -> None:
    first, ids = tiered(model, disk=tmp_path), random_ids(101, 1)
    alone(first, greedy(ids))
    forget(first)
    settled(first)
    first.close()
    second = tiered(model, pages=32, disk=tmp_path, single_rows=EagerSteps)
    files = list(tmp_path.rglob("*.page"))
    for file in files:  # who reads one waits for somebody who writes
        file.unlink()
        os.mkfifo(file)
    running, large, small = Collected(), Collected(), Collected()
    second.add(greedy(random_ids(40, 2), 60), running)
    for _ in range(3):
        second.step()
    second.add(greedy(ids), large)
    second.step()
    second.add(greedy(random_ids(8, 3), 4), small)
    while not small.ended and not running.ended:
        second.step()
    assert small.ended and not running.ended and not large.ended
    ends = time.monotonic() + WAIT_S
    while not large.ended:
        assert time.monotonic() < ends
        for file in files:
            with suppress(OSError):  # nobody waits at this one
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        second.step()
    finish(second)
    assert large.tokens == reference.greedy(ids) and small.tokens == reference.greedy(random_ids(8, 3), 4)
    settled(second)
    second.close()


@pytest.fixture
def written(model: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    """An engine whose KV of LONG went to the disk."""
    engine = tiered(model, disk=tmp_path)
    alone(engine, greedy(LONG))
    forget(engine)
    settled(engine)
    yield engine
    engine.close()


def test_pages_come_back_from_disk_to_another_engine(
    model: LoadedModel, reference: Reference, written: Engine, tmp_path: Path
) -> None:
    assert written.stats().disk_written_pages == written.stats().disk_pages > 24
    second = tiered(model, disk=tmp_path)
    sink = alone(second, greedy(LONG))
    assert sink.tokens == reference.greedy(LONG)
    assert sink.result.loaded_tokens == 100
    assert second.stats().disk_read_pages == 25
    settled(second)
    second.close()


@pytest.mark.usefixtures("written")
def test_others_run_while_the_disk_is_read(model: LoadedModel, reference: Reference, tmp_path: Path) -> None:
    second, other = tiered(model, disk=tmp_path), random_ids(20, 2)
    both = together(second, greedy(LONG), greedy(other, 30))
    assert both[0].tokens == reference.greedy(LONG) and both[0].result.loaded_tokens == 100
    assert both[1].tokens == reference.greedy(other, 30)
    settled(second)
    second.close()


@pytest.mark.usefixtures("written")
def test_an_abort_while_the_disk_is_read(model: LoadedModel, tmp_path: Path) -> None:
    second, sink = tiered(model, disk=tmp_path), Collected()
    sequence = second.add(greedy(LONG), sink)
    second.step()
    second.abort(sequence)
    finish(second)
    assert sink.result.finish_reason == "abort"
    settled(second)
    second.close()


@pytest.mark.usefixtures("written")
def test_another_models_pages_are_not_found(model: LoadedModel, tmp_path: Path) -> None:
    second = tiered(replace(model, fingerprint="other weights"), disk=tmp_path)
    assert alone(second, greedy(LONG)).result.cached_tokens == 0
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "late", "disk"), [(0, False, False), (1, True, False), (2, True, True)])
def test_a_mixed_load_on_a_small_pool(
    model: LoadedModel, reference: Reference, tmp_path: Path, seed: int, late: bool, disk: bool
) -> None:
    """Conversations of three tenants on too few pages: preemptions, aborts and evictions at every tier."""
    dice = random.Random(seed)
    engine = tiered(
        model,
        pages=70,
        host_pages=90,
        disk=tmp_path if disk else None,
        disk_pages=150,
        side_stream=LateStream() if late else None,
        step_tokens=48,
        max_running=6,
    )
    talks = [random_ids(dice.randrange(70, 120), 100 * seed + each) for each in range(8)]
    live, asked = list[tuple](), list[tuple[tuple[int, ...], int, Collected]]()
    for _ in range(150):
        talk, sink, length = dice.randrange(len(talks)), Collected(), dice.choice([1, 6, 30])
        ids = talks[talk][: dice.randrange(60, len(talks[talk]) + 1)]
        request = greedy(ids, length, namespace=dice.choice(["", "a", "b"]), priority=dice.choice([0, 0, 1]))
        live.append((engine.add(request, sink), sink))
        asked.append((ids, length, sink))
        while len(engine.sequences) > 8:
            engine.step()
        if dice.random() < 0.15:
            engine.abort(dice.choice(live)[0])
    finish(engine)
    settled(engine)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.loaded_tokens > 1000 and stats.host_evicted_pages > 0
    assert stats.host_pages_cached <= stats.host_pages_total == 90
    if disk:
        assert stats.disk_read_pages > 0
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.page")) <= engine.options.disk_bytes
    for ids, length, sink in dice.sample(asked, 50):
        expected = reference.greedy(ids, length)
        assert sink.tokens == expected[: len(sink.tokens)]
        assert sink.result.finish_reason == "abort" or sink.tokens == expected
    forget(engine)
    engine.close()


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="disk_path"):
        EngineOptions(host_bytes=1, disk_bytes=1)
    with pytest.raises(ConfigError, match="host_bytes"):
        EngineOptions(host_bytes=-1)


def test_a_folder_lost_on_the_way_costs_the_disk_tier_alone(
    model: LoadedModel, reference: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, ids = tiered(model, disk=tmp_path / "pages"), random_ids(101, 1)
    shutil.rmtree(tmp_path / "pages")
    (tmp_path / "pages").write_text("somebody else's")
    alone(engine, greedy(ids))
    forget(engine)
    settled(engine)
    assert engine.stats().disk_failures == 1 and "nothing is written" in caplog.text
    again = alone(engine, greedy(ids))
    assert again.tokens == reference.greedy(ids) and again.result.loaded_tokens == 100
    engine.close()


@pytest.mark.slow
def test_many_callers_of_two_services_on_one_folder(model: LoadedModel, reference: Reference, tmp_path: Path) -> None:
    """Conversations that take turns on pools too small for all of them, half of them at each engine."""
    services = [EngineService(tiered(model, pages=50, host_pages=60, disk=tmp_path)) for _ in range(2)]
    for service in services:
        service.start()

    def talk(seed: int) -> None:
        ids = random_ids(80, seed)
        for turn in range(3):
            sink = Collected()
            services[(seed + turn) % 2].submit(greedy(ids, 6), sink)
            ends = time.monotonic() + WAIT_S
            while not sink.ended:
                assert time.monotonic() < ends
                time.sleep(0.002)
            assert sink.tokens == expected(ids)
            ids = (*ids, *sink.tokens, *random_ids(10, 100 * turn + seed))

    @lru_cache
    def expected(ids: tuple[int, ...]) -> list[int]:
        with lock:
            return reference.greedy(ids, 6)

    lock = threading.Lock()
    with ThreadPoolExecutor(6) as callers:
        list(callers.map(talk, range(6)))
    for service in services:
        settled(service.engine)
        service.stop()
    stats = [service.engine.stats() for service in services]
    assert sum(each.loaded_tokens for each in stats) > 0 and all(each.disk_failures == 0 for each in stats)


def test_reading_is_given_up_where_computing_is_faster(model: LoadedModel, tmp_path: Path) -> None:
    first, ids = tiered(model, disk=tmp_path), random_ids(101, 1)
    alone(first, greedy(ids))
    forget(first)
    settled(first)
    second = tiered(model, disk=tmp_path)
    names = tiers(second).naming.extend(tiers(second).naming.start(""), np.array(ids))
    second.tier.computed(1 << 40, 1e-3)  # a machine that computes as fast as no disk reads
    tiers(second).disk_rate.add(1, 1)
    assert second.tier.fetch(names).done
    assert alone(second, greedy(ids)).result.loaded_tokens == 0
    first.close()
    second.close()
