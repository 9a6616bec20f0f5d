"""What every chunk store promises, and what the RAM tier and the tiers together add to it."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import (
    BackedStore,
    ChunkKey,
    ChunkStore,
    DiskStore,
    EmptyStore,
    KeySpace,
    RamStore,
    StoredChunk,
    TieredStore,
    open_store,
)
from promptsluice.kv_reuse.places import Pinned, Place
from promptsluice.prompt.errors import ConfigError

SPACE = KeySpace("model", "salt")
TOKEN_BYTES = 2 * (2 * 3 * 4 * 4) + 4  # k and v of 2 layers, 3 heads, 4 dims in float32, and the id


def make(number: int, tokens: int = 5, dtype: torch.dtype = torch.float32) -> tuple[ChunkKey, StoredChunk]:
    generator = torch.Generator().manual_seed(number)
    k, v = (torch.randn(2, tokens, 3, 4, generator=generator).to(dtype) for _ in range(2))
    ids = (number, *range(1, tokens))
    return SPACE.key(ids), StoredChunk(ids, KVBlock(k, v))


def same(a: StoredChunk | None, b: StoredChunk) -> bool:
    if a is None or (a.ids, a.position) != (b.ids, b.position) or a.kv.k.dtype != b.kv.k.dtype:
        return False
    return torch.equal(a.kv.k, b.kv.k) and torch.equal(a.kv.v, b.kv.v)


STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "ram": lambda path: RamStore(1 << 20),
    "disk": lambda path: DiskStore(path, 1 << 20),
    "tiered": lambda path: open_store(ram=1 << 20, disk=1 << 20, path=path),
    "tiered, all on disk": lambda path: open_store(ram=1, disk=1 << 20, path=path),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return STORES[request.param](tmp_path / "kv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_put_comes_back_bit_for_bit(store: ChunkStore, dtype: torch.dtype):
    (key, chunk), (other, _) = make(1, dtype=dtype), make(2)
    assert not store.contains(key) and store.get(key) is None
    assert store.put(key, chunk)
    assert store.contains(key) and same(store.get(key), chunk)
    assert not store.contains(other) and store.get(other) is None


def test_what_is_at_hand(tmp_path: Path):
    """What is in memory, and nothing that a disk or a server would have to be asked for."""
    (key, chunk), (other, another) = make(1), make(2)
    disk, ram = DiskStore(tmp_path, 1 << 20), RamStore(1 << 20)
    tiered = TieredStore(disk, ram_budget=1 << 20)
    behind = BackedStore(TieredStore(EmptyStore(), ram_budget=1 << 20), RamStore(1 << 20))
    for store, there in ((disk, False), (ram, True), (tiered, True), (behind, True), (EmptyStore(), False)):
        store.put(key, chunk)
        assert store.at_hand(key) is there and not store.at_hand(other)
    assert disk.put(other, another) and tiered.contains(other) and not tiered.at_hand(other)
    assert same(tiered.get(other), another) and tiered.at_hand(other), "a hit is promoted"


def test_the_position_is_kept(store: ChunkStore):
    key, chunk = make(1)
    moved = StoredChunk(chunk.ids, chunk.kv, position=37)
    store.put(key, moved)
    assert same(store.get(key), moved)


def test_anchors_of_a_chunk_are_kept_apart_and_deleted_together(store: ChunkStore):
    bare, chunk = make(1)
    others = [(SPACE.key(chunk.ids, anchor=range(length)), make(10 + length)[1].kv) for length in (1, 2)]
    other_key, other = make(2)
    store.put(other_key, other)
    store.put(bare, chunk)
    for key, kv in others:
        store.put(key, StoredChunk(chunk.ids, kv, len(key.anchor)))
    assert same(store.get(bare), chunk)
    for key, kv in others:
        assert same(store.get(key), StoredChunk(chunk.ids, kv, len(key.anchor)))
    store.flush()
    assert store.delete(others[0][0]) >= 3
    assert not any(store.contains(key) for key in (bare, *(key for key, _ in others)))
    assert same(store.get(other_key), other)


def test_deleted_is_gone(store: ChunkStore):
    key, chunk = make(1)
    store.put(key, chunk)
    store.flush()
    assert store.delete(key)
    assert store.get(key) is None and not store.delete(key)
    assert sum(tier.entries for tier in store.stats()) == 0


def test_a_chunk_that_is_kept_twice_is_counted_once(store: ChunkStore):
    key, chunk = make(1)
    store.put(key, chunk)
    store.put(key, chunk)
    assert max(tier.entries for tier in store.stats()) == 1
    assert max(tier.bytes for tier in store.stats()) < 2 * chunk.nbytes + 1024


def test_the_empty_store_keeps_nothing():
    store = EmptyStore()
    key, chunk = make(1)
    assert not store.put(key, chunk)
    store.flush()
    assert store.get(key) is None and not store.contains(key) and not store.delete(key) and store.stats() == ()


def test_open_store_picks_the_tiers_that_have_a_budget(tmp_path: Path):
    assert [tier.tier for tier in open_store().stats()] == []
    assert [tier.tier for tier in open_store(ram=1).stats()] == ["ram"]
    assert [tier.tier for tier in open_store(disk=1, path=tmp_path).stats()] == ["disk"]
    assert [tier.tier for tier in open_store(ram=1, disk=1, path=tmp_path).stats()] == ["ram", "disk"]
    with pytest.raises(ConfigError, match="the folder of the chunk files"):
        open_store(disk=1)
    with pytest.raises(ConfigError, match="ram must not be negative"):
        open_store(ram=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(disk=1, path=tmp_path / "file")


Action = tuple[str, int]
ACTIONS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 7)), max_size=40)


class NaiveLru:
    """Least recently used out first, by tokens; the model that the real stores are held against."""

    def __init__(self, budget: int) -> None:
        self.budget, self.held, self.evicted = budget, OrderedDict[int, int](), []

    def act(self, verb: str, number: int) -> bool:
        if verb == "delete":
            return self.held.pop(number, None) is not None
        if verb == "get":
            if number in self.held:
                self.held.move_to_end(number)
            return number in self.held
        self.held.pop(number, None)
        if number + 1 > self.budget:
            return False
        self.held[number] = number + 1
        while sum(self.held.values()) > self.budget:
            self.evicted.append(self.held.popitem(last=False)[0])
        return True


def act(store: ChunkStore, verb: str, number: int) -> bool:
    key, chunk = make(number, tokens=number + 1)
    if verb == "put":
        return store.put(key, chunk)
    return store.delete(key) > 0 if verb == "delete" else store.get(key) is not None


@given(ACTIONS, st.integers(0, 20))
def test_ram_evicts_like_the_naive_model(actions: list[Action], budget: int):
    evicted: list[int] = []
    store = RamStore(budget * TOKEN_BYTES, on_evict=lambda key, chunk: evicted.append(chunk.ids[0]))
    naive = NaiveLru(budget)
    for verb, number in actions:
        assert act(store, verb, number) == naive.act(verb, number)
    assert evicted == naive.evicted
    (stats,) = store.stats()
    held = sum(naive.held.values())
    assert (stats.entries, stats.bytes, stats.evictions) == (len(naive.held), held * TOKEN_BYTES, len(evicted))


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 12), st.integers(0, 12))
def test_tiers_lose_nothing_that_one_of_them_has_room_for(actions: list[Action], ram: int, disk: int):
    """An unbounded naive model says what may be there; the tiers may have evicted it only from the bottom."""
    bottom = RamStore(disk * TOKEN_BYTES)
    store = TieredStore(bottom, ram_budget=ram * TOKEN_BYTES)
    known: set[int] = set()
    for verb, number in actions:
        found = act(store, verb, number)
        lost = bottom.stats()[0]
        if verb == "put":
            known.add(number)
            assert found or number + 1 > max(ram, disk)
        elif verb == "get":
            assert not found or number in known
            assert found or number not in known or lost.evictions + lost.refused > 0
        elif number in known:
            known.remove(number)
    for tier in store.stats():
        assert tier.bytes <= tier.budget


def test_ram_evictions_spill_and_disk_hits_are_promoted(tmp_path: Path):
    first, second = make(1), make(2)
    store = open_store(ram=first[1].nbytes, disk=1 << 20, path=tmp_path)
    store.put(*first)
    assert [tier.entries for tier in store.stats()] == [1, 0]
    store.put(*second)
    assert [tier.entries for tier in store.stats()] == [1, 1]
    tiers = [getattr(store.get(first[0]), "tier", None) for _ in range(2)]
    assert tiers == ["disk", "ram"]
    assert [tier.entries for tier in store.stats()] == [1, 2]
    assert same(store.get(second[0]), second[1])


@pytest.mark.parametrize("device", [False, True])
def test_what_another_process_deleted_does_not_come_back_from_memory(tmp_path: Path, device: bool):
    first, second = make(1), make(2)
    disk, size = DiskStore(tmp_path, 1 << 20), first[1].nbytes
    store = TieredStore(disk, ram_budget=size)
    if device:
        store = TieredStore(store, ram_budget=size, tier="device")
    for key, chunk in (first, second):
        assert store.put(key, chunk)
        store.flush()
    for _ in range(2):  # what was promoted, or handed down and up again
        assert store.get(first[0]) is not None and store.get(second[0]) is not None
    other = DiskStore(tmp_path, 1 << 20)
    assert other.delete(first[0]) == 1 and other.delete(second[0]) == 1
    for number in range(3, 6):
        assert store.put(*make(number))
        store.flush()
    assert other.stats()[0].entries == 3 and not store.contains(first[0]) and not store.contains(second[0])
    assert store.put(*first) and store.put(*second) and store.put(*make(6)), "what is computed again is stored again"
    store.flush()
    assert other.contains(first[0]) and other.contains(second[0])


def test_flush_makes_chunks_survive(tmp_path: Path):
    store = open_store(ram=1 << 20, disk=1 << 20, path=tmp_path)
    for number in range(3):
        store.put(*make(number))
    store.flush()
    reopened = open_store(ram=1 << 20, disk=1 << 20, path=tmp_path)
    assert all(same(reopened.get(make(number)[0]), make(number)[1]) for number in range(3))


def test_threads_share_a_store(store: ChunkStore):
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(30):
            key, chunk = make((seed * 7 + step * 5) % 6)
            store.put(key, chunk)
            found = store.get(key)
            if found is not None and not same(found, chunk):
                wrong.append(step)
            if step % 4 == seed:
                store.delete(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for tier in store.stats():
        assert 0 <= tier.bytes <= tier.budget and tier.corrupt == 0 and tier.entries <= 6


@pytest.mark.parametrize("tiers", ["spilled", "backed"])
def test_a_chunk_that_is_deleted_while_it_is_read_from_a_slow_tier_stays_nowhere(tiers: str):
    class Slow(RamStore):
        def get(self, key: ChunkKey) -> StoredChunk | None:
            chunk = super().get(key)
            reading.set()
            assert go.wait(10)
            return chunk

    reading, go = threading.Event(), threading.Event()
    slow, fast = Slow(1 << 20), RamStore(1 << 20)
    store = TieredStore(slow, ram_budget=1 << 20) if tiers == "spilled" else BackedStore(fast, slow)
    (key, chunk), (other, kept) = make(1), make(2)
    assert slow.put(key, chunk) and slow.put(other, kept)

    class Watched(OrderedDict[ChunkKey, StoredChunk]):
        def __setitem__(self, key: ChunkKey, chunk: StoredChunk) -> None:
            came.append(key)
            super().__setitem__(key, chunk)

    came: list[ChunkKey] = []
    if isinstance(store, TieredStore):
        store._memory._chunks = Watched()
    got: list[StoredChunk | None] = []
    reader = threading.Thread(target=lambda: got.append(store.get(key)))
    reader.start()
    assert reading.wait(10)
    assert store.delete(key) == 1
    go.set()
    reader.join()
    assert got[0] is not None and got[0].ids == chunk.ids, "it was there when it was asked for"
    assert not store.at_hand(key) and not store.contains(key) and store.get(key) is None
    assert came == [], "nor for a moment, in which others could take it from there"
    assert store.get(other) is not None and store.at_hand(other)
    assert store.put(key, chunk) and store.get(key) is not None and store.at_hand(key), "it is stored again"


@pytest.mark.parametrize("flushed", [False, True])
def test_a_chunk_that_is_deleted_on_its_way_to_a_slow_tier_stays_nowhere(flushed: bool):
    writing, go = threading.Event(), threading.Event()

    class Slow(RamStore):
        def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
            writing.set()
            assert go.wait(10)
            return super().put(key, chunk)

    (key, chunk), (other, another) = make(1), make(2)
    slow = Slow(1 << 20)
    store = TieredStore(slow, ram_budget=chunk.nbytes)
    store.put(key, chunk)
    moving = threading.Thread(target=store.flush if flushed else lambda: store.put(other, another))
    moving.start()
    assert writing.wait(10)
    store.delete(key)
    go.set()
    moving.join()
    assert not store.contains(key) and not slow.contains(key)
    store.put(other, another)
    store.put(key, chunk)
    store.flush()
    assert slow.contains(key) and slow.contains(other), "what comes after that is kept as ever"


def test_pinned_memory_is_counted_as_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    """Where memory is pinned, each tensor takes the next power of two."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    (key, chunk), (other, second) = make(1), make(2)
    size = 2 * 512 + 4 * 5  # k and v have 480 bytes each
    store = RamStore(2 * size - 1, place=Pinned())
    assert store.put(key, chunk) and store.stats()[0].bytes == size
    assert store.put(other, second) and store.stats()[0].bytes == size and store.get(key) is None
    assert store.delete(other) == 1 and store.stats()[0].bytes == 0
    assert not RamStore(size - 1, place=Pinned()).put(key, chunk)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory, which needs a GPU")
