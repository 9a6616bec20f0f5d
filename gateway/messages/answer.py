"""A whole chat completion as a message of Anthropic's API."""

import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...prompt import UpstreamError, Usage
from ..backends.base import Answer
from ..backends.upstream import read_usage
from ..wire import dumps, loads
from .form import as_error_body, ending, message_id, usage_object


def as_message(answer: Answer, *, stops: Collection[str]) -> Answer:
    """The same answer in Anthropic's form; `stops` are the strings that the request ends at.

    UpstreamError for what is no chat completion.
    """
    if answer.status >= 400:
        return replace(answer, body=as_error_body(answer.status, answer.body))
    completion = _parsed(answer.body)
    try:
        choice = completion["choices"][0]
        blocks = list(_blocks(choice["message"], cut=choice.get("finish_reason") == "length"))
        called = any(block["type"] == "tool_use" for block in blocks)
        end = ending(choice.get("finish_reason"), choice.get("stop_reason"), stops, called=called)
    except (LookupError, TypeError, AttributeError) as error:
        raise UpstreamError("the backend answered with what is no chat completion") from error
    usage = usage_object(read_usage(completion.get("usage")) or Usage())
    body = {"id": message_id(), "type": "message", "role": "assistant", "model": str(completion.get("model") or "")}
    return replace(answer, body=dumps({**body, "content": blocks, **end, "usage": usage}))


def call_id(call: Mapping[str, Any]) -> str:
    """A call's own id, or a new one where a server gives none."""
    return call["id"] if isinstance(call.get("id"), str) and call["id"] else f"toolu_{uuid.uuid4().hex}"


def read_input(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments as the object that they are; None where they are none. Nothing at all is an empty object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = loads(arguments) if isinstance(arguments, str) and arguments.strip() else {}
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def text_of(content: Any) -> str:
    """The text of a chat message's content: a string, or parts with texts."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _blocks(message: Mapping[str, Any], *, cut: bool) -> Iterator[dict[str, Any]]:
    """Text first, then calls. A call that was `cut` off within its arguments is none: nobody may act on a half."""
    text = text_of(message.get("content")) + text_of(message.get("refusal"))
    if text:
        yield {"type": "text", "text": text}
    calls = message.get("tool_calls") or ()
    legacy = message.get("function_call")
    for call in [*calls, *([{"function": legacy}] if legacy else [])]:
        given = read_input(call["function"].get("arguments"))
        if given is None and not cut:
            raise UpstreamError("the backend called a tool with arguments that are no JSON object")
        if given is not None:
            yield {"type": "tool_use", "id": call_id(call), "name": call["function"]["name"], "input": given}


def _parsed(body: bytes) -> Any:
    try:
        return loads(body)
    except ValueError as error:
        raise UpstreamError("the backend answered with broken JSON") from error
