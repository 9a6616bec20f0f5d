"""Pydantic's complaints about a policy file in a policy writer's words: where, what, and the nearest valid key.

Values are never repeated in a message: one of them may be a secret that does not belong there.
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .schema import ApiKeySpec, PolicyFile
from .yamltree import Path

_SECRET_KEYS = {
    "api_key", "apikey", "api-key", "key", "token", "secret", "password", "authorization", "bearer", "auth", "headers",
}  # fmt: skip
_KINDS = {
    "string_type": "must be a text (quote it if it looks like a number)",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
    "tuple_type": "must be a list",
    "missing": "is required",
    "string_too_short": "must not be empty",
    "union_tag_not_found": "needs kind: embedded or kind: openai",
    "union_tag_invalid": "kind must be embedded or openai",
    "finite_number": "must be a finite number",
}


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that looks most like `name`, however little; None only when there is none at all."""
    lowered = {candidate.lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower()[:200], lowered, n=1, cutoff=0.0)
    return lowered[close[0]] if close else None


def complaints(error: ValidationError, data: Any) -> list[tuple[Path, str]]:
    """(path in `data`, message) for each error, one for each path."""
    found: dict[Path, str] = {}
    for details in error.errors(include_url=False, include_input=False):
        path = _path_in(data, details)
        found.setdefault(path, _message(details, path, data))
    return list(found.items())


def _path_in(data: Any, details: ErrorDetails) -> Path:
    """Pydantic's location without the parts that name alternatives of a union or the key side of a mapping."""
    path: list[str | int] = []
    for part in details["loc"]:
        if isinstance(data, Mapping) and part in data:
            data = data[str(part)]
        elif isinstance(data, tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif details["type"] != "missing" or part != details["loc"][-1]:
            continue
        path.append(part)
    return tuple(path)


def _message(details: ErrorDetails, path: Path, data: Any) -> str:
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), path[:-1], data)
    if kind == "literal_error" and path == ("version",):
        return "version must be 1, the only version of policy files so far"
    text = _KINDS.get(kind) or details["msg"].removeprefix("Value error, ")
    text = text.replace("Input should", "must").replace("String should", "must")
    return f"{dotted(path) or 'the file'}{':' if 'needs' in text or text.startswith('kind ') else ''} {text}"


def _unknown_key(key: str, parent: Path, data: Any) -> str:
    model = model_at(parent, data)
    valid = sorted(model.model_fields) if model else []
    where = f" in {dotted(parent)}" if parent else ""
    shown = repr(key if len(key) <= 60 else key[:57] + "...")
    if key.lower() in _SECRET_KEYS and {"api_key_env", "sha256"} & set(valid):
        instead = "its sha256, or its environment variable as env" if model is ApiKeySpec else "it as api_key_env"
        return f"unknown key {shown}{where}: a secret is never written into this file; name {instead}"
    return f"unknown key {shown}{where}; the nearest valid key is {nearest(key, valid)!r} (of {', '.join(valid)})"


def model_at(path: Path, data: Any) -> type[BaseModel] | None:
    """The model that describes the mapping at `path`; a backend's by its `kind`. None where there is no single one."""
    annotation: Any = PolicyFile
    for part in path:
        annotation = _step(_single(annotation, data), part)
        if isinstance(data, tuple):
            data = data[part] if isinstance(part, int) else None
        else:
            data = data.get(part) if isinstance(data, Mapping) else None
    return _single(annotation, data)


def _step(annotation: Any, part: str | int) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return field.annotation if field else None
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(annotation) is tuple else None


def _single(annotation: Any, data: Any) -> Any:
    """Unwrap Annotated and optional; of several models take the one whose `kind` the data has."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    options = [_single(option, data) for option in get_args(annotation) if option is not type(None)]
    if len(options) == 1:
        return options[0]
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return next((o for o in options if kind in get_args(o.model_fields["kind"].annotation)), None)


def dotted(path: Path) -> str:
    """routes[0].match.model"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text if len(text) <= 120 else text[:117] + "..."
