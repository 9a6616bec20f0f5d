"""A mixed load on the engine's service: no token lost or doubled, streams that keep their pace, flat memory.

Run: python benchmarks/load.py [--requests 200] [--rate 4] [--prefill 8000] [--streams 4] [--device cuda]
     python benchmarks/load.py --shape llama-8b     (on a GPU, random bfloat16 weights, without the third part)

Three parts, in one process, in float32, greedy:
1. Requests with Poisson arrivals (`--rate` a second), mixed lengths and three tenants; a tenth is aborted after some
   tokens. Prints the times to the first token and between tokens, and the resident memory after each quarter.
2. Streams run alone, then beside a prefill. Prints the times between tokens of both, and the ratio of their 99th
   percentiles.
3. Each output is compared with a lone run of the same request on a fresh engine without prefix cache; an aborted one
   must be a beginning of it.

Exits with 1 if an output differs. The ratio and the memory are printed, not judged: both depend on what else runs here.
"""

import argparse
import asyncio
import os
import platform
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from blend_speed import loaded
from engine_gpu import SHAPES
from promptsluice.backend_engine import Engine, EngineService, GenerationRequest, SamplingParams, load_model
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.options import EngineOptions

TENANTS = ("a", "b", "c")
ALONE = 60  # tokens of each stream before the prefill comes; the first ten do not count


@dataclass
class Sent:
    """A request and what came of it; `times` are readings of time.perf_counter at each token."""

    request: GenerationRequest
    keep: int | None = None  # abort after so many tokens
    submitted: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reason: str | None = None
    under_way: asyncio.Event = field(default_factory=asyncio.Event)  # has `ALONE` tokens

    @property
    def gaps(self) -> list[float]:
        return list(np.diff(self.times))


def greedy(ids: list[int], tokens: int, tenant: str = "") -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(ids=tuple(ids), sampling=params, namespace=tenant)


def drawn(dice: random.Random, *, requests: int, vocab: int, longest: int) -> list[Sent]:
    """Requests of mixed lengths: mostly short, some long, some with a prefix that others have too."""
    prefixes = [[dice.randrange(100, vocab) for _ in range(96)] for _ in range(4)]
    sent = []
    for _ in range(requests):
        length = min(longest, round(dice.lognormvariate(3.6, 1.0)) + 1)
        ids = (dice.choice(prefixes) if dice.random() < 0.3 else []) + [
            dice.randrange(100, vocab) for _ in range(length)
        ]
        tokens = dice.choice((2, 8, 16, 24))
        keep = dice.randrange(1, tokens) if dice.random() < 0.1 else None
        sent.append(Sent(greedy(ids, tokens, dice.choice(TENANTS)), keep=keep))
    return sent


async def served(service: EngineService, one: Sent) -> None:
    """Run a request to its end, or abort it when it has its tokens."""
    one.submitted = time.perf_counter()
    generation = service.generate(one.request)
    async for delta in generation:
        one.times += [time.perf_counter()] * len(delta.token_ids)
        one.tokens += delta.token_ids
        one.reason = delta.finish_reason or one.reason
        if len(one.tokens) >= ALONE:
            one.under_way.set()
        if one.keep is not None and len(one.tokens) >= one.keep:
            generation.abort()


async def load(service: EngineService, sent: list[Sent], *, rate: float, dice: random.Random) -> list[float]:
    """Send all at random times; return the resident MiB after each quarter, when all of it has ended."""
    memory: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    for number, one in enumerate(sent, 1):
        await asyncio.sleep(dice.expovariate(rate))
        tasks.append(asyncio.create_task(served(service, one)))
        if number * 4 // len(sent) > len(memory):
            await asyncio.gather(*tasks)
            memory.append(held_mib())
    await asyncio.gather(*tasks)
    return memory


