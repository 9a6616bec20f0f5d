"""Which grammar a chat request asks for: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

Strict or not, a schema is kept to the letter, or refused with the place of what cannot be kept.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from ..backend_engine.grammar import Grammar
from ..prompt import BadRequest
from ..prompt.jsontext import parse
from .bodies import MAX_DEPTH, Body

_JSON_DEPTH = 4 * MAX_DEPTH


class JsonSchema(Body):
    """OpenAI's wrapper of a schema; only the schema counts."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """vLLM's clients also send what they leave open, as null."""
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Formats(Body):
    """The fields of a request that restrict what is written."""

    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

    @property
    def structured(self) -> bool:
        """Whether any of them does."""
        return bool(self._asked())

    def grammar(self) -> Grammar:
        """What they ask for; a large schema takes a while. BadRequest where it cannot be had, or more than one is."""
        asked = self._asked()
        fields = sorted(asked)
        if len(fields) > 1:
            message = f"{fields[0]} and {fields[1]} cannot be combined; leave out one of them"
            raise BadRequest(message, param=fields[1], code="invalid_value")
        return asked[fields[0]](fields[0])

    def _asked(self) -> dict[str, Callable[[str], Grammar]]:
        """By field, what makes its grammar, given the field."""
        asked: dict[str, Callable[[str], Grammar]] = {}
        wrapped, more = self.response_format.json_schema, self.structured_outputs
        if self.response_format.type == "json_object":
            asked["response_format"] = lambda field: Grammar.json_object(param=field)
        if wrapped is not None:
            asked["response_format.json_schema.schema"] = lambda field: Grammar.json_schema(
                wrapped.schema_, param=field
            )
        for field, schema in (("guided_json", self.guided_json), ("structured_outputs.json", more.json_)):
            if schema is not None:
                asked[field] = lambda field, schema=schema: Grammar.json_schema(_read(schema, field), param=field)
        for field, pattern in (("guided_regex", self.guided_regex), ("structured_outputs.regex", more.regex)):
            if pattern is not None:
                asked[field] = lambda field, pattern=pattern: Grammar.regex(pattern, param=field)
        for field, options in (("guided_choice", self.guided_choice), ("structured_outputs.choice", more.choice)):
            if options is not None:
                asked[field] = lambda field, options=options: Grammar.choice(options, param=field)
        if more.json_object:
            asked["structured_outputs.json_object"] = lambda field: Grammar.json_object(param=field)
        return asked


def _read(schema: Any, field: str) -> Any:
    """vLLM takes a schema also as its text."""
    if not isinstance(schema, str):
        return schema
    try:
        return parse(schema, max_depth=_JSON_DEPTH)
    except BadRequest as error:
        raise BadRequest(f"{field}: {error.message}", param=field, code="invalid_value") from error
