"""The disk tier against damage, strangers, full disks and other processes."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.rounded_kv import RoundedBlock
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import ChunkKey, DiskStore, KeySpace, StoredChunk, chunkfile
from promptsluice.kv_reuse.chunkfile import DamagedChunk, decode, encode

SPACE = KeySpace("model", "salt")


def make(number: int, tokens: int = 5) -> tuple[ChunkKey, StoredChunk]:
    k, v = torch.arange(24 * tokens).reshape(2, 2, tokens, 3, 2).float().add(number).unbind(0)
    ids = (number, *range(1, tokens))
    return SPACE.key(ids), StoredChunk(ids, KVBlock(k, v))


def file_of(root: Path, key: ChunkKey) -> Path:
    return root / f"{key.name}.safetensors"


def without_metadata(raw: bytes) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + size]) | {"__metadata__": None}).encode()
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_changed_or_missing_byte_is_noticed(data: st.DataObject):
    key, chunk = make(3)
    raw = bytearray(encode(key, chunk))
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[place:]
    else:
        raw[place] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(raw), key=key)
    except DamagedChunk:
        return
    # Space between JSON tokens of the header may change without changing what it says.
    assert decoded.ids == chunk.ids and torch.equal(decoded.kv.k, chunk.kv.k) and torch.equal(decoded.kv.v, chunk.kv.v)


def test_the_file_is_plain_safetensors(tmp_path: Path):
    key, chunk = make(1)
    DiskStore(tmp_path, 1 << 20).put(key, chunk)
    with safetensors.safe_open(file_of(tmp_path, key), "pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("k"), chunk.kv.k)
    assert metadata.keys() == {"format", "key", "anchor", "fingerprint", "tokens", "position", "flops", "checksum"}
    assert (metadata["format"], metadata["fingerprint"], metadata["tokens"]) == ("promptsluice-chunk-3", "model", "5")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_rounded_chunk_comes_back_as_it_was(tmp_path: Path, dtype: torch.dtype):
    key, chunk = make(1)
    assert isinstance(chunk.kv, KVBlock)
    kept = replace(chunk, kv=RoundedBlock.of(chunk.kv, dtype))
    store = DiskStore(tmp_path, 1 << 20)
    assert store.put(key, kept)
    found = store.get(key)
    assert found is not None and isinstance(found.kv, RoundedBlock)
    for mine, theirs in zip(found.kv.tensors, kept.kv.tensors, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    with safetensors.safe_open(file_of(tmp_path, key), "pt") as file:
        assert set(file.keys()) == {"ids", "k", "v", "k_scales", "v_scales"}
    (stats,) = store.stats()
    assert kept.nbytes < chunk.nbytes and kept.nbytes <= stats.bytes <= kept.nbytes + 1024


@pytest.mark.parametrize("name", ["v_scales", "more"])
def test_a_file_with_other_tensors_is_damaged(name: str):
    key, chunk = make(1)
    ids = torch.tensor(chunk.ids, dtype=torch.int32)
    tensors = {"ids": ids, "k": chunk.kv.k, "v": chunk.kv.v, name: torch.ones(3)}
    metadata = chunkfile._metadata(key, 0, 0.0)
    raw = safetensors.torch.save(tensors, metadata | {"checksum": chunkfile._checksum(metadata, tensors)})
    with pytest.raises(DamagedChunk, match=name):
        decode(raw, key=key)


def test_metadata_that_is_no_text_is_damage():
    key, chunk = make(1)
    whole = encode(key, chunk)
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    for name in header["__metadata__"]:
        odd = json.dumps(header | {"__metadata__": header["__metadata__"] | {name: 3}}).encode()
        odd += b" " * (-len(odd) % 8)
        with pytest.raises(DamagedChunk, match=name):
            decode(len(odd).to_bytes(8, "little") + odd + whole[end:], key=key)


def rounded_of(chunk: StoredChunk) -> dict[str, torch.Tensor]:
    assert isinstance(chunk.kv, KVBlock)
    block = RoundedBlock.of(chunk.kv, torch.int8)
    return {"k": block.k, "v": block.v, "k_scales": block.k_scales, "v_scales": block.v_scales}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: {"k_scales": own["k_scales"].half()}, "must be torch.float32 .*, found torch.float16"),
        (
            lambda own: {"v_scales": own["v_scales"][:, :3].contiguous()},
            r"\(2, 5, 3\), found torch.float32 \(2, 3, 3\)",
        ),
        (lambda own: {"v_scales": own["v_scales"][..., None]}, r"found torch.float32 \(2, 5, 3, 1\)"),
        (lambda own: {"v": own["v"].view(torch.float8_e4m3fn)}, "v is torch.float8_e4m3fn .* but k is torch.int8"),
        (lambda own: {"v": own["v"][:, :4].contiguous()}, r"v is torch.int8 \(2, 4, 3, 2\), but k"),
        (lambda own: {name: own[name].float() for name in "kv"}, "k and v are torch.float32 with scales"),
        (lambda own: {"k": own["k"][0], "v": own["v"][0]}, "k has 3 dimensions"),
        (lambda own: {name: own[name][:, :4].contiguous() for name in own}, "KV of 4 tokens and 5 ids, not 5"),
        (lambda own: {"ids": torch.arange(4, dtype=torch.int32)}, "KV of 5 tokens and 4 ids, not 5"),
        (lambda own: {"k_scales": None, "v_scales": None}, "k and v are torch.int8 without scales"),
    ],
)
def test_a_file_whose_tensors_do_not_belong_together_is_damaged(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor | None]], reason: str
):
    """With a checksum that is right: kernels follow addresses and would read what lies behind them."""
    key, chunk = make(1)
    own = rounded_of(chunk)
    changed = {"ids": torch.tensor(chunk.ids, dtype=torch.int32), **own, **change(own)}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    metadata = chunkfile._metadata(key, 0, 0.0)
    raw = safetensors.torch.save(tensors, metadata | {"checksum": chunkfile._checksum(metadata, tensors)})
    with pytest.raises(DamagedChunk, match=reason):
        decode(raw, key=key)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: raw[:-7], "not a complete safetensors file"),
        (lambda raw: b"", "not a complete safetensors file"),
        (lambda raw: b"PK\x03\x04 something else", "not a complete safetensors file"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "checksum does not match"),
        (lambda raw: safetensors.torch.save({"k": torch.ones(2)}), "with metadata"),
        (lambda raw: encode(KeySpace("other model", "salt").key(range(5)), make(1)[1]), "key is"),
        (
            lambda raw: encode(ChunkKey(make(1)[0].digest, "other", 5), make(1)[1]),
            "fingerprint is 'other', not 'model'",
        ),
        (lambda raw: encode(KeySpace("model", "salt").key(make(1)[1].ids, anchor=[7]), make(1)[1]), "anchor is"),
        (lambda raw: raw.replace(b"promptsluice-chunk-3", b"promptsluice-chunk-9"), "format is"),
        (lambda raw: without_metadata(raw), "metadata is null"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_named_miss_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], reason: str
):
    store = DiskStore(tmp_path, 1 << 20)
    key, chunk = make(1)
    store.put(key, chunk)
    path = file_of(tmp_path, key)
    path.write_bytes(damage(path.read_bytes()))
    assert store.get(key) is None
    assert not path.exists()
    assert path.name in caplog.text and reason in caplog.text
    (stats,) = store.stats()
    assert (stats.corrupt, stats.misses, stats.hits, stats.entries) == (1, 1, 0, 0)
    assert store.put(key, chunk) and store.get(key) is not None


def test_an_unreadable_file_is_a_miss_that_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    key, chunk = make(1)
    file_of(tmp_path, key).mkdir()
    store = DiskStore(tmp_path, 1 << 20)
    assert store.get(key) is None
    assert "cannot be read" in caplog.text and file_of(tmp_path, key).is_dir()
    assert not store.put(key, chunk) and not store.contains(key)


def test_a_full_disk_skips_the_chunk_and_leaves_no_half_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    full = True

    def write(handle: BinaryIO, data: bytes) -> None:
        handle.write(data[: len(data) // 2] if full else data)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(tmp_path, 1 << 20, write=write)
    key, chunk = make(1)
    assert not store.put(key, chunk)
    assert "No space left on device" in caplog.text and names(tmp_path) == set()
    assert store.get(key) is None and store.stats()[0].refused == 1
    full = False
    assert store.put(key, chunk) and store.get(key) is not None


def test_an_interrupted_write_leaves_no_half_file(tmp_path: Path):
    def write(handle: BinaryIO, data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DiskStore(tmp_path, 1 << 20, write=write).put(*make(1))
    assert names(tmp_path) == set()


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_is_served(tmp_path: Path):
    script = f"""
