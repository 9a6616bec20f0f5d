"""Time to first token of prompts whose chunks are stored, blended at 15 %, beside their full prefill and the floors.

Run: python benchmarks/blend_speed.py --shape llama-8b [--prompts 4096,8192,16000] [--chunks 512,1024] [--requests 8]
     python benchmarks/blend_speed.py --model smollm2-135m-instruct --prompts 4096     (on a CPU)

A prompt is 64 tokens, chunks in a fresh order, and a question of 32 tokens. Each way gets the same prompt in turn: full
prefill, then the chunks from RAM and from disk (files as the operating system's cache has them). A time to first token
begins before the lookup. Chunks are computed bare, by the engine, and kept in `--dtype`; with `--shape` weights are
random, so texts mean nothing and speed is real. The floor of a full prefill is its operations over the measured product
rate; that of a blend the larger of the computed rows' operations, the question's rows twice, and the chunks' bytes over
the measured rate of copies to the device. With `--requests`, so many prompts come at once: the mean time to their first
tokens.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from engine_gpu import SHAPES, RandomWeights, Sink, drained, random_ids
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.hub import resolve
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.rounded_kv import Block
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from promptsluice.backend_engine.weights import load_weights
from promptsluice.kv_reuse import KeySpace, Reuser, StoredChunk, open_store
from promptsluice.kv_reuse.rounding import ChunkDtype, chosen_dtype, chunk_fingerprint, kept
from rich.console import Console
from rich.table import Table

HEAD, QUESTION, RATIO = 64, 32, 0.15


@dataclass(frozen=True)
class Rates:
    """Operations per second of a product, bytes per second of a copy from host memory to the device."""

    product: float
    copy: float


def best(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some runs, the device's work included."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    host = torch.randn(1 << 26, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    return Rates(
        product=2 * size**3 / best(lambda: a @ b),
        copy=host.nbytes / best(lambda: there.copy_(host, non_blocking=True)),
    )


def loaded(shape: str | None, name: str) -> LoadedModel:
    if shape is None:
        return load_model(resolve(name), dtype="float32", device="cpu")
    torch.manual_seed(0)
    spec = spec_from_config(SHAPES[shape])
    weights = load_weights(RandomWeights(spec), spec, dtype=torch.bfloat16, device="cuda")
    return LoadedModel(spec=spec, decoder=Decoder(spec, weights), tokenizer=None, fingerprint="random")


class Bench:
    """The engine, and chunks of one length with their KV."""

    def __init__(self, model: LoadedModel, engine: Engine, *, tokens: int, most: int, dtype: ChunkDtype) -> None:
        self.spec = model.spec
        self._model = model
        self._engine = engine
        self._dtype: ChunkDtype = chosen_dtype(dtype, model.decoder.device.type)
        self._draw = random.Random(0)
        self.chunks = [tuple(random_ids(tokens, model.spec)) for _ in range((most - HEAD - QUESTION) // tokens)]
        self._stored = [StoredChunk(ids, self._computed(ids)) for ids in self.chunks]

    def _computed(self, ids: tuple[int, ...]) -> Block:
        sink = Sink()
        self._engine.add(GenerationRequest(ids=ids, sampling=SamplingParams(max_tokens=0), keep_kv=True), sink)
        drained(self._engine, [sink])
        assert sink.result is not None and sink.result.kv is not None
        return kept(sink.result.kv, self._dtype)

    @property
    def token_bytes(self) -> float:
        """Of a stored token's keys and values."""
        return self._stored[0].kv.nbytes / len(self.chunks[0])

    @contextmanager
    def reuser(self, tier: str) -> Iterator[Reuser]:
        """One whose store has all chunks in this tier alone."""
        size = sum(chunk.nbytes for chunk in self._stored) * 3
        with tempfile.TemporaryDirectory() as folder:
            budgets = {"ram": size} if tier == "RAM" else {"disk": size, "path": Path(folder)}
            store = open_store(**budgets, on=self._model.decoder.device.type)
            space = KeySpace(chunk_fingerprint(self._model.fingerprint, self._dtype), "")
            for chunk in self._stored:
                assert store.put(space.key(chunk.ids), chunk), tier
            store.flush()
            yield Reuser(
                Unused(), store, spec=self.spec, fingerprint=self._model.fingerprint,
                device=self._model.decoder.device.type, dtype=self._dtype,
            )  # fmt: skip

    def prompt(self, total: int) -> tuple[list[int], list[tuple[int, int]]]:
        """About `total` ids, and the chunks' places (start, length) in them."""
        count = (total - HEAD - QUESTION) // len(self.chunks[0])
        ids, spans = random_ids(HEAD, self.spec), []
        for chunk in self._draw.sample(self.chunks, count):
            spans.append((len(ids), len(chunk)))
            ids += chunk
        return ids + random_ids(QUESTION, self.spec), spans

    def ttft_ms(self, prompts: list[tuple[list[int], list[tuple[int, int]]]], reuser: Reuser | None) -> float:
        """Mean milliseconds to the first token of prompts that come at once."""
        sinks, began = [Sink() for _ in prompts], time.perf_counter()
        for (ids, spans), sink in zip(prompts, sinks, strict=True):
            reuse = None if reuser is None else reuser.plan(ids, spans, mode="blend", ratio=RATIO).reuse
            sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            self._engine.add(GenerationRequest(ids=ids, sampling=sampling, reuse=reuse, prefix_cache=False), sink)
        drained(self._engine, sinks)
        firsts = [sink.first for sink in sinks if sink.first is not None]
        assert len(firsts) == len(sinks), "a request had no token"
        return (statistics.mean(firsts) - began) * 1e3


