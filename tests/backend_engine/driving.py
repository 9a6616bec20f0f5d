"""Running requests on an engine by hand, and what they produced."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.step_cost import StepCost
from promptsluice.backend_engine.steps import MixedSteps, SingleRowSteps
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from promptsluice.prompt.errors import PromptsluiceError
from transformers import AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where engines run in tests: on a GPU machine the same tests go through graphs and kernels."""
FREE_ROWS = StepCost(rows=(1, 512), seconds=(1.0, 1.0))
"""Guesses always pay: what is tested does not depend on how fast the machine is."""


@dataclass
class Collected:
    """A sink that keeps everything."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    error: PromptsluiceError | None = None

    def delta(self, delta: Delta) -> None:
        assert not self.ended
        self.text += delta.text
        self.tokens += delta.token_ids
        self.deltas.append(delta)

    def done(self, result: Result) -> None:
        assert not self.ended
        self.results.append(result)

    def failed(self, error: PromptsluiceError) -> None:
        assert not self.ended
        self.error = error

    @property
    def ended(self) -> bool:
        return bool(self.results) or self.error is not None

    @property
    def result(self) -> Result:
        assert self.error is None and len(self.results) == 1, self
        return self.results[0]


def tiny_engine(
    model: LoadedModel,
    *,
    pages: int = 200,
    page_size: int = 4,
    single_rows: Callable[..., SingleRowSteps] | None = None,
    mixed: Callable[..., MixedSteps] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    stall: float | None = None,
    **options: int,
) -> Engine:
    """Tokens are guessed only if `guessed_tokens` says so, and then at no cost. Without `stall`, no chunk's size
    depends on how fast the machine is.
    """
    sizes = {"step_tokens": 64, "max_running": 16, "shared_tokens": 8, "guessed_tokens": 0, "graph_rows": 64}
    sizes |= options
    chosen = EngineOptions(pages=pages, page_size=page_size, stall=stall, **sizes)
    return Engine(model, options=chosen, single_rows=single_rows, mixed=mixed, step_cost=FREE_ROWS, clock=clock)


def greedy(ids: Sequence[int], max_tokens: int = 12, **fields: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(ids=tuple(ids), sampling=params, **fields)


def finish(engine: Engine, *, most_steps: int = 5000) -> None:
    """Step until nothing is left; an engine that makes no progress fails the test instead of hanging it."""
    for _ in range(most_steps):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"still at work after {most_steps} steps: {engine.stats()}")


def together(engine: Engine, *requests: GenerationRequest) -> list[Collected]:
    """Submit all, run all."""
    sinks = [Collected() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.add(request, sink)
    finish(engine)
    return sinks


def alone(engine: Engine, request: GenerationRequest) -> Collected:
    return together(engine, request)[0]


def assert_as_far(sink: Collected, expected: list[int]) -> None:
    """It got `expected`, or the beginning of it before it was aborted."""
    assert sink.tokens == expected[: len(sink.tokens)]
    assert sink.result.finish_reason == "abort" or sink.tokens == expected


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and every page is free or the prefix tree's."""
    engine.allocator.check()
    engine.tree.check()
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert engine.tree.evictable == engine.tree.pages


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


class Reference:
    """transformers on the same weights."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], max_tokens: int = 12, *, ignore_eos: bool = True, **options: Any) -> list[int]:
        """The ids that `generate` appends; `options` are its own."""
        prompt = torch.tensor([ids])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **({"eos_token_id": None} if ignore_eos else {}) | options,
        )
        return output[0, len(ids) :].tolist()

    @torch.inference_mode()
    def assert_greedy(self, ids: Sequence[int], output: Sequence[int], max_tokens: int) -> None:
        """`generate` would append `output`: each token is the likeliest after those before it, and the end is the same.

        One pass over prompt and output, where `generate` makes one for each token.
        """
        logits = self.model(torch.tensor([[*ids, *output[:-1]]]), logits_to_keep=len(output)).logits[0]
        assert logits.argmax(-1).tolist() == list(output)
        eos = self.model.generation_config.eos_token_id
        ends = [place for place, token in enumerate(output, 1) if token in (eos if isinstance(eos, list) else [eos])]
        assert ends == [len(output)] or (not ends and len(output) == max_tokens)

    @torch.inference_mode()
    def scores(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [tokens - 1, vocab] of what may follow each token but the last."""
        return self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of each token but the first."""
        scores = self.scores(ids)
        return scores.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
