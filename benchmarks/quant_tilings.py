"""Which tiling of a product with a rounded matrix is fastest, by the number of rows: for `products.tiling_of`.

Run: python benchmarks/quant_tilings.py [--rows 1 8 32 64 256] [--processes 12]

Kernels are compiled by several processes first; Triton keeps them on disk. For each kind, rows and matrix: the three
fastest tilings, and the one that is chosen.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import torch
from promptsluice.backend_engine.quantization.forms import rounded_forms
from promptsluice.backend_engine.quantization.products import RoundedMatrix, Tiling, tiling_of
from rich.console import Console
from rich.table import Table
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

KINDS = ("int8", "int4", "fp8")
MATRICES = ((4096, 4096), (28672, 4096), (4096, 14336))
# What fails to compile or to fit, for a tiling, is no candidate.
UNFIT = (OutOfResources, CompilationError, AssertionError, RuntimeError)


def candidates(rows: int) -> list[Tiling]:
    if rows == 1:
        return [Tiling(1, n, k, warps, 2) for n, k, warps in product((2, 4, 8, 16), (512, 1024, 2048), (2, 4, 8))]
    if rows <= 32:
        grid = product((16 if rows <= 16 else 32,), (16, 32, 64, 128), (128, 256, 512), (4, 8), (3, 5))
        return [Tiling(*sizes) for sizes in grid]
    heights = (64,) if rows <= 64 else (64, 128)
    return [Tiling(*sizes) for sizes in product(heights, (64, 128), (64, 128), (4, 8), (3, 4), (False, True))]


def matrix_of(kind: str, out: int, inputs: int) -> RoundedMatrix:
    weight = torch.randn(out, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    linear = rounded_forms(kind, torch.bfloat16).linear(weight, None)
    return linear.matrix


def compiled(job: tuple[str, int, Tiling]) -> None:
    """Run a small product of the kind once; a large one has the same kernel."""
    kind, rows, tiling = job
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    try:
        matrix_of(kind, 256, 4096).product(x, None, tiling)
        torch.cuda.synchronize()
    except UNFIT:
        return


def microseconds(matrix: RoundedMatrix, x: torch.Tensor, tiling: Tiling) -> float:
    try:
        ms = do_bench(lambda: matrix.product(x, None, tiling), warmup=3, rep=15, return_mode="median")
    except UNFIT:
        return float("inf")
    assert isinstance(ms, float)
    return ms * 1e3


def shown(tiling: Tiling, us: float) -> str:
    swapped = " swapped" if tiling.swapped else ""
    sizes = f"{tiling.block_m}x{tiling.block_n}x{tiling.block_k}"
    return f"{us:.1f}: {sizes} w{tiling.warps} s{tiling.stages}{swapped}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32, 64, 256])
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    jobs = [(kind, rows, tiling) for kind in KINDS for rows in options.rows for tiling in candidates(rows)]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as workers:
        list(workers.map(compiled, jobs, chunksize=8))
    console = Console(width=190)
    table = Table("kind", "rows", "matrix", "GB/s", "us of what is chosen", "first", "second", "third")
    for kind, (out, inputs) in product(KINDS, MATRICES):
        matrix = matrix_of(kind, out, inputs)
        for rows in options.rows:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            chosen = tiling_of(rows, inputs, out, packed=kind == "int4")
            found = sorted((microseconds(matrix, x, tiling), number) for number, tiling in enumerate(candidates(rows)))
            best = [shown(candidates(rows)[number], us) for us, number in found[:3]]
            rate = matrix.nbytes / found[0][0] / 1e3
            mine = shown(chosen, microseconds(matrix, x, chosen))
            table.add_row(kind, f"{rows}", f"{out} x {inputs}", f"{rate:.0f}", mine, *best)
    console.print(table)


if __name__ == "__main__":
    main()
