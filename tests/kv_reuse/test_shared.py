"""The shared tier over the real client and a server that speaks Redis's protocol, and over one that says nothing."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakeredis import TcpFakeServer
from promptsluice.backend_engine.types import KVBlock
from promptsluice.kv_reuse import (
    BackedStore,
    ChunkKey,
    Finder,
    KeySpace,
    RamStore,
    SharedStore,
    StoredChunk,
    connect,
    open_store,
)
from promptsluice.prompt.errors import ConfigError

SPACE = KeySpace("model", "salt")


def make(number: int, anchor: tuple[int, ...] = ()) -> tuple[ChunkKey, StoredChunk]:
    ids = (number, *range(1, 40))
    k, v = torch.arange(2.0 * 40).reshape(2, 1, 40, 1, 1).add(number).unbind(0)
    return SPACE.key(ids, anchor=anchor), StoredChunk(ids, KVBlock(k, v), len(anchor), flops=7.5)


@pytest.fixture
def url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    client: Any = connect(url, timeout_s=30)
    yield client
    client.close()


def test_what_one_gateway_stores_another_finds_bit_for_bit(url: str, client: Any):
    key, chunk = make(1)
    one = BackedStore(RamStore(1 << 20), SharedStore(client))
    assert one.put(key, chunk)
    other_client: Any = connect(url, timeout_s=30)
    shared = SharedStore(other_client)
    other = BackedStore(RamStore(1 << 20), shared)
    assert other.contains(key) and not other.contains(make(2)[0]) and other.get(make(2)[0]) is None
    for tier in ("shared", "ram"):
        got = other.get(key)
        assert got is not None and (got.tier, got.ids, got.position, got.flops) == (tier, chunk.ids, 0, 7.5)
        assert torch.equal(got.kv.k, chunk.kv.k) and torch.equal(got.kv.v, chunk.kv.v)
    (ram, counted) = other.stats()
    assert (counted.tier, counted.hits, counted.misses, ram.entries) == ("shared", 1, 1, 1)
    assert 0 < client.ttl(client.keys()[0]) <= 7 * 86_400
    finder = Finder(other, fingerprint="model")
    finder.sync("salt")
    assert finder.find(chunk.ids, salt="salt") and not finder.find(chunk.ids, salt="another")
    other_client.close()


def test_anchors_are_kept_apart_and_deleted_together(client: Any):
    store = SharedStore(client)
    bare, anchored = make(1), make(1, anchor=(8, 9))
    for key, chunk in (bare, anchored, make(2)):
        assert store.put(key, chunk) and store.put(key, chunk)
    got = store.get(anchored[0])
    assert got is not None and got.position == 2
    assert sorted(one.read() or () for one in store.catalogue()) == [make(1)[1].ids, make(2)[1].ids]
    assert store.delete(bare[0]) == 2 and store.delete(bare[0]) == 0
    assert store.get(bare[0]) is store.get(anchored[0]) is None and store.get(make(2)[0]) is not None


@pytest.mark.parametrize("damage", ["cut", "another's", "no chunk"])
def test_what_is_damaged_or_another_chunks_is_a_named_miss(client: Any, caplog: pytest.LogCaptureFixture, damage: str):
    store = SharedStore(client)
    key, chunk = make(1)
    store.put(key, chunk)
    store.put(*make(2))
    name, other = f"promptsluice:kv:{key.digest}", f"promptsluice:kv:{make(2)[0].digest}"
    whole = client.hget(name, "bare")
    bad = {"cut": whole[:-3], "another's": client.hget(other, "bare"), "no chunk": b"\xff\x00"}[damage]
    client.hset(name, "bare", bad)
    assert store.get(key) is None and key.name in caplog.text
    assert not store.contains(key) and store.stats()[0].corrupt == 1
    assert store.put(key, chunk) and store.get(key) is not None


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that accepts and never answers; the connections that it got."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                taken.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0", taken
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for one in taken:
        one.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_dead_server_is_one_timeout_then_misses_and_is_asked_again_later(
    silent: tuple[str, list[socket.socket]], caplog: pytest.LogCaptureFixture
):
    url, taken = silent
    clock, client = Clock(), connect(url, timeout_s=0.05)
    store = BackedStore(RamStore(1 << 20), SharedStore(client, pause_s=10, clock=clock))
    key, chunk = make(1)
    assert store.get(key) is None
    asked = len(taken)
    assert store.get(key) is None and not store.contains(key) and store.delete(key) == 0
    assert list(store.catalogue()) == []
    assert store.put(key, chunk) and store.get(key) is not None, "the other tiers go on"
    assert len(taken) == asked and caplog.text.count("left alone") == 1
    clock.now = 10
    assert store.get(make(2)[0]) is None and len(taken) > asked and caplog.text.count("left alone") == 2
    client.close()


class Severed:
    """A client whose server can be out of reach."""

    def __init__(self, client: Any) -> None:
        self.client, self.away = client, False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise ConnectionError("the network is gone")
        return getattr(self.client, name)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("folder", [True, False])
def test_what_was_deleted_while_the_server_was_away_is_never_found_again(
    client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: bool, restarted: bool
):
    path = tmp_path / "kv" / "undelivered" if folder else None
    clock, severed = Clock(), Severed(client)

    def opened() -> SharedStore:
        return SharedStore(severed, undelivered=path, clock=clock)

    store, other = opened(), opened()
    chunks = [make(1), make(1, anchor=(8, 9)), make(2), make(3)]
    for key, chunk in chunks:
        assert store.put(key, chunk)
    severed.away = True
    gone, kept = [chunks[0][0], chunks[2][0]], chunks[3][0]
    for key in gone:
        assert store.delete(key) == 0
    assert caplog.text.count("still has 1 deleted chunks") == 2
    severed.away, clock.now = False, 5.0
    assert store.get(kept) is None and len(client.keys()) == 3, "it is still left alone"
    clock.now = 10.0
    if restarted:  # without a folder nobody is left who knows
        store = opened()
    assert store.contains(kept)
    assert len(client.keys()) == (3 if restarted and not folder else 1)
    assert (store.get(gone[0]) is None) == (folder or not restarted) and store.get(kept) is not None
    assert store.put(*chunks[0]) and store.get(gone[0]) is not None, "it is stored again"
    assert opened().get(gone[0]) is not None and other.get(gone[0]) is not None, "and was deleted once"
    assert path is None or list(path.iterdir()) == []


def test_a_deletion_by_another_process_is_delivered_by_whoever_reaches_the_server(client: Any, tmp_path: Path):
    gateway = SharedStore(client, undelivered=tmp_path)
    assert gateway.put(*make(1)) and gateway.put(*make(2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = SharedStore(connect(f"redis://127.0.0.1:{port}/0"), undelivered=tmp_path)
    assert command.delete_all([make(1)[0].digest]) == Counter()
    assert gateway.get(make(1)[0]) is None and gateway.get(make(2)[0]) is not None
    assert gateway.delete_all([make(number)[0].digest for number in (1, 2, 3)])[make(2)[0].digest] == 1


def test_a_deletion_that_breaks_off_begins_again(client: Any, tmp_path: Path):
    class Breaking(Severed):
        left = 3

        def delete(self, *names: str) -> Any:
            self.left -= 1
            self.away = self.left < 0
            return getattr(self, "client" if not self.away else "keys").delete(*names)

    clock, breaking = Clock(), Breaking(client)
    store = SharedStore(breaking, undelivered=tmp_path, clock=clock)
    chunks = [make(number) for number in range(6)]
    for key, chunk in chunks:
        assert store.put(key, chunk)
    store.delete_all([key.digest for key, _ in chunks])
    assert len(client.keys()) == 3 and len(list(tmp_path.iterdir())) == 1
    breaking.left, breaking.away, clock.now = 100, False, 10.0
    assert not store.contains(chunks[0][0]) and client.keys() == [] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_or_read(client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    clock, severed, path = Clock(), Severed(client), tmp_path / "a file"
    path.write_text("")
    store = SharedStore(severed, undelivered=path / "folder", clock=clock)
    assert store.put(*make(1)) and "left alone" not in caplog.text
    severed.away = True
    store.delete(make(1)[0])
    assert "only remembered by this process" in caplog.text
    severed.away, clock.now = False, 10.0
    assert store.get(make(1)[0]) is None and client.keys() == []
    path.unlink()
    (path / "folder" / "x.deleted").mkdir(parents=True)
    clock.now = 20.0
    assert not store.contains(make(2)[0]) and str(path) in caplog.text, "nobody knows what is to be deleted"


def test_nobody_listens(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = open_store(ram=1 << 20, shared=SharedStore(connect(f"redis://127.0.0.1:{port}/0")))
    key, chunk = make(1)
    assert store.get(key) is None and store.put(key, chunk) and store.get(key) is not None
    assert "left alone" in caplog.text


def test_a_url_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"kv_cache\.shared\.url"):
        connect("http://127.0.0.1:1")
