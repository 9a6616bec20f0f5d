"""The model cache: what is pulled is whole, what is broken is rebuilt, and nothing is left behind by a failure."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from promptsluice.backend_engine.hub import ModelHub, Silent
from promptsluice.backend_engine.hub.catalogue import ModelCard
from promptsluice.backend_engine.hub.install import exclusive, require_space
from promptsluice.backend_engine.hub.manifest import FILE_NAME, Provenance
from promptsluice.backend_engine.hub.progress import Progress, size_of
from promptsluice.backend_engine.hub.sources import SourceUnavailable
from promptsluice.prompt import ModelUnavailable, StorageFull, UnknownModel

NAME = "smollm2-135m-instruct"


class Fixed:
    """A source that always delivers the same small model, and counts."""

    name = "fixed"

    def __init__(self) -> None:
        self.fetches = 0

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance:
        self.fetches += 1
        (scratch / "download").write_bytes(b"x" * 100)
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_bytes(b"weights!")
        (into / "sub").mkdir()
        (into / "sub" / "config.json").write_text("{}")
        return Provenance(origin="fixed:1", weights="eight bytes")


class Refusing:
    name = "refusing"

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance:
        (into / "config.json").write_text("{}")
        raise SourceUnavailable("closed on Sundays")


class OnFullDisk:
    """Writes a part, then meets a device that is full."""

    name = "full"

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance:
        (into / "config.json").write_text("{}")
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"weights")
        raise AssertionError("a full device took the bytes")


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.glob(".staging/*")]


def test_pull_then_resolve(tmp_path: Path) -> None:
    source = Fixed()
    hub = ModelHub(tmp_path, sources=[source])
    with pytest.raises(ModelUnavailable, match=f"promptsluice models pull {NAME}"):
        hub.resolve(NAME)
    path = hub.pull(NAME)
    assert path == hub.pull(NAME) == hub.resolve(NAME) == tmp_path / NAME
    assert source.fetches == 1
    assert (path / "sub" / "config.json").read_text() == "{}"
    assert leftovers(tmp_path) == []
    entry = next(entry for entry in hub.catalogue() if entry.name == NAME)
    assert (entry.state, entry.origin, entry.weights, entry.bytes) == ("ready", "fixed:1", "eight bytes", 12)


def test_a_broken_folder_is_found_and_rebuilt(tmp_path: Path) -> None:
    hub = ModelHub(tmp_path, sources=[Fixed()])
    weights = hub.pull(NAME) / "model.safetensors"

    def check(repair_at_pull_only: bool = False) -> None:
        if not repair_at_pull_only:
            assert next(entry for entry in hub.catalogue() if entry.name == NAME).state == "broken"
            with pytest.raises(ModelUnavailable):
                hub.resolve(NAME)
        hub.pull(NAME)
        assert weights.read_bytes() == b"weights!"
        assert hub.resolve(NAME) == tmp_path / NAME

    weights.write_bytes(b"wei")
    check()
    weights.unlink()
    check()
    (tmp_path / NAME / FILE_NAME).unlink()
    check()
    (tmp_path / NAME / FILE_NAME).write_text('{"format": 2, "files": 3}')
    check()
    (tmp_path / NAME / FILE_NAME).write_text("[" * 100_000)
    check()
    weights.unlink()
    weights.mkdir()
    check()
    weights.write_bytes(b"WEIGHTS!")  # same size: seen by the time stamp, proved by the digest
    os.utime(weights, ns=(1, 1))
    check(repair_at_pull_only=True)


def test_a_touched_but_whole_model_is_kept(tmp_path: Path) -> None:
    source = Fixed()
    hub = ModelHub(tmp_path, sources=[source])
    os.utime(hub.pull(NAME) / "model.safetensors", ns=(1, 1))
    hub.pull(NAME)
    assert source.fetches == 1


def test_sources_are_tried_in_order_and_their_reasons_reported(tmp_path: Path) -> None:
    assert ModelHub(tmp_path / "a", sources=[Refusing(), Fixed()]).pull(NAME).is_dir()
    with pytest.raises(ModelUnavailable, match="refusing: closed on Sundays"):
        ModelHub(tmp_path / "b", sources=[Refusing()]).pull(NAME)
    assert leftovers(tmp_path / "b") == []
    assert not (tmp_path / "b" / NAME).exists()
    with pytest.raises(ModelUnavailable, match="no source is configured"):
        ModelHub(tmp_path / "b", sources=[]).pull(NAME)


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        ModelHub(tmp_path, sources=[OnFullDisk(), Fixed()]).pull(NAME)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / NAME).exists()
    with pytest.raises(StorageFull, match="MB are needed"):
        require_space(tmp_path, 1 << 62)


def test_an_unusable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        ModelHub(tmp_path / "file" / "models", sources=[Fixed()]).pull(NAME)


@pytest.mark.slow
def test_the_size_of_a_folder_that_others_change(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"12345")

    def churn() -> None:
        for _ in range(300):
            (tmp_path / "a" / "b").mkdir(parents=True)
            (tmp_path / "a" / "b" / "file").write_bytes(b"1")
            shutil.rmtree(tmp_path / "a")

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        while not churning.done():
            assert size_of(tmp_path) in (5, 6)
        churning.result()


WORKER = """
import os, sys
from pathlib import Path
from promptsluice.backend_engine.hub import ModelHub
from promptsluice.backend_engine.hub.manifest import Provenance

