"""Time to first token of a RAG prompt: full prefill, prefix cache, reused chunks, and blends at 5, 15 and 30 %.

Run: python benchmarks/ttft_rag.py [FOLDER] [--model NAME_OR_DIR] [--rounds 7] [--threads N]

Six chunks of 300 tokens of the folder's texts stand in a fresh order in each round, before one question. In a round
each mode gets the same prompt once; modes take turns, so that a machine that slows down slows all of them. A TTFT
counts the lookup and the re-positioning of chunks too. One process, medians. Not here: the quality of the answers.
"""

import argparse
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from promptsluice.backend_engine import ChatTokenizer, Result
    from promptsluice.backend_engine.service import EngineService
    from promptsluice.kv_reuse import Reuser

DEFAULT_FOLDER = Path(__file__).parent.parent / "examples" / "data" / "fastapi_docs"
SYSTEM = "You answer questions about the documents below. Say so if they do not contain the answer."
QUESTION = "How do I declare a query parameter with a default value?"


@dataclass(frozen=True)
class Mode:
    """A way to serve the prompt; `namespace` keeps its prefix tree apart from the other modes'."""

    name: str
    reuse: str
    ratio: float = 0.0
    prefix_cache: bool = True


MODES = (
    Mode("full prefill", "off", prefix_cache=False),
    Mode("prefix cache", "prefix"),
    Mode("reuse", "reuse"),
    *(Mode(f"blend {percent} %", "blend", percent / 100) for percent in (5, 15, 30)),
)

COLUMNS = ("TTFT ms", "min to max", "speed-up", "load ms", "cached", "reused", "recomputed", "computed", "floor ms")


@dataclass
class Samples:
    """What the rounds measured for one mode: milliseconds, tokens, and the share of rows computed."""

    ttft: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """The engine, and how prompts are put together from chunks."""

    service: "EngineService"
    reuser: "Reuser"
    tokenizer: "ChatTokenizer"
    chunks: list[list[int]]

    def prompt(self, order: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the chunks' places (start, length) in them."""
        ids = self.tokenizer.encode_plain(f"{SYSTEM}\n\n")
        spans = []
        for number in order:
            spans.append((len(ids), len(self.chunks[number])))
            ids += self.chunks[number]
        return ids + self.tokenizer.encode_plain(f"\n\nQuestion: {QUESTION}\nAnswer:"), spans

    def measure(self, mode: Mode, ids: list[int], spans: list[tuple[int, int]], samples: Samples) -> None:
        from promptsluice.backend_engine import GenerationRequest, SamplingParams

        start = time.perf_counter()
        plan = self.reuser.plan(ids, spans, mode=mode.reuse, ratio=mode.ratio)
        loaded = time.perf_counter()
        result = self.service.run(
            GenerationRequest(
                ids=ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                reuse=plan.reuse,
                namespace=mode.name,
                prefix_cache=mode.prefix_cache,
            )
        )
        samples.load.append((loaded - start) * 1e3)
        samples.ttft.append((time.perf_counter() - start) * 1e3)
        samples.cached.append(result.cached_tokens)
        samples.reused.append(result.reused_tokens)
        samples.recomputed.append(result.recomputed_tokens)
        computed = result.prompt_tokens - result.cached_tokens - result.reused_tokens
        samples.computed.append(computed)
        samples.work.append(self.work(mode, result, computed))

    def work(self, mode: Mode, result: "Result", computed: int) -> float:
        """Rows computed, as a share of a full prefill's: a blend runs what is not reused twice, first as a probe."""
        probed = computed - result.recomputed_tokens if mode.ratio else 0
        return (computed + probed) / result.prompt_tokens


def read_chunks(folder: Path, tokenizer: "ChatTokenizer", *, count: int, tokens: int) -> list[list[int]]:
    """The first `count` chunks of `tokens` token ids of the folder's .md and .txt files, by name."""
    chunks: list[list[int]] = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt")):
        ids = tokenizer.encode_plain(path.read_text(encoding="utf-8"))
        chunks += [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]
        if len(chunks) >= count:
            return chunks[:count]
    raise SystemExit(f"{folder} has only {len(chunks)} chunks of {tokens} tokens in .md and .txt files; {count} needed")


def orders(chunks: int, rounds: int) -> list[list[int]]:
    """One order a round, each beginning with another chunk than the one before: no prefix is repeated by chance."""
    rng = random.Random(0)
    drawn: list[list[int]] = []
    while len(drawn) < rounds:
        order = rng.sample(range(chunks), chunks)
        if not drawn or chunks == 1 or order[0] != drawn[-1][0]:
            drawn.append(order)
    assert chunks == 1 or all(one[0] != two[0] for one, two in pairwise(drawn))
    return drawn


def machine() -> str:
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return (
        f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}{load}"
    )


