"""Our attention kernels on a GPU: achieved bytes and operations per second beside this card's ceilings, and the error.

Run: python benchmarks/kernels_gpu.py [--quick]

Ceilings are measured in the same process: a device-to-device copy (bytes read plus written) and a large bfloat16 matrix
product. A case's floor is the larger of its bytes over the copy rate and its operations over the product rate. Page
tables are random permutations. The error is the norm of the difference to float64 on the same bfloat16 inputs, relative
to the norm of the result, over a sample of rows. Medians of timed launches, by CUDA events.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from promptsluice.backend_engine.attention import attention_backend
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench

PAGE = 16


@dataclass(frozen=True)
class Case:
    """Requests as (rows, keys): the last `rows` of `keys`, or scattered over them."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    requests: tuple[tuple[int, int], ...]
    scattered: bool = False


def cases(quick: bool) -> list[Case]:
    found = []
    for label, heads, kv_heads, dim in (("8B", 32, 8, 128), ("0.5B", 14, 2, 64)):
        for batch, keys in ((1, 2048), (1, 32768), (8, 2048), (64, 640), (64, 4096), (256, 640)):
            found.append(Case(f"{label} decode {batch} x {keys}", heads, kv_heads, dim, ((1, keys),) * batch))
        mixed = tuple((1, random.Random(batch).randint(1, 32768)) for batch in range(32))
        found.append(Case(f"{label} decode 32 x 1..32768", heads, kv_heads, dim, mixed))
        for rows, keys in ((2048, 2048), (8192, 8192), (2048, 16384)):
            found.append(Case(f"{label} prefill {rows} of {keys}", heads, kv_heads, dim, ((rows, keys),)))
        found.append(Case(f"{label} blend 1228 of 8192", heads, kv_heads, dim, ((1228, 8192),), scattered=True))
    return found[:: 3 if quick else 1]


def laid_out(case: Case, draw: random.Random) -> tuple[StepBatch, int]:
    """The batch on the device, and the number of pages."""
    total = sum(-(-keys // PAGE) for _, keys in case.requests)
    order = list(range(total))
    draw.shuffle(order)
    parts, taken = [], 0
    for rows, keys in case.requests:
        needed = -(-keys // PAGE)
        indices = sorted(draw.sample(range(keys), rows)) if case.scattered else list(range(keys - rows, keys))
        parts.append(RequestRows(ids=indices, indices=indices, pages=order[taken : taken + needed], key_count=keys))
        taken += needed
    return build_batch(parts, page_size=PAGE, device="cuda"), total


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch, scale: float, draw: random.Random) -> float:
    """Relative error over a sample of rows, against float64."""
    difference = size = 0.0
    owner = torch.repeat_interleave(torch.arange(batch.requests), torch.tensor(batch.query_start_host).diff()).tolist()
    for row in draw.sample(range(batch.rows), min(24, batch.rows)):
        keys = torch.arange(int(batch.visible[row]), device="cuda")
        slots = batch.page_table[owner[row], keys // PAGE].long() * PAGE + keys % PAGE
        group = q.shape[1] // k.shape[1]
        mine, values = (x[slots].double().repeat_interleave(group, 1) for x in (k, v))  # [keys, heads, dim]
        scores = torch.einsum("hd,khd->hk", q[row].double(), mine) * scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        difference += float((out[row].double() - expected).square().sum())
        size += float(expected.square().sum())
    return (difference / size) ** 0.5


def timed(run: Callable[[], object]) -> float:
    """Median milliseconds of a launch."""
    ms = do_bench(run, return_mode="median")
    assert isinstance(ms, float), ms
    return ms


def ceilings() -> tuple[float, float]:
    """(bytes per second of a copy, operations per second of a product)."""
    source, target = torch.randn(1 << 30, device="cuda"), torch.empty(1 << 30, device="cuda")
    copy = timed(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timed(lambda: a @ b)
    return 2 * source.nbytes / copy * 1e3, 2 * 8192**3 / product * 1e3


def measured(case: Case, backend: str, draw: random.Random) -> tuple[float, float, float, float]:
    """(milliseconds, bytes, operations, error) of one layer's attention."""
    batch, pages = laid_out(case, draw)
    q = torch.randn(batch.rows, case.heads, case.dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(pages * PAGE, case.kv_heads, case.dim, device="cuda").to(torch.bfloat16) for _ in range(2))
    scale = case.dim**-0.5
    plan = attention_backend(backend).plan(batch, page_size=PAGE, scale=scale)
    wrong = error(plan(q, k, v), q, k, v, batch, scale, draw)
    ms = timed(lambda: plan(q, k, v))
    kv_bytes = 2 * sum(keys for _, keys in case.requests) * case.kv_heads * case.dim * 2
    operations = 4 * float(batch.visible.double().sum()) * case.heads * case.dim
    return ms, kv_bytes + 2 * q.nbytes, operations, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every third case")
    options = parser.parse_args()
    draw = random.Random(0)
    copy, product = ceilings()
    console = Console(width=130)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s, "
        f"bf16 product {product / 1e12:.0f} TFLOP/s"
    )
    table = Table("case", "us", "floor us", "of floor", "TB/s", "TFLOP/s", "error")
    for case in cases(options.quick):
        ms, moved, operations, wrong = measured(case, "triton", draw)
        floor = max(moved / copy, operations / product) * 1e3
        table.add_row(
            case.name,
            f"{ms * 1e3:.1f}",
            f"{floor * 1e3:.1f}",
            f"{floor / ms:.0%}",
            f"{moved / ms / 1e9:.2f}",
            f"{operations / ms / 1e9:.0f}",
            f"{wrong:.1e}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
