"""Tables for JSON arrays of like objects, objects of like objects, and lines of like objects. Nothing is lost.

    [{"id":1,"name":"Bob","seat":{"row":3,"side":"left"}},{"id":2,"name":"Al, Jr."}]

becomes

    [table id,name,seat{row,side}
    1,Bob,3,left
    2,"Al, Jr.",,
    ]

`{"k1":{"a":1},"k2":{"a":2}}` has the rows `k1:1` and `k2:2` between `{table a` and `}`, and the documents `{"a":1}` and
`{"a":2}`, one on a line, stand between `(table a` and `)`. A cell is JSON, except that a text has quotes only where it
holds what could be mistaken; an empty cell is a key that the row does not have. `table_reader.restored` gives back the
JSON, to the character, but for white space between its tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .jsontree import Members, Node, dense, tree_of

MARK = re.compile(r"[\[{(]table ")
"""What begins a table. A text that holds it already gets no tables, so that none can be mistaken."""
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null")
"""A cell without quotes that is no text."""
NAME = re.compile(r"[A-Za-z_][\w-]*+")
"""A key that needs no quotes."""

# Only where one object can follow another is there anything to make a table of.
_NEIGHBOURS = re.compile(r'\}[ \t\r\n]*+,[ \t\r\n]*+["{]')
_PLAIN_TEXT = re.compile(r'[^\W_](?:[^",:\\\[\]{}\s\x00-\x1f\x7f-\x9f]++| (?=\S)|:(?=\S))*+')
_MOST_COLUMNS = 128
_FEWEST_ROWS = 2


def table_of(documents: Sequence[str]) -> str | None:
    """One JSON document, or several objects that stand one on a line, with tables; None where that is not shorter."""
    if len(documents) == 1:
        tree = tree_of(documents[0]) if _NEIGHBOURS.search(documents[0]) else None
        written = None if tree is None else _written(tree)
        return written if written is not None and MARK.search(written) else None
    trees = [tree_of(document) for document in documents]
    rows = [tree for tree in trees if isinstance(tree, Members)]
    table = _table(rows, "()") if len(rows) == len(documents) else None
    plain = sum(len(dense(row)) + 1 for row in rows)
    return table if table is not None and len(table) < plain else None


def _written(node: Node) -> str:
    """The shortest form of a node, in characters."""
    if isinstance(node, str):
        return node
    if isinstance(node, Members):
        inner = "{" + ",".join([f"{key}:{_written(value)}" for key, value in node]) + "}"
        table = _table([value for _, value in node], "{}", [key for key, _ in node])
    else:
        inner = "[" + ",".join([_written(item) for item in node]) + "]"
        table = _table(node, "[]")
    return table if table is not None and len(table) < len(inner) else inner


def _table(rows: Sequence[Node], brackets: str, keys: Sequence[str] = ()) -> str | None:
    """The table of these rows, each behind its key if there are any; None when they are not like each other."""
    columns = _columns(rows) if len(rows) >= _FEWEST_ROWS else None
    if columns is None:
        return None
    lines = [",".join(_cells(row, columns)) for row in rows if isinstance(row, Members)]
    if keys:
        lines = [f"{_bare_name(key)}:{line}" for key, line in zip(keys, lines, strict=True)]
    head = ",".join(column.head() for column in columns)
    return "\n".join([f"{brackets[0]}table {head}", *lines, brackets[1]])


@dataclass(slots=True)
class Column:
    """A key, and the columns below it where every value is an object of like keys."""

    key: str
    columns: "list[Column]" = field(default_factory=list)

    def head(self) -> str:
        below = ",".join(column.head() for column in self.columns)
        return _bare_name(self.key) + (f"{{{below}}}" if below else "")


def _columns(rows: Sequence[Node]) -> list[Column] | None:
    """Columns in an order that every row's keys follow; None when a row is no object or has keys of its own."""
    objects = [row for row in rows if isinstance(row, Members) and row]
    if len(objects) < len(rows):
        return None
    keys: list[str] = []
    seen: set[tuple[str, ...]] = set()
    most = 0
    for row in objects:
        own = tuple([key for key, _ in row])
        if own in seen:
            continue
        seen.add(own)
        keys = _merged(keys, own)
        most = max(most, len(own))
        if len(keys) > min(_MOST_COLUMNS, 2 * most + 2):
            return None
    values: list[list[Node]] = [[] for _ in keys]
    for row in objects:
        for place, value in _placed(row, keys):
            values[place].append(value)
    return [Column(key, _columns(below) or []) for key, below in zip(keys, values, strict=True)]


def _merged(keys: list[str], own: Sequence[str]) -> list[str]:
    """`keys` with what `own` has beside them, put in so that both orders hold."""
    merged = list(keys)
    at = 0
    for key in own:
        try:
            at = merged.index(key, at) + 1
        except ValueError:
            merged.insert(at, key)
            at += 1
    return merged


def _placed(row: Members, keys: Sequence[str]) -> Iterator[tuple[int, Node]]:
    """(column, value): the first column of that key behind the last one, as a reader would fill them in."""
    at = 0
    for key, value in row:
        while keys[at] != key:
            at += 1
        yield at, value
        at += 1


def _cells(row: Members | None, columns: Sequence[Column]) -> Iterator[str]:
    """The cells of a row; all empty where there is no object."""
    found = dict(_placed(row, [column.key for column in columns])) if row is not None else {}
    for i, column in enumerate(columns):
        value = found.get(i)
        if column.columns:
            assert value is None or isinstance(value, Members), "columns below a value that is no object"
            yield from _cells(value, column.columns)
        else:
            yield "" if value is None else _bare_text(dense(value))


def _bare_text(raw: str) -> str:
    bare = raw[1:-1]
    plain = raw[0] == '"' and _PLAIN_TEXT.fullmatch(bare) and not SCALAR.fullmatch(bare)
    return bare if plain else raw


def _bare_name(raw: str) -> str:
    return raw[1:-1] if NAME.fullmatch(raw, 1, len(raw) - 1) else raw
