"""JSON as text: parse with limits, find where values stand in the source, and change only these places.

A rewritten request keeps key order, number text, escapes, duplicate keys and white space of everything that was not
changed, because edits are spliced into the source instead of writing the parsed document anew. Parsing itself is the
standard library's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import BadRequest
from .segment import Path

DECIDED = frozenset(
    {
        *("model", "messages", "prompt", "input", "system", "instructions", "tools", "stream", "stream_options", "n"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "best_of"),
        *("user", "previous_response_id", "store"),
    }
)
"""Top-level fields of requests by which it is decided who answers, whether he may, and what that costs."""
_STREAMING = "stream_options"
_STREAMED = frozenset({"include_usage", "continuous_usage_stats"})  # the fields of these options of which that is true

_SPACE = re.compile(r"[ \t\n\r]*")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder()


def _refuse_constant(name: str) -> Any:
    raise BadRequest(f"the body is not valid JSON: {name} is no JSON number", code="invalid_json")


def decode_text(raw: bytes) -> str:
    """UTF-8 bytes to text; BadRequest for anything else.

    A byte order mark is refused by the JSON parser that follows.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadRequest(f"the body is not valid UTF-8 (byte {exc.start})", code="invalid_json") from exc


def check_depth(text: str, limit: int) -> None:
    """Raise BadRequest if brackets nest deeper than `limit`.

    Linear, no recursion; runs before any parser sees the text.
    """
    if text.count("{") + text.count("[") <= limit:
        return  # too few of them, wherever they stand; so it is with nearly all bodies
    depth = 0
    for match in _BRACKETS.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > limit:
                raise BadRequest(f"the body nests deeper than {limit} levels", code="json_too_deep")
        elif first in "]}":
            depth -= 1


_READER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse(text: str, *, max_depth: int) -> Any:
    """Parse JSON with a depth limit.

    BadRequest for broken JSON, NaN and Infinity, strings that no UTF-8 can carry, and fields of `DECIDED` that stand
    twice in an object that is the whole text, or are spelled otherwise there; so of the options of a stream.
    """
    check_depth(text, max_depth)
    try:
        value = _object(text)
        if value is None:
            value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        where = f"line {exc.lineno} column {exc.colno}"
        raise BadRequest(f"the body is not valid JSON: {exc.msg} at {where}", code="invalid_json") from exc
    except ValueError as exc:  # an integer with more digits than Python converts
        raise BadRequest("the body is not valid JSON: a number has too many digits", code="invalid_json") from exc
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _object(text: str) -> dict[str, Any] | None:
    """An object that is the whole text, read member by member; None for all else, also for what is broken."""
    found: dict[str, Any] = {}
    try:
        at = _skip(text, 0)
        if text[at] != "{":
            return None
        at = _skip(text, at + 1)
        while text[at] == '"':
            key, at = _READER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at] != ":":
                return None
            start = _skip(text, at + 1)
            value, at = _READER.raw_decode(text, start)
            _refuse_ambiguous(key, DECIDED, again=key in found)
            if key == _STREAMING and isinstance(value, dict):
                _check_options(text, start)
            found[key] = value
            at = _skip(text, at)
            if text[at] != ",":
                break
            at = _skip(text, at + 1)
            if text[at] != '"':
                return None
        return found if text[at] == "}" and _skip(text, at + 1) == len(text) else None
    except (ValueError, IndexError):
        return None


def _check_options(text: str, at: int) -> None:
    """Of a stream: the object at `at`."""
    seen = set[str]()
    for key, _, _ in _members(text, at):
        _refuse_ambiguous(key, _STREAMED, again=key in seen, within=f"{_STREAMING}.")
        seen.add(key)


def _refuse_ambiguous(key: str, decided: frozenset[str], *, again: bool, within: str = "") -> None:
    """Servers differ in which of two members of the same name they read, and some take `Model` for `model`: what was
    decided by one of them would be carried out by another.
    """
    name = key.casefold()
    if name not in decided:
        return
    param = within + key
    if key != name:
        message = (
            f"the field {param!r} is another spelling of {within + name!r}, for which some servers take it; "
            f"send {within + name!r}"
        )
        raise BadRequest(message, param=param, code="ambiguous_field")
    if again:
        raise BadRequest(f"the field {param!r} is given twice; send it once", param=param, code="ambiguous_field")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        code = ord(exc.object[exc.start])
        raise BadRequest(
            f"a string holds half of a surrogate pair (\\u{code:04x}), which is no character; send whole characters",
            code="invalid_unicode",
        ) from exc


