"""Our kernels on a GPU: achieved bytes and operations per second beside this card's ceilings, and the error.

Run: python benchmarks/kernels_gpu.py [--quick]
     TRITON_INTERPRET=1 python benchmarks/kernels_gpu.py --check     (errors alone, small, without a GPU)

Ceilings are measured in the same process: a device-to-device copy (bytes read plus written) and a large bfloat16 matrix
product. A case's floor is the larger of its bytes over the copy rate and its operations over the product rate; keys
outside all rows' windows count for nothing. Page tables are random permutations. The error is the norm of the
difference to float64 on the same bfloat16 inputs, relative to the norm of the result, of attention over a sample of
rows. Medians by CUDA events: of launches for rows of a prefill, of replays of a graph of many launches for decode
steps, which run as graphs (so there the second-level cache holds what fits it).
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
from promptsluice.backend_engine.attention import attention_backend
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from promptsluice.backend_engine.fused import FusedOps, HeadTurn, Joint, TorchOps
from promptsluice.backend_engine.linear import PlainLinear
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

PAGE = 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
FEW_REQUESTS = 8  # of one row each: their rotation and attention are one launch
SHRUNK = 64  # by which `--check` divides rows and keys


@dataclass(frozen=True)
class Shape:
    """One layer's attention of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None