def test_pinned_chunks_are_pinned_and_the_same():
    key, chunk = make(1)
    store = RamStore(1 << 20, place=Pinned())
    store.put(key, chunk)
    found = store.get(key)
    assert found is not None and same(found, chunk) and found.kv.k.is_pinned() and found.kv.v.is_pinned()


def test_a_device_tier_is_over_the_others_and_its_chunks_outlive_it(tmp_path: Path):
    """Any place stands for a device: here one that makes copies, so that whose tensors come back shows."""
    places: list[KVBlock] = []

    class Copies(Place):
        def held(self, kv: KVBlock) -> KVBlock:
            places.append(KVBlock(kv.k.clone(), kv.v.clone()))
            return places[-1]

    def opened() -> TieredStore:
        below = TieredStore(DiskStore(tmp_path, 1 << 20), ram_budget=1 << 20)
        return TieredStore(below, ram_budget=make(1)[1].nbytes, tier="device", place=Copies())

    store = opened()
    store.put(*make(1))
    got = store.get(make(1)[0])
    assert got is not None and got.tier == "device" and got.kv is places[0]
    store.put(*make(2))  # there is room for one
    assert [tier.entries for tier in store.stats()] == [1, 1, 0]
    assert [one.tier for number in (2, 1, 1) if (one := store.get(make(number)[0]))] == ["device", "ram", "device"]
    store.flush()
    assert [tier.entries for tier in store.stats()] == [1, 2, 2]
    store = opened()
    got = store.get(make(2)[0])
    assert got is not None and got.tier == "disk" and same(got, make(2)[1])
    assert [tier.tier for tier in open_store(device=1 << 20, ram=1 << 20).stats()] == ["ram"], "no GPU, no device tier"


