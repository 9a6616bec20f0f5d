"""What Anthropic's API looks like where it is not about content: errors, usage, ends of answers."""

import json
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from ...prompt import Usage
from ..wire import dumps

# Anthropic's own words for what a status means.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
            "content_filter": "refusal"}  # fmt: skip


def message_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


def error_object(status: int, message: str, *, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error, and the data of an error event."""
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def status_of(status: int) -> int:
    """Anthropic's status for one of ours: who finds no room is told so by a number of its own."""
    return _OVERLOADED if status == 503 else status


def as_error_body(status: int, body: bytes) -> bytes:
    """Any upstream's error body; one that has the form already stays byte for byte."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and parsed.get("type") == "error" and isinstance(parsed.get("error"), dict):
        return body
    return dumps(error_object(status, _said(parsed) or f"the upstream answered with status {status}"))


def _said(parsed: Any) -> str | None:
    found = parsed
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return found if isinstance(found, str) else None if isinstance(found, dict | None) else json.dumps(found)


def usage_object(usage: Usage) -> dict[str, int]:
    """Anthropic counts the tokens that came from its cache apart from the others."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def usage_of(raw: Any) -> Usage | None:
    """Our usage of Anthropic's object; what a cache was written with is part of the prompt, too."""
    if not isinstance(raw, Mapping):
        return None
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    fresh, written, read = (_count(raw.get(name)) for name in names)
    return Usage(
        prompt_tokens=fresh + written + read,
        completion_tokens=_count(raw.get("output_tokens")),
        cached_tokens=read,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= 1 << 53 else 0


def ending(reason: Any, told: Any, stops: Collection[str], *, called: bool) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`; `told` is what an engine says of the stop string that it met.

    Some servers finish with `stop` although they called a tool.
    """
    if reason == "stop" and isinstance(told, str) and told in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": told}
    known = _REASONS.get(reason, "end_turn") if isinstance(reason, str) else "end_turn"
    return {"stop_reason": "tool_use" if called and known == "end_turn" else known, "stop_sequence": None}