import os, signal
from pathlib import Path
from promptsluice.kv_reuse import DiskStore, KeySpace, StoredChunk
from promptsluice.backend_engine.types import KVBlock
import torch
def write(handle, data):
    handle.write(data[:50]); handle.flush(); os.kill(os.getpid(), signal.SIGKILL)
ids = (1, 2)
chunk = StoredChunk(ids, KVBlock(torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1)))
DiskStore(Path({str(tmp_path)!r}), 1 << 20, write=write).put(KeySpace("model", "salt").key(ids), chunk)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    (half,) = tmp_path.iterdir()
    assert half.name.endswith(".tmp")
    store = DiskStore(tmp_path, 1 << 20)
    assert store.get(SPACE.key((1, 2))) is None and store.stats()[0].entries == 0
    assert half.exists()  # it might be another process's, being written now
    os.utime(half, (1, 1))
    DiskStore(tmp_path, 1 << 20)
    assert names(tmp_path) == set()


def test_two_stores_share_one_folder(tmp_path: Path):
    size = len(encode(*make(1)))
    one, two = (DiskStore(tmp_path, 3 * size + 10) for _ in range(2))
    one.put(*make(1))
    assert two.get(make(1)[0]) is not None
    two.put(*make(2))
    one.put(*make(3))
    one.get(make(1)[0])
    two.put(*make(4))  # the budget is the folder's: out goes 2, the least recently used of all
    held = [number for number in range(1, 5) if one.contains(make(number)[0])]
    assert held == [1, 3, 4]
    assert one.stats()[0].bytes == two.stats()[0].bytes == 3 * size
    two.delete(make(1)[0])
    assert one.get(make(1)[0]) is None