def table_of(samples: dict[Mode, Samples], *, title: str) -> Table:
    table = Table(title=title)
    table.add_column("mode")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    full = statistics.median(samples[MODES[0]].ttft)
    for mode, seen in samples.items():
        ttft, work = statistics.median(seen.ttft), statistics.median(seen.work)
        counts = (statistics.median(values) for values in (seen.cached, seen.reused, seen.recomputed, seen.computed))
        table.add_row(
            mode.name,
            f"{ttft:.0f}",
            f"{min(seen.ttft):.0f} to {max(seen.ttft):.0f}",
            f"{full / ttft:.2f}",
            f"{statistics.median(seen.load):.0f}",
            *(f"{count:.0f}" for count in counts),
            f"{full * work:.0f} ({work:.0%})",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    # Must be set before torch is loaded: threads that spin while they wait steal time on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run(options, Console(width=120))


def run(options: argparse.Namespace, console: Console) -> None:
    import torch
    from promptsluice.backend_engine import load_model
    from promptsluice.backend_engine.engine import Engine
    from promptsluice.backend_engine.service import EngineService
    from promptsluice.kv_reuse import RamStore, Reuser

    torch.set_num_threads(options.threads)
    console.print(machine())
    model = load_model(options.model)
    assert model.tokenizer is not None, "the benchmark needs texts"
    chunks = read_chunks(options.folder, model.tokenizer, count=options.chunks, tokens=options.tokens)
    service = EngineService(Engine(model))
    service.start()
    try:
        reuser = Reuser(service, RamStore(4 << 30), spec=model.spec, fingerprint=model.fingerprint)
        bench = Bench(service, reuser, model.tokenizer, chunks)
        samples = rounds(bench, orders(len(chunks), options.rounds + 1))
    finally:
        service.stop()
    title = f"{options.chunks} chunks of {options.tokens} tokens, medians of {options.rounds}"
    console.print(table_of(samples, title=title))
    console.print(
        "load: lookup and re-positioning, part of TTFT. computed: prompt rows that went through all layers.\n"
        "floor: full prefill's time times the share of rows that the mode computes, a probe's counted again."
    )


def rounds(bench: Bench, drawn: list[list[int]]) -> dict[Mode, Samples]:
    """Measure each mode once for each order; the first round warms up and is not counted."""
    with Progress(transient=True) as progress:
        warming = progress.add_task("computing chunk KV", total=len(bench.chunks))
        bench.reuser.warm(bench.chunks, progress=lambda done, total: progress.update(warming, completed=done))
        running = progress.add_task("measuring", total=len(drawn) * len(MODES))
        samples: dict[Mode, Samples] = {}
        for number, order in enumerate(drawn):
            if number <= 1:
                samples = {mode: Samples() for mode in MODES}
            ids, spans = bench.prompt(order)
            for mode in MODES:
                bench.measure(mode, ids, spans, samples[mode])
                progress.advance(running)
    return samples


if __name__ == "__main__":
    main()
