"""A conversation whose pages were evicted returns: time to its first token from host memory, from disk, and computed.

Run: python benchmarks/tiers.py [--tokens 2000] [--rounds 5] [--model smollm2-135m-instruct]
     python benchmarks/tiers.py --shape llama-8b --tokens 16000   (a GPU, random bfloat16 weights)

One process; each round has new prompts and takes every way in turn. One engine computes a prompt, gives all its pages
up and is asked again (host memory). Another one with empty memory is asked for it then: from files in the page cache,
and for a second prompt from files that the kernel was told to forget (cold). Tokens must agree on float32.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_gpu import SHAPES, RandomWeights, random_ids, request
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.spec import spec_from_config
from promptsluice.backend_engine.tiers.tiered import Tiers
from promptsluice.backend_engine.types import Delta, Result
from promptsluice.backend_engine.weights import load_weights
from promptsluice.prompt import PromptsluiceError
from rich.console import Console
from rich.progress import track
from rich.table import Table

WAIT_S = 600.0


@dataclass
class Sink:
    """What a request produced, and when its first token came."""

    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    result: Result | None = None

    def delta(self, delta: Delta) -> None:
        self.first = self.first or time.perf_counter()
        self.tokens += delta.token_ids

    def done(self, result: Result) -> None:
        self.result = result

    def failed(self, error: PromptsluiceError) -> None:
        raise SystemExit(error.message)


@dataclass
class Way:
    """The measurements of one way to a first token."""

    ms: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def ask(self, engine: Engine, ids: list[int]) -> list[int]:
        sink = Sink()
        began = time.perf_counter()
        engine.add(request(ids, 4), sink)
        while engine.has_work:
            engine.step()
        assert sink.result is not None
        self.ms.append(1e3 * (sink.first - began))
        self.cached.append(sink.result.cached_tokens)
        return sink.tokens


def tiers_of(engine: Engine) -> Tiers:
    if not isinstance(engine.tier, Tiers):
        raise SystemExit("the engine has no tiers: a page does not fit into its host memory")
    return engine.tier


def evict(engine: Engine) -> None:
    """Give everything up, and wait until it has arrived where it goes."""
    engine.tree.evict(engine.tree.pages)
    if not tiers_of(engine).quiet(WAIT_S):
        raise SystemExit("the tiers did not come to rest")


def forget_files(folder: Path) -> None:
    """Have the kernel drop the page cache of the folder's files."""
    for path in folder.rglob("*.page"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(options: argparse.Namespace) -> LoadedModel:
    if options.shape is None:
        return load_model(options.model, dtype="float32")
    spec = spec_from_config(SHAPES[options.shape])
    torch.manual_seed(0)
    weights = load_weights(RandomWeights(spec), spec, dtype=torch.bfloat16, device="cuda")
    return LoadedModel(spec=spec, decoder=Decoder(spec, weights), tokenizer=None, fingerprint="random")


def engine_for(model: LoadedModel, options: argparse.Namespace, folder: Path) -> Engine:
    """Its pool holds two prompts, its host memory four."""
    prompt_bytes = KVPool.bytes_per_token(model.spec, model.decoder.dtype) * (options.tokens + 64)
    on_card = model.decoder.device.type == "cuda"
    return Engine(
        model,
        options=EngineOptions(
            kv_bytes=2 * prompt_bytes,
            step_tokens=8192 if on_card else 512,
            max_running=4,
            host_bytes=4 * prompt_bytes,
            disk_bytes=1 << 40,
            disk_path=folder,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the disk tier's files go for the time of the run")
    options = parser.parse_args()
    model = loaded(options)
    names = ("computed", "host memory", "disk, page cache", "disk, cold")
    ways, wrong = {name: Way() for name in names}, 0
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        first, second = (engine_for(model, options, folder) for _ in range(2))
        for _ in track(range(options.rounds + 1), description="rounds"):  # the first is to warm up
            prompts = [random_ids(options.tokens, model.spec) for _ in range(2)]
            answers = []
            for ids in prompts:
                answers.append(ways["computed"].ask(first, ids))
                evict(first)
                wrong += ways["host memory"].ask(first, ids) != answers[-1]
                evict(first)
            tiers_of(second).refresh()  # by itself it would look for others' files some seconds later
            wrong += ways["disk, page cache"].ask(second, prompts[0]) != answers[0]
            forget_files(folder)
            wrong += ways["disk, cold"].ask(second, prompts[1]) != answers[1]
            evict(second)
        for engine in (first, second):
            engine.close()
    device = torch.cuda.get_device_name() if model.decoder.device.type == "cuda" else platform.processor()
    title = f"{options.shape or options.model}, {options.tokens} tokens, {device or platform.machine()}"
    table = Table("way", "TTFT ms (median)", "min", "max", "cached tokens", "of computed", title=title)
    medians = {name: statistics.median(way.ms[1:]) for name, way in ways.items()}
    for name, way in ways.items():
        times = (f"{value:,.1f}" for value in (medians[name], min(way.ms[1:]), max(way.ms[1:])))
        share = medians[name] / medians["computed"]
        table.add_row(name, *times, f"{statistics.median(way.cached[1:]):,.0f}", f"1/{1 / share:.1f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"answers that differ from the computed one: {wrong} of {6 * (options.rounds + 1)}")
    if wrong and model.decoder.dtype is torch.float32:
        raise SystemExit("what came back is not what was computed")


if __name__ == "__main__":
    main()
