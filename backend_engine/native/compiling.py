"""The C++ sources beside this file, compiled for this machine, as a shared library in a cache folder.

A library is named by all that it depends on: sources, compiler, flags, processor. Its last bytes are a digest of the
others, so that one that was cut short or changed is compiled again instead of being loaded. Files are renamed into
place: processes may share the folder, and at worst compile the same library at the same time. Folder and library must
be this user's or root's, and nobody else may write to them: what is loaded runs with this user's rights.
"""

import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_DIGEST = 32
_TIMEOUT_S, _ANSWER_S = 300.0, 30.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Unavailable(Exception):
    """There is no library on this machine; the message says why."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/promptsluice/native`, by default below `~/.cache`. Raises Unavailable without a home folder."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise Unavailable(f"{error} for the compiled step; set XDG_CACHE_HOME") from error
    return base / "promptsluice" / "native"


def compiler() -> tuple[str, ...]:
    """The C++ compiler and its first arguments: `$CXX`, or the first of COMPILERS on the path. Raises Unavailable."""
    named = os.environ.get("CXX", "").strip()
    try:  # a path with spaces, or words as a shell reads them
        words = [named] if not named or shutil.which(named) else shlex.split(named)
    except ValueError as error:
        raise Unavailable(f"CXX={named} cannot be read: {error}") from error
    for name in words[:1] if named else COMPILERS:
        if found := shutil.which(name):
            return found, *words[1:]
    raise Unavailable(f"no C++ compiler ({named or ', '.join(COMPILERS)}) is installed")


def flags() -> tuple[str, ...]:
    """For this processor; sums keep the order that the source gives them (no -ffast-math)."""
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ("-std=c++17", "-O3", machine, "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")


def compiled(*, folder: Path, compiler: Sequence[str], flags: Sequence[str], timeout_s: float = _TIMEOUT_S) -> Path:
    """The library in `folder`, which takes some seconds where it is not there yet. Raises Unavailable."""
    name = f"step-{_key(compiler, flags)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        _check_alone(folder)
        path = folder / name
        if not _is_whole(path):
            with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
                fresh = Path(scratch) / name
                _compile(fresh, compiler, flags, timeout_s)
                with fresh.open("ab") as file:
                    file.write(_digest(fresh.read_bytes()))
                fresh.chmod(0o700)
                fresh.replace(path)
    except OSError as error:
        raise Unavailable(f"the compiled step cannot be kept in {folder} (XDG_CACHE_HOME moves it): {error}") from error
    return path


def _check_alone(folder: Path) -> None:
    """Raise Unavailable where others could put a library into `folder`, or another folder in its place."""
    if not _is_ours(folder):
        _refuse(folder)
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            _refuse(parent)


def _refuse(folder: Path) -> None:
    raise Unavailable(f"others may write to {folder}: no library is loaded from there (chmod go-w, or XDG_CACHE_HOME)")


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user and root may write to `path`. Systems without such users are not asked."""
    if not hasattr(os, "geteuid"):
        return True
    found = path.lstat()
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _WRITABLE_BY_OTHERS


def _compile(target: Path, compiler: Sequence[str], flags: Sequence[str], timeout_s: float) -> None:
    logger.info("compiling the step for this processor with %s, once", shlex.join(compiler))
    command = [*compiler, *flags, "-o", str(target), *map(str, sorted(SOURCES.glob("*.cpp")))]
    _output(command, timeout_s, TMPDIR=str(target.parent))  # the folder that is known to be writable


def _output(command: Sequence[str], timeout_s: float, **environment: str) -> str:
    """What a compiler prints. Raises Unavailable with what is wrong; nothing of it runs on afterwards."""
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C", **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{name} does not run: {error}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:  # an interrupt, too
            _kill(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"{name} has not ended after {timeout_s:g} s") from error
            raise
    if process.returncode:
        lines = (errors or output).strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise Unavailable(f"{name} fails with {process.returncode}: {wrong}")
    return output


def _kill(process: "subprocess.Popen[str]") -> None:
    """With the programs that it has started: a compiler is several."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = blake2b(digest_size=12)
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = _output([*compiler, "--version"], _ANSWER_S)
    # Its predefined macros name every instruction set that it will use: what `native` means to it, here.
    macros = _output([*compiler, *flags, "-dM", "-E", "-x", "c++", "-"], _ANSWER_S)
    for part in (*compiler, version, macros, *flags, _processor()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


def _processor() -> str:
    """What else `native` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.startswith(kept))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST).digest()


def _is_whole(path: Path) -> bool:
    try:
        if not _is_ours(path):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and content[-_DIGEST:] == _digest(content[:-_DIGEST])
