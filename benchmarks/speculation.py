"""Decode speed with tokens guessed ahead and without: the same requests on two engines, step by step, in one process.

Run: python benchmarks/speculation.py [--data FOLDER] [--rounds 3] [--batches 1 8 64] [--prompts 6] [--tokens 192]
     python benchmarks/speculation.py --device cuda --dtype bfloat16 [--shape llama-8b]

With `--shape`, the model's weights stand amid zeros in matrices of that shape: its greedy tokens at that model's cost.
There is no hot set then, since the ids that the shape has more would be drawn, too.

Sets: quotes and summaries of meetings (QMSum; `--data` is the folder that has qmsum/test.jsonl), or of pages of
documentation where there is no such folder; edits of this repository's own functions; and questions that give nothing
to copy. A model this small repeats itself in any long answer, so a set of its own has noise for prompts and draws hot:
there guesses can only cost. Speed counts the steps between a batch's last prefill and its first end; on a CPU the
engine that had less time so far steps next, on a GPU one runs after the other. Every output is compared with that of
the engine that guesses nothing. Medians of ratios; CPU is the ratio of the process's own time, which neighbours on the
machine disturb less.
"""

import argparse
import ast
import json
import platform
import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from engine_gpu import SHAPES
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.hub import resolve
from promptsluice.backend_engine.loader import DTYPES, LoadedModel, load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from promptsluice.prompt.errors import PromptsluiceError
from rich.console import Console
from rich.table import Table
from widened import widened

ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "Why is the sky blue?",
    "How do bees find their way home?",
    "What should I pack for a week in the mountains?",
    "Explain how a bicycle stays upright.",
    "Write a short poem about winter.",
    "How is bread made?",
    "What makes a good leader?",
    "Tell me about the history of paper.",
)


@dataclass(frozen=True, kw_only=True)
class Set:
    name: str
    prompts: list[tuple[int, ...]]
    temperature: float = 0.0


