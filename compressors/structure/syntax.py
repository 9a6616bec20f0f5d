"""Syntax trees of source code by tree-sitter, within a time: what in it is a comment, a function, or not understood.

The parser reads through a function, for only then does it ask whether to go on. Trees are walked and not queried: a
query takes quadratic time in nodes of many children, and asking it whether to go on crashes the process (binding 0.26).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..result import Span
from .languages import LANGUAGES, grammar

_PIECE = 1 << 14  # bytes
_STRIDE = 1024  # nodes between two looks at the clock
_LONGEST_NAME = 200  # characters that are looked at
# What gives a name to a function that has none of its own, and in which fields: the name, and what is named.
_NAMING = {
    "variable_declarator": ("name", "value"),
    "pair": ("key", "value"),
    "assignment_expression": ("left", "right"),
    "field_definition": ("property", "value"),
    "public_field_definition": ("name", "value"),
    "short_var_declaration": ("left", "right"),
    "assignment_statement": ("left", "right"),
    "var_spec": ("name", "value"),
}


@dataclass(frozen=True, slots=True)
class Function:
    """Where a function and its body stand; `broken`: something in it could not be parsed. `name` may be a path, or
    empty.
    """

    name: str
    span: Span
    body: Span
    broken: bool


@dataclass(frozen=True, slots=True)
class Syntax:
    """Spans of a text in characters, each list ascending. `broken`: something is wrong or missing."""

    comments: list[Span]
    docs: list[Span]
    functions: list[Function]
    errors: list[Span]
    broken: bool


def syntax_of(source: str, language: str, *, expired: Callable[[], bool]) -> Syntax | None:
    """What the parser finds; None when `expired` says so before it is done. Broken source gives errors and the rest."""
    tree_sitter = import_module("tree_sitter")
    text = source.encode("utf-8", "surrogatepass")

    def read(at: int, point: object) -> bytes:
        return text[at : at + _PIECE]

    def stop(*state: object) -> bool:
        return expired()

    try:
        tree = tree_sitter.Parser(grammar(language)).parse(read, progress_callback=stop)
    except ValueError:  # what the binding says of a parse that was stopped
        return None
    place = _places(source, text)
    known, found = LANGUAGES[language], Syntax([], [], [], [], bool(tree.root_node.has_error))
    names: dict[int, str] = {}  # by where what has them begins

    def named(node: Any) -> str:
        return source[place(node.start_byte) : place(node.end_byte)][:_LONGEST_NAME]

    for seen, (node, first) in enumerate(_nodes(tree)):
        if seen % _STRIDE == 0 and expired():
            return None
        span = place(node.start_byte), place(node.end_byte)
        if node.type in _NAMING:
            names.update((start, named(name)) for start, name in _named(node))
        if node.type == "ERROR":
            found.errors.append(span)
        elif node.type in known.comments:
            found.comments.append(span)
        elif node.type in known.functions and (body := node.child_by_field_name("body")) is not None:
            inner = place(body.start_byte), place(body.end_byte)
            own = _name(node)
            name = named(own) if own is not None else names.get(node.start_byte, "")
            found.functions.append(Function(name, span, inner, bool(node.has_error)))
        elif first and known.indented and _is_string(node):
            found.docs.append(span)
    return found


def _nodes(tree: Any) -> Iterator[tuple[Any, bool]]:
    """All nodes of a tree but what is within errors, in their order; whether only comments stand before one in a block
    or in all of the source.
    """
    cursor = tree.walk()
    fresh: list[bool] = [False]  # by depth
    while True:
        node = cursor.node
        yield node, fresh[-1]
        if node.type != "comment":
            fresh[-1] = False
        if node.type != "ERROR" and cursor.goto_first_child():
            fresh.append(node.type in ("module", "block"))
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            fresh.pop()


def _named(node: Any) -> Iterator[tuple[int, Any]]:
    """Where what a declaration or an assignment names begins, also within a call such as `memo(() => {})`; its name."""
    name, value = map(node.child_by_field_name, _NAMING[node.type])
    if name is None or value is None:
        return
    yield value.start_byte, name
    arguments = value.child_by_field_name("arguments")
    for argument in arguments.named_children if arguments is not None else ():
        yield argument.start_byte, name


def _name(function: Any) -> Any | None:
    """The node of a function's own name, in C at the end of a chain of declarators."""
    name = function.child_by_field_name("name")
    inner = function.child_by_field_name("declarator")
    while name is None and inner is not None:
        inner, last = inner.child_by_field_name("declarator"), inner
        name = last if inner is None else None
    return name


def _is_string(statement: Any) -> bool:
    return (
        statement.type == "expression_statement" and statement.child_count == 1 and statement.child(0).type == "string"
    )


def _places(source: str, text: bytes) -> Callable[[int], int]:
    """From places in the bytes to places in the characters."""
    if len(text) == len(source):
        return lambda at: at
    starts: NDArray[np.int64] = np.flatnonzero((np.frombuffer(text, dtype=np.uint8) & 0xC0) != 0x80)
    return lambda at: int(np.searchsorted(starts, at))
