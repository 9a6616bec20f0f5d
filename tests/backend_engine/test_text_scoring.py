"""Scores of texts by windows: exact where nothing is left out, near where the KV of far tokens is, and on time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.text_scoring import Encoding, Scores, TextScorer
from promptsluice.backend_engine.types import GenerationRequest, KVBlock, Result, Reuse, ReusedSpan
from promptsluice.prompt import BadRequest

Reference = Callable[[Sequence[int]], torch.Tensor]


def letters(text: str) -> Encoding:
    """A token a character."""
    return Encoding([3 + ord(char) % 500 for char in text], [(at, at + 1) for at in range(len(text))])


def text_of(size: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return "".join(chr(97 + code) for code in rng.integers(0, 400, size))


@pytest.fixture(scope="module")
def service(tiny_llama_dir: Path) -> Iterator[EngineService]:
    service = EngineService(
        Engine(load_model(tiny_llama_dir, dtype="float32"), options=EngineOptions(kv_bytes=1 << 26))
    )
    service.start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Reference:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        table = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        return table.gather(1, torch.tensor(list(ids[1:]))[:, None]).squeeze(1)

    return logprobs


def joined(windows: Sequence[Scores], number: int) -> np.ndarray:
    return np.concatenate([window.tokens for window in windows if window.text == number])


def forever() -> float:
    return math.inf


def test_windows_that_carry_everything_equal_one_pass(service: EngineService, reference: Reference) -> None:
    texts = [text_of(150, 1), text_of(7, 2), "", text_of(140, 3)]
    scorer = TextScorer(service.run_all, letters, rows=512, room=1024)
    windows = list(scorer(texts, remaining=forever))
    assert {window.text for window in windows} == {0, 1, 3}
    for number in (0, 1, 3):
        tokens = joined(windows, number)
        ids = letters(texts[number]).ids
        assert np.isnan(tokens[0, 2])
        assert np.abs(tokens[1:, 2] - reference(ids).numpy()).max() < 1e-3
        assert [window.end for window in windows if window.text == number][-1] == len(texts[number])
        assert (tokens[:, 0] == np.arange(len(ids))).all()


def test_given_text_is_read_first(service: EngineService, reference: Reference) -> None:
    text, given = text_of(140, 4), text_of(20, 5)
    scorer = TextScorer(service.run_all, letters, rows=512, room=1024)
    tokens = joined(list(scorer([text], given=given, remaining=forever)), 0)
    expected = reference([*letters(given).ids, *letters(text).ids]).numpy()[-140:]
    assert np.abs(tokens[:, 2] - expected).max() < 1e-3


def test_long_texts_stay_within_the_room(service: EngineService) -> None:
    text = text_of(700, 6)
    requests: list[GenerationRequest] = []

    def run(batch: Sequence[GenerationRequest]) -> Sequence[Result]:
        requests.extend(batch)
        return service.run_all(batch)

    tokens = joined(list(TextScorer(run, letters, rows=100, room=256)([text], remaining=forever)), 0)
    assert len(tokens) == 700
    assert max(len(request.ids) for request in requests) <= 256
    computed = sum(len(request.ids) - sum(span.kv.tokens for span in request.reuse.spans) if request.reuse else
                   len(request.ids) for request in requests)  # fmt: skip
    assert computed <= 700 + len(requests)
    assert np.isfinite(tokens[1:, 2]).all()


@pytest.mark.slow
def test_what_is_left_behind_changes_little(smollm2: LoadedModel) -> None:
    """Of a real text under a real model, against one pass over all of it."""
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = (Path(__file__).parents[1] / "data" / "compressors" / "async_en.md").read_text(encoding="utf-8")[:6000]

    def encode(text: str) -> Encoding:
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    service = EngineService(Engine(smollm2, options=EngineOptions(kv_bytes=1 << 28)))
    service.start()
    try:
        near = joined(list(TextScorer(service.run_all, encode, rows=256, room=2048)([text], remaining=forever)), 0)
        request = GenerationRequest(
            ids=encode(text).ids, sampling=SamplingParams(max_tokens=0), prompt_logprobs=True, prefix_cache=False
        )
        whole = service.run(request).prompt_logprobs
    finally:
        service.stop()
    assert whole is not None and len(whole) > 1000
    assert np.corrcoef(near[1:, 2], whole.numpy())[0, 1] > 0.965
    assert abs(near[1:, 2].mean() - float(whole.mean())) < 0.1


def test_what_is_wanted_is_scored_as_it_would_be_among_all(service: EngineService, reference: Reference) -> None:
    text = text_of(300, 9)
    spans = [(10, 14), (40, 41), (90, 120)]
    scorer = TextScorer(service.run_all, letters, rows=512, room=1024)
    (window,) = scorer([text], wanted=[spans], remaining=forever)
    places = [place for start, end in spans for place in range(start, end)]
    assert window.tokens[:, 0].tolist() == places
    assert window.end == 300
    expected = reference(letters(text).ids).numpy()[[place - 1 for place in places]]
    assert np.abs(window.tokens[:, 2] - expected).max() < 1e-3


def test_what_is_far_before_all_that_is_wanted_is_not_read(service: EngineService) -> None:
    read: list[int] = []

    def run(batch: Sequence[GenerationRequest]) -> Sequence[Result]:
        read.extend(len(request.ids) for request in batch)
        return service.run_all(batch)

    texts = [text_of(400, 10), text_of(50, 11), text_of(300, 12)]
    scorer = TextScorer(run, letters, rows=512, room=1024)
    windows = list(scorer(texts, wanted=[[(2, 5), (350, 352)], [], [(299, 300)]], remaining=forever))
    assert read == [5 + 63 + 2, 64]
    assert {window.text: window.tokens[:, 0].tolist() for window in windows} == {
        0: [2, 3, 4, 350, 351],
        1: [],
        2: [299],
    }
    assert {window.text: window.end for window in windows} == {0: 400, 1: 50, 2: 300}


def test_scores_are_the_same_where_time_is_short(service: EngineService) -> None:
    """The piece by which the speed is learned is no window of its own: nothing before it is forgotten."""
    texts = [text_of(500, 13), text_of(90, 14)]
    sizes: list[int] = []

    def run(batch: Sequence[GenerationRequest]) -> Sequence[Result]:
        sizes.append(len(batch[0].ids))
        return service.run_all(batch)

    scorer = TextScorer(run, letters, rows=200, room=1024)
    at_leisure = list(scorer(texts, remaining=forever))
    assert sizes[0] == 200
    sizes.clear()
    in_haste = list(scorer(texts, remaining=lambda: 1e6))
    assert sizes[0] == 128
    for number in (0, 1):
        one, other = joined(at_leisure, number), joined(in_haste, number)
        assert np.allclose(one, other, atol=1e-4, equal_nan=True)


def test_several_texts_share_a_call(service: EngineService) -> None:
    sizes: list[int] = []

    def run(batch: Sequence[GenerationRequest]) -> Sequence[Result]:
        sizes.append(len(batch))
        return service.run_all(batch)

    windows = list(
        TextScorer(run, letters, rows=256, room=1024)([text_of(40, n) for n in range(12)], remaining=forever)
    )
    assert sizes == [6, 6]
    alone = list(TextScorer(service.run_all, letters, rows=256, room=1024)([text_of(40, 7)], remaining=forever))
    assert np.allclose(joined(windows, 7), joined(alone, 0), atol=1e-4, equal_nan=True)


def test_ends_before_the_time_does(service: EngineService) -> None:
    now = 0.0

    def run(batch: Sequence[GenerationRequest]) -> Sequence[Result]:
        nonlocal now
        now += 1.0 * len(batch[0].ids)
        return service.run_all(batch)

    scorer = TextScorer(run, letters, rows=128, room=1024, clock=lambda: now)
    windows = list(scorer([text_of(900, 8)], remaining=lambda: 500.0 - now))
    assert 128 < windows[-1].end < 900
    assert now <= 500.0 + 128


def test_reused_rows_tell_nothing(service: EngineService) -> None:
    ids = tuple(range(10, 60))
    request = GenerationRequest(ids=ids, sampling=SamplingParams(max_tokens=0), prompt_logprobs=True, keep_kv=True)
    plain = service.run(request)
    assert plain.kv is not None and plain.prompt_logprobs is not None
    span = ReusedSpan(0, KVBlock(plain.kv.k[:, :30], plain.kv.v[:, :30]))
    again = service.run(replace(request, reuse=Reuse(spans=(span,)))).prompt_logprobs
    assert again is not None
    assert again[:30].isnan().all()
    assert torch.allclose(again[30:], plain.prompt_logprobs[30:], atol=1e-4)


def test_logprobs_of_reused_rows_are_refused(service: EngineService) -> None:
    block = KVBlock(*(torch.zeros(4, 2, 2, 16) for _ in range(2)))
    request = GenerationRequest(
        ids=(3, 4, 5),
        sampling=SamplingParams(max_tokens=1, logprobs=2),
        prompt_logprobs=True,
        reuse=Reuse(spans=(ReusedSpan(0, block),)),
    )
    with pytest.raises(BadRequest) as refused:
        service.run(request)
    assert refused.value.param == "prompt_logprobs"