def member(text: str, key: str) -> str:
    """The source of a member's value of the JSON object `text`, which must have been parsed before and have it."""
    start = _skip(text, 0)
    *_, (begin, end) = ((begin, end) for name, begin, end in _members(text, start) if name == key)
    return text[begin:end]


@dataclass(slots=True)
class _Node:
    """The wanted places below one value: what to put there, or what to look for further down."""

    replacement: str | None = None
    remove: bool = False
    children: dict[str | int, "_Node"] = field(default_factory=dict)


def _tree(replace: Mapping[Path, str], remove: Sequence[Path]) -> _Node:
    root = _Node()

    def at(path: Path) -> _Node:
        node = root
        for step in path:
            node = node.children.setdefault(step, _Node())
        return node

    for path, value in replace.items():
        at(path).replacement = value
    for path in remove:
        at(path).remove = True
    return root


Edit = tuple[int, int, str]


def splice(text: str, *, replace: Mapping[Path, str], remove: Sequence[Path] = ()) -> str:
    """Return the JSON `text` with the values at the paths of `replace` exchanged and array elements in `remove` taken
    out.

    `text` must have been parsed before. Replacements are JSON text themselves. A path of length 1 whose key is missing
    is added at the end of the top-level object. Where a key stands twice, the last one counts, as for the parser.
    """
    root = _tree(replace, remove)
    start = _skip(text, 0)
    edits = list(_edits(text, start, root))
    present = {key for key, _, _ in _members(text, start)}
    missing = [
        (key, node) for key, node in root.children.items() if key not in present and node.replacement is not None
    ]
    if missing:
        edits.append(_append_members(text, start, [(str(key), node.replacement or "") for key, node in missing]))
    out, done = [], 0
    for begin, end, new in sorted(edits):
        assert begin >= done, f"edits overlap at {begin}"
        out += [text[done:begin], new]
        done = end
    return "".join([*out, text[done:]])


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _value_end(text: str, at: int) -> int:
    return _DECODER.raw_decode(text, at)[1]


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """(key, start, end) of each member's value of the object at `at`."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        end = _value_end(text, at)
        yield key, at, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _elements(text: str, at: int) -> list[tuple[int, int]]:
    """(start, end) of each element of the array at `at`."""
    found: list[tuple[int, int]] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _value_end(text, at)
        found.append((at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _edits(text: str, at: int, node: _Node) -> Iterator[Edit]:
    """All edits below the value at `at`. Descends only along wanted paths, so depth is the length of a path."""
    if node.replacement is not None:
        yield at, _value_end(text, at), node.replacement
    elif text[at] == "{":
        last = {key: start for key, start, _ in _members(text, at) if key in node.children}
        for key, start in last.items():
            yield from _edits(text, start, node.children[key])
    elif text[at] == "[":
        elements = _elements(text, at)
        gone = [i for i in range(len(elements)) if i in node.children and node.children[i].remove]
        yield from _removals(elements, gone)
        for i, (start, _) in enumerate(elements):
            if i in node.children and not node.children[i].remove:
                yield from _edits(text, start, node.children[i])


def _removals(elements: list[tuple[int, int]], gone: list[int]) -> Iterator[Edit]:
    """Cut runs of elements together with the comma that they leave over."""
    i = 0
    while i < len(gone):
        first = last = gone[i]
        while i + 1 < len(gone) and gone[i + 1] == last + 1:
            i += 1
            last = gone[i]
        i += 1
        if last + 1 < len(elements):
            yield elements[first][0], elements[last + 1][0], ""
        else:
            yield (elements[first - 1][1] if first else elements[0][0]), elements[last][1], ""


def _append_members(text: str, at: int, members: list[tuple[str, str]]) -> Edit:
    end = _value_end(text, at) - 1
    fresh = ", ".join(f"{json.dumps(key)}: {value}" for key, value in members)
    empty = next(_members(text, at), None) is None
    return end, end, fresh if empty else f", {fresh}"
