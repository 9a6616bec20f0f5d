"""A device that has no memory for a step: smaller steps, fewer requests, the same tokens; who can run does not fail."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.fitting import fitting_engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.token_counts import TokenCounts
from promptsluice.prompt.errors import ModelUnavailable, Overloaded

from .driving import Collected, Reference, assert_idle, finish, greedy, random_ids, tiny_engine
from .eager import EagerSteps


class SmallDevice:
    """A decoder on a device that has memory for `room(calls)` rows at a time."""

    def __init__(self, decoder: Any, room: Callable[[int], int]) -> None:
        self.calls = 0
        self.failures = 0
        self._decoder = decoder
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
        self.calls += 1
        if batch.rows > self._room(self.calls):
            self.failures += 1
            raise torch.OutOfMemoryError("no memory")
        return self._decoder.forward(batch, pool, **options)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir)


def _served(
    model: LoadedModel, room: Callable[[int], int], lengths: list[int], **options: Any
) -> tuple[Engine, SmallDevice, list[Collected]]:
    """The requests' outcomes on such a device, through the service."""
    device = SmallDevice(model.decoder, room)
    service = EngineService(tiny_engine(replace(model, decoder=device), **options))
    sinks = [Collected() for _ in lengths]
    for seed, (length, sink) in enumerate(zip(lengths, sinks, strict=True)):
        service.submit(greedy(random_ids(length, seed), 20), sink)
    service.start()
    service.stop(drain_s=120)
    return service.engine, device, sinks


@pytest.mark.slow
@pytest.mark.parametrize(
    "room",
    [lambda _: 40, lambda _: 17, lambda calls: 0 if calls % 7 == 3 and calls < 40 else 1000],
    ids=["for 40 rows", "for 17 rows", "not in every seventh step"],
)
def test_nobody_fails_and_no_token_changes(
    model: LoadedModel, reference: Reference, room: Callable[[int], int]
) -> None:
    lengths = [5, 100, 30, 61, 90, 8]
    engine, device, sinks = _served(model, room, lengths)
    assert device.failures > 0 and engine.stats().out_of_memory == device.failures
    assert [sink.tokens for sink in sinks] == [
        reference.greedy(random_ids(length, seed), 20) for seed, length in enumerate(lengths)
    ]
    assert_idle(engine)


@pytest.mark.slow
def test_fewer_run_at_a_time_where_their_decodes_alone_are_too_many(model: LoadedModel, reference: Reference) -> None:
    engine, device, sinks = _served(model, lambda calls: 1000 if calls < 4 else 3, [16] * 8)
    assert device.failures > 2
    for seed, sink in enumerate(sinks):
        expected = reference.greedy(random_ids(16, seed), 20)
        assert sink.tokens == expected or isinstance(sink.error, Overloaded), "a prompt of 16 rows needs 16 rows"
        assert sink.tokens == expected[: len(sink.tokens)]
    assert_idle(engine)


def test_what_cannot_be_made_smaller_is_refused_with_a_time_to_retry(model: LoadedModel) -> None:
    engine, _, sinks = _served(model, lambda _: 0, [30, 30])
    for sink in sinks:
        error = sink.error
        assert error is not None and isinstance(error, Overloaded) and error.retry_after >= 1
    assert_idle(engine)


def test_no_guess_costs_a_request_its_place(few_words_dir: Path) -> None:
    """A device that has memory for a prompt, but not for a step with guesses."""
    model = load_model(few_words_dir)
    device = SmallDevice(model.decoder, lambda _: 20)
    engine = tiny_engine(replace(model, decoder=device), guessed_tokens=31)
    sink = Collected()
    engine.add(greedy(random_ids(16, 40), 100), sink)
    _stepped(engine)
    assert device.failures == 1 and engine.stats().drafted_tokens == 0
    assert sink.tokens == Reference(few_words_dir).greedy(random_ids(16, 40), 100)
    assert_idle(engine)


