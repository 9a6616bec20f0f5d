"""YAML text to plain data, with the line of every key and value; rejects what a policy file has no use for.

Scalars follow YAML 1.2's core schema (`off`, `no` and `12:30` are texts). Size, depth and the expansion of aliases are
bounded, duplicate keys and tags are problems, and all problems of the text are collected.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_CHARS = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong, at a line counted from 1."""

    line: int
    message: str


@dataclass(slots=True)
class Tree:
    """Data made of dict (text keys), tuple and scalars; `lines` gives the line of the key or item at each path."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """The line of `path`, or of its nearest ancestor that stands in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2 and a bound on depth."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own interface

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_SCALARS = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), "~nN\0"),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)\Z"), "-+0123456789"),
    ("float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"), "-+.0123456789"),
    ("float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"), "-+."),
    ("merge", re.compile(r"<<\Z"), "<"),
)
_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, ["" if c == "\0" else c for c in _first])


def read_tree(text: str) -> Tree:
    """Parse one YAML document. Never raises for bad text: see `Tree.problems` (data is None after a syntax error)."""
    tree = Tree()
    if len(text) > MAX_CHARS:
        tree.problems.append(Problem(1, f"the file is longer than {MAX_CHARS} characters"))
        return tree
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        tree.problems.append(Problem(line, f"character U+{ord(text[int(error.position)]):04X} may not stand in YAML"))
        return tree
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        tree.problems.append(Problem(mark.line + 1 if mark else 1, f"not valid YAML: {what}"))
        return tree
    except (ValueError, OverflowError) as error:  # PyYAML's own, for escapes beyond Unicode
        tree.problems.append(Problem(1, f"not valid YAML: {error}"))
        return tree
    if node is None:
        tree.problems.append(Problem(1, "the file is empty; it needs at least `version: 1`"))
        return tree
    _Builder(tree).build(node)
    return tree


class _TooMuch(Exception):
    """Aliases expand to more than MAX_VALUES values."""


class _Builder:
    """Turns nodes into data, expanding aliases within bounds."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._values = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node) -> None:
        try:
            self._tree.data = self._value(node, ())
        except _TooMuch:
            self._problem(node, f"aliases expand to more than {MAX_VALUES} values")

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _TooMuch
        self._tree.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            return self._problem(node, "an alias stands inside the value that it names")
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            return self._problem(node, f"tags such as {_shown(node.tag)} have no place in a policy file")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            assert isinstance(node, yaml.SequenceNode), node
            return tuple(self._value(item, (*path, i)) for i, item in enumerate(node.value))
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                self._merge(value_node, path, into=merged)
                continue
            key = self._key(key_node)
            if key is None:
                continue
            if key in data:
                first = self._tree.lines[(*path, key)]
                self._problem(key_node, f"duplicate key {_shown(key)}, first given in line {first}")
                continue
            self._tree.lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self._value(value_node, (*path, key))
        return {**merged, **data}

    def _merge(self, node: yaml.Node, path: Path, *, into: dict[str, Any]) -> None:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in reversed(sources):
            value = self._value(source, path)
            if isinstance(value, dict):
                into.update(value)
            else:
                self._problem(source, "<< merges mappings only")

    def _key(self, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            return self._problem(node, "a key must be a text, not a list or a mapping")
        return node.value

    def _scalar(self, node: yaml.ScalarNode) -> Hashable:
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return node.value
        if kind == "null":
            return None
        if kind == "bool":
            return node.value.lower() == "true"
        if kind == "int":
            return self._integer(node)
        if kind == "float":
            return self._float(node)
        return self._problem(node, f"tags such as {_shown(node.tag)} have no place in a policy file")

    def _integer(self, node: yaml.ScalarNode) -> int | None:
        text: str = node.value
        if len(text) > 30:
            return self._problem(node, "a number with more than 30 digits")
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError:
            return self._problem(node, "not a whole number")

    def _float(self, node: yaml.ScalarNode) -> float | None:
        try:
            return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            return self._problem(node, "not a number")

    def _problem(self, node: yaml.Node, message: str) -> None:
        self._tree.problems.append(Problem(node.start_mark.line + 1, message))


def _shown(text: str) -> str:
    """A key from the file, short enough for a message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
