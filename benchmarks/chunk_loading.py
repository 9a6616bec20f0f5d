"""Chunks of one prompt from the disk tier: one after the other, and several at a time, from the page cache and without.

Run: python benchmarks/chunk_loading.py [--chunks 8] [--tokens 512] [--layers 32] [--folder DIR]

Files of random KV (8 heads of 128 in float16: an 8B model's sizes by default) are read, verified and turned into
tensors by `DiskStore.get`, as a prompt's are. Without the page cache: each file is dropped from it before it is read
(posix_fadvise), so that the disk is measured, not the memory. Medians of several rounds, which take turns.
Not here: copying to a GPU, re-positioning.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from promptsluice.kv_reuse import ChunkKey, DiskStore

HEADS, DIM = 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        run(options, folder, Console(width=160))


def run(options: argparse.Namespace, folder: Path, console: Console) -> None:
    from promptsluice.kv_reuse import DiskStore

    store = DiskStore(folder, 1 << 40)
    keys = written(store, options)
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(f"{len(keys)} chunks, {size / 1e6:.0f} MB; {os.cpu_count()} cores, {platform.processor()}")
    ways = [(cached, threads) for cached in (True, False) for threads in options.threads]
    times: dict[tuple[bool, int], list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for cached, threads in ways:
            times[cached, threads].append(seconds(store, keys, folder, cached=cached, threads=threads))
    console.print("| page cache | at a time | ms | GB/s | times faster |\n|---|---|---|---|---|", markup=False)
    for cached, threads in ways:
        took, alone = median(times[cached, threads]), median(times[cached, options.threads[0]])
        cells = ("yes" if cached else "no", threads, f"{1000 * took:.0f}", f"{size / took / 1e9:.2f}")
        console.print(f"| {' | '.join(map(str, cells))} | {alone / took:.1f} |", markup=False)


def written(store: "DiskStore", options: argparse.Namespace) -> "list[ChunkKey]":
    """The keys of chunks of random KV."""
    import torch
    from promptsluice.backend_engine.types import KVBlock
    from promptsluice.kv_reuse import KeySpace, StoredChunk

    space, keys = KeySpace("benchmark", ""), []
    generator = torch.Generator().manual_seed(0)
    for number in range(options.chunks):
        ids = tuple(range(number, number + options.tokens))
        k, v = torch.randn(2, options.layers, options.tokens, HEADS, DIM, generator=generator).half().unbind(0)
        keys.append(space.key(ids))
        assert store.put(keys[-1], StoredChunk(ids, KVBlock(k, v))), "the disk is full"
    return keys


def seconds(store: "DiskStore", keys: "Sequence[ChunkKey]", folder: Path, *, cached: bool, threads: int) -> float:
    for path in folder.iterdir():
        if cached:
            path.read_bytes()
        else:
            forget(path)
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as readers:
        chunks = list(readers.map(store.get, keys))
    took = time.perf_counter() - began
    assert None not in chunks
    return took


def forget(path: Path) -> None:
    """Drop a synced file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
