"""Prefills beside running streams: how much a step may carry, learned from a machine whose clock is ours."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pace import Pace
from promptsluice.backend_engine.sequence import Rows, Sequence
from promptsluice.prompt.errors import ConfigError

from .driving import Collected, Reference, finish, greedy, random_ids, tiny_engine

Machine = Callable[[int, int], float]
MACHINES: dict[str, Machine] = {
    "linear": lambda decodes, rows: 0.05 + 0.002 * decodes + 0.003 * rows,
    "slow for few rows": lambda decodes, rows: 0.04 + (0.06 if decodes + rows > 1 else 0) + 0.003 * (decodes + rows),
    "fast": lambda decodes, rows: 0.001 + 0.00002 * (decodes + rows),
}


def _run(pace: Pace, machine: Machine, decodes: int, steps: int, noise: random.Random) -> list[tuple[int, float]]:
    """(rows, seconds) of steps that prefill as much as they may."""
    ran = []
    for _ in range(steps):
        rows = pace.rows(decodes)
        seconds = machine(decodes, rows) * noise.uniform(0.95, 1.05)
        pace.ran(decodes=decodes, rows=rows, seconds=seconds)
        ran.append((rows, seconds))
    return ran


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("decodes", [1, 8, 40])
def test_steps_take_about_the_aim_or_carry_the_least_or_the_most(name: str, decodes: int) -> None:
    machine, noise = MACHINES[name], random.Random(decodes)
    pace = Pace(stall=2.5, least=16, most=512)
    ran = _run(pace, machine, decodes, 300, noise)[60:]
    alone = machine(decodes, 0)
    for rows, seconds in ran:
        assert seconds <= 3 * alone or rows == 16, (rows, seconds / alone)
    full = sorted(seconds for rows, seconds in ran if rows)
    reached = full[len(full) // 2]
    assert 2.2 * alone < reached or {rows for rows, _ in ran} >= {512} or machine(decodes, 16) > 2.2 * alone
    assert sum(rows == 0 for rows, _ in ran) <= 6, "measuring costs few steps"


def test_a_single_slow_step_is_soon_forgotten() -> None:
    pace, machine = Pace(stall=2.5, least=16, most=512), MACHINES["linear"]
    before = _run(pace, machine, 8, 100, random.Random(1))[-1][0]
    pace.ran(decodes=8, rows=before, seconds=60.0)
    after = [rows for rows, _ in _run(pace, machine, 8, 20, random.Random(2))]
    assert min(after) >= before * 0.4 and after[-1] > before * 0.8


def test_it_grows_from_a_single_row() -> None:
    ran = _run(Pace(stall=2.5, least=1, most=512), MACHINES["fast"], 8, 60, random.Random(1))
    assert max(rows for rows, _ in ran) > 50


def test_it_follows_a_machine_that_becomes_slower_and_streams_that_come_and_go() -> None:
    pace, noise, machine = Pace(stall=2.5, least=16, most=512), random.Random(3), MACHINES["linear"]
    _run(pace, machine, 4, 100, noise)
    slower = _run(pace, lambda decodes, rows: machine(decodes, 3 * rows), 4, 100, noise)[20:]
    assert all(seconds <= 3 * machine(4, 0) or rows == 16 for rows, seconds in slower)
    assert pace.rows(9) == 0, "these streams have never been seen alone"


def test_without_streams_or_without_an_aim_a_step_is_full() -> None:
    assert Pace(stall=2.5, least=16, most=512).rows(0) == 512
    pace = Pace(stall=None, least=16, most=512)
    pace.ran(decodes=3, rows=500, seconds=9.0)
    assert pace.rows(3) == 512
    with pytest.raises(ConfigError, match="stall"):
        EngineOptions(stall=1.0)


class SimulatedTime:
    """A clock on which a step takes as long as its rows say: a decoder's calls move it."""

    def __init__(self, machine: Machine) -> None:
        self.now = 0.0
        self._machine = machine

    def __call__(self) -> float:
        return self.now

    def watch(self, decoder: Any) -> "TimedDecoder":
        return TimedDecoder(decoder, self)

    def pass_for(self, rows: int, requests: int) -> None:
        prefills = rows - requests
        self.now += self._machine(requests, max(0, prefills))


class TimedDecoder:
    def __init__(self, decoder: Any, time: SimulatedTime) -> None:
        self._decoder = decoder
        self._time = time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any, pool: Any, **options: Any) -> Any:
        self._time.pass_for(batch.rows, batch.requests)
        return self._decoder.forward(batch, pool, **options)


def _engine(model: LoadedModel, time: SimulatedTime, **options: Any) -> Engine:
    timed = replace(model, decoder=time.watch(model.decoder))
    return tiny_engine(timed, clock=time, pages=500, step_tokens=512, least_prefill=4, **options)


class AlwaysWrong:
    """Guesses eight tokens of each sequence that nobody would draw."""

    def drafts(self, sequences: list[Sequence], *, room: int) -> list[Rows]:
        return [np.full(8, sequence.ids[-1]) for sequence in sequences]

    def ran(self, *, rows: int, seconds: float) -> None:
        """Learns nothing."""


@pytest.mark.parametrize("guessing", [False, True])
def test_streams_go_on_during_a_long_prefill(tiny_llama_dir: Path, guessing: bool) -> None:
    """On the CPU, where every step goes through the decoder. Steps with guesses take longer and are no measure."""
    model, time = load_model(tiny_llama_dir), SimulatedTime(MACHINES["linear"])
    engine = _engine(model, time, stall=2.5, guessed_tokens=8 if guessing else 0)
    streams, long = [Collected() for _ in range(4)], Collected()
    for seed, sink in enumerate(streams):
        engine.add(greedy(random_ids(9, seed), 400), sink)
    if guessing:
        engine._scheduler._speculator = AlwaysWrong()
    for _ in range(20):
        engine.step()
    assert (engine.stats().drafted_tokens > 0) == guessing
    began, alone = time.now, MACHINES["linear"](4, 0)
    engine.add(greedy(random_ids(900, 9), 3), long)
    longest = 0.0
    while not long.tokens:
        before = time.now, [len(sink.tokens) for sink in streams]
        engine.step()
        assert all(len(sink.tokens) > count for sink, count in zip(streams, before[1], strict=True)), (
            "decodes always run"
        )
        longest = max(longest, time.now - before[0])
    assert longest <= 3 * alone, longest / alone
    assert time.now - began < 900 * 0.003 * 3, "and the prefill is not stretched beyond need"
    for sequence in engine.sequences:
        engine.abort(sequence)


def test_chunks_are_large_when_nobody_streams(tiny_llama_dir: Path, reference: Reference) -> None:
    model, time = load_model(tiny_llama_dir), SimulatedTime(MACHINES["linear"])
    engine, sink = _engine(model, time, stall=2.5), Collected()
    engine.add(greedy(random_ids(900, 9), 3), sink)
    finish(engine)
    assert engine.stats().steps == 4  # two chunks, the second of which draws, and two tokens
    assert sink.tokens == reference.greedy(random_ids(900, 9), 3)
