"""A full disk or a kill at any point of an ingest: the old state stays usable, and nothing is left to grow."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from promptsluice.prompt import Conflict, PromptsluiceError, StorageFull
from promptsluice.rag import Collections, Document
from promptsluice.rag.commit import writer_lock
from promptsluice.rag.files import write_durably

OLD = [Document(id="old", text="the old words"), Document(id="both", text="the first words")]
NEW = [Document(id="new", text="some new words"), Document(id="both", text="the second words")]


class Quota:
    """A disk with room for so many more bytes: it takes what fits, then fails like a full one."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, data: bytes) -> None:
        if len(data) > self.room:
            path.with_name(f"{path.name}.tmp").write_bytes(data[: self.room])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self.room -= len(data)
        write_durably(path, data)


def state(collections: Collections) -> dict[str, str]:
    """Texts by document, as a search finds them."""
    hits = collections.get("c").search("words", top_k=100)
    return {hit.document_id: hit.text for hit in hits}


BEFORE = {"old": "the old words", "both": "the first words"}
AFTER = {"old": "the old words", "both": "the second words", "new": "some new words"}


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 100, 300, 700, 1000, 1300])
def test_full_disk_at_every_file(collections: Collections, reopen: Callable[..., Collections], room: int) -> None:
    collections.create("c").add(OLD)
    before = sorted(path.name for path in collections.get("c").folder.iterdir())
    tight = reopen(write=Quota(room)).get("c")
    with pytest.raises(StorageFull, match="as it was before"):
        tight.add(NEW)
    assert state(collections) == state(reopen()) == BEFORE
    assert sorted(path.name for path in tight.folder.iterdir()) == before
    tight_again = reopen(write=Quota(10**6))
    tight_again.get("c").add(NEW)
    assert state(tight_again) == state(collections) == AFTER
    assert not list(tight.folder.glob("*.tmp"))


def test_full_disk_when_a_collection_is_made(reopen: Callable[..., Collections]) -> None:
    collections = reopen(write=Quota(10))
    with pytest.raises(StorageFull):
        collections.create("c")
    assert collections.list() == []
    assert not [path for path in collections.root.iterdir() if path.is_dir()]


def test_other_disk_errors_are_not_called_a_full_disk(reopen: Callable[..., Collections]) -> None:
    def forbidden(path: Path, data: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(PromptsluiceError, match="Permission denied") as caught:
        reopen(write=forbidden).create("c")
    assert not isinstance(caught.value, StorageFull)


KILLED = """
import importlib.util, os, signal, sys
from pathlib import Path
from promptsluice.rag import Collections, Document
from promptsluice.rag.files import write_durably

spec = importlib.util.spec_from_file_location("parts", sys.argv[2])
parts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parts)
left, how = int(sys.argv[3]), sys.argv[4]

def write(path, data):
    global left
    left -= 1
    if left < 0:
        if how == "torn":
            path.with_name(path.name + ".tmp").write_bytes(data[: len(data) // 2])
        if how == "after":
            write_durably(path, data)
        os.kill(os.getpid(), signal.SIGKILL)
    write_durably(path, data)

class Embedder(parts.WordEmbedder):
    def embed(self, texts):
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().embed(texts)

collections = Collections(Path(sys.argv[1]), embedder=Embedder(), count_tokens=len, write=write)
collections.get("c").add(
    [Document(id="new", text="some new words"), Document(id="both", text="the second words")]
)
"""
# Writes of an ingest: 0 chunks, 1 vectors, 2 manifest. Before a write, halfway through it, and right after it.
SEAMS = [(-1, "embedding"), *((n, how) for n in range(3) for how in ("before", "torn", "after"))]


@pytest.mark.slow
@pytest.mark.parametrize(("left", "how"), SEAMS)
def test_killed_while_ingesting(
    collections: Collections, reopen: Callable[..., Collections], left: int, how: str
) -> None:
    collections.create("c").add(OLD)
    conftest = Path(__file__).with_name("conftest.py")
    command = [sys.executable, "-c", KILLED, str(collections.root), str(conftest), str(left), how]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    committed = (left, how) == (2, "after")
    assert state(collections) == (AFTER if committed else BEFORE)  # a reader that was open all the time
    fresh = reopen()
    assert state(fresh) == (AFTER if committed else BEFORE)
    folder = fresh.get("c").folder
    named = {f"{n:08d}" for n in fresh.get("c").snapshot().manifest.segments}
    assert {path.stem for path in folder.iterdir()} == named | {"manifest"}  # the litter went at the next open
    fresh.get("c").add(NEW)  # and the lock with its holder
    assert state(fresh) == AFTER


def test_killed_while_making_a_collection(reopen: Callable[..., Collections], tmp_path: Path) -> None:
    collections = reopen()
    collections.create("other")
    litter = collections.root / ".aside-killed" / "c"
    litter.mkdir(parents=True)
    (litter / "manifest.json.tmp").write_text("half")
    assert [info.name for info in collections.list()] == ["other"]
    collections.create("c").add(OLD)
    assert not litter.exists()


def test_a_busy_collection_is_a_conflict(collections: Collections, reopen: Callable[..., Collections]) -> None:
    busy = collections.create("c")
    busy.add(OLD)
    with writer_lock(busy.folder, wait_s=0):
        impatient = reopen().get("c")
        impatient._lock_wait_s = 0.01
        with pytest.raises(Conflict, match="being changed by somebody else"):
            impatient.add(NEW)
        assert state(reopen()) == BEFORE  # reading goes on
    assert os.path.exists(busy.folder)
