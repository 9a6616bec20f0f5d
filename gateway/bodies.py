"""JSON bodies of our own routes, and pydantic's complaints in the words of an OpenAI error."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..prompt import BadRequest
from ..prompt.jsontext import decode_text, parse

MAX_DEPTH = 32


class Body(BaseModel):
    """Base of the bodies: strict, unknown fields are errors."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


B = TypeVar("B", bound=Body)


def read_body(raw: bytes, form: type[B]) -> B:
    """Parse and check a body; BadRequest names the first field at fault."""
    body = parse(decode_text(raw), max_depth=MAX_DEPTH)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    try:
        return form.model_validate(body)
    except ValidationError as error:
        raise bad_request(error) from None


def bad_request(error: ValidationError, *, said: Mapping[str, str] | None = None) -> BadRequest:
    """The first fault, without the value that was given: it may be the user's text. `said` has own words by field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(fault["loc"][0]) if fault["loc"] else "body"
    param = field + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"][1:])
    if fault["type"] == "extra_forbidden":
        return BadRequest(f"{param!r} is not supported here", param=param, code="unsupported_parameter")
    if field in (said or {}):
        return BadRequest((said or {})[field], param=field, code="unsupported_value")
    if fault["type"] == "missing":
        return BadRequest(f"{param} is required", param=param, code="missing_parameter")
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return BadRequest(f"{param} must be an object", param=param, code="invalid_value")
    message = fault["msg"].removeprefix("Value error, ")
    return BadRequest(f"{param}: {message[0].lower()}{message[1:]}", param=param, code="invalid_value")
