"""The embedded engine on a CPU beside transformers, llama.cpp and vLLM: TTFT, decode rate, repeated prompts, floors.

Run: python benchmarks/engine_cpu.py [--threads 2] [--peer llama.cpp=PYTHON] [--peer vllm=PYTHON] [--gguf FILE]

Each peer is a process of its own, in the environment of PYTHON (one that has llama-cpp-python, or vllm); `vllm=URL` is
a server that runs already, for vLLM takes minutes to start. All subjects take turns within each round, so that a busy
machine slows all of them, and each turn begins with a short prompt that does not count: after a pause of seconds the
first one takes a tenth longer. Figures are medians over the rounds. Prompts are random ids, new in each round; a
repeated one is repeated five times, of which the median counts. llama.cpp reads the same weights as float16, or FILE.
The floor of a decode step is its bytes of weights over the measured memory rate (of torch's sum, or of the product of
one row with the output matrix, which may read faster), that of a prefill its operations over the measured float32
product rate.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from cpu_gguf import write_f16_gguf
from cpu_subjects import Ours, PeerProcess, PeerServer, Subject, Transformers
from promptsluice.backend_engine.hub import resolve
from promptsluice.backend_engine.loader import LoadedModel, load_model
from rich.console import Console
from rich.table import Table

DECODE_PROMPT, DECODE_TOKENS, AGAIN, WARM_PROMPT = 64, 24, 5, 256


def best(seconds: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        seconds()
        taken.append(time.perf_counter() - began)
    return min(taken)


def ceilings(model: LoadedModel) -> tuple[float, float]:
    """(bytes per second of reading memory, operations per second of a float32 product)."""
    much, a, b = torch.randn(1 << 27), torch.randn(1536, 1536), torch.randn(1536, 1536)
    row = torch.randn(1, model.spec.hidden)
    product = model.decoder.weights.head.nbytes / best(lambda: model.decoder.logits(row), times=20)
    return max(much.nbytes / best(much.sum), product), 2 * 1536**3 / best(lambda: a @ b)


def decode_bytes(model: LoadedModel) -> int:
    """What a step of one request reads of weights."""
    weights = model.decoder.weights
    matrices = (part for layer in weights.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return sum(matrix.nbytes for matrix in matrices) + weights.head.nbytes


def prefill_operations(model: LoadedModel, tokens: int) -> int:
    spec = model.spec
    matrices = spec.hidden * (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim + 3 * spec.hidden * spec.ffn
    return spec.layers * (2 * matrices * tokens + 2 * spec.heads * spec.head_dim * tokens**2)


@contextmanager
def subjects(options: argparse.Namespace, directory: Path, models: dict[str, LoadedModel]) -> Iterator[list[Subject]]:
    with ExitStack() as stack:
        found: list[Subject] = [Ours(f"ours {name}", model) for name, model in models.items()]
        found.append(Transformers(directory))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-cpu-")))
        for peer in options.peer:
            kind, _, python = peer.partition("=")
            files = {"float32": directory}
            if python.startswith("http"):
                found.append(stack.enter_context(PeerServer(f"{kind} server", python)))
                continue
            if kind == "llama.cpp":
                files = {"f16": write_f16_gguf(directory, models["float32"].spec, scratch / "f16.gguf")}
                files |= {options.gguf.stem: options.gguf} if options.gguf else {}
            for label, file in files.items():
                process = PeerProcess(f"{kind} {label}", kind, python, file, options.threads)
                found.append(stack.enter_context(process))
        yield found


def rest(subject: Subject) -> None:
    """Until nothing of its turn runs on beside the next one's."""
    if isinstance(subject, PeerServer):
        subject.rest()


def measure(found: list[Subject], vocab: int, prompts: list[int], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds until the first token, and tokens per second, by subject and case."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocab, (count,)).tolist()

    for number in range(rounds + 1):  # the first round warms up: its figures are dropped, its long prompts left out
        for tokens in prompts if number else prompts[:1]:
            prompt = ids(tokens)
            for subject in found:
                subject.ttft(ids(WARM_PROMPT))
                taken[subject.name, f"TTFT {tokens}"].append(subject.ttft(prompt) * 1e3)
                if tokens == 2048:
                    again = [subject.again(prompt) * 1e3 for _ in range(AGAIN if subject.caches else 1)]
                    taken[subject.name, "the same again"].append(statistics.median(again))
                rest(subject)
        for batch in (1, 8):
            chosen = [ids(DECODE_PROMPT) for _ in range(batch)]
            for subject in found:
                subject.ttft(ids(WARM_PROMPT))
                rate = batch / subject.step(chosen, DECODE_TOKENS)
                taken[subject.name, f"tokens/s, batch {batch}"].append(rate)
                rest(subject)
        if not number:
            taken.clear()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", default="512,2048,4096")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="llama.cpp or vllm")
    parser.add_argument("--gguf", type=Path, help="another file for llama.cpp, of the same model")
    options = parser.parse_args()
    if wrong := [peer for peer in options.peer if peer.partition("=")[0] not in ("llama.cpp", "vllm")]:
        parser.error(f"--peer {wrong[0]}: llama.cpp=PYTHON or vllm=PYTHON or vllm=URL")
    torch.set_num_threads(options.threads)
    torch.seed()  # not the same prompts again for a server that has kept them
    directory = resolve(options.model)
    models = {
        "float32": load_model(directory, dtype="float32"),
        "int8": load_model(directory, dtype="float32", quantize="int8"),
    }
    prompts = [int(text) for text in options.prompts.split(",")]
    memory, product = ceilings(models["float32"])
    with subjects(options, directory, models) as found:
        taken = measure(found, models["float32"].spec.vocab, prompts, options.rounds)
        cases = list(dict.fromkeys(case for _, case in taken))
        cases.sort(key=lambda case: ("tokens/s" in case, "again" in case))
        table = Table("medians", *cases)
        for name in dict.fromkeys(name for name, _ in taken):
            table.add_row(name, *(f"{statistics.median(taken[name, case]):,.1f}" for case in cases))
        for name, model in models.items():
            table.add_row(f"floor {name}", *(_floor(model, case, memory, product) for case in cases))
        ratios = Table("times as fast as", *cases)
        for ours in found[: len(models)]:
            for other in found[len(models) :]:
                ratios.add_row(f"{ours.name} : {other.name}", *(_ratio(taken, ours, other, case) for case in cases))
    console = Console(width=150)
    console.print(
        f"{_machine()}, {options.threads} threads, torch {torch.__version__}, {options.model}, "
        f"{options.rounds} rounds: "
        f"memory {memory / 1e9:.1f} GB/s, float32 products {product / 1e9:.0f} GFLOP/s. TTFT in ms."
    )
    console.print(table)
    console.print(ratios)


def _floor(model: LoadedModel, case: str, memory: float, product: float) -> str:
    if case.startswith("TTFT"):
        return f"{prefill_operations(model, int(case.split()[1])) / product * 1e3:,.1f}"
    step = decode_bytes(model) / memory
    return f"{step * 1e3:,.1f}" if "again" in case else f"{int(case.split()[-1]) / step:,.1f}"


def _ratio(taken: dict[tuple[str, str], list[float]], ours: Subject, other: Subject, case: str) -> str:
    """The median over rounds; above 1 we are faster."""
    pairs = zip(taken[ours.name, case], taken[other.name, case], strict=True)
    rates = "tokens/s" in case
    return f"{statistics.median(mine / theirs if rates else theirs / mine for mine, theirs in pairs):.2f}"


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]} ({torch.backends.cpu.get_cpu_capability()})"


if __name__ == "__main__":
    main()
