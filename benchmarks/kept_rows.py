"""Results of a long run in a file, so that it may be stopped at any time and go on where it was.

Used by compress.py, compress_quality.py and plan.py.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class KeptRows:
    """A JSONL file, a result a line, each under the words that say what it is of. Without a file nothing is kept.
    SystemExit where the file is damaged or of something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(complete_rows(path), 1):
            match row:
                case {"key": str(key), "value": dict(value)}:
                    self._found[key] = value
                case _:
                    raise not_ours(path, number)

    def get(self, *words: str) -> dict[str, Any] | None:
        return self._found.get(_key(words))

    def put(self, value: dict[str, Any], *words: str) -> None:
        """Written at once."""
        self._found[_key(words)] = value
        append_rows(self._path, [{"key": _key(words), "of": words[0], "value": value}])


def complete_rows(path: Path | None) -> list[Any]:
    """What a JSONL file holds, a value a line, without the half line at the end that a killed run may have left.
    SystemExit where it cannot be read.
    """
    if path is None or not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read ({error.strerror}): name another file for --rows") from None
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise SystemExit(
                f"{path}, line {number} is damaged: delete it, and what it was of is made again, "
                f"or name another file for --rows"
            ) from None
    return found


def not_ours(path: Path | None, number: int) -> SystemExit:
    """To be raised for a line that is of something else."""
    return SystemExit(f"{path}, line {number} is no result of this benchmark: name another file for --rows")


def append_rows(path: Path | None, rows: Iterable[Any]) -> None:
    """Written at once, in place of a half line at the end."""
    if path is None:
        return
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.writelines(f"{json.dumps(row)}\n".encode() for row in rows)


def _key(words: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(words).encode("utf-8", "surrogatepass")).hexdigest()[:32]
