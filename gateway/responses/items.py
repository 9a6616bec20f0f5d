"""Items of the Responses API as chat messages: the input of a request, and what an earlier answer said.

Only what a chat completion has a place for; other items are refused by their place and type. What a model thought
(`reasoning` items) is left out: chat completions do not take it back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...prompt import BadRequest

Message = dict[str, Any]

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text"}


def messages_of(given: str | Sequence[Any], *, earlier: Iterable[Message] = ()) -> list[Message]:
    """The chat messages of a request's input. `earlier` are those that it follows: what outputs answer to may be there.

    BadRequest names the item and the field at fault.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    known = {call["id"] for message in earlier for call in message.get("tool_calls") or ()}
    messages: list[Message] = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise BadRequest(f"{where} must be an object", param=where)
        _add(messages, item, where, known)
    if not messages:
        raise BadRequest("input must have at least one message or function output", param="input")
    return messages


def _add(messages: list[Message], item: Mapping[str, Any], where: str, known: set[str]) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        messages.append(_message(item, where))
    elif kind == "function_call":
        call = _call(item, where)
        known.add(call["id"])
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append(_output(item, where, known))
    elif kind != "reasoning":
        shown = repr(kind)[:60]
        raise BadRequest(
            f"{where}: items of type {shown} cannot be served here; messages, function calls and their outputs can",
            param=f"{where}.type",
        )


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", param=f"{where}.role")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or a list of parts", param=where)
    parts = [_part(part, f"{where}[{place}]") for place, part in enumerate(content)]
    # One text is the same said as a string, and that every server and every chat template takes.
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, where: str) -> Message:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXTS:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text(part, "refusal", where)}
    if kind == "input_image" and part.get("image_url"):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": _text(part, "image_url", where), **detail}}
    if kind == "input_file" and part.get("file_data"):
        name = {"filename": part["filename"]} if part.get("filename") else {}
        return {"type": "file", "file": {"file_data": _text(part, "file_data", where), **name}}
    shown = repr(kind)[:60]
    raise BadRequest(
        f"{where}: a part of type {shown} cannot be served here; texts can, images as image_url, files as file_data",
        param=where,
    )


def _call(item: Mapping[str, Any], where: str) -> Message:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _output(item: Mapping[str, Any], where: str, known: set[str]) -> Message:
    call = _text(item, "call_id", where)
    if call not in known:
        raise BadRequest(f"{where}: no function call before it has the call_id {call[:80]!r}", param=f"{where}.call_id")
    return {"role": "tool", "tool_call_id": call, "content": _content(item.get("output"), f"{where}.output")}


def _text(holder: Mapping[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
