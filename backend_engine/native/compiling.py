"""The C++ sources beside this file, compiled for this machine, as a shared library in a cache folder.

A library is named by all that it depends on: sources, compiler, flags, processor. Its last bytes are a digest of the
others, so that one that was cut short or changed is compiled again instead of being loaded. Files are renamed into
place: processes may share the folder, and at worst compile the same library at the same time.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
_DIGEST = 32
_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """There is no library on this machine; the message says why."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/promptsluice/native`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "promptsluice" / "native"


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of COMPILERS that is on the path. Raises Unavailable."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise Unavailable(f"no C++ compiler ({named or ', '.join(COMPILERS)}) is installed")


def flags() -> tuple[str, ...]:
    """For this processor; sums keep the order that the source gives them (no -ffast-math)."""
    machine = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ("-std=c++17", "-O3", machine, "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")


def compiled(*, folder: Path, compiler: str, flags: Sequence[str]) -> Path:
    """The library in `folder`, which takes some seconds where it is not there yet. Raises Unavailable."""
    path = folder / f"step-{_key(compiler, flags)}.so"
    if not _is_whole(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
                fresh = Path(scratch) / path.name
                _compile(fresh, compiler, flags)
                with fresh.open("ab") as file:
                    file.write(_digest(fresh.read_bytes()))
                fresh.replace(path)
        except OSError as error:
            raise Unavailable(f"the compiled step cannot be kept in {folder}: {error}") from error
    return path


def _compile(target: Path, compiler: str, flags: Sequence[str]) -> None:
    command = [compiler, *flags, "-o", str(target), str(SOURCES / "step.cpp")]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "TMPDIR": str(target.parent)},  # the folder that is known to be writable
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} cannot compile: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise Unavailable(f"{compiler} fails with {done.returncode}: {wrong}")


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = blake2b(digest_size=12)
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (compiler, _version(compiler), *flags, _processor()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} does not run: {error}") from error


def _processor() -> str:
    """What `native` depends on: a cache folder may be shared by unlike machines."""
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
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and content[-_DIGEST:] == _digest(content[:-_DIGEST])