def test_a_last_piece_that_never_fits_is_not_tried_for_ever(model: LoadedModel) -> None:
    """The pieces before it always run: that alone is no progress."""

    class NoScores(SmallDevice):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            if len(hidden) < 16:
                raise torch.OutOfMemoryError("no memory")
            return self._decoder.logits(hidden)

    engine = tiny_engine(replace(model, decoder=NoScores(model.decoder, lambda _: 16)))
    sink = Collected()
    engine.add(replace(greedy(random_ids(100, 1), 20), prompt_logprobs=True), sink)
    _stepped(engine)
    assert isinstance(sink.error, Overloaded)
    assert_idle(engine)


def test_a_row_of_counts_that_could_not_be_filled_was_never_there(model: LoadedModel) -> None:
    counts, sequence = TokenCounts(torch.device("cpu")), tiny_engine(model).prepare(greedy((3, 400)), Collected())
    sequence.row = 0
    with pytest.raises(IndexError):
        counts.of([sequence], vocab=100)
    counts.forget(0)
    assert counts.nbytes == 0
    assert counts.of([sequence], vocab=512)[0].nonzero().flatten().tolist() == [3, 400]


def _stepped(engine: Engine) -> None:
    for _ in range(500):
        if not engine.has_work:
            return
        try:
            engine.step()
        except torch.OutOfMemoryError:
            engine.relieve()
    raise AssertionError(f"tried for ever: {engine.stats()}")


def test_the_limits_grow_back(model: LoadedModel) -> None:
    engine = tiny_engine(replace(model, decoder=SmallDevice(model.decoder, lambda calls: 0 if calls == 1 else 1000)))
    first, late = Collected(), Collected()
    engine.add(greedy(random_ids(64, 1), 300), first)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    engine.relieve()
    engine.step()
    assert not first.tokens, "the prompt comes in two pieces now"
    engine.step()
    assert len(first.tokens) == 1
    finish(engine)
    engine.add(greedy(random_ids(64, 2), 1), late)
    engine.step()
    assert late.ended, "in one piece again"


def test_a_pool_that_does_not_fit_becomes_smaller(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    asked = EngineOptions(kv_bytes=64 << 20)
    made = []

    def graphs(decoder: Any, pool: Any, pages: Any, **fields: Any) -> EagerSteps:
        made.append(pool.data.nbytes)
        if pool.data.nbytes > 30 << 20:
            raise torch.OutOfMemoryError("no memory")
        return EagerSteps(decoder, pool, pages, **fields)

    with caplog.at_level(logging.WARNING):
        engine = fitting_engine(model, options=asked, single_rows=graphs)
    assert 20 << 20 < engine.pool.data.nbytes <= 30 << 20
    assert len(made) == 4 and "smaller than asked for" in caplog.text


@pytest.mark.slow
def test_a_device_without_any_room_is_named(model: LoadedModel) -> None:
    def graphs(*args: Any, **fields: Any) -> EagerSteps:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(ModelUnavailable, match="cpu has no memory for the KV"):
        fitting_engine(model, single_rows=graphs)


def test_a_hung_step_is_logged_with_its_stack(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    gate, logged = threading.Event(), threading.Event()

    class Hanging(SmallDevice):
        def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
            assert gate.wait(120)
            return super().forward(batch, pool, **options)

    class Noticing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "in one step" in record.getMessage():
                self.message = record.getMessage()
                logged.set()

    handler = Noticing()
    logging.getLogger("promptsluice.backend_engine.watchdog").addHandler(handler)
    engine = tiny_engine(replace(model, decoder=Hanging(model.decoder, lambda _: 1000)))
    service = EngineService(engine, slow_step_s=0.05)
    service.start()
    try:
        sink = Collected()
        service.submit(greedy(random_ids(8, 1)), sink)
        assert logged.wait(60)
        assert "gate.wait" in handler.message and service.step_s > 0.05
    finally:
        gate.set()
        service.stop(drain_s=60)
        logging.getLogger("promptsluice.backend_engine.watchdog").removeHandler(handler)
    assert sink.result.completion_tokens == 12 and service.step_s == 0
