"""Fewer bits on a GPU: decode, prefill and long contexts of a model's shape with rounded weights and rounded KV.

Run: python benchmarks/quant_gpu.py [--shape llama-8b] [--only products weights kv]

`products`: one matrix product of the shape's sizes by the number of rows, cold from memory, beside bfloat16 and what
torch ships for the same bits; GB/s count the matrix alone. `weights`: the whole engine with random weights of each
kind, 512 tokens in, 128 out. `kv`: decode steps of 8 requests at long contexts, by the pool's dtype. Loss is measured
by benchmarks/quant_loss.py, on a CPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from engine_gpu import SHAPES, RandomWeights, Sink, decode_ms, drained, random_ids, request, ttft_ms
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.quantization import Quantization, quantized_forms
from promptsluice.backend_engine.quantization.forms import rounded_forms
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.types import KVDtype
from promptsluice.backend_engine.weights import load_weights
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench

WEIGHTS: tuple[Quantization, ...] = ("none", "int8", "int4", "fp8")
KV: tuple[KVDtype, ...] = ("auto", "int8", "fp8")
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048)
BATCHES = (1, 8, 64)
PREFILL, LONG = 8192, (4096, 16000)
LONG_BATCH, LONG_OUTPUT = 8, 96
CARD = torch.device("cuda")


def timed(run: Callable[[], object]) -> float:
    """Median milliseconds, the cache emptied in between."""
    ms = do_bench(run, warmup=10, rep=40, return_mode="median")
    assert isinstance(ms, float)
    return ms


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's matrices."""
    heads = spec.heads * spec.head_dim
    return {
        "qkv": (heads + 2 * spec.kv_heads * spec.head_dim, spec.hidden),
        "out": (spec.hidden, heads),
        "gate_up": (2 * spec.ffn, spec.hidden),
        "down": (spec.hidden, spec.ffn),
    }


def shipped_int4(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """torch's own product of 4-bit weights in groups of 32, on arbitrary levels."""
    out, inputs = weight.shape
    levels = torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8, device=CARD)
    packed = torch.ops.aten._convert_weight_to_int4pack(levels, 8)
    scales = torch.ones(inputs // 32, out, 2, dtype=torch.bfloat16, device=CARD)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 32, scales)


def products(spec: ModelSpec, console: Console) -> None:
    for name, (out, inputs) in matrices(spec).items():
        weight = torch.randn(out, inputs, device=CARD, dtype=torch.bfloat16) * 0.02
        ways: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
            "bfloat16": (lambda x, weight=weight: F.linear(x, weight), weight.nbytes)
        }
        for kind in WEIGHTS[1:]:
            linear = rounded_forms(kind, torch.bfloat16).linear(weight, None)
            ways[kind] = (linear, linear.nbytes)
        ways["torch int4"] = (shipped_int4(weight), out * inputs * 5 // 8)
        table = Table(f"{name} {out} x {inputs}", *(f"{way}, us (GB/s)" for way in ways))
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=CARD, dtype=torch.bfloat16)
            cells = []
            for way, nbytes in ways.values():
                ms = timed(lambda way=way, x=x: way(x))
                cells.append(f"{ms * 1e3:.1f} ({nbytes / ms / 1e6:.0f})")
            table.add_row(f"{rows} rows", *cells)
        console.print(table)


def model_of(spec: ModelSpec, quantize: Quantization) -> LoadedModel:
    torch.manual_seed(0)
    forms = quantized_forms(quantize, spec, dtype=torch.bfloat16, device=CARD)
    weights = load_weights(RandomWeights(spec), spec, dtype=torch.bfloat16, device=CARD, forms=forms)
    return LoadedModel(spec=spec, decoder=Decoder(spec, weights), tokenizer=None, fingerprint="random")


def engine_of(model: LoadedModel, kv_dtype: KVDtype, *, running: int) -> Engine:
    # Prefills are not paced: all requests of a batch must be decoding before the first one ends.
    options = EngineOptions(
        kv_bytes=24 << 30, kv_dtype=kv_dtype, step_tokens=8192, max_running=running, stall=None, guessed_tokens=0
    )
    return Engine(model, options=options)


def weights_table(spec: ModelSpec, console: Console) -> None:
    table = Table("weights", "KV", "GiB", "load s", *(f"ms at batch {batch}" for batch in BATCHES), "prefill tokens/s")
    cases: list[tuple[Quantization, KVDtype]] = [(quantize, "auto") for quantize in WEIGHTS] + [("fp8", "fp8")]
    for quantize, kv_dtype in cases:
        torch.cuda.empty_cache()
        began, before = time.perf_counter(), torch.cuda.memory_allocated()
        model = model_of(spec, quantize)
        torch.cuda.synchronize()
        loaded, size = time.perf_counter() - began, torch.cuda.memory_allocated() - before
        engine = engine_of(model, kv_dtype, running=max(BATCHES))
        decode_ms(engine, 1)
        decoded = [min(decode_ms(engine, batch) for _ in range(2)) for batch in BATCHES]
        prefill = statistics.median(ttft_ms(engine, random_ids(PREFILL, spec)) for _ in range(4))
        table.add_row(
            quantize, kv_dtype, f"{size / 2**30:.2f}", f"{loaded:.1f}", *(f"{ms:.2f}" for ms in decoded),
            f"{PREFILL / prefill * 1e3:,.0f}",
        )  # fmt: skip
        engine.close()
        del engine, model
    console.print(table)


def long_ms(engine: Engine, tokens: int) -> float:
    """Mean milliseconds of a decode step of LONG_BATCH requests behind `tokens` each."""
    sinks = [Sink() for _ in range(LONG_BATCH)]
    for sink in sinks:
        engine.add(request(random_ids(tokens, engine.model.spec), LONG_OUTPUT), sink)
    while any(sink.first is None for sink in sinks):
        engine.step()
    began, steps = time.perf_counter(), 0
    while all(sink.result is None for sink in sinks):
        engine.step()
        steps += 1
    ms = (time.perf_counter() - began) / steps * 1e3
    drained(engine, sinks)
    return ms


def kv_table(spec: ModelSpec, console: Console) -> None:
    table = Table("KV", "tokens a GiB", *(f"ms, {LONG_BATCH} x {tokens}" for tokens in LONG), f"TTFT ms, {LONG[-1]}")
    model = model_of(spec, "int8")
    for kv_dtype in KV:
        engine = engine_of(model, kv_dtype, running=LONG_BATCH)
        tokens = engine.pool.slots / engine.pool.data.nbytes * 2**30
        decoded = [long_ms(engine, count) for count in LONG]
        prefill = statistics.median(ttft_ms(engine, random_ids(LONG[-1], spec)) for _ in range(3))
        table.add_row(kv_dtype, f"{tokens:,.0f}", *(f"{ms:.2f}" for ms in decoded), f"{prefill:.0f}")
        engine.close()
        del engine
        torch.cuda.empty_cache()
    console.print(table)


def main() -> None:
    parts = {"products": products, "weights": weights_table, "kv": kv_table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--only", nargs="*", choices=parts, default=list(parts))
    options = parser.parse_args()
    console = Console(width=150)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}")
    for name in options.only:
        began = time.perf_counter()
        parts[name](spec_from_config(SHAPES[options.shape]), console)
        console.print(f"{name}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
