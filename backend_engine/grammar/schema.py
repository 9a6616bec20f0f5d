"""Whether a JSON schema can be enforced: every keyword is known, references stay inside, its size is bounded.

The grammar library compiles what is left. A keyword that it does not know is an error here, named with its place: a
constraint that is dropped without a word would be worse than none.
"""

from collections.abc import Iterator
from typing import Any

from ...prompt.errors import BadRequest
from .regex import check_regex

MAX_DEPTH = 48
MAX_NODES = 4_000
MAX_PROPERTIES = 400  # of one object: all that may come next are looked at for each token

_ONE = ("items", "additionalItems", "additionalProperties")  # one schema (`items` may be a list)
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_ENFORCED = {
    *_ONE, *_LISTS, *_NAMED, "$ref", "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
}  # fmt: skip
# These say nothing about what is valid. `discriminator` (OpenAPI) only repeats what its `oneOf` says.
_NOTES = {
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
}  # fmt: skip


def check_schema(schema: Any, *, param: str) -> None:
    """Raise BadRequest that names the place within `param` of the first thing that cannot be enforced."""
    waiting, nodes = [(schema, param, 0)], 0
    while waiting:
        node, place, depth = waiting.pop()
        nodes += 1
        if nodes > MAX_NODES:
            raise _bad(param, f"the schema has more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise _bad(place, f"the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _bad(place, "a schema must be an object or a boolean")
        _check_keywords(node, place)
        waiting += [(child, where, depth + 1) for child, where in _children(node, place)]


def _check_keywords(node: dict[Any, Any], place: str) -> None:
    for name in node:
        if not isinstance(name, str):
            raise _bad(place, "the keywords of a schema must be strings")
        if name not in _ENFORCED and name not in _NOTES and (name == "x-guidance" or not name.startswith("x-")):
            raise _bad(f"{place}.{name}", f"the keyword {name!r} cannot be enforced; leave it out")
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _bad(f"{place}.$ref", "references must stay within the schema (#/...); nothing is fetched")
    if len(node.get("properties") or ()) > MAX_PROPERTIES:
        raise _bad(f"{place}.properties", f"an object may have at most {MAX_PROPERTIES} properties")
    patterns = [("pattern", node["pattern"])] if "pattern" in node else []
    patterns += [(f"patternProperties.{pattern}", pattern) for pattern in _named(node, "patternProperties")]
    for keyword, pattern in patterns:
        if not isinstance(pattern, str):
            raise _bad(f"{place}.{keyword}", "a pattern must be a string")
        check_regex(pattern, param=f"{place}.{keyword}")


def _children(node: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    for keyword in _LISTS:
        children = node.get(keyword)
        if isinstance(children, list):
            yield from ((child, f"{place}.{keyword}[{index}]") for index, child in enumerate(children))
        elif keyword in node and keyword != "items":
            raise _bad(f"{place}.{keyword}", "must be a list of schemas")
    for keyword in _ONE:
        if keyword in node and not isinstance(node[keyword], list):
            yield node[keyword], f"{place}.{keyword}"
    for keyword in _NAMED:
        yield from ((child, f"{place}.{keyword}.{name}") for name, child in _named(node, keyword).items())


def _named(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    return node[keyword] if isinstance(node.get(keyword), dict) else {}


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param, code="invalid_value")
