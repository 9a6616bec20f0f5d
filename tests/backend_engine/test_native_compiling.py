"""The compiled library: where it is kept, damaged files, several processes, and machines without a compiler."""

import logging
import os
import select
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from promptsluice.backend_engine import load_model
from promptsluice.backend_engine.linear import PackedLinear, TwofoldLinear
from promptsluice.backend_engine.native import Unavailable, compiling, library
from promptsluice.backend_engine.native.bindings import functions

from .driving import alone, greedy, random_ids, tiny_engine

FLAGS = ("-O1",)
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners and modes here")


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A program that is called like a compiler, counts its calls and writes a `library` of its own."""
    return script(tmp_path / "compiler", 'printf x >> "$0.calls"; printf "a library, well made" > "$to"')


def script(path: Path, commands: str) -> Path:
    """`commands` write to `$to`, and call themselves `$0`."""
    target = 'for word; do [ "$before" = -o ] && to=$word; before=$word; done'
    answer = 'case "$*" in *--version|*-dM*) cat "$0.says" 2>/dev/null; exit 0; esac'
    path.write_text("\n".join(("#!/bin/sh", answer, target, commands, "")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def calls(compiler: Path) -> int:
    return len(Path(f"{compiler}.calls").read_text())


def compiled(folder: Path, compiler: Path) -> Path:
    return compiling.compiled(folder=folder, compiler=(str(compiler),), flags=FLAGS)


@pytest.fixture
def forgetful() -> Iterator[Callable[[], None]]:
    """Lets the process look for its library again, as it did at first; afterwards too."""
    yield library.forget
    library.forget()


def test_it_is_compiled_once_and_again_for_another_compiler_or_other_flags(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    path = compiled(folder, compiler)
    assert compiled(folder, compiler) == path and calls(compiler) == 1
    assert list(folder.iterdir()) == [path]
    other = script(tmp_path / "other", 'printf x >> "$0.calls"; printf "another library" > "$to"')
    assert compiled(folder, other) != path
    assert compiling.compiled(folder=folder, compiler=(str(compiler),), flags=("-O2",)) != path
    assert calls(compiler) == 2 and len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"a lib", b"something else", None])
def test_what_is_damaged_is_compiled_again(compiler: Path, tmp_path: Path, damage: bytes | None) -> None:
    """Cut at the start, in the middle, overwritten, and with one bit turned."""
    path = compiled(tmp_path / "cache", compiler)
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:] if damage is None else damage)
    assert compiled(tmp_path / "cache", compiler).read_bytes() == whole and calls(compiler) == 2


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "echo part > $to; echo 'step.cpp:3: error: no such thing' >&2; exit 3")
    with pytest.raises(Unavailable, match=r"broken fails with 3: step.cpp:3: error: no such thing"):
        compiled(tmp_path / "cache", broken)
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(Unavailable, match="does not run"):
        compiled(tmp_path / "cache", tmp_path / "absent")


def test_it_is_compiled_again_where_native_means_something_else(compiler: Path, tmp_path: Path) -> None:
    """As on another machine that shares the cache folder: the compiler names other instruction sets."""
    folder = tmp_path / "cache"
    paths = list[Path]()
    for says in ("#define __AVX2__ 1", "#define __AVX512F__ 1", "#define __AVX2__ 1"):
        Path(f"{compiler}.says").write_text(says)
        paths.append(compiled(folder, compiler))
    assert paths[0] == paths[2] != paths[1] and calls(compiler) == 2


@pytest.mark.slow
@posix
def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """The pipe ends when nobody can write to it any more."""
    hanging, pipe = script(tmp_path / "hanging", 'exec 9> "$0.pipe"; sleep 600 & wait'), tmp_path / "hanging.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    with pytest.raises(Unavailable, match=r"hanging has not ended after 0\.5 s"):
        compiling.compiled(folder=tmp_path / "cache", compiler=(str(hanging),), flags=FLAGS, timeout_s=0.5)
    os.close(writer)
    assert select.select([reader], [], [], 20)[0] and os.read(reader, 1) == b""
    os.close(reader)
    assert not list((tmp_path / "cache").iterdir())


def test_messages_in_any_encoding_are_quoted(tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "printf 'error: \\377' >&2; exit 1")
    with pytest.raises(Unavailable, match="error: \N{REPLACEMENT CHARACTER}"):
        compiled(tmp_path / "cache", broken)


def test_cxx_may_have_arguments_and_a_path_with_spaces(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = script(tmp_path / "a compiler", 'echo "$1" > "$to"')
    for cxx, words in (
        (f"{compiler} -m64 '-D A'", (str(compiler), "-m64", "-D A")),
        (str(spaced), (str(spaced),)),
        (f"'{spaced}' -m64", (str(spaced), "-m64")),
    ):
        monkeypatch.setenv("CXX", cxx)
        assert compiling.compiler() == words
    path = compiling.compiled(folder=tmp_path / "a cache", compiler=compiling.compiler(), flags=FLAGS)
    assert path.read_bytes().startswith(b"-m64\n")
    for cxx, message in (("absent -m64", "absent -m64"), ("'open", "CXX='open cannot be read")):
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(Unavailable, match=message):
            compiling.compiler()


def test_without_a_home_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    with pytest.raises(Unavailable, match="set XDG_CACHE_HOME"):
        compiling.default_folder()


@posix
def test_no_library_is_taken_from_where_others_may_write(compiler: Path, tmp_path: Path) -> None:
    """Neither from such a folder, nor below one unless names there are safe, as in /tmp."""
    outer, folder = tmp_path / "outer", tmp_path / "outer" / "cache"
    path = compiled(folder, compiler)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700
    for place, mode in ((folder, 0o770), (folder, 0o707), (outer, 0o707)):
        place.chmod(mode)
        with pytest.raises(Unavailable, match=f"others may write to {place}:"):
            compiled(folder, compiler)
        place.chmod(0o700)
    outer.chmod(0o1777)
    assert compiled(folder, compiler) == path and calls(compiler) == 1


@posix
def test_a_library_that_others_may_change_is_compiled_again(compiler: Path, tmp_path: Path) -> None:
    path = compiled(tmp_path / "cache", compiler)
    path.chmod(0o722)
    assert compiled(tmp_path / "cache", compiler) == path and calls(compiler) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    elsewhere.chmod(0o777)
    assert compiled(tmp_path / "cache", compiler) == path and not path.is_symlink()


def test_a_folder_that_cannot_be_written_is_named(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"cannot be kept in .*file"):
        compiled(tmp_path / "file" / "cache", compiler)


def test_many_at_once_end_with_one_whole_library(tmp_path: Path) -> None:
    """Each compiles slowly; nobody ever sees a part of what another one writes."""
    slow = script(tmp_path / "slow", 'printf "half " > "$to"; sleep 0.05; printf "and half" >> "$to"')
    seen: list[bytes] = []
    workers = [
        threading.Thread(target=lambda: seen.append(compiled(tmp_path / "cache", slow).read_bytes())) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(seen) == 8 and set(seen) == {seen[0]} and seen[0].startswith(b"half and half")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(OSError):
        functions(tmp_path / "text.so")


@pytest.mark.parametrize("lacking", ["compiler", "library"])
def test_without_it_torch_runs_the_steps_and_the_log_says_why(
    lacking: str,
    tiny_llama_dir: Path,
    compiler: Path,
    tmp_path: Path,
    forgetful: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No compiler on the machine; and one whose product cannot be loaded."""
    usual = load_model(tiny_llama_dir)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler" if lacking == "compiler" else str(compiler))
    forgetful()
    with caplog.at_level(logging.WARNING):
        model = load_model(tiny_llama_dir)
    why = "no C++ compiler (no-such-compiler)" if lacking == "compiler" else ".so"
    assert why in model.steps and model.steps.startswith("torch (")
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert isinstance(model.decoder.weights.head, PackedLinear)
    request = greedy(random_ids(30, 1))
    assert alone(tiny_engine(model), request).tokens == alone(tiny_engine(usual), request).tokens


def test_it_can_be_turned_off(tiny_llama_dir: Path) -> None:
    model = load_model(tiny_llama_dir, native=False)
    assert model.steps == "torch (native is off)" and isinstance(model.decoder.weights.head, PackedLinear)
    usual = load_model(tiny_llama_dir)
    if usual.steps.startswith("native"):
        assert isinstance(usual.decoder.weights.head, TwofoldLinear)
    assert model.decoder.library is None
