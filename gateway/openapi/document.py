"""Puts the document together: FastAPI knows paths, parameters and docstrings; what goes over the wire is told here.

A route without an entry is left out, and a test says so: a body that nobody has described is not described wrongly.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from . import chat, house, messages, responses
from .kinds import TEXT, Schema
from .schema import Operation, record, ref

OPERATIONS = chat.OPERATIONS | responses.OPERATIONS | messages.OPERATIONS | house.OPERATIONS
_SCHEMAS = chat.SCHEMAS | responses.SCHEMAS | messages.SCHEMAS | house.SCHEMAS
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# OpenAPI 3.1 has no words for a stream: as tools read it, this is one of its events.
_EVENT = {**record({"data": TEXT}, {"event": TEXT}), "description": "Server-sent events, where `stream` is true."}


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application's routes."""
    told = get_openapi(
        title="promptsluice",
        version=version("promptsluice"),
        description="An OpenAI- and Anthropic-compatible gateway that makes prompts cheaper.",
        routes=routes,
    )
    paths: dict[str, Any] = {}
    for path, methods in told["paths"].items():
        for method, found in methods.items():
            operation = OPERATIONS.get(f"{method.upper()} {path}")
            if operation is not None:
                paths.setdefault(path, {})[method] = _described(found, operation)
    return {**told, "paths": paths, "components": {"schemas": _components(), "securitySchemes": _KEYS}}


def _described(found: dict[str, Any], operation: Operation) -> dict[str, Any]:
    """FastAPI's entry with what the route really takes and gives."""
    whole = {"text/plain": {"schema": TEXT}} if operation.answer is None else _json(operation.answer)
    streamed = {"text/event-stream": {"schema": _EVENT}} if operation.streamed else {}
    responses: dict[str, Any] = {str(operation.status): {"description": "Done.", "content": whole | streamed}}
    for status, schema in (operation.also or {}).items():
        responses[str(status)] = {"description": "Not so.", "content": _json(schema)}
    responses["default"] = {"description": "What went wrong.", "content": _json(ref(operation.error))}
    fields: dict[str, Any] = {"tags": [operation.tag], "responses": responses}
    if operation.body is not None:
        text = {"text/plain": {"schema": TEXT}, "text/markdown": {"schema": TEXT}} if operation.text_body else {}
        fields["requestBody"] = {"required": True, "content": _json(operation.body) | text}
    if not operation.open:
        # A policy file may list keys; where it lists none, none is needed.
        fields["security"] = [{}, *({name: []} for name in _KEYS)]
    return {**found, **fields}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _components() -> dict[str, Schema]:
    """All schemas by name; the parts of our own forms beside them."""
    components: dict[str, Schema] = {}
    for name, schema in _SCHEMAS.items():
        own = {key: value for key, value in schema.items() if key != "$defs"}
        for key, value in {**schema.get("$defs", {}), name: own}.items():
            assert components.setdefault(key, value) == value, f"two schemas are called {key}"
    return components
