"""Pieces of grammars in llguidance's Lark form: literal text, a special token, JSON under a schema."""

import json
from typing import Any

from ...prompt.errors import BadRequest
from .schema import check_schema

# Of JSON. White space between two tokens is bounded: a model that likes line breaks would write nothing else. Without
# \u there are no lone surrogates, and no second spelling of a property's name.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,32}", "json_allowed_escapes": 'nrbtf\\"'}


def literal(text: str) -> str:
    """The text itself."""
    return json.dumps(text)


def token(token_id: int) -> str:
    """A token by its id."""
    return f"<[{token_id}]>"


def json_object(schema: Any, *, param: str) -> str:
    """A JSON object under a schema, in which references start at its own root.

    BadRequest names the place within `param` of what cannot be enforced.
    """
    check_schema(schema, param=param)
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be an object", param=param, code="invalid_value")
    try:
        return "%json " + json.dumps({"type": "object", **schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{param}: the schema is not JSON", param=param, code="invalid_value") from error