@dataclass(frozen=True)
class Case:
    """Requests as (rows, keys): the last `rows` of `keys`, or scattered over them."""

    shape: Shape
    name: str
    requests: tuple[tuple[int, int], ...]
    scattered: bool = False

    @property
    def small(self) -> "Case":
        requests = ((-(-rows // SHRUNK), -(-keys // SHRUNK)) for rows, keys in self.requests[:4])
        window = self.shape.window and -(-self.shape.window // SHRUNK)
        return replace(self, requests=tuple(requests), shape=replace(self.shape, window=window))


@dataclass(frozen=True)
class Measured:
    """What one launch took, moved and computed, and how far it is off. Zero milliseconds: not timed."""

    ms: float
    moved: int
    operations: float
    error: float


FULL = (Shape("8B", 32, 8, 128), Shape("0.5B", 14, 2, 64))
OTHERS = (
    Shape("heads of 80", 32, 32, 80),
    Shape("heads of 96", 32, 8, 96),
    Shape("heads of 256", 8, 4, 256),
    Shape("heads of 256, window", 8, 4, 256, 1024),
    Shape("8B, window", 32, 8, 128, 4096),
)


def cases(quick: bool) -> list[Case]:
    found = []
    mixed = tuple((1, random.Random(number).randint(1, 32768)) for number in range(32))
    for shape in FULL:
        for batch, keys in ((1, 2048), (1, 32768), (8, 2048), (64, 640), (64, 4096), (256, 640)):
            found.append(Case(shape, f"decode {batch} x {keys}", ((1, keys),) * batch))
        found.append(Case(shape, "decode 32 x 1..32768", mixed))
        for rows, keys in ((2048, 2048), (8192, 8192), (2048, 16384)):
            found.append(Case(shape, f"prefill {rows} of {keys}", ((rows, keys),)))
        found.append(Case(shape, "blend 1228 of 8192", ((1228, 8192),), scattered=True))
    for shape in OTHERS:
        found.append(Case(shape, "decode 1 x 32768", ((1, 32768),)))
        found.append(Case(shape, "decode 32 x 1..32768", mixed))
        found.append(Case(shape, "prefill 8192 of 8192", ((8192, 8192),)))
        found.append(Case(shape, "blend 1228 of 8192", ((1228, 8192),), scattered=True))
    return found[:: 3 if quick else 1]


def laid_out(case: Case, draw: random.Random) -> tuple[StepBatch, int, int]:
    """The batch on the device, the number of pages, and how many keys any row sees."""
    total = sum(-(-keys // PAGE) for _, keys in case.requests)
    order = list(range(total))
    draw.shuffle(order)
    parts, taken, seen = [], 0, 0
    for rows, keys in case.requests:
        needed = -(-keys // PAGE)
        indices = sorted(draw.sample(range(keys), rows)) if case.scattered else list(range(keys - rows, keys))
        parts.append(RequestRows(ids=indices, indices=indices, pages=order[taken : taken + needed], key_count=keys))
        taken += needed
        seen += keys_seen(indices, case.shape.window)
    return build_batch(parts, page_size=PAGE, device=DEVICE), total, seen


def keys_seen(indices: list[int], window: int | None) -> int:
    """The size of the union of what ascending rows see."""
    if window is None:
        return indices[-1] + 1
    count = stop = 0
    for index in indices:
        count += index + 1 - max(stop, index + 1 - window)
        stop = index + 1
    return count


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, shape: Shape, draw: random.Random) -> float:
    """Relative error over a sample of rows, against float64."""
    difference = size = 0.0
    owner = torch.repeat_interleave(torch.arange(batch.requests), torch.tensor(batch.query_start_host).diff()).tolist()
    for row in draw.sample(range(batch.rows), min(24, batch.rows)):
        stop = int(batch.visible[row])
        keys = torch.arange(max(0, stop - (shape.window or stop)), stop, device=DEVICE)
        slots = batch.page_table[owner[row], keys // PAGE].long() * PAGE + keys % PAGE
        group = shape.heads // shape.kv_heads
        mine, values = (x[slots].double().repeat_interleave(group, 1) for x in (k, v))  # [keys, heads, dim]
        scores = torch.einsum("hd,khd->hk", q[row].double(), mine) * shape.dim**-0.5
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        difference += float((out[row].double() - expected).square().sum())
        size += float(expected.square().sum())
    return (difference / size) ** 0.5


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(NARROW)


def timed(run: Callable[[], object], *, graphed: bool = False) -> float:
    """Median milliseconds of a launch, or of one within a graph; zero where there is no GPU to time."""
    if DEVICE == "cpu":
        return 0.0
    ms = (do_bench_cudagraph if graphed else do_bench)(run, return_mode="median")
    assert isinstance(ms, float), ms
    return ms


def ceilings() -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a product)."""
    source, target = torch.randn(1 << 30, device=DEVICE), torch.empty(1 << 30, device=DEVICE)
    copy = timed(lambda: target.copy_(source))
    a, b = noise(8192, 8192), noise(8192, 8192)
    product = timed(lambda: a @ b)
    return 2 * source.nbytes / copy * 1e3, 2 * 8192**3 / product * 1e3


def attention(case: Case, backend: str, draw: random.Random) -> Measured:
    """One layer's attention."""
    shape = case.shape
    batch, pages, seen = laid_out(case, draw)
    q = noise(batch.rows, shape.heads, shape.dim)
    k, v = (noise(pages * PAGE, shape.kv_heads, shape.dim) for _ in range(2))
    plan = attention_backend(backend).plan(batch, page_size=PAGE, scale=shape.dim**-0.5, window=shape.window)
    wrong = error(plan(q, k, v), q, k, v, batch, shape, draw)
    visible = batch.visible.double() if shape.window is None else batch.visible.double().clamp_max(shape.window)
    operations = 4 * float(visible.sum()) * shape.heads * shape.dim
    moved = 2 * seen * shape.kv_heads * shape.dim * 2 + 2 * q.nbytes
    decodes = all(rows == 1 for rows, _ in case.requests)
    return Measured(timed(lambda: plan(q, k, v), graphed=decodes), moved, operations, wrong)


def lone_rows(case: Case, draw: random.Random) -> Measured:
    """One layer's rotation, storing and attention of requests of one row each, as a decode step of few has it."""
    shape = case.shape
    batch, pages, seen = laid_out(case, draw)
    qkv = noise(batch.rows, shape.heads + 2 * shape.kv_heads, shape.dim)
    k, v = (noise(pages * PAGE, shape.kv_heads, shape.dim) for _ in range(2))
    turn = HeadTurn(
        shape.heads, shape.kv_heads, noise(batch.rows, 1, shape.dim), noise(batch.rows, 1, shape.dim), None, 1e-6
    )
    plan = attention_backend("triton").plan(batch, page_size=PAGE, scale=shape.dim**-0.5, window=shape.window)

    def turned() -> Tensor:
        out = plan.turned(qkv, turn, batch.slots, k, v)
        assert out is not None, "more requests than one launch serves"
        return out

    out = turned()  # the rows' own keys are in the pool from here on
    wide = replace(turn, cos=turn.cos.double(), sin=turn.sin.double())
    q, _, _ = TorchOps().rotated(qkv.double(), wide)
    wrong = error(out, q.to(NARROW), k, v, batch, shape, draw)
    operations = 4 * float(batch.visible.sum()) * shape.heads * shape.dim
    moved = 2 * seen * shape.kv_heads * shape.dim * 2 + 2 * qkv.nbytes
    return Measured(timed(turned, graphed=True), moved, operations, wrong)


def products() -> Iterator[tuple[str, Measured]]:
    """Products of few rows with the matrices of a small model, and of one row with two of an 8B model."""
    one, few = (import_module(f"promptsluice.backend_engine.{name}") for name in ("one_row_triton", "few_rows_triton"))
    for rows, outputs, inputs in (
        (1, 896, 896), (1, 896, 4864), (1, 28672, 4096), (1, 4096, 14336), (2, 1152, 896), (8, 1152, 896),
        (8, 896, 4864),
    ):  # fmt: skip
        x, weight = noise(rows, inputs), noise(outputs, inputs)
        if rows == 1:
            run = partial(one.one_row, x, weight, None)
        elif inputs > 1024:
            run = partial(few.parts, x, weight)
        else:
            run = partial(few.whole, x, weight, None)
        made = run().double()
        made = made.sum(0) if made.ndim == 3 else made
        expected = x.double() @ weight.double().T
        wrong = float((made - expected).norm() / expected.norm())
        operations = 2 * rows * weight.numel()
        yield (
            f"product {rows} x {inputs} x {outputs}",
            Measured(timed(run, graphed=True), weight.nbytes, operations, wrong),
        )
    hidden, ffn = 896, 4864
    ops = import_module("promptsluice.backend_engine.fused_triton").TritonOps()
    for rows in (1, 8):
        x, residual, norm = noise(rows, hidden), noise(rows, hidden), noise(hidden)
        before, after = PlainLinear(noise(hidden, hidden) / hidden**0.5), PlainLinear(noise(2 * ffn, hidden))
        joint = Joint(before=before, first=None, weight=norm, eps=1e-6, after=after, activation="silu")
        wide = replace(
            joint,
            before=PlainLinear(before.weight.double()),
            weight=norm.double(),
            after=PlainLinear(after.weight.double()),
        )
        expected, _ = TorchOps().joined(x.double(), residual.double(), wide)
        wrong = float((ops.joined(x, residual.clone(), joint)[0].double() - expected).norm() / expected.norm())
        moved = before.nbytes + after.nbytes
        run = partial(ops.joined, x, residual, joint)
        yield f"joint of {rows}, {hidden} and {2 * ffn}", Measured(timed(run, graphed=True), moved, 0.0, wrong)


def element_wise(rows: int) -> Iterator[tuple[str, Measured]]:
    """The work between products of an 8B layer, plain, and with the norms and the gate that Gemma adds."""
    ops, hidden, ffn, shape = (
        import_module("promptsluice.backend_engine.fused_triton").TritonOps(),
        4096,
        14336,
        FULL[0],
    )
    x, residual, weight, first = noise(rows, hidden), noise(rows, hidden), noise(hidden), noise(hidden)
    gate_up, qkv = noise(rows, 2 * ffn), noise(rows, shape.heads + 2 * shape.kv_heads, shape.dim)
    turn = HeadTurn(shape.heads, shape.kv_heads, noise(rows, 1, shape.dim), noise(rows, 1, shape.dim),
                    noise(shape.heads + shape.kv_heads, shape.dim), 1e-6)  # fmt: skip
    slots, pool = torch.randperm(rows, device=DEVICE), noise(2, rows, shape.kv_heads, shape.dim)

    def add_norm(ops: FusedOps, first: Tensor | None, dtype: torch.dtype) -> Tensor:
        wide = None if first is None else first.to(dtype)
        return ops.add_norm(x.to(dtype), residual.to(dtype, copy=True), weight.to(dtype), 1e-6, first=wide)[0]

    def rotated(ops: FusedOps, dtype: torch.dtype) -> Tensor:
        held = pool.to(dtype, copy=True)
        wide = replace(turn, **{name: getattr(turn, name).to(dtype) for name in ("cos", "sin", "norm")})
        q = ops.rotated_into(qkv.to(dtype), wide, slots, *held)
        return torch.cat([q, held[0][slots], held[1][slots]], 1)

    def measured(make: Callable[[FusedOps, torch.dtype], Tensor], run: Callable[[], object], moved: int) -> Measured:
        expected = make(TorchOps(), torch.float64)
        wrong = (make(ops, NARROW).double() - expected).norm() / expected.norm()
        return Measured(timed(run, graphed=rows <= 512), moved, 0.0, float(wrong))

    for name, other in (("add, norm", None), ("norm, add, norm", first)):
        yield (
            name,
            measured(
                lambda ops, dtype, other=other: add_norm(ops, other, dtype),
                lambda other=other: ops.add_norm(x, residual, weight, 1e-6, first=other),
                4 * x.nbytes,
            ),
        )
    yield "norm, rotate, store", measured(rotated, lambda: ops.rotated_into(qkv, turn, slots, *pool), 2 * qkv.nbytes)
    for activation in ("silu", "gelu_tanh"):
        yield (
            activation,
            measured(
                lambda ops, dtype, activation=activation: ops.gated(gate_up.to(dtype), activation),
                lambda activation=activation: ops.gated(gate_up, activation),
                gate_up.nbytes * 3 // 2,
            ),
        )


def row(name: str, found: Measured, copy: float, product: float) -> list[str]:
    if not found.ms:
        return [name, "", "", "", "", "", f"{found.error:.1e}"]
    floor = max(found.moved / copy, found.operations / product) * 1e3
    return [
        name,
        f"{found.ms * 1e3:.1f}",
        f"{floor * 1e3:.1f}",
        f"{floor / found.ms:.0%}",
        f"{found.moved / found.ms / 1e9:.2f}",
        f"{found.operations / found.ms / 1e9:.0f}",
        f"{found.error:.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every third case")
    parser.add_argument("--check", action="store_true", help=f"errors alone, of cases {SHRUNK} times smaller")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.check:
        parser.error("there is no CUDA device here; --check runs on a CPU with TRITON_INTERPRET=1")
    draw, console, copy, product = random.Random(0), Console(width=130), 1.0, 1.0
    if DEVICE == "cuda":
        copy, product = ceilings()
        console.print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s, "
            f"bf16 product {product / 1e12:.0f} TFLOP/s"
        )
    table = Table("case", "us", "floor us", "of floor", "TB/s", "TFLOP/s", "error")
    for case in cases(options.quick):
        found = attention(case.small if options.check else case, "triton", draw)
        table.add_row(*row(f"{case.shape.name}: {case.name}", found, copy, product))
        if all(rows == 1 for rows, _ in case.requests) and len(case.requests) <= FEW_REQUESTS:
            found = lone_rows(case.small if options.check else case, draw)
            table.add_row(*row(f"{case.shape.name}: {case.name}, rotated", found, copy, product))
    for name, found in products():
        table.add_row(*row(name, found, copy, product))
    for rows in (1, 8) if options.check else (1, 64, 8192):
        for name, found in element_wise(rows):
            table.add_row(*row(f"{rows} rows: {name}", found, copy, product))
    console.print(table)


if __name__ == "__main__":
    main()
