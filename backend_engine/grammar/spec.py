"""What a generation may be restricted to: a JSON object, a JSON schema, a regular expression, one of some strings, or
text made of fixed pieces, tokens and JSON.

Making a `Grammar` checks its form and size. Whether it can be compiled is the compiler's to say.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...prompt.errors import BadRequest
from .regex import check_regex
from .schema import check_schema

MAX_CHARS = 1 << 17

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`text` is the schema as JSON, the regular expression, or llguidance's form of a Lark grammar. Two grammars of the
    same text are one.

    `param` is the request's field that asked for it; errors name it.
    """

    kind: Kind
    text: str
    param: str = field(default="response_format", compare=False)

    @classmethod
    def json_object(cls, *, param: str = "response_format") -> "Grammar":
        """Any JSON object."""
        return cls(kind="json_schema", text='{"type":"object"}', param=param)

    @classmethod
    def json_schema(cls, schema: Any, *, param: str = "response_format") -> "Grammar":
        """JSON that a schema (drafts 4 to 2020-12) accepts; object members come in the order of `properties`.

        Raises BadRequest naming the place of a keyword that could not be enforced.
        """
        check_schema(schema, param=param)
        if schema is False:
            raise BadRequest(f"{param}: nothing is valid under the schema false", param=param, code="invalid_value")
        try:
            text = json.dumps({} if schema is True else schema, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"{param}: the schema is not JSON", param=param, code="invalid_value") from error
        return cls(kind="json_schema", text=_limited(text, param), param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "response_format") -> "Grammar":
        """Text that a regular expression matches as a whole: the syntax of Rust's regex crate without look-around.

        The classes \\d, \\w and \\s are ASCII, as in JSON schemas.
        """
        check_regex(_limited(pattern, param), param=param)
        return cls(kind="regex", text=pattern, param=param)

    @classmethod
    def lark(cls, text: str, *, param: str) -> "Grammar":
        """What a grammar of our own says (see lark.py). Not for grammars from outside: nothing in them is checked."""
        return cls(kind="lark", text=_limited(text, param), param=param)

    @classmethod
    def choice(cls, options: Sequence[str], *, param: str = "response_format") -> "Grammar":
        """One of some strings, to the letter."""
        if not options or not all(options):
            raise BadRequest(f"{param} must be strings, none of them empty", param=param, code="invalid_value")
        return cls(kind="regex", text=_limited("|".join(map(_literal, options)), param), param=param)


def _literal(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def _limited(text: str, param: str) -> str:
    if len(text) > MAX_CHARS:
        message = f"{param} has {len(text)} characters; the most that a grammar may have is {MAX_CHARS}"
        raise BadRequest(message, param=param, code="invalid_value")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise BadRequest(f"{param} has a lone surrogate", param=param, code="invalid_value")
    return text