class Unused:
    """No chunk is computed while planning."""

    def run(self, request: GenerationRequest) -> object:
        raise AssertionError(request.request_id)

    submit = run


def operations(spec: ModelSpec, rows: int, *, keys: float) -> float:
    """Of rows that see `keys` keys on average."""
    matrices = spec.hidden * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim + 3 * spec.hidden * spec.ffn
    return spec.layers * rows * (2 * matrices + 4 * spec.heads * spec.head_dim * keys)


def floors(model: LoadedModel, total: int, rates: Rates, *, chunk_bytes: float) -> tuple[float, float]:
    """Milliseconds of a full prefill and of a blend; `chunk_bytes` are a stored token's."""
    spec, rest = model.spec, HEAD + QUESTION
    full = operations(spec, total, keys=total / 2) / rates.product
    rows = RATIO * (total - rest) + 2 * rest
    loads = (total - rest) * chunk_bytes / rates.copy if model.decoder.device.type == "cuda" else 0.0
    return full * 1e3, max(loads, operations(spec, int(rows), keys=total / 2) / rates.product) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", default="4096,8192,16000")
    parser.add_argument("--chunks", default="512,1024")
    parser.add_argument("--requests", type=int, default=1, help="prompts that come at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph-rows", type=int, default=512, help="see EngineOptions.graph_rows")
    parser.add_argument("--dtype", choices=("auto", "model", "int8", "fp8"), default="auto", help="of the chunks")
    options = parser.parse_args()
    totals, lengths = ([int(one) for one in text.split(",")] for text in (options.prompts, options.chunks))
    model = loaded(options.shape, options.model)
    device = model.decoder.device
    tokens = options.requests * (max(totals) + 64) + 1024
    chosen = EngineOptions(
        pages=tokens // 16,
        step_tokens=8192 if device.type == "cuda" else 512,
        max_running=16,
        graph_rows=options.graph_rows,
    )
    engine = Engine(model, options=chosen)
    found = rates(device, model.decoder.dtype)
    console = Console(width=130)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(
        f"{where}, torch {torch.__version__}, {options.shape or options.model}: product {found.product / 1e12:.2f} "
        f"TFLOP/s, copies to the device {found.copy / 1e9:.1f} GB/s; chunks kept as {options.dtype}; "
        f"{options.requests} requests at once, medians of {options.rounds}"
    )
    columns = ("full ms", "floor", "RAM ms", "times", "disk ms", "times", "blend's floor")
    table = Table("prompt", "chunk", *columns)
    for length in lengths:
        bench = Bench(model, engine, tokens=length, most=max(totals), dtype=options.dtype)
        with bench.reuser("RAM") as ram, bench.reuser("disk") as disk:
            for total in totals:
                times: dict[str, list[float]] = {"full": [], "RAM": [], "disk": []}
                for _ in range(options.rounds + 1):
                    prompts = [bench.prompt(total) for _ in range(options.requests)]
                    for name, reuser in (("full", None), ("RAM", ram), ("disk", disk)):
                        times[name].append(bench.ttft_ms(prompts, reuser))
                ms = {name: statistics.median(taken[1:]) for name, taken in times.items()}
                each = floors(model, total, found, chunk_bytes=bench.token_bytes)
                full, blend = (floor * (options.requests + 1) / 2 for floor in each)
                table.add_row(
                    f"{total}", f"{length}", f"{ms['full']:.1f}", f"{full:.1f}", f"{ms['RAM']:.1f}",
                    f"{ms['full'] / ms['RAM']:.2f}", f"{ms['disk']:.1f}", f"{ms['full'] / ms['disk']:.2f}",
                    f"{blend:.1f}",
                )  # fmt: skip
    console.print(table)
    engine.close()


if __name__ == "__main__":
    main()
