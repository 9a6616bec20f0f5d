"""Processes that share one folder, are killed in the middle of it, and find the disk full: nothing wrong is served."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import ChunkKey, DiskStore, KeySpace, StoredChunk

pytestmark = pytest.mark.slow
BUDGET = 3 << 20
NUMBERS = 24


def make(number: int) -> tuple[ChunkKey, StoredChunk]:
    """Half a megabyte that tells its number in each of its values."""
    ids = (number, *range(1, 64))
    kv = KVBlock(torch.full((8, 64, 4, 32), float(number)), torch.full((8, 64, 4, 32), float(-number)))
    return KeySpace("model", "salt").key(ids), StoredChunk(ids, kv, flops=1.0)


def right(store: DiskStore, number: int) -> bool:
    """Whether a chunk was there; asserts that it then is the right one."""
    key, chunk = make(number)
    got = store.get(key)
    assert got is None or (
        got.ids == chunk.ids and torch.equal(got.kv.k, chunk.kv.k) and torch.equal(got.kv.v, chunk.kv.v)
    )
    return got is not None


WORKER = """
import random, sys
sys.path.insert(0, {here!r})
import test_processes as shared
source, store = random.Random({seed}), shared.DiskStore(shared.Path({root!r}), shared.BUDGET)
while True:
    number = source.randrange(shared.NUMBERS)
    if source.random() < 0.5:
        store.put(*shared.make(number))
    elif source.random() < 0.1:
        store.delete(shared.make(number)[0])
    else:
        shared.right(store, number)
    print(number, flush=True)
"""


def start(root: Path, seed: int) -> "subprocess.Popen[str]":
    code = WORKER.format(here=str(Path(__file__).parent), root=str(root), seed=seed)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_processes_on_one_folder_are_killed_again_and_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = DiskStore(tmp_path, BUDGET)
    served = 0
    for round_ in range(2):
        workers = [start(tmp_path, 10 * round_ + number) for number in range(2)]
        try:
            for worker in workers:
                assert worker.stdout is not None and worker.stdout.readline(), "a worker died by itself"
            for step in range(40 + 7 * round_):
                served += right(store, step % NUMBERS)
                for worker in workers:
                    assert worker.stdout is not None and worker.stdout.readline(), "a worker died by itself"
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        served += sum(right(store, number) for number in range(NUMBERS))
    assert served > 0 and caplog.records == []  # half a file is nobody's, not a damaged one
    assert store.put(*make(NUMBERS)) and right(store, NUMBERS)
    (stats,) = store.stats()
    assert stats.bytes <= BUDGET and stats.corrupt == 0


FULL = """
import resource, sys
sys.path.insert(0, {here!r})
import test_processes as shared
store = shared.DiskStore(shared.Path({root!r}), shared.BUDGET)
assert store.put(*shared.make(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # the kernel ends writes as it does on a full disk
assert not store.put(*shared.make(2))
assert shared.right(store, 1) and not shared.right(store, 2) and store.stats()[0].refused == 1
"""


def test_a_disk_that_takes_no_more_is_a_refusal(tmp_path: Path):
    code = FULL.format(here=str(Path(__file__).parent), root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "was not stored" in done.stderr and len(list(tmp_path.iterdir())) == 1
    assert right(DiskStore(tmp_path, BUDGET), 1)
