"""The disk tier's folder: damage, crashes, full disks and neighbours end in misses, never in wrong bytes."""

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import pytest
from promptsluice.backend_engine.tiers.disk import DiskFolder
from promptsluice.backend_engine.tiers.pagefile import HEAD_BYTES
from promptsluice.prompt.errors import ConfigError

SIZE = 4096
FILE = SIZE + HEAD_BYTES
WAIT_S = 60.0


def space(name: str = "model") -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def page(number: int) -> tuple[bytes, memoryview]:
    """A key and the content that belongs to it."""
    key = blake2b(str(number).encode(), digest_size=16).digest()
    return key, memoryview(random.Random(number).randbytes(SIZE))


def folder(root: Path, *, pages: int = 1000, name: str = "model") -> DiskFolder:
    return DiskFolder(root, budget=pages * FILE, space=space(name), page_bytes=SIZE)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_is_written_is_read_also_by_another(tmp_path: Path) -> None:
    first = folder(tmp_path)
    key, content = page(1)
    assert not first.has(key) and first.read(key) is None
    assert first.write(key, content)
    for reader in (first, folder(tmp_path)):
        assert reader.has(key) and reader.read(key) == content
    assert first.bytes == FILE and (files(tmp_path)[0].stat().st_mode & 0o777) == 0o600


def test_another_models_pages_are_neither_found_nor_taken_for_ours(tmp_path: Path) -> None:
    ours, theirs = folder(tmp_path), folder(tmp_path, name="other")
    key, content = page(1)
    theirs.write(key, content)
    ours.refresh()
    assert not ours.has(key)
    own = tmp_path / space().hex() / key.hex()[:2]
    own.mkdir(parents=True)
    files(tmp_path)[0].rename(own / f"{key.hex()}.page")
    ours.refresh()
    assert ours.has(key) and ours.read(key) is None and ours.damaged == 1


@pytest.mark.parametrize("harm", ["cut", "longer", "flipped head", "flipped end", "empty"])
def test_a_damaged_file_is_a_miss_named_in_the_log(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = folder(tmp_path)
    key, content = page(1)
    disk.write(key, content)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    if harm == "cut":
        data = data[:-7]
    elif harm == "longer":
        data += b"more"
    elif harm == "empty":
        data = bytearray()
    else:
        data[20 if harm == "flipped head" else -1] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert disk.read(key) is None
    assert str(path) in caplog.text and disk.damaged == 1
    assert not disk.has(key) and not files(tmp_path)
    assert disk.write(key, content) and disk.read(key) == content


def test_the_budget_holds_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    disk, other = folder(tmp_path, pages=20), folder(tmp_path, pages=20, name="other")
    other.write(*page(1000))
    disk.refresh()
    for number in range(20):
        disk.write(*page(number))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= disk.budget
        assert disk.read(page(0)[0]) == page(0)[1]  # always just used
    assert other.read(page(1000)[0]) is None
    assert disk.has(page(19)[0]) and not disk.has(page(1)[0])


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """What a full disk does: a write stops in the middle and fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_writing_not_the_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = folder(tmp_path)
    disk.write(*page(1))
    with caplog.at_level(logging.WARNING), files_limited_to(SIZE // 2):
        assert not disk.write(*page(2))
    assert "nothing is written" in caplog.text and disk.failures == 1
    assert len(files(tmp_path)) == 1 and disk.bytes == FILE
    assert not disk.write(*page(3)) and disk.failures == 1  # not tried
    assert disk.read(page(1)[0]) == page(1)[1]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        folder(tmp_path / "file")


def test_what_a_dead_writer_left_goes_when_it_is_old(tmp_path: Path) -> None:
    disk = folder(tmp_path)
    disk.write(*page(1))
    old, new = (files(tmp_path)[0].parent / name for name in (".1-2-3.tmp", ".1-2-4.tmp"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    folder(tmp_path)
    assert not old.exists() and new.exists()


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_whole_pages_or_none(tmp_path: Path) -> None:
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_tiers_disk import folder, page
        disk = folder(Path({str(tmp_path)!r}), pages=60)
        for number in range(10**9):
            disk.write(*page(number % 200))
            print(number, flush=True)
    """
    survived = 0
    for pages in (1, 10, 90):
        writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert [next(writer.stdout) for _ in range(pages)][-1] == f"{pages - 1}\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(WAIT_S)
        writer.stdout.close()
        disk = folder(tmp_path, pages=60)
        for number in range(200):
            key, content = page(number)
            assert not disk.has(key) or disk.read(key) == content
            survived += disk.has(key)
        assert disk.damaged == 0 and disk.bytes <= disk.budget
        assert disk.write(*page(999)) and disk.read(page(999)[0]) == page(999)[1]
    assert survived > 0


def test_neighbours_in_one_folder_get_the_right_bytes_or_nothing(tmp_path: Path) -> None:
    disks = [folder(tmp_path, pages=30) for _ in range(3)]
    wrong: list[int] = []

    def work(disk: DiskFolder, seed: int) -> None:
        dice = random.Random(seed)
        for step in range(150):
            key, content = page(dice.randrange(60))
            if dice.random() < 0.5:
                disk.write(key, content)
            elif (found := disk.read(key)) is not None and found != content:
                wrong.append(step)
            if step % 40 == 0:
                disk.refresh()

    threads = [threading.Thread(target=work, args=(disk, seed)) for seed, disk in enumerate(disks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong and sum(disk.failures + disk.damaged for disk in disks) == 0
    disks[0].refresh()
    disks[0].write(*page(100))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= disks[0].budget + FILE
