"""Entries of API keys put into the text of a policy file, and taken out of it; every other line stays as it is."""

import secrets
from dataclasses import dataclass
from typing import Any

import yaml

from ..prompt import BadRequest, ConfigError
from .match import digest
from .policyset import PolicySet

_PREFIX = "psk_"
_RANDOM_BYTES = 32
_PLACE = ("server", "api_keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was made just now. Only its digest is ever written down."""

    secret: str
    entry: dict[str, Any]

    def __repr__(self) -> str:
        return f"NewKey(entry={self.entry!r})"


def new_key(name: str, **fields: Any) -> NewKey:
    """A key of 256 random bits, so that its digest needs no salt; `fields` are those of its entry that are given."""
    secret = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    given = {field: value for field, value in fields.items() if value not in (None, [], {})}
    return NewKey(secret=secret, entry={"name": name, "sha256": digest(secret), **given})


def stanza(entry: dict[str, Any]) -> str:
    """The entry as a list item of YAML."""
    return yaml.safe_dump([entry], sort_keys=False, allow_unicode=True, width=10_000)


def with_key(text: str, entry: dict[str, Any], *, file: str) -> str:
    """The file's text with one more key. ConfigError where the text is wrong, before or after; BadRequest where its
    keys are written on one line.
    """
    before = PolicySet.from_text(text, file=file)
    lines = text.splitlines(keepends=True)
    root = yaml.compose(text)
    keys, server = _at(root, _PLACE), _at(root, _PLACE[:1])
    if keys is None:
        at, indent, head = _place_of_section(root, server, lines)
        new = head + _indented(stanza(entry), indent)
    elif not isinstance(keys, yaml.SequenceNode) or keys.flow_style:
        raise BadRequest("server.api_keys is written on one line; write it as a list, one key below the other")
    else:
        at, indent = _last_line(keys) + 1, keys.start_mark.column
        new = _indented(stanza(entry), indent)
    if at and not lines[at - 1].endswith(("\n", "\r")):
        lines[at - 1] += "\n"
    changed = "".join([*lines[:at], new, *lines[at:]])
    after = PolicySet.from_text(changed, file=file)
    assert after.server.api_keys[:-1] == before.server.api_keys, "the other keys stay"
    return changed


def without_key(text: str, name: str, *, file: str) -> str:
    """The file's text without this key. BadRequest where there is none of the name; where it is the last one, for
    without keys everybody is let in; and where keys are written on one line.
    """
    names = [key.name for key in PolicySet.from_text(text, file=file).server.api_keys]
    if name not in names:
        raise BadRequest(f"there is no API key {name!r}; there are {', '.join(names) or 'none'}")
    if len(names) == 1:
        raise BadRequest(
            f"{name!r} is the only API key, and without keys everybody is let in; create another one first, "
            "or let it expire (expires: 2000-01-01)"
        )
    keys = _at(yaml.compose(text), _PLACE)
    if not isinstance(keys, yaml.SequenceNode) or keys.flow_style:
        raise BadRequest("server.api_keys is written on one line; take the key out by hand")
    lines, item = text.splitlines(keepends=True), keys.value[names.index(name)]
    changed = "".join([*lines[: item.start_mark.line], *lines[_last_line(item) + 1 :]])
    left = [key.name for key in PolicySet.from_text(changed, file=file).server.api_keys]
    if left != [other for other in names if other != name]:
        raise BadRequest(f"the entry of {name!r} shares lines or anchors with others; take it out by hand")
    return changed


def _place_of_section(root: Any, server: Any, lines: list[str]) -> tuple[int, int, str]:
    """Where the section begins in a file that has none: the line, the column of its items, and its head."""
    if server is None:
        if not isinstance(root, yaml.MappingNode) or root.flow_style:
            raise ConfigError("the policy file is written on one line; write it as a mapping, one key below the other")
        return len(lines), 4, "server:\n  api_keys:\n"
    if not isinstance(server, yaml.MappingNode) or server.flow_style or not server.value:
        raise BadRequest("server is written on one line; write it as a mapping, one key below the other")
    first = server.value[0][0].start_mark
    return first.line, first.column + 2, f"{' ' * first.column}api_keys:\n"


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for key, value in pairs if key.value == name), None)
    return node


def _last_line(node: Any) -> int:
    """The last line that a value stands on, without the blank lines and comments behind it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        mark = node.end_mark
        return mark.line - 1 if mark.column == 0 and mark.line > node.start_mark.line else mark.line
    last = node.value[-1]
    if isinstance(last, tuple):
        return max(_last_line(last[0]), _last_line(last[1]))
    return _last_line(last)


def _indented(text: str, columns: int) -> str:
    return "".join(" " * columns + line for line in text.splitlines(keepends=True))
