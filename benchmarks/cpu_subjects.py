"""What engine_cpu.py measures: our engine, transformers' generate, and peers in processes of their own or served."""

import json
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result
from promptsluice.prompt import PromptsluiceError


class Subject(Protocol):
    """Seconds of one greedy run. Prompts that were not seen before hit no cache."""

    @property
    def name(self) -> str: ...

    @property
    def caches(self) -> bool:
        """Whether it remembers a prompt that was seen before."""
        ...

    def ttft(self, ids: list[int]) -> float:
        """From the prompt to its first token."""
        ...

    def again(self, ids: list[int]) -> float:
        """The same right after `ttft` of this prompt, with whatever cache the subject has."""
        ...

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        """A decode step of all prompts together: the median of the steps after the first token."""
        ...


@dataclass
class Sink:
    tokens: int = 0
    ended: bool = False
    errors: list[str] = field(default_factory=list)

    def delta(self, delta: Delta) -> None:
        self.tokens += len(delta.token_ids)

    def done(self, result: Result) -> None:
        self.ended = True

    def failed(self, error: PromptsluiceError) -> None:
        self.errors.append(error.message)


class Ours:
    """See Subject. Guessing ahead is off: what it gains depends on the text."""

    caches = True

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name = name
        self._engine = Engine(model, options=EngineOptions(kv_bytes=1 << 30, guessed_tokens=0))

    def ttft(self, ids: list[int]) -> float:
        began, sink = time.perf_counter(), self._added(ids, 1)
        while not sink.ended:
            self._step([sink])
        return time.perf_counter() - began

    def again(self, ids: list[int]) -> float:
        return self.ttft(ids)

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        sinks = [self._added(ids, tokens) for ids in prompts]
        while any(sink.tokens == 0 for sink in sinks):
            self._step(sinks)
        taken = []
        while not any(sink.ended for sink in sinks):
            began = time.perf_counter()
            self._step(sinks)
            taken.append(time.perf_counter() - began)
        while self._engine.has_work:
            self._step(sinks)
        return statistics.median(taken)

    def _added(self, ids: list[int], tokens: int) -> Sink:
        sink = Sink()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._engine.add(GenerationRequest(ids=ids, sampling=sampling), sink)
        return sink

    def _step(self, sinks: list[Sink]) -> None:
        self._engine.step()
        if errors := [error for sink in sinks for error in sink.errors]:
            raise SystemExit(f"{self.name}: {errors[0]}")


class Transformers:
    """`generate` in float32. It keeps no KV between calls, so a repeated prompt is computed again."""

    name, caches = "transformers", False

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def ttft(self, ids: list[int]) -> float:
        return self._times([ids], 1)[0]

    def again(self, ids: list[int]) -> float:
        return self.ttft(ids)

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        times = self._times(prompts, tokens)
        return statistics.median(after - before for before, after in pairwise(times))

    def _times(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """When each token came, in seconds from the start."""
        times: list[float] = []

        def noted(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter() - began)
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        batch = torch.tensor(prompts)
        began = time.perf_counter()
        self._model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[noted],
        )
        return times


class PeerProcess:
    """A subject of cpu_peers.py in its own environment; a context that ends its process. Speaks one JSON a line."""

    caches = True

    def __init__(self, name: str, kind: str, python: str, model: Path, threads: int) -> None:
        self.name = name
        script = Path(__file__).with_name("cpu_peers.py")
        self._command = [python or "python", str(script), kind, str(model), str(threads)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it says when it is ready, which may take minutes
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ttft(self, ids: list[int]) -> float:
        return self._ask({"case": "ttft", "prompts": [ids]})

    def again(self, ids: list[int]) -> float:
        return self._ask({"case": "again", "prompts": [ids]})

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        return self._ask({"case": "step", "prompts": prompts, "tokens": tokens})

    def _ask(self, question: dict[str, object]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> float:
        """The next answer; a peer may print other things, which are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"seconds":'):
                return json.loads(line)["seconds"]
        raise SystemExit(f"{self.name}: the process ended with {self._process.wait()}: {' '.join(self._command)}")


class PeerServer:
    """A server that speaks OpenAI's API and takes token ids as a prompt, as vLLM's does, with its prefix cache on.

    A request over loopback is in its figures: a millisecond or two. After a request vLLM's worker keeps a core busy
    waiting for the next one, for a second or two: whoever has the next turn begins when that is over.
    """

    _REST_S = 4.0

    caches = True

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._client = httpx.Client(base_url=url, timeout=600)
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def rest(self) -> None:
        time.sleep(self._REST_S)

    def ttft(self, ids: list[int]) -> float:
        return self._generate([ids], 1)

    def again(self, ids: list[int]) -> float:
        return self._generate([ids], 1)

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        self._generate(prompts, 1)
        first = self._generate(prompts, 1)  # from the prefix cache, as the longer run
        return (self._generate(prompts, tokens) - first) / (tokens - 1)

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        body = {"model": self._model, "prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        written = (
            self._client.post("/v1/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"]
        )
        seconds = time.perf_counter() - began
        if written != len(prompts) * tokens:
            raise SystemExit(f"{self.name} wrote {written} tokens instead of {len(prompts) * tokens}")
        return seconds
