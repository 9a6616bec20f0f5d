"""What another process, or an earlier life of this one, stored is found, by its own tenant only."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import (
    Catalogue,
    ChunkIndex,
    ChunkStore,
    DiskStore,
    Finder,
    KeySpace,
    RamStore,
    StoredChunk,
    TieredStore,
)


def text(seed: int, tokens: int = 40) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(1000) for _ in range(tokens))


def put(store: ChunkStore, ids: tuple[int, ...], *, salt: str = "a", anchor: tuple[int, ...] = ()) -> None:
    kv = KVBlock(*torch.ones(2, 1, len(ids), 1, 1).unbind(0))
    store.put(KeySpace("model", salt).key(ids, anchor=anchor), StoredChunk(ids, kv, len(anchor)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def found(index: ChunkIndex, ids: tuple[int, ...], salt: str = "a") -> bool:
    return bool(index.matches(np.array(ids, dtype=np.int32), salt=salt, least=32))


STORES = {
    "ram": lambda path: RamStore(1 << 20),
    "disk": lambda path: DiskStore(path, 1 << 20),
    "tiers": lambda path: TieredStore(DiskStore(path, 1 << 20), ram_budget=900),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return STORES[request.param](tmp_path)


def test_a_store_lists_what_it_has(store: ChunkStore):
    chunks = [text(number) for number in range(4)]
    for chunk in chunks:
        put(store, chunk)
        put(store, chunk, anchor=(1, 2))
    listed = list(store.catalogue())
    assert {(one.digest, one.read()) for one in listed} == {
        (KeySpace("model", "a").key(chunk).digest, chunk) for chunk in chunks
    }
    store.delete(KeySpace("model", "a").key(chunks[0]))
    assert {one.read() for one in store.catalogue()} == set(chunks[1:])


def test_a_new_finder_finds_what_is_stored_under_its_salt_and_for_its_model(store: ChunkStore):
    put(store, text(1))
    put(store, text(2), salt="b")
    for fingerprint, salt, known in [("model", "a", 1), ("model", "b", 2), ("model", "c", 0), ("other", "a", 0)]:
        finder = Finder(store, fingerprint=fingerprint)
        assert finder.stale(salt) and finder.find(text(1), salt=salt) == finder.find(text(2), salt=salt) == []
        finder.sync(salt)
        assert [bool(finder.find(text(number), salt=salt)) for number in (1, 2)] == [known == 1, known == 2]
        assert not finder.stale(salt) and finder.stale("somebody else")


def test_the_store_is_looked_at_from_time_to_time(tmp_path: Path):
    store, index, clock = DiskStore(tmp_path, 1 << 20), ChunkIndex(), Clock()
    catalogue, space = Catalogue(store, index, every_s=10, clock=clock), KeySpace("model", "a")
    catalogue.sync(space)
    put(DiskStore(tmp_path, 1 << 20), text(1))  # another process
    catalogue.sync(space)
    assert not catalogue.stale("a") and not found(index, text(1))
    clock.now = 10
    assert catalogue.stale("a")
    catalogue.sync(space)
    assert found(index, text(1)) and not found(index, text(1), "b")


def test_damaged_ids_are_nobodys(tmp_path: Path):
    store = DiskStore(tmp_path, 1 << 20)
    for number in range(4):
        put(store, text(number))
    paths = [next(tmp_path.glob(f"{KeySpace('model', 'a').key(text(number)).digest}-*")) for number in range(4)]
    one, two = (struct.pack("<f", value) for value in (1, 2))
    paths[0].write_bytes(paths[0].read_bytes().replace(one, two, 1))  # in the KV, which is not read
    id_ = struct.pack("<i", text(1)[3])
    paths[1].write_bytes(paths[1].read_bytes().replace(id_, struct.pack("<i", text(1)[3] ^ 1)))
    paths[2].write_bytes(b"\xff" * 100)
    index = ChunkIndex()
    Catalogue(store, index).sync(KeySpace("model", "a"))
    assert [found(index, text(number)) for number in range(4)] == [True, False, False, True]
    assert store.get(KeySpace("model", "a").key(text(0))) is None, "the KV is verified when it is read"


def test_what_nobody_claims_is_bounded():
    store, index = RamStore(1 << 20), ChunkIndex()
    for number in range(5):
        put(store, text(number))
    catalogue = Catalogue(store, index, most_tokens=80)
    catalogue.sync(KeySpace("model", "b"))
    catalogue.sync(KeySpace("model", "a"))
    assert [found(index, text(number)) for number in range(5)] == [False, False, False, True, True]


def test_what_several_tiers_have_counts_once(tmp_path: Path):
    store, index = TieredStore(DiskStore(tmp_path, 1 << 20), ram_budget=1 << 20), ChunkIndex()
    for number in range(4):
        put(store, text(number))
    store.flush()
    assert len(list(store.catalogue())) == 8
    Catalogue(store, index, most_tokens=160).sync(KeySpace("model", "a"))
    assert all(found(index, text(number)) for number in range(4))


def test_what_goes_and_comes_back_counts_once():
    store, index, clock = RamStore(1 << 20), ChunkIndex(), Clock()
    catalogue = Catalogue(store, index, every_s=10, most_tokens=80, clock=clock)
    for _ in range(5):
        put(store, text(1))
        catalogue.sync(KeySpace("model", "nobody"))
        clock.now += 10
        store.delete(KeySpace("model", "a").key(text(1)))
        catalogue.sync(KeySpace("model", "nobody"))
        clock.now += 10
    put(store, text(1))
    catalogue.sync(KeySpace("model", "a"))
    assert found(index, text(1))


def test_the_text_of_what_is_gone_is_not_held_for_whoever_may_claim_it():
    store, index, clock = RamStore(1 << 20), ChunkIndex(), Clock()
    catalogue = Catalogue(store, index, every_s=10, clock=clock)
    for number in (1, 2):
        put(store, text(number))
    catalogue.sync(KeySpace("model", "nobody"))
    store.delete(KeySpace("model", "a").key(text(1)))
    clock.now += 10
    catalogue.sync(KeySpace("model", "a"))
    assert not found(index, text(1)) and found(index, text(2))
