"""A decode step on a GPU, looked into: what drawing costs beside the likeliest token, and which kernels take the time.

Run: python benchmarks/decode_gpu.py [--shape llama-8b|qwen-0.5b] [--batches 1,8,64,256] [--profile]

Requests of random weights as in engine_gpu.py, with 512 tokens in and 128 out. Without --profile: the median
milliseconds of a step where all requests are greedy, sample, sample through filters, a third each, and where the host
draws (they ask for log-probabilities). With it: the kernels of a greedy step by torch's profiler.
"""

import argparse
import statistics
import time
from itertools import cycle
from typing import Any

import torch
from engine_gpu import OUTPUT, PROMPT, SHAPES, RandomWeights, Sink, drained, random_ids
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.spec import spec_from_config
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from promptsluice.backend_engine.weights import load_weights
from rich.console import Console
from rich.table import Table

GREEDY: dict[str, Any] = {"temperature": 0.0}
# Random weights are flat over the whole vocabulary: without top_k, top_p would always be wider than the candidates.
SAMPLED: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": (GREEDY,),
    "temperature": (SAMPLED,),
    "temperature, top-k, top-p": (FILTERED,),
    "a third of each": (GREEDY, SAMPLED, FILTERED),
    "drawn by the host": (FILTERED | {"logprobs": 0},),
}
STEPS, KERNELS = 20, 24


def decoding(engine: Engine, batch: int, kinds: tuple[dict[str, Any], ...]) -> list[Sink]:
    """Start requests of these kinds in turn, and step until all are prefilled."""
    sinks = [Sink() for _ in range(batch)]
    for sink, fields in zip(sinks, cycle(kinds), strict=False):
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **fields)
        engine.add(GenerationRequest(ids=random_ids(PROMPT, engine.model.spec), sampling=params), sink)
    while any(sink.first is None for sink in sinks):
        engine.step()
    return sinks


def step_ms(engine: Engine, batch: int, kinds: tuple[dict[str, Any], ...]) -> float:
    """Median milliseconds of a step with `batch` requests running; the second of two runs."""
    times = []
    for _ in range(2):
        sinks, times = decoding(engine, batch, kinds), []
        while all(sink.result is None for sink in sinks):
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        drained(engine, sinks)
    return statistics.median(times) * 1e3


def kernels(engine: Engine, batch: int) -> Table:
    """The kernels of a greedy step, the most expensive ones first."""
    sinks = decoding(engine, batch, (GREEDY,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    drained(engine, sinks)
    found = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in found) / STEPS
    table = Table(f"batch {batch}: {total / 1e3:.2f} ms of kernels a step", "launches a step", "us each", "us a step")
    for one in found[:KERNELS]:
        each, whole = one.self_device_time_total / one.count, one.self_device_time_total / STEPS
        table.add_row(one.key[:64], f"{one.count / STEPS:.1f}", f"{each:.1f}", f"{whole:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step instead of its time")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    spec = spec_from_config(SHAPES[options.shape])
    torch.manual_seed(0)
    weights = load_weights(RandomWeights(spec), spec, dtype=torch.bfloat16, device="cuda")
    model = LoadedModel(spec=spec, decoder=Decoder(spec, weights), tokenizer=None, fingerprint="random")
    sizes = EngineOptions(kv_bytes=48 << 30, step_tokens=8192, max_running=max(batches), stall=None, guessed_tokens=0)
    began = time.perf_counter()
    engine = Engine(model, options=sizes)
    console = Console(width=120)
    reserved = torch.cuda.memory_reserved() / 2**30
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}: started in "
        f"{time.perf_counter() - began:.1f} s, {reserved:.1f} GiB reserved"
    )
    if options.profile:
        for batch in batches:
            console.print(kernels(engine, batch))
        return
    table = Table("ms a step at batch", *map(str, batches))
    for name, kinds in KINDS.items():
        table.add_row(name, *(f"{step_ms(engine, batch, kinds):.2f}" for batch in batches))
    console.print(table)


if __name__ == "__main__":
    main()