def test_a_device_without_memory_for_a_chunk_is_a_tier_less(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Full(Place):
        def held(self, kv: KVBlock) -> KVBlock:
            raise torch.OutOfMemoryError("CUDA out of memory")

    below = TieredStore(DiskStore(tmp_path, 1 << 20), ram_budget=1 << 20)
    store = TieredStore(below, ram_budget=1 << 20, tier="device", place=Full())
    key, chunk = make(1)
    assert store.put(key, chunk) and "was not kept in the tier device" in caplog.text
    got = store.get(key)
    assert got is not None and got.tier == "ram" and same(got, chunk)
    assert [(tier.entries, tier.refused) for tier in store.stats()] == [(0, 2), (1, 0), (0, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_device_tier_is_over_the_others(tmp_path: Path):
    size = make(1)[1].nbytes
    store = open_store(device=size, ram=1 << 20, disk=1 << 20, path=tmp_path, on="cuda")
    for number in (1, 2):
        store.put(*make(number))
    first, second = store.get(make(1)[0]), store.get(make(2)[0])
    assert first is not None and second is not None
    assert first.tier == "ram" and first.kv.k.is_cuda, "it was promoted"
    assert second.tier == "ram" and torch.equal(second.kv.k.cpu(), make(2)[1].kv.k)
    store.flush()
    again = open_store(disk=1 << 20, path=tmp_path).get(make(1)[0])
    assert again is not None and same(again, make(1)[1])
