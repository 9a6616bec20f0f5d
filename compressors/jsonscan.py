"""JSON documents inside text: where one ends, and which of its white space means nothing (RFC 8259).

A scanner, not a parser: number text, key order, duplicate keys and escapes are never looked into, so they cannot
change. No recursion, linear time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .result import Span

_TOKEN = re.compile(
    r"""[ \t\r\n]*+(?:
        (?P<string>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+")
      | (?P<scalar>(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)(?![0-9A-Za-z_.+-]))
      | (?P<open>[\[{])
      | (?P<close>[\]}])
      | (?P<comma>,)
      | (?P<colon>:)
    )""",
    re.VERBOSE,
)
_SPACE_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"|[ \t\r\n]++', re.DOTALL)
_START = re.compile(r'[\[{](?=[ \t\r\n]{0,64}["\[{\]}\d-])')
_CLOSER = {"[": "]", "{": "}"}
# Scanning starts anew after every failed candidate; this bounds all scans together, in lengths of the text.
_PASSES = 4

# What may come next; a value is a string, a scalar or an opening bracket.
_VALUE, _KEY, _COLON, _AFTER = "value", "key", "colon", "after"


@dataclass(frozen=True, slots=True)
class Scan:
    """`end` is where the document ends, or where it stopped being JSON; `whole` tells which."""

    end: int
    whole: bool


def scan_document(text: str, start: int) -> Scan:
    """Scan the object or array that begins at `start`."""
    stack: list[str] = []
    expect, may_close = _VALUE, False
    at = start
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            return Scan(at, False)
        what, char = match.lastgroup, text[match.end() - 1]
        if what == "close":
            if not stack or _CLOSER[stack[-1]] != char or not (may_close or expect == _AFTER):
                return Scan(at, False)
            stack.pop()
            expect = _AFTER
        elif what == "comma" and expect == _AFTER:
            expect = _KEY if stack[-1] == "{" else _VALUE
        elif what == "colon" and expect == _COLON:
            expect = _VALUE
        elif what == "string" and expect == _KEY:
            expect = _COLON
        elif what == "open" and expect == _VALUE:
            stack.append(char)
            expect = _KEY if char == "{" else _VALUE
        elif what in ("string", "scalar") and expect == _VALUE and stack:
            expect = _AFTER
        else:
            return Scan(at, False)
        may_close = what == "open"
        at = match.end()
        if not stack:
            return Scan(at, True)


def documents(text: str, *, broken_from: int | None = None) -> Iterator[Span]:
    """Outermost JSON objects and arrays in a text, ascending.

    With `broken_from`, a document that breaks off is reported too, up to the break, when at least so many characters of
    it were JSON: a cut-off or slightly wrong document is still none to be read as prose.
    """
    at, budget = 0, _PASSES * len(text)
    while budget > 0 and (match := _START.search(text, at)):
        scan = scan_document(text, match.start())
        size = scan.end - match.start()
        budget -= size
        if scan.whole or (broken_from is not None and size >= broken_from):
            yield match.start(), scan.end
            at = scan.end
        else:
            at = match.start() + 1


def dense_spans(text: str, start: int, end: int) -> Iterator[Span]:
    """The parts of the valid document at `start` to `end` without the white space between its tokens."""
    at = start
    for match in _SPACE_OR_STRING.finditer(text, start, end):
        if text[match.start()] != '"':
            if match.start() > at:
                yield at, match.start()
            at = match.end()
    if at < end:
        yield at, end
