"""The engine's thread: many callers, cancelled consumers, overload, shutdown, failing steps."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from promptsluice.prompt.errors import ContextTooLong, Overloaded, PromptsluiceError

from .driving import Collected, Reference, assert_idle, greedy, random_ids, tiny_engine


class GatedDecoder:
    """A decoder that waits until it is let go, and breaks when told to."""

    def __init__(self, decoder: Decoder) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.broken = False
        self._decoder = decoder

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)

    def forward(self, *args: Any, **options: Any) -> object:
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken:
            raise ArithmeticError("broken")
        return self._decoder.forward(*args, **options)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir)


@pytest.fixture
def service(model: LoadedModel) -> Iterator[EngineService]:
    service = EngineService(tiny_engine(model))
    service.start()
    yield service
    service.stop()
    assert_idle(service.engine)


@pytest.fixture
def gated(model: LoadedModel) -> Iterator[tuple[EngineService, GatedDecoder]]:
    decoder = GatedDecoder(model.decoder)
    service = EngineService(tiny_engine(replace(model, decoder=decoder), max_running=1), max_waiting=2)
    service.start()
    yield service, decoder
    decoder.gate.set()
    service.stop()
    assert_idle(service.engine)


def _assert_ended(service: EngineService, requests: int) -> None:
    """Once a later request has run, the `requests` earlier ones of 900 tokens have ended too, before their last one."""
    service.run(greedy(random_ids(10, 99), 200))
    stats = service.engine.stats()
    assert (stats.finished, stats.running, stats.waiting) == (requests + 1, 0, 0)
    assert stats.generated_tokens < 200 + 900


@pytest.mark.slow
async def test_concurrent_generations_equal_lone_ones(service: EngineService, reference: Reference) -> None:
    async def tokens(ids: tuple[int, ...]) -> list[int]:
        generation = service.generate(greedy(ids))
        collected = [token async for delta in generation for token in delta.token_ids]
        assert generation.result.completion_tokens == 12
        return collected

    prompts = [random_ids(10 + n, n) for n in range(12)]
    outputs = await asyncio.gather(*map(tokens, prompts))
    assert outputs == [reference.greedy(ids) for ids in prompts]


def test_many_threads_run_and_wait(service: EngineService, reference: Reference) -> None:
    requests = [replace(greedy(random_ids(9, n), 0), prompt_logprobs=True) for n in range(20)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(service.run, requests))
    for request, result in zip(requests, results, strict=True):
        assert result.prompt_logprobs is not None
        assert (result.prompt_logprobs - reference.logprobs(request.ids)).abs().max() < 1e-4


async def test_leaving_the_loop_early_ends_the_request(service: EngineService) -> None:
    async for delta in service.generate(greedy(random_ids(10, 1), 900)):
        assert delta.token_ids
        break
    await asyncio.to_thread(_assert_ended, service, 1)


async def test_a_cancelled_consumer_ends_the_request(service: EngineService) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in service.generate(greedy(random_ids(10, 1), 900)):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(_assert_ended, service, 1)


async def test_a_generation_that_is_dropped_unread_is_ended(service: EngineService) -> None:
    service.generate(greedy(random_ids(10, 1), 900))
    await asyncio.to_thread(_assert_ended, service, 1)


async def test_abort_ends_the_stream_with_its_reason(service: EngineService) -> None:
    generation, reasons = service.generate(greedy(random_ids(10, 1), 900)), []
    async for delta in generation:
        generation.abort()
        reasons.append(delta.finish_reason)
    assert reasons[-1] == generation.result.finish_reason == "abort"


def test_a_loop_that_was_closed_takes_its_requests_along(service: EngineService) -> None:
    kept = []

    async def leave() -> None:
        kept.append(service.generate(greedy(random_ids(10, 1), 900)))

    asyncio.run(leave())
    _assert_ended(service, 1)


def test_beyond_the_bound_requests_are_refused_with_a_time_to_retry(
    gated: tuple[EngineService, GatedDecoder],
) -> None:
    service, decoder = gated
    sinks = [Collected() for _ in range(3)]
    service.submit(greedy(random_ids(8, 0)), sinks[0])
    assert decoder.entered.wait(20)
    for sink in sinks[1:]:
        service.submit(greedy(random_ids(8, 1)), sink)
    with pytest.raises(Overloaded) as refused:
        service.submit(greedy(random_ids(8, 2)), Collected())
    assert int(refused.value.headers["retry-after"]) >= 1
    decoder.gate.set()
    service.stop(drain_s=30)
    assert [sink.result.completion_tokens for sink in sinks] == [12] * 3


def test_waiting_is_bounded_by_tokens_too_but_a_large_prompt_may_wait_alone(model: LoadedModel) -> None:
    service = EngineService(tiny_engine(model), max_waiting_tokens=100)
    service.submit(greedy(random_ids(150, 0)), Collected())
    with pytest.raises(Overloaded, match="150 tokens"):
        service.submit(greedy(random_ids(10, 1)), Collected())
    service.stop()


def test_who_waits_too_long_is_refused_with_a_time_to_retry(model: LoadedModel) -> None:
    decoder = GatedDecoder(model.decoder)
    engine = tiny_engine(replace(model, decoder=decoder), max_running=1)
    service, running, late = EngineService(engine, queue_timeout_s=0.1), Collected(), Collected()
    service.start()
    service.submit(greedy(random_ids(8, 0)), running)
    assert decoder.entered.wait(60)
    queued = service.submit(greedy(random_ids(8, 1)), late)
    while time.monotonic() - queued.submitted < 0.2:
        time.sleep(0.01)
    decoder.gate.set()
    service.stop(drain_s=60)
    assert running.result.completion_tokens == 12, "who has begun is not refused"
    error = late.error
    assert error is not None and isinstance(error, Overloaded) and error.retry_after >= 1
    assert_idle(engine)


def test_the_time_to_retry_follows_how_fast_requests_end(gated: tuple[EngineService, GatedDecoder]) -> None:
    service, decoder = gated
    decoder.gate.set()
    began = time.monotonic()
    for seed in range(3):
        service.run(greedy(random_ids(8, seed)))
    took = time.monotonic() - began
    decoder.gate.clear()
    decoder.entered.clear()
    service.submit(greedy(random_ids(8, 3)), Collected())
    assert decoder.entered.wait(60)
    for seed in range(2):
        service.submit(greedy(random_ids(8, 4 + seed)), Collected())
    with pytest.raises(Overloaded) as refused:
        service.submit(greedy(random_ids(8, 6)), Collected())
    assert 0 < refused.value.retry_after <= max(1.0, took + (time.monotonic() - began))


def test_a_failed_step_is_an_error_for_its_requests_and_the_service_goes_on(
    gated: tuple[EngineService, GatedDecoder],
) -> None:
    service, decoder = gated
    decoder.gate.set()
    decoder.broken = True
    with pytest.raises(PromptsluiceError, match="broken"):
        service.run(greedy(random_ids(8, 0)))
    decoder.broken = False
    assert service.run(greedy(random_ids(8, 0))).completion_tokens == 12
    assert service.healthy()


async def test_a_failure_is_raised_from_the_iteration(gated: tuple[EngineService, GatedDecoder]) -> None:
    service, decoder = gated
    decoder.gate.set()
    decoder.broken = True
    with pytest.raises(PromptsluiceError, match="broken"):
        async for _ in service.generate(greedy(random_ids(8, 0))):
            pass


def test_a_hung_step_shows(gated: tuple[EngineService, GatedDecoder]) -> None:
    service, decoder = gated
    service.submit(greedy(random_ids(8, 0)), Collected())
    assert decoder.entered.wait(20)
    assert service.healthy(within_s=60)
    assert not service.healthy(within_s=0)


def test_what_can_never_run_is_refused_in_the_callers_thread(service: EngineService) -> None:
    with pytest.raises(ContextTooLong):
        service.run(greedy((5,) * 2000))


def test_stopping_lets_running_requests_finish(model: LoadedModel) -> None:
    service, sink = EngineService(tiny_engine(model)), Collected()
    service.submit(greedy(random_ids(8, 0), 50), sink)
    service.start()
    service.stop(drain_s=30)
    assert sink.result.completion_tokens == 50
    with pytest.raises(Overloaded, match="shutting down"):
        service.submit(greedy(random_ids(8, 0)), Collected())
    assert not service.healthy()


def test_stopping_without_patience_aborts(gated: tuple[EngineService, GatedDecoder]) -> None:
    service, decoder = gated
    sinks = Collected(), Collected()
    for sink in sinks:
        service.submit(greedy(random_ids(8, 0), 900), sink)
    assert decoder.entered.wait(20)
    threading.Timer(0.05, decoder.gate.set).start()
    service.stop()
    assert [sink.result.finish_reason for sink in sinks] == ["abort", "abort"]


def test_who_waits_while_the_service_stops_is_told(gated: tuple[EngineService, GatedDecoder]) -> None:
    service, decoder = gated
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.run, greedy(random_ids(8, 0), 900))
        assert decoder.entered.wait(30)
        stopping = threading.Thread(target=service.stop)
        stopping.start()
        decoder.gate.set()
        stopping.join()
        with pytest.raises(Overloaded, match="shutting down"):
            waiting.result(30)


def test_a_service_that_never_started_stops(model: LoadedModel) -> None:
    service, sink = EngineService(tiny_engine(model)), Collected()
    service.submit(GenerationRequest(ids=(5,), sampling=SamplingParams()), sink)
    service.stop()
    assert sink.result.finish_reason == "abort"


def test_the_memory_of_a_stopped_service_is_free_at_once(model: LoadedModel) -> None:
    """Gigabytes would wait for a collection of cycles, which a process with few new objects hardly ever does."""
    service = EngineService(tiny_engine(model))
    service.start()
    service.run(greedy(random_ids(8, 0), 2))
    engine = weakref.ref(service.engine)
    gc.collect()
    gc.disable()
    try:
        service.stop()
        del service
        assert engine() is None
    finally:
        gc.enable()
