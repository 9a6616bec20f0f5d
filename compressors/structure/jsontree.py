"""A JSON document as nested lists of its raw texts: number text, escapes, key order and duplicate keys stay as written.

For documents that `jsonscan.scan_document` has found to be JSON; nothing is checked twice.
"""

import re
from typing import TypeAlias

DEEPEST = 32
"""Documents that are nested deeper have no tree."""

_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*+"|[^\s,:\[\]{}"]++', re.DOTALL)


class Members(list[tuple[str, "Node"]]):
    """An object: (key, value) pairs; the keys are JSON strings with their quotes."""


class Items(list["Node"]):
    """An array."""


Node: TypeAlias = str | Members | Items
"""A scalar is its raw text."""


def tree_of(document: str) -> Members | Items | None:
    """The tree of an object or an array; None when it is nested too deep."""
    top = Items()
    stack: list[Members | Items] = [top]
    key: str | None = None
    for match in _TOKEN.finditer(document):
        token = match[0]
        if token in "]}":
            stack.pop()
            continue
        inside = stack[-1]
        if key is None and isinstance(inside, Members):
            key = token
            continue
        value: Node = Items() if token == "[" else Members() if token == "{" else token
        if isinstance(inside, Members):
            assert key is not None, "a value without a key"
            inside.append((key, value))
            key = None
        else:
            inside.append(value)
        if not isinstance(value, str):
            if len(stack) > DEEPEST:
                return None
            stack.append(value)
    first = top[0]
    assert not isinstance(first, str), "a document is an object or an array"
    return first


def dense(node: Node) -> str:
    """The text of a node without white space between its tokens."""
    if isinstance(node, str):
        return node
    if isinstance(node, Members):
        return "{" + ",".join([f"{key}:{dense(value)}" for key, value in node]) + "}"
    return "[" + ",".join([dense(item) for item in node]) + "]"
