"""The embedded engine on a GPU: decode time a step, prefill rate and time to first token, beside the card's floor.

Run: python benchmarks/engine_gpu.py --shape llama-8b|qwen-0.5b [--batches 1,8,64,256] [--peer NAME[=PYTHON]]

Weights are random bfloat16 of the real shape, so texts mean nothing and speed is real. Decode: every request has 512
tokens in and 128 out, greedy; the figure is the mean step after all were prefilled, in the better of two runs. The
floor of a step is the bytes of weights and of keys and values over the measured copy rate; the floor of a prefill its
operations over the measured product rate. A peer (transformers, vllm) runs the same afterwards, in a process of its own
(of PYTHON, an environment that has it), when this one's memory has been given back.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import LoadedModel
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from promptsluice.backend_engine.weights import expected_shapes, load_weights
from promptsluice.prompt import PromptsluiceError
from rich.console import Console
from rich.table import Table

SHAPES = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
}
PROMPT, OUTPUT = 512, 128


@dataclass
class RandomWeights:
    """Random tensors of a model's shapes, made on the device."""

    spec: ModelSpec

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_shapes(self.spec)

    def get(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device="cuda")
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


@dataclass
class Sink:
    """Counts what a request produced, and when its first token came."""

    tokens: int = 0
    first: float | None = None
    result: Result | None = None
    errors: list[str] = field(default_factory=list)

    def delta(self, delta: Delta) -> None:
        if delta.token_ids and self.first is None:
            self.first = time.perf_counter()
        self.tokens += len(delta.token_ids)

    def done(self, result: Result) -> None:
        self.result = result

    def failed(self, error: PromptsluiceError) -> None:
        self.errors.append(error.message)


def keys_seen(spec: ModelSpec, length: float) -> float:
    """Keys that one row sees at this length, over all layers."""
    return sum(min(length, window or length) for window in spec.windows)


def pairs(spec: ModelSpec, tokens: int) -> float:
    """Pairs of a row and a key that it sees in a prefill, over all layers."""
    seen = (min(tokens, window or tokens) for window in spec.windows)
    return sum(most * tokens - most**2 / 2 for most in seen)


def random_ids(count: int, spec: ModelSpec) -> list[int]:
    return torch.randint(3, spec.vocab, (count,)).tolist()