class Logging:
    name = "logging"
    def fetch(self, card, into, *, scratch, progress):
        with open(sys.argv[2], "a") as log:
            log.write("fetch\\n")
        (into / "config.json").write_text("{}")
        if sys.argv[3] == "die":
            os._exit(9)
        return Provenance(origin="test", weights="none")

ModelHub(Path(sys.argv[1]), sources=[Logging()]).pull("all-minilm-l6-v2")
"""


def worker(root: Path, log: Path, how: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", WORKER, str(root), str(log), how])


def test_two_processes_pull_once(tmp_path: Path) -> None:
    root, log = tmp_path / "models", tmp_path / "log"
    workers = [worker(root, log, "finish") for _ in range(3)]
    assert [process.wait(60) for process in workers] == [0, 0, 0]
    assert log.read_text() == "fetch\n"


def test_killed_while_pulling(tmp_path: Path) -> None:
    root, log = tmp_path / "models", tmp_path / "log"
    assert worker(root, log, "die").wait(60) == 9
    assert not (root / "all-minilm-l6-v2").exists()
    assert len(leftovers(root)) == 1
    ModelHub(root, sources=[Fixed()]).pull("all-minilm-l6-v2")
    assert leftovers(root) == []


def test_waiting_for_another_pull_ends(tmp_path: Path) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(tmp_path, NAME, wait_s=1, progress=Silent()):
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        with pytest.raises(ModelUnavailable, match="another process has been pulling"):
            ModelHub(tmp_path, sources=[Fixed()], lock_wait_s=0.05).pull(NAME)
    finally:
        release.set()
        holder.join()


def test_folders_gguf_files_and_hub_ids(tmp_path: Path) -> None:
    hub = ModelHub(tmp_path / "cache", sources=[Fixed()])
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        hub.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(ModelUnavailable, match=r"has no 1\.safetensors"):
        hub.resolve(str(folder))
    (folder / "1.safetensors").write_bytes(b"")
    assert hub.resolve(str(folder)) == hub.pull(str(folder)) == folder
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert hub.pull("some/model") == tmp_path / "cache" / "some--model"
    assert "some/model" in [entry.name for entry in hub.catalogue()]


ODD = ["", "nothing", "a/b/c", "../etc", "x/../y", "/no/such/folder", "gone.gguf", "a\0b", "a/b.gguf", "~nobody/x"]
ODD += ["~\0/x", "a--b/c", "a/b--c", "a/b..c"]  # the hub has no such ids, and a folder's name could not tell them apart


@pytest.mark.parametrize("name", [*ODD, "a/" + "b" * 5000, "\ud800"])
def test_unknown_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownModel, match="known names are smollm2-135m-instruct, all-minilm-l6-v2"):
        ModelHub(tmp_path, sources=[Fixed()]).pull(name)
