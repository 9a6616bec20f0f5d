"""Errors on the wire, in the form that a route's clients read: OpenAI's, or Anthropic's below /v1/messages."""

from collections.abc import Mapping
from typing import Any

from .messages.form import error_object, status_of
from .wire import dumps

_MESSAGES = "/v1/messages"


def on_the_wire(
    path: str, status: int, error: Mapping[str, Any], *, request_id: str
) -> tuple[int, bytes, Mapping[str, str]]:
    """Status, body and further headers for an OpenAI error object that answers a request to `path`."""
    if path != _MESSAGES and not path.startswith(f"{_MESSAGES}/"):
        return status, dumps(error), {}
    body = error_object(status, error["error"]["message"], request_id=request_id)
    return status_of(status), dumps(body), {"request-id": request_id}