def test_a_restart_keeps_the_lru_order(tmp_path: Path):
    size = len(encode(*make(1)))
    store = DiskStore(tmp_path, 1 << 20)
    for number in (1, 2, 3, 4):
        store.put(*make(number))
    store.get(make(1)[0])
    store = DiskStore(tmp_path, 3 * size + 10)
    store.put(*make(5))
    assert [number for number in range(1, 6) if store.contains(make(number)[0])] == [1, 4, 5]
    assert store.stats()[0].evictions == 2


def test_strangers_in_the_folder_are_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    size = len(encode(*make(1)))
    store = DiskStore(tmp_path, size)
    for number in (1, 2):
        assert store.put(*make(number))
    assert names(tmp_path) == {"notes.txt", "model.safetensors", file_of(tmp_path, make(2)[0]).name}


def test_what_is_larger_than_the_budget_evicts_nothing(tmp_path: Path):
    store = DiskStore(tmp_path, len(encode(*make(1))))
    store.put(*make(1))
    assert not store.put(*make(2, tokens=50))
    assert store.contains(make(1)[0]) and store.stats()[0].refused == 1


def test_a_removed_folder_is_misses_and_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    root = tmp_path / "kv"
    store = DiskStore(root, 1 << 20)
    root.rmdir()
    assert store.get(make(1)[0]) is None and not store.put(*make(1))
    assert store.stats()[0].entries == 0
    assert caplog.records and all(record.levelno == logging.WARNING for record in caplog.records)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "reopen"]), st.integers(0, 4)), max_size=25))
def test_disk_evicts_the_least_recently_used(tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]):
    root = tmp_path_factory.mktemp("kv")
    budget = 2 * len(encode(*make(1))) + 10
    store = DiskStore(root, budget)
    order: list[int] = []  # least recently used first
    for verb, number in actions:
        key, chunk = make(number)
        if verb == "reopen":
            store = DiskStore(root, budget)
        elif verb == "put":
            assert store.put(key, chunk)
            order = [*(old for old in order if old != number), number][-2:]
        else:
            assert (store.get(key) is not None) == (number in order)
            order = sorted(order, key=lambda old: old == number)
        assert {file.name for file in root.iterdir()} == {file_of(root, make(held)[0]).name for held in order}
