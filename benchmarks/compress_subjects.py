"""What compress.py and compress_quality.py compare: our compressors with a real model behind them, and peers."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from kept_rows import KeptRows
from promptsluice.backend_engine import load_model
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.generation import Collector
from promptsluice.backend_engine.hub import resolve
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.text_scoring import Encoding, TextScorer
from promptsluice.backend_engine.types import GenerationRequest
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.context import Generated
from promptsluice.policies.presets import PRESETS
from promptsluice.prompt import Prompt
from promptsluice.rag.embedder import SentenceEmbedder


@dataclass(frozen=True)
class Outcome:
    """What came out, the seconds of wall and processor time, what went wrong, if anything, and what a compressor of
    ours says of it.
    """

    text: str
    wall: float
    cpu: float
    error: str = ""
    note: str = ""


class Subject(Protocol):
    @property
    def name(self) -> str: ...

    def compress(self, text: str, *, question: str, rate: float) -> Outcome: ...


class _Summaries(dict[str, str]):
    """What the model wrote of a text at a length: it is asked once."""

    def put(self, key: str, text: str) -> None:
        self[key] = text


class Machinery:
    """One model on the CPU with its engine, and an embedder that is loaded when it is asked for."""

    def __init__(self, model: Path, *, dtype: str = "float32") -> None:
        self.name = f"{model.name} {dtype}"
        self.model = load_model(model, dtype=dtype)
        assert self.model.tokenizer is not None, f"{model} has no tokenizer"
        self.tokenizer = self.model.tokenizer
        self.service = EngineService(Engine(self.model, options=EngineOptions(kv_bytes=1 << 30, guessed_tokens=0)))
        self.service.start()
        self.score = TextScorer(self.service.run_all, self._encoding, rows=512, room=4096)
        self._embedder = SentenceEmbedder()
        self._summaries = _Summaries()

    @property
    def count(self) -> Callable[[str], int]:
        return self.tokenizer.count

    def context(self, question: str) -> CompressionContext:
        return CompressionContext(
            count=self.count,
            question=question,
            embed=self._embedder.embed,
            score=self.score,
            generate=self._generated,
            memory=self._summaries,
        )

    def plain_pass(self, text: str) -> tuple[float, int]:
        """Processor seconds of a prefill without any logits, and its tokens."""
        ids = tuple(self.tokenizer.encode_plain(text))
        began = time.process_time()
        self.service.run(GenerationRequest(ids=ids, sampling=SamplingParams(max_tokens=0), prefix_cache=False))
        return time.process_time() - began, len(ids)

    def greedy(self, ids: Sequence[int], tokens: int) -> Generated:
        """The likeliest tokens after a prompt."""
        collector = Collector()
        self.service.submit(
            GenerationRequest(ids=ids, sampling=SamplingParams(temperature=0, max_tokens=tokens)), collector
        )
        reason = collector.wait().finish_reason
        return Generated(text=self.tokenizer.decode(collector.tokens), whole=reason == "stop")

    def _generated(
        self, messages: Sequence[Mapping[str, str]], *, backend: str, model: str, max_tokens: int, timeout_s: float
    ) -> Generated:
        return self.greedy(self.tokenizer.encode_chat(messages).ids, max_tokens)

    def _encoding(self, text: str) -> Encoding:
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)


@dataclass(frozen=True)
class Ours:
    """One or more compressors in a row; `rate` goes to the lossy ones, unless their options name one."""

    name: str
    machinery: Machinery
    steps: Sequence[tuple[str, Mapping[str, Any]]]

    def compress(self, text: str, *, question: str, rate: float) -> Outcome:
        wall, cpu = time.perf_counter(), time.process_time()
        prompt, notes = self.prompt(chat(text, question), question=question, rate=rate)
        taken = time.perf_counter() - wall, time.process_time() - cpu
        failed = "; ".join(note for note in notes if "failed" in note or "lost" in note)
        return Outcome(str(prompt.messages[2]["content"]), *taken, failed, "; ".join(filter(None, notes)))

    def prompt(self, prompt: Prompt, *, question: str, rate: float) -> tuple[Prompt, list[str]]:
        """All of a prompt, and a note from each step."""
        context = self.machinery.context(question)
        notes: list[str] = []
        for name, options in self.steps:
            asked = {} if name == "lossless" else {"target_rate": rate}
            result = create(name, {**asked, **options}).compress(prompt, context=context)
            prompt = result.prompt
            notes.append(result.note)
        return prompt, notes


def chat(text: str, question: str) -> Prompt:
    """The text as the result of a tool that was called for the question."""
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return Prompt.from_messages(
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c0", "content": text},
        ]
    )


def ours(machinery: Machinery, names: Sequence[str]) -> list[Subject]:
    """Compressors by name."""
    return [Ours(name, machinery, steps_of(name)) for name in names]


def steps_of(name: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """A compressor with its options: `contrast` is `perplexity` with two passes, `balanced` what the preset does,
    `summarize` asks the same model, and `summary` takes what it writes without the facts that it lost.
    """
    if name == "balanced":
        specs = PRESETS["balanced"]["compress"]
        return [(spec["use"], {key: value for key, value in spec.items() if key != "use"}) for spec in specs]
    asked = {"kinds": ["tool_result"], "backend": "same", "model": "same", "min_tokens": 64}
    return {
        "contrast": [("perplexity", {"contrast": 1.0})],
        "summarize": [("summarize", asked)],
        "summary": [("summarize", {**asked, "protect": [], "facts": [], "fallback": "none"})],
    }.get(name, [(name, {})])


class Peer:
    """A program of compress_peers.py in a process of its own, with one thread."""

    def __init__(self, name: str, python: Path, model: Path) -> None:
        self.name = name
        self._command = [str(python), str(Path(__file__).with_name("compress_peers.py")), name, str(model)]

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        environment = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HOME": "/tmp",
        }
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment | {"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"{self.name} did not start: run {' '.join(self._command)} by hand to see why")
        return process

    def compress(self, text: str, *, question: str, rate: float) -> Outcome:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps({"text": text, "question": question, "rate": rate}), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
        return Outcome(answer.get("text", ""), answer["wall"], answer["cpu"], answer.get("error", ""))

    def close(self) -> None:
        if "_process" in self.__dict__:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


@dataclass(frozen=True)
class Remembered:
    """A subject whose outcomes are kept: what it once made of a text is not made again under the same `setting`."""

    subject: Subject
    rows: KeptRows
    setting: str

    @property
    def name(self) -> str:
        return self.subject.name

    def compress(self, text: str, *, question: str, rate: float) -> Outcome:
        words = (self.name, self.setting, str(rate), question, text)
        known = self.rows.get(*words)
        if known is not None:
            return Outcome(**known)
        outcome = self.subject.compress(text, question=question, rate=rate)
        self.rows.put(asdict(outcome), *words)
        return outcome


def peers(model: Path, pythons: Mapping[str, Path | None]) -> list[Peer]:
    """Those whose interpreter is given; says which are left out."""
    for name, python in pythons.items():
        if python is None:
            print(f"{name} is left out: name its environment's interpreter with --{name}")
    return [Peer(name, python, model) for name, python in pythons.items() if python is not None]


def common_options(description: str, *, compared: Sequence[str], rows: bool = True) -> argparse.ArgumentParser:
    """What the benchmarks take; `compared`: which of ours by default; `rows`: whether results can be kept."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--llmlingua", type=Path, help="interpreter of an environment with llmlingua")
    parser.add_argument("--headroom", type=Path, help="interpreter of an environment with headroom-ai")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="of our engine; llmlingua takes float32 on a CPU")
    parser.add_argument("--ours", nargs="*", default=list(compared))
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 0.33])
    if rows:
        parser.add_argument("--rows", type=Path, help="keep results in this JSONL file, and take those that are there")
    else:
        parser.set_defaults(rows=None)
    return parser


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[tuple[Machinery, list[Subject]]]:
    """The machinery and everything that is compared, on one thread, remembered in `--rows`; the peers end with it."""
    torch.set_num_threads(1)
    model = resolve(options.model)
    machinery = Machinery(model, dtype=options.dtype)
    guests = peers(model, {"llmlingua": options.llmlingua, "headroom": options.headroom})
    try:
        rows, setting = KeptRows(options.rows), f"{options.model}, {options.dtype}"
        yield machinery, [Remembered(subject, rows, setting) for subject in (*ours(machinery, options.ours), *guests)]
    finally:
        for guest in guests:
            guest.close()
        machinery.service.stop()


def heading(options: argparse.Namespace) -> str:
    """What it was measured with, for the head of a table."""
    return f"{machine()}, 1 thread, {options.model}, {options.dtype}"


def machine() -> str:
    """The processor, for the head of a table."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "an unknown processor"


def seeded_mean(values: Sequence[float], *, rounds: int = 2000) -> tuple[float, float, float]:
    """The mean and the borders of its 95 % interval by the bootstrap (Efron 1979), percentiles of resampled means."""
    found = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = found[rng.integers(0, len(found), (rounds, len(found)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(found.mean()), float(low), float(high)
