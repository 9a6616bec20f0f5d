"""The manifest of a pulled model: where it came from and what every file of it must be. Written last, so it vouches."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .catalogue import ModelKind

FILE_NAME = "promptsluice.json"
FORMAT = 2  # raised when the conversion changes, so that models converted by older versions are built anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a source delivered.

    `origin` is `hub:ORG/NAME@COMMIT` or `package:NAME==VERSION`; `digest` the SHA-256 of the archive where there was
    one; `weights` tells people what the numbers are, as one name may carry different weights.
    """

    origin: str
    weights: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file: size in bytes, SHA-256, and the time stamp that lets an untouched file go unread."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Name, kind, provenance and files (by POSIX path relative to the model folder)."""

    name: str
    kind: ModelKind
    provenance: Provenance
    files: dict[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Size of the model on disk, without the manifest."""
        return sum(record.size for record in self.files.values())


def sha256_of(path: Path, *, report: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal; `report` gets the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            if report:
                report(done)
    return digest.hexdigest()


def record(folder: Path) -> dict[str, FileRecord]:
    """Read every file below `folder` and describe it."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        name = path.relative_to(folder).as_posix()
        files[name] = FileRecord(size=stat.st_size, sha256=sha256_of(path), mtime_ns=stat.st_mtime_ns)
    return files


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the model folder."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def read(folder: Path) -> Manifest | None:
    """The folder's manifest; None if there is none, or it is damaged, or of another format."""
    try:
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            return None
        data["provenance"] = Provenance(**data["provenance"])
        data["files"] = {name: FileRecord(**entry) for name, entry in data["files"].items()}
        return Manifest(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def damage(folder: Path, manifest: Manifest, *, deep: bool) -> str | None:
    """What is wrong with the folder, None if nothing is.

    Always compares sizes. With `deep`, files whose time stamp has moved since the pull are read and their digests
    compared; damage that keeps both size and time stamp is not seen.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            stat = path.stat()
            if stat.st_size != expected.size:
                return f"{name} has {stat.st_size} bytes instead of {expected.size}"
            if deep and stat.st_mtime_ns != expected.mtime_ns and sha256_of(path) != expected.sha256:
                return f"{name} has been changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
