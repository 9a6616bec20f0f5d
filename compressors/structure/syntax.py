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


@dataclass(frozen=True, slots=True)
class Function:
    """Where a function and its body stand; `broken`: something in it could not be parsed."""

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
    for seen, (node, first) in enumerate(_nodes(tree)):
        if seen % _STRIDE == 0 and expired():
            return None
        span = place(node.start_byte), place(node.end_byte)
        if node.type == "ERROR":
            found.errors.append(span)
        elif node.type in known.comments:
            found.comments.append(span)
        elif node.type in known.functions and (body := node.child_by_field_name("body")) is not None:
            inner = place(body.start_byte), place(body.end_byte)
            found.functions.append(Function(span, inner, bool(node.has_error)))
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
