"""Results of a long run in a file, so that it may be stopped at any time and go on where it was.

Used by compress.py and compress_quality.py.
"""

import hashlib
import json
from pathlib import Path
from typing import Any


class KeptRows:
    """A JSONL file, a result a line, each under the words that say what it is of. Without a file nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):  # the last line of a run that was killed may be half a one
                    row = json.loads(line)
                    self._found[row["key"]] = row["value"]

    def get(self, *words: str) -> dict[str, Any] | None:
        return self._found.get(_key(words))

    def put(self, value: dict[str, Any], *words: str) -> None:
        """Written at once."""
        self._found[_key(words)] = value
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'key': _key(words), 'of': words[0], 'value': value})}\n")


def _key(words: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(words).encode("utf-8", "surrogatepass")).hexdigest()[:32]
