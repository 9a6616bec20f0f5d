"""The few words in which the schemas of the document are written: JSON Schema 2020-12, as OpenAPI 3.1 has it."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from .kinds import Schema


def ref(name: str) -> Schema:
    """A schema among the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: str) -> Schema:
    return {"type": "string", "const": value}


def many(items: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these members; others may be there, too."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def form_of(model: type[BaseModel], *, prefix: str = "") -> Schema:
    """The schema of a body that one of our own forms checks; its parts, which `$defs` has, begin with `prefix`."""
    form = model.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    parts = {f"{prefix}{name}": part for name, part in form.pop("$defs", {}).items()}
    return {**form, "$defs": parts}


def fields_of(form: Schema) -> dict[str, Schema]:
    """The fields of a form where null counts as absent."""
    return {name: field if _may_be_null(field) else or_null(field) for name, field in form["properties"].items()}


def _may_be_null(field: Schema) -> bool:
    kinds = field.get("anyOf")
    return {"type": "null"} in kinds if kinds else not {"type", "$ref", "enum"} & field.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a route takes and gives, beyond its path, its parameters and its docstring.

    `body` and `answer` are of JSON; None: no body is read, or the answer is plain text. `streamed`: with `stream: true`
    the answer is server-sent events whose data is JSON. `also` are further telling statuses with their schema. `open`:
    no key is asked for. `text_body`: the body may be a text, too.
    """

    tag: str
    answer: Schema | None
    status: int = 200
    body: Schema | None = None
    streamed: bool = False
    also: Mapping[int, Schema] | None = None
    error: str = "Error"
    open: bool = False
    text_body: bool = False