@dataclass
class Collected:
    """A sink that keeps the ids."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def delta(self, delta: Delta) -> None:
        self.tokens += delta.token_ids

    def done(self, result: Result) -> None:
        self.ended = True

    def failed(self, error: PromptsluiceError) -> None:
        raise error


class Side:
    """A batch on one engine; `seconds` and `tokens` are of the steps in which all of it runs."""

    def __init__(self, engine: Engine, requests: list[GenerationRequest]) -> None:
        self.engine = engine
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.tokens = 0
        self.sinks = [Collected() for _ in requests]
        for request, sink in zip(requests, self.sinks, strict=True):
            engine.add(request, sink)

    def step(self) -> None:
        counts = all(sink.tokens and not sink.ended for sink in self.sinks)
        before = sum(len(sink.tokens) for sink in self.sinks)
        began, cpu = time.perf_counter(), time.process_time()
        self.engine.step()
        if counts:
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.process_time() - cpu
            self.tokens += sum(len(sink.tokens) for sink in self.sinks) - before

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def passages(data: Path | None, dice: random.Random) -> Iterator[str]:
    """Texts of some hundred words: turns of meetings, or paragraphs of documentation."""
    if data is not None:
        for line in (data / "qmsum" / "test.jsonl").read_text(encoding="utf-8").splitlines():
            turns = json.loads(line)["meeting_transcripts"]
            first = dice.randrange(max(1, len(turns) - 6))
            yield "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in turns[first : first + 6])
        return
    for page in sorted((ROOT / "examples" / "data" / "fastapi_docs").rglob("*.md")):
        yield re.sub(r"\n{2,}", "\n", page.read_text(encoding="utf-8"))[200:1400]


def functions() -> Iterator[tuple[str, str]]:
    """Names and texts of functions of this repository."""
    for path in sorted((ROOT / "backend_engine").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef) and text and 300 < len(text) < 1000:
                yield node.name, text


def sets(model: LoadedModel, data: Path | None, count: int) -> list[Set]:
    tokenizer, dice = model.tokenizer, random.Random(1)
    assert tokenizer is not None

    def chat(*texts: str) -> list[tuple[int, ...]]:
        return [tuple(tokenizer.encode_chat([{"role": "user", "content": text}]).ids) for text in texts]

    kind = "documentation" if data is None else "transcript"
    passage = [text for text in passages(data, dice) if 500 < len(text) < 1600][:count]
    found = [f"Here is a part of a {kind}:\n\n{text}" for text in passage]
    edits = [
        f"```python\n{text}\n```\n\nRename the function `{name}` to `handle` and write the whole file again."
        for name, text in dice.sample(list(functions()), count)
    ]
    noise = [tuple(dice.randrange(100, model.spec.vocab) for _ in range(200)) for _ in range(count)]
    return [
        Set(
            name="quotes",
            prompts=chat(*(f"{text}\n\nRepeat this part of the {kind}, word for word." for text in found)),
        ),
        Set(name="summaries", prompts=chat(*(f"{text}\n\nSummarize it." for text in found))),
        Set(name="code edits", prompts=chat(*edits)),
        Set(name="questions", prompts=chat(*QUESTIONS[:count])),
        Set(name="noise, hot", prompts=noise, temperature=1.5),
    ]


def race(plain: Engine, guessing: Engine, requests: list[GenerationRequest]) -> tuple[Side, Side]:
    """Run a batch on both; whoever had less time so far is next, so that both meet the same weather.

    On a GPU one after the other: what an engine has launched ahead would run in the other one's time.
    """
    sides = Side(plain, requests), Side(guessing, requests)
    if plain.model.decoder.device.type == "cuda":
        for side in sides:
            while side.engine.has_work:
                side.step()
            torch.cuda.synchronize()
    while live := [side for side in sides if side.engine.has_work]:
        min(live, key=lambda side: side.seconds).step()
    return sides


def compared(plain: Engine, guessing: Engine, chosen: Set, batch: int, rounds: int, tokens: int) -> list[str]:
    """A row of the table: the set's prompts one by one, or in batches of as many as there are, again and again."""
    sides, before = [], guessing.stats()
    cases = [[prompt] for prompt in chosen.prompts] if batch == 1 else [(chosen.prompts * batch)[:batch]]
    for prompts in cases * max(1, rounds // len(cases)):
        params = [
            SamplingParams(temperature=chosen.temperature, seed=number, max_tokens=tokens) for number in range(batch)
        ]
        requests = [GenerationRequest(ids=ids, sampling=each) for ids, each in zip(prompts, params, strict=True)]
        sides.append(race(plain, guessing, requests))
    after = guessing.stats()
    outputs = [(a.tokens, b.tokens) for pair in sides for a, b in zip(*(side.sinks for side in pair), strict=True)]
    timed = [pair for pair in sides if all(side.seconds for side in pair)]
    if not timed:
        raise SystemExit(f"all answers of {chosen.name} ended with their first token")
    ratios = [fast.speed / slow.speed for slow, fast in timed]
    slow, fast = (statistics.median(side.speed for side in each) for each in zip(*timed, strict=True))
    work = [slow.cpu_seconds / slow.tokens * fast.tokens / fast.cpu_seconds for slow, fast in timed]
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    speeds = [f"{value:.1f}" for value in (slow, fast)] + [
        f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios), statistics.median(work))
    ]
    same = f"{sum(a == b for a, b in outputs)} of {len(outputs)}"
    return [chosen.name, str(batch), *speeds, f"{accepted} of {drafted}", same]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", help="narrower ones round by the batch: outputs may differ")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sets", nargs="*", help="only these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--guessed", type=int, help="tokens guessed at most (the engine's default)")
    options = parser.parse_args()
    if options.shape:
        model = widened(
            resolve(options.model),
            SHAPES[options.shape],
            dtype=DTYPES[options.dtype],
            device=torch.device(options.device),
        )
    else:
        model = load_model(options.model, dtype=options.dtype, device=options.device)
    most = max(options.batches)
    sizes = EngineOptions(max_running=most, step_tokens=max(512, most), guessed_tokens=0)
    plain, guessing = (
        Engine(model, options=sizes),
        Engine(model, options=replace(sizes, guessed_tokens=options.guessed)),
    )
    console = Console(width=120)
    processor = f"{platform.machine()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if model.decoder.device.type == "cuda" else processor
    console.print(f"{where}, torch {torch.__version__}, {options.shape or options.model}, {options.dtype}")
    for chosen in sets(model, options.data, options.prompts):
        if (options.sets and chosen.name not in options.sets) or (options.shape and chosen.temperature):
            continue
        table = Table("prompts", "batch", "tokens/s", "guessing", "ratio", "min", "max", "CPU", "accepted", "identical")
        for batch in options.batches:
            table.add_row(*compared(plain, guessing, chosen, batch, options.rounds, options.tokens))
        console.print(table)


if __name__ == "__main__":
    main()
