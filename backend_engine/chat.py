"""Chat Completions messages in the plain shape that chat templates understand: one string of content, a known role.

Which features a template has is read off its source: a template that never names `tool_calls` cannot render them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..prompt.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TOOL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What models write around tool calls; some tokenizers have special tokens for it."""
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # part type to the key of its text


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """Characters `start..end` of a message's content (or of its part `part`) that are tokenized on their own."""

    message: int
    part: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """`content` as one string; `fields` has every other key. `offsets` are the places of the content's parts in it."""

    content: str
    offsets: tuple[int, ...]
    fields: dict[str, Any]

    def place(self, mark: ChunkMark) -> tuple[int, int]:
        """Where a mark lies in `content`."""
        offset = self.offsets[mark.part] if mark.part is not None else 0
        start, end = offset + mark.start, offset + mark.end
        assert 0 <= start < end <= len(self.content), (mark, len(self.content))
        return start, end


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[PlainMessage]:
    """Raises BadRequest naming the first message or part that is not text."""
    return [_plain(message, index, template) for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], index: int, template: str) -> PlainMessage:
    texts = _texts(message.get("content"), f"messages[{index}].content")
    content = "\n".join(texts)
    offsets, offset = [], 0
    for text in texts:
        offsets.append(offset)
        offset += len(text) + 1
    fields = {key: value for key, value in message.items() if key != "content"}
    role = fields.get("role")
    # A template may name more roles than the API has.
    if role not in ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
        raise BadRequest(f"role must be one of {', '.join(ROLES)}, not {role!r}", param=f"messages[{index}].role")
    if fields.get("role") == "developer" and "developer" not in template:
        fields["role"] = "system"
    calls = _calls(fields.pop("tool_calls", None), f"messages[{index}].tool_calls")
    if (legacy := fields.pop("function_call", None)) is not None:  # the one call of the API before tools
        calls = [*calls, *_calls([{"type": "function", "function": legacy}], f"messages[{index}].function_call")]
    if calls:
        if "tool_calls" in template:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        else:
            content = "\n".join([*([content] if content else []), *map(_call_as_text, calls)])
    return PlainMessage(content, tuple(offsets), fields)


def _calls(calls: Any, where: str) -> list[Mapping[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRequest("tool_calls must be a list", param=where)
    for number, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function") or {}, Mapping):
            raise BadRequest("a tool call must be an object with an object 'function'", param=f"{where}[{number}]")
    return calls


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadRequest("content must be a string or a list of parts", param=where)
    return [_part_text(part, f"{where}[{number}]") for number, part in enumerate(content)]


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise BadRequest(f"this model reads text only, not a part of type {kind!r}", param=where)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise BadRequest(f"a {kind} part needs a string {TEXT_PARTS[kind]!r}", param=where)
    return text


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates expect arguments as an object, the API has them as JSON text; text that is no object stays text."""
    function = dict(call.get("function") or {})
    arguments = _parsed(function.get("arguments"))
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _call_as_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    shown = {"name": function.get("name"), "arguments": _parsed(function.get("arguments"))}
    return json.dumps(shown, ensure_ascii=False)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
