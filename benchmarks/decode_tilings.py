"""Which tiling serves decode attention best on this card: each one's time beside the floor of its bytes.

Run: python benchmarks/decode_tilings.py [--batches 16,256] [--keys 576] [--stored int8|fp8]

Attention of one layer with 32 heads of 128 over 8 key and value heads (an 8B model), one row a request, pages of 16 in
random order. The five fastest tilings and the one in use, in microseconds by CUDA events, medians; the floor is the
bytes of keys and values as they are stored (bfloat16, unless said) over the measured copy rate. Every result is
compared with that of the tiling in use. Of up to 8 requests it is in use over pools of 8 bits only: others have a
kernel of their own, which turns the rows, too (kernels_gpu.py).
"""

import argparse
from dataclasses import replace
from itertools import product

import torch
from promptsluice.backend_engine.attention.paged import Tiling, TritonAttention
from promptsluice.backend_engine.batch import RequestRows, StepBatch, build_batch
from promptsluice.backend_engine.rounded_kv import RoundedKV, Stored, pool_dtype, rounded
from rich.console import Console
from rich.table import Table
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MOST_KEYS = 32768
TILINGS = [
    Tiling(keys=keys, warps=warps, stages=stages, heads_first=heads_first)
    for keys, warps, stages, heads_first in product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4), (False, True))
]


def decode(requests: int, keys: int) -> StepBatch:
    """One row of each request, behind its other keys."""
    each = -(-keys // PAGE)
    pages = torch.randperm(requests * each).view(requests, each).tolist()
    parts = [RequestRows(ids=[0], indices=[keys - 1], pages=own, logits=[0]) for own in pages]
    batch = build_batch(parts, page_size=PAGE, device="cuda")
    return replace(batch, key_count_host=(MOST_KEYS,) * len(parts))  # as graphs do, which serve any length


def microseconds(
    attention: TritonAttention, batch: StepBatch, pool: tuple[Stored, Stored]
) -> tuple[float, torch.Tensor]:
    q = torch.randn(batch.rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda"))
    plan = attention.plan(batch, page_size=PAGE, scale=DIM**-0.5)
    took = do_bench(lambda: plan(q, pool[0], pool[1]), return_mode="median")
    assert isinstance(took, float)
    return 1e3 * took, plan(q, pool[0], pool[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="16,256")
    parser.add_argument("--keys", type=int, default=576)
    parser.add_argument("--stored", choices=("int8", "fp8"), help="keys and values of 8 bits")
    options = parser.parse_args()
    source, target = torch.randn(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    assert isinstance(copy, float)
    rate = 2 * source.nbytes / copy * 1e3
    console = Console(width=110)
    console.print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s")
    for batch in (int(one) for one in options.batches.split(",")):
        step = decode(batch, options.keys)
        slots = -(-options.keys // PAGE) * PAGE * batch
        data = torch.randn(2, slots, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        pool, nbytes = (data[0], data[1]), data.nbytes
        if options.stored:
            dtype = pool_dtype(options.stored, data.dtype, data.device)
            rows = rounded(data, dtype)
            pool = tuple(RoundedKV.of(half, dtype, KV_HEADS, DIM) for half in rows)
            nbytes = rows.nbytes
        used, expected = microseconds(TritonAttention(), step, pool)
        times = {}
        for tiling in TILINGS:
            try:
                times[tiling], got = microseconds(TritonAttention(tiling=tiling), step, pool)
            except OutOfResources:  # of shared memory
                continue
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        floor = nbytes / rate * 1e6
        table = Table(f"batch {batch}, {options.keys} keys: floor {floor:.1f} us", "us", "of floor")
        table.add_row("in use", f"{used:.1f}", f"{floor / used:.0%}")
        for tiling in sorted(times, key=times.__getitem__)[:5]:
            table.add_row(str(tiling), f"{times[tiling]:.1f}", f"{floor / times[tiling]:.0%}")
        console.print(table)


if __name__ == "__main__":
    main()
