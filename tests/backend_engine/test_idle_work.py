"""What a prefill has cost, the first token's distribution, and requests that run while nothing else does."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams

from .driving import random_ids

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32")


@pytest.fixture
def service(model: LoadedModel) -> Iterator[EngineService]:
    options = EngineOptions(pages=128, page_size=4, step_tokens=32, max_running=8, stall=None, least_prefill=5)
    running = EngineService(Engine(model, options=options))
    running.start()
    yield running
    running.stop()


def test_a_prefills_work_is_counted_over_its_steps(service: EngineService) -> None:
    result = service.run(GenerationRequest(ids=random_ids(70, 1), sampling=GREEDY))
    assert (result.work.steps, result.work.rows, result.work.pairs) == (3, 70, 70 * 71 // 2)
    assert 0 < result.work.seconds <= result.ttft_ms / 1000
    again = service.run(GenerationRequest(ids=random_ids(70, 1), sampling=GREEDY))
    assert (again.work.steps, again.work.rows, again.work.pairs) == (1, 1, 70)


def test_prefills_that_share_steps_share_their_cost(service: EngineService) -> None:
    requests = [GenerationRequest(ids=random_ids(12, seed), sampling=GREEDY) for seed in (2, 3)]
    first, second = service.run_all(requests)
    for work in (first.work, second.work):
        assert (work.rows, work.pairs) == (12, 12 * 13 // 2)
    # How much they share depends on when the second one comes: before, while or after the first one decodes.
    assert 1 <= first.work.steps + second.work.steps <= 2


def test_the_first_tokens_distribution_is_the_models(service: EngineService, model: LoadedModel) -> None:
    ids = random_ids(40, 4)
    result = service.run(GenerationRequest(ids=ids, sampling=replace(GREEDY, temperature=1.5), first_logprobs=True))
    assert result.first_logprobs is not None
    expected = [
        service.run(
            GenerationRequest(ids=(*ids, token), sampling=SamplingParams(max_tokens=0), prompt_logprobs=True)
        ).prompt_logprobs
        for token in (7, 300)
    ]
    got = result.first_logprobs[torch.tensor([7, 300])]
    torch.testing.assert_close(got, torch.stack([one[-1] for one in expected if one is not None]), atol=1e-4, rtol=1e-4)
    assert service.run(GenerationRequest(ids=ids, sampling=GREEDY)).first_logprobs is None


def test_idle_requests_run_alone_in_small_steps(service: EngineService) -> None:
    request = GenerationRequest(ids=random_ids(23, 5), sampling=GREEDY, idle=True, prefix_cache=False)
    finished = service.run_idle(request)
    assert finished is not None and len(finished.tokens) == 4
    assert finished.result.work.steps == 5
    live = service.run(replace(request, idle=False))
    assert live.work.steps == 1


def test_an_idle_request_is_given_up_for_anybody_else(service: EngineService) -> None:
    endless = replace(GREEDY, max_tokens=400)
    request = GenerationRequest(ids=random_ids(60, 6), sampling=endless, idle=True, prefix_cache=False)
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.append(service.run_idle(request)))
    thread.start()
    while not service.stats().running and thread.is_alive():
        pass
    alone = service.run(GenerationRequest(ids=random_ids(9, 7), sampling=GREEDY))
    thread.join()
    assert outcomes == [None] and alone.completion_tokens == 4
    assert service.run_idle(replace(request, sampling=GREEDY)) is not None, "the next one may run"


def test_nothing_idle_begins_beside_others(service: EngineService) -> None:
    sink = _Held()
    service.submit(GenerationRequest(ids=random_ids(9, 8), sampling=replace(GREEDY, max_tokens=30)), sink)
    sink.began.wait()  # before, the idle one may begin and be given up, for which the held thread would be needed
    request = GenerationRequest(ids=random_ids(9, 9), sampling=GREEDY, idle=True)
    assert service.run_idle(request) is None
    sink.release.set()


def test_known_tokens_are_what_a_prompt_would_find(service: EngineService) -> None:
    ids = random_ids(50, 10)
    assert service.known_tokens(ids) == 0
    service.run(GenerationRequest(ids=ids, sampling=GREEDY))
    tree = service.engine.tree
    for prompt in (ids, ids[:30], (*ids[:22], *random_ids(20, 11)), random_ids(20, 12)):
        whole = len(tree.match(np.asarray(prompt, dtype=np.int64)[:-1]).pages) * tree.page_size
        assert service.known_tokens(prompt) == whole
    assert service.known_tokens(ids, namespace="another") == 0


class _Held:
    """A sink that keeps its request from going on."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()

    def delta(self, delta: object) -> None:
        self.began.set()
        self.release.wait()

    def done(self, result: object) -> None: ...

    def failed(self, error: object) -> None: ...
