"""From a text with tables back to JSON: the proof that tables.py loses nothing, and a tool for who needs the JSON."""

import re
from collections.abc import Iterator, Sequence

from ..jsonscan import scan_document
from .jsontree import DEEPEST
from .tables import NAME, SCALAR, Column

_HEAD = re.compile(r"([\[{(])table ([^\n]+)\n")
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')


def restored(text: str) -> str:
    """The text with every table written as JSON again; what only looks like one stays."""
    parts: list[str] = []
    done = 0
    while match := _HEAD.search(text, done):
        read = _Reader(text, match).table()
        if read is None:
            parts.append(text[done : match.start() + 1])
            done = match.start() + 1
            continue
        parts += [text[done : match.start()], read[0]]
        done = read[1]
    return "".join([*parts, text[done:]])


class _Reader:
    """Reads the table that begins at a match of its head. `None` and ValueError: it is none."""

    def __init__(self, text: str, head: re.Match[str]) -> None:
        self._text, self._head, self._keyed = text, head, head[1] == "{"

    def table(self) -> tuple[str, int] | None:
        """Its JSON and where it ends."""
        opening, closing = self._head[1], _CLOSING[self._head[1]]
        try:
            columns, rest = _head_columns(self._head[2], 0)
            if rest != len(self._head[2]):
                return None
            rows: list[str] = []
            at = self._head.end()
            while not self._text.startswith(closing, at):
                row, at = self._row(at, columns)
                rows.append(row)
        except ValueError:
            return None
        if opening == "(":
            return "\n".join(rows), at + 1
        return opening + ",".join(rows) + closing, at + 1

    def _row(self, at: int, columns: Sequence[Column]) -> tuple[str, int]:
        end = self._text.find("\n", at)
        if end < 0:
            raise ValueError("a table without an end")
        key = ""
        if self._keyed:
            key, at = _name_at(self._text, at)
            if not self._text.startswith(":", at):
                raise ValueError("a row without its key")
            key, at = f"{key}:", at + 1
        cells = _split_cells(self._text, at, end)
        row = _object(columns, cells)
        if row is None or next(cells, None) is not None:
            raise ValueError("a row with other columns")
        return key + row, end + 1


def _head_columns(head: str, at: int, depth: int = 0) -> tuple[list[Column], int]:
    if depth > DEEPEST:
        raise ValueError("no table of ours nests as deep")
    columns: list[Column] = []
    while True:
        key, at = _name_at(head, at)
        column = Column(key)
        columns.append(column)
        if head.startswith("{", at):
            column.columns, at = _head_columns(head, at + 1, depth + 1)
            if not head.startswith("}", at):
                raise ValueError("columns that do not close")
            at += 1
        if not head.startswith(",", at):
            return columns, at
        at += 1


def _name_at(text: str, at: int) -> tuple[str, int]:
    """The JSON string of the key at this place, and where it ends."""
    match = NAME.match(text, at)
    if match:
        return f'"{match[0]}"', match.end()
    end = _value_end(text, at) if text.startswith('"', at) else at
    if end == at:
        raise ValueError("no key")
    return text[at:end], end


def _value_end(text: str, at: int) -> int:
    """Where the quoted text, the array or the object ends that begins here; `at` if it does not end."""
    if text.startswith('"', at):
        match = _STRING.match(text, at)
        return match.end() if match else at
    scan = scan_document(text, at)
    return scan.end if scan.whole else at


def _split_cells(text: str, at: int, end: int) -> Iterator[str]:
    while True:
        if text.startswith(('"', "[", "{"), at):
            stop = _value_end(text, at)
            if stop == at:
                raise ValueError("a cell that does not close")
            yield text[at:stop]
        else:
            comma = text.find(",", at, end)
            stop = end if comma < 0 else comma
            bare = text[at:stop]
            yield bare if not bare or SCALAR.fullmatch(bare) else f'"{bare}"'
        if stop == end:
            return
        if not text.startswith(",", stop):
            raise ValueError("cells without a comma")
        at = stop + 1


def _object(columns: Sequence[Column], cells: Iterator[str]) -> str | None:
    """The object of a row; None when all its cells are empty."""
    members: list[str] = []
    for column in columns:
        value = _object(column.columns, cells) if column.columns else next(cells, None)
        if value is None and not column.columns:
            raise ValueError("a row with too few cells")
        if value:
            members.append(f"{column.key}:{value}")
    return "{" + ",".join(members) + "}" if members else None