def held_mib() -> float:
    """This process's memory, as Linux counts it, and what torch holds of a GPU's."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (pages * os.sysconf("SC_PAGE_SIZE") + torch.cuda.memory_reserved()) / 2**20


async def beside_a_prefill(
    service: EngineService, *, streams: int, prefill: int, vocab: int, dice: random.Random
) -> tuple[list[float], list[float], float]:
    """Seconds between tokens of streams alone and beside a prefill, and how long the prefill took."""
    endless = [Sent(greedy([dice.randrange(100, vocab) for _ in range(32)], 100_000)) for _ in range(streams)]
    tasks = [asyncio.create_task(served(service, one)) for one in endless]
    await asyncio.gather(*(one.under_way.wait() for one in endless))
    began = time.perf_counter()
    long = Sent(greedy([dice.randrange(100, vocab) for _ in range(prefill)], 1))
    await served(service, long)
    took = time.perf_counter() - began
    alone, beside = [], []
    for one in endless:
        alone += [gap for at, gap in zip(one.times[1:], one.gaps, strict=True) if at < began][10:]
        beside += [gap for at, gap in zip(one.times[1:], one.gaps, strict=True) if began <= at < began + took]
        one.keep = 0
    await asyncio.gather(*tasks)
    return alone, beside, took


def sizes(model: LoadedModel, pages: int, *, graph_rows: int, least_prefill: int) -> EngineOptions:
    """As the gateway has them on the device."""
    if model.decoder.device.type == "cpu":
        return EngineOptions(pages=pages, max_running=32)
    return EngineOptions(
        pages=pages, max_running=32, step_tokens=4096, least_prefill=least_prefill, graph_rows=graph_rows
    )


def lone_outputs(model: LoadedModel, sent: list[Sent], *, pages: int) -> list[list[int]]:
    """What each request gives on an engine of its own, one after another."""
    service = EngineService(Engine(model, options=EngineOptions(pages=pages, max_running=1)))
    service.start()

    async def run() -> list[list[int]]:
        outputs = []
        for one in sent:
            again = Sent(replace(one.request, prefix_cache=False))
            await served(service, again)
            outputs.append(again.tokens)
        return outputs

    try:
        return asyncio.run(run())
    finally:
        service.stop()


def wrong(sent: list[Sent], expected: list[list[int]]) -> list[int]:
    """The numbers of the requests whose output is not what it must be."""
    found = []
    for number, (one, tokens) in enumerate(zip(sent, expected, strict=True)):
        whole = one.tokens == tokens and one.reason == "length"
        begun = one.keep is not None and one.reason == "abort" and one.tokens == tokens[: len(one.tokens)]
        if not whole and not begun:
            found.append(number)
    return found


def line(name: str, seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return f"{name:<42} p50 {p50:8.1f} ms   p99 {p99:8.1f} ms   ({len(seconds)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graph-rows", type=int, default=512, help="on a GPU: see EngineOptions.graph_rows")
    parser.add_argument("--least-prefill", type=int, default=64, help="on a GPU: see EngineOptions.least_prefill")
    parser.add_argument("--dtype", default="float32", help="in others outputs depend on the batch: no third part")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of its shapes, on a GPU")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second")
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--prefill", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    if options.shape:
        options.model, options.device, options.dtype = options.shape, "cuda", "bfloat16"
        model = loaded(options.shape, options.model)
    else:
        model = load_model(options.model, dtype=options.dtype, device=options.device)
    vocab, pages = model.spec.vocab, (options.prefill + 16_000) // 16
    sent = drawn(dice, requests=options.requests, vocab=vocab, longest=options.longest)
    chosen = sizes(model, pages, graph_rows=options.graph_rows, least_prefill=options.least_prefill)
    service = EngineService(Engine(model, options=chosen), max_waiting=1000)
    service.start()
    processor = f"{platform.machine()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if model.decoder.device.type == "cuda" else processor
    print(f"{where}, torch {torch.__version__}, {options.model} {options.dtype}, {options.rate:g} requests a second")

    async def measured() -> tuple[list[float], list[float], list[float], float]:
        memory = await load(service, sent, rate=options.rate, dice=dice)
        counts = {"streams": options.streams, "prefill": options.prefill}
        return memory, *await beside_a_prefill(service, **counts, vocab=vocab, dice=dice)

    memory, alone, beside, took = asyncio.run(measured())
    stats = service.stats()
    service.stop()
    aborted = sum(one.reason == "abort" for one in sent)
    print(
        f"{len(sent)} requests, {aborted} aborted, {stats.preemptions} preempted, {stats.cached_tokens} tokens cached"
    )
    print(line("first token, mixed load", [one.times[0] - one.submitted for one in sent if one.times]))
    print(line("between tokens, mixed load", [gap for one in sent for gap in one.gaps]))
    print(line(f"between tokens, {options.streams} streams alone", alone))
    print(line(f"the same beside a prefill of {options.prefill}", beside))
    ratio = np.percentile(beside, 99) / np.percentile(alone, 99)
    print(f"p99 beside the prefill over p99 alone: {ratio:.2f}; the prefill took {took:.1f} s")
    print("resident MiB, a GPU's with them, after each quarter: " + " ".join(f"{each:.0f}" for each in memory))
    if options.dtype != "float32":
        return
    differing = wrong(sent, lone_outputs(model, sent, pages=pages))
    print(f"outputs that differ from a lone run: {len(differing)} {differing or ''}")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