def request(ids: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(ids=ids, sampling=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def drained(engine: Engine, sinks: list[Sink]) -> None:
    while engine.has_work:
        engine.step()
    problems = [error for sink in sinks for error in sink.errors]
    if problems:
        raise SystemExit(problems[0])


def decode_ms(engine: Engine, batch: int) -> float:
    """Mean milliseconds of a decode step with `batch` requests running."""
    sinks = [Sink() for _ in range(batch)]
    for sink in sinks:
        engine.add(request(random_ids(PROMPT, engine.model.spec), OUTPUT), sink)
    while any(sink.first is None for sink in sinks):
        engine.step()
    made, began = sum(sink.tokens for sink in sinks), time.perf_counter()
    while all(sink.result is None for sink in sinks):
        engine.step()
    ms = (time.perf_counter() - began) * 1e3
    steps = (sum(sink.tokens for sink in sinks) - made) / batch
    drained(engine, sinks)
    return ms / steps


def ttft_ms(engine: Engine, ids: list[int]) -> float:
    sink = Sink()
    began = time.perf_counter()
    engine.add(request(ids, 2), sink)
    drained(engine, [sink])
    assert sink.first is not None, "no token came"
    return (sink.first - began) * 1e3


def ceilings() -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a bfloat16 product)."""
    from triton.testing import do_bench

    source, target = torch.randn(1 << 29, device="cuda"), torch.empty(1 << 29, device="cuda")
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = do_bench(lambda: a @ b, return_mode="median")
    assert isinstance(copy, float) and isinstance(product, float)
    return 2 * source.nbytes / copy * 1e3, 2 * 8192**3 / product * 1e3


@dataclass(kw_only=True)
class Figures:
    """Milliseconds: of a decode step by batch, of a first token by prompt length, without and with a cached prefix."""

    step: dict[int, float]
    cold: dict[int, float]
    cached: dict[int, float]


def ours(spec: ModelSpec, batches: list[int], prompts: list[int], console: Console, *, graph_rows: int) -> Figures:
    """Measure the engine; prints it beside the floors."""
    copy, product = ceilings()
    torch.manual_seed(0)
    weights = load_weights(RandomWeights(spec), spec, dtype=torch.bfloat16, device="cuda")
    model = LoadedModel(spec=spec, decoder=Decoder(spec, weights), tokenizer=None, fingerprint="random")
    layer_bytes = sum(
        layer.qkv.nbytes + layer.out.nbytes + layer.gate_up.nbytes + layer.down.nbytes for layer in weights.layers
    )
    matrices, weight_bytes = layer_bytes // 2, layer_bytes + weights.head.nbytes
    key_bytes = 4 * spec.kv_heads * spec.head_dim  # of a key and its value in one layer
    # Without `stall`: all requests come at once, and with it the first would end before the last has begun. Without
    # guesses: random weights repeat themselves now and then.
    options = EngineOptions(
        kv_bytes=48 << 30, step_tokens=8192, max_running=max(batches), page_size=16, stall=None,
        graph_rows=graph_rows, guessed_tokens=0,
    )  # fmt: skip
    held, began = torch.cuda.memory_reserved(), time.perf_counter()
    engine = Engine(model, options=options)
    taken = (torch.cuda.memory_reserved() - held) / 2**30 - options.kv_bytes / 2**30
    console.print(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s")
    console.print(f"the engine began in {time.perf_counter() - began:.1f} s, with {taken:.2f} GiB beside the KV pool")
    figures = Figures(step={}, cold={}, cached={})
    table = Table("decode batch", "ms a step", "floor ms", "of floor", "tokens/s")
    decode_ms(engine, 1)
    for batch in batches:
        decode_ms(engine, batch)
        ms = figures.step[batch] = min(decode_ms(engine, batch) for _ in range(2))
        floor = (weight_bytes + batch * key_bytes * keys_seen(spec, PROMPT + OUTPUT / 2)) / copy * 1e3
        table.add_row(f"{batch}", f"{ms:.2f}", f"{floor:.2f}", f"{floor / ms:.0%}", f"{batch / ms * 1e3:,.0f}")
    console.print(table)
    table = Table("prompt", "TTFT ms", "cached ms", "floor ms", "of floor", "prefill tokens/s")
    for tokens in prompts:
        cold, warm = [], []
        for _ in range(4):
            ids = random_ids(tokens, spec)
            cold.append(ttft_ms(engine, ids))
            warm.append(ttft_ms(engine, ids))
        operations = 2 * matrices * tokens + 4 * spec.heads * spec.head_dim * pairs(spec, tokens)
        floor = operations / product * 1e3
        ms = figures.cold[tokens] = statistics.median(cold[1:])
        cached = figures.cached[tokens] = statistics.median(warm[1:])
        table.add_row(
            f"{tokens}", f"{ms:.1f}", f"{cached:.1f}", f"{floor:.1f}", f"{floor / ms:.0%}", f"{tokens / ms * 1e3:,.0f}"
        )
    console.print(table)
    engine.close()
    return figures


def peer(name: str, python: str, shape: str, batches: list[int], prompts: list[int]) -> Figures:
    """Measure transformers or vLLM by gpu_peers.py. Exits with the end of its output where it fails."""
    asked = {"config": SHAPES[shape], "batches": batches, "prompts": prompts, "prompt": PROMPT, "output": OUTPUT}
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder, "questions.json")
        questions.write_text(json.dumps(asked))
        command = [python, str(Path(__file__).with_name("gpu_peers.py")), name, str(questions)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stdout[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    ttft = {int(tokens): times for tokens, times in found["ttft"].items()}
    return Figures(
        step={int(batch): ms for batch, ms in found["step"].items()},
        cold={tokens: times["cold"] for tokens, times in ttft.items()},
        cached={tokens: times["cached"] for tokens, times in ttft.items() if "cached" in times},
    )


def compared(name: str, mine: Figures, theirs: Figures) -> Table:
    """The peer's times over ours: above 1 we are the faster ones."""
    table = Table("", "ours ms", f"{name} ms", "times as fast")
    for label, ours, others in (
        ("step, batch", mine.step, theirs.step),
        ("TTFT", mine.cold, theirs.cold),
        ("TTFT cached", mine.cached, theirs.cached),
    ):
        for size, ms in others.items():
            table.add_row(f"{label} {size}", f"{ours[size]:.2f}", f"{ms:.2f}", f"{ms / ours[size]:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--prompts", default="2048,8192,16000")
    parser.add_argument("--graph-rows", type=int, default=512, help="see EngineOptions; for shorter --prompts")
    parser.add_argument("--peer", action="append", default=[], help="transformers or vllm, or vllm=PYTHON")
    options = parser.parse_args()
    batches, prompts = ([int(one) for one in text.split(",")] for text in (options.batches, options.prompts))
    console = Console(width=120)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}")
    mine = ours(spec_from_config(SHAPES[options.shape]), batches, prompts, console, graph_rows=options.graph_rows)
    gc.collect()
    torch.cuda.empty_cache()
    for one in options.peer:
        name, _, python = one.partition("=")
        console.print(compared(name, mine, peer(name, python or sys.executable, options.shape, batches, prompts)))


if __name__ == "__main__":
    main()
