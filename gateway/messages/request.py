"""Anthropic's Messages body as a Chat Completions body, and where each of its texts came from.

Nothing is refused here that only matters to who is asked: what Chat Completions have no place for is noted, for an
upstream that speaks Anthropic's API gets the body as it came and judges for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...prompt import BadRequest, Path
from .blocks import Notes, call_of, content_of, image_of, texts_of, tool_of

MOST_STOPS = 4  # of Chat Completions
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Ours to say otherwise, or without any effect on an answer's form. Marks for a provider's prompt cache stand in blocks.
_OWN = frozenset(
    {
        "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "metadata", "thinking",
        "output_config", "output_format", "service_tier", "cache_control", "stream_options",
    }
)  # fmt: skip


@dataclass(slots=True)
class ChatBody:
    """`body` has all fields; `origins` maps the path of a text in it to that text's path in the Messages body.

    `notes` are what Chat Completions cannot say, each with its place.
    """

    body: dict[str, Any]
    origins: dict[Path, Path]
    notes: Notes

    def refuse(self) -> None:
        """BadRequest for the first of the notes."""
        if self.notes:
            raise self.notes[0]


def chat_body(body: Mapping[str, Any]) -> ChatBody:
    """Translate; BadRequest where `messages` or `system` have no form that could be read at all."""
    turns = _Turns()
    turns.system(body.get("system"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        turns.add(message, index)
    if isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        turns.note("messages: the last one is the assistant's; an answer cannot be begun for it here")
    fields = {name: value for name, value in body.items() if name not in _OWN}
    fields |= _fields(body, turns.notes)
    if body.get("stream"):
        fields["stream_options"] = {"include_usage": True}  # Anthropic's streams always tell it
    return ChatBody(body={**fields, "messages": turns.messages}, origins=turns.origins, notes=turns.notes)


@dataclass(slots=True)
class _Turns:
    """Collects messages."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[Path, Path] = field(default_factory=dict)
    notes: Notes = field(default_factory=list)

    def note(self, message: str) -> None:
        self.notes.append(BadRequest(message, code="unsupported_value"))

    def system(self, system: Any) -> None:
        if system is None or system == []:
            return
        if not isinstance(system, str | list):
            raise BadRequest("system: must be a string or a list of text blocks", param="system")
        self._message("system", texts_of(system, ("system",), self.notes))

    def add(self, message: Any, index: int) -> None:
        where = f"messages.{index}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{where}: must be an object with a role", param=where)
        role, content = message["role"], message.get("content")
        if not isinstance(content, str | list):
            raise BadRequest(f"{where}.content: must be a string or a list of blocks", param=f"{where}.content")
        if role not in ("user", "assistant"):
            self.note(f"{where}.role: must be user or assistant, not {role[:40]!r}")
        path: Path = ("messages", index, "content")
        if isinstance(content, str):
            self._message(role, [(content, path)])
        elif role == "assistant":
            self._assistant(content, path)
        else:
            self._user(role, content, path)

    def _assistant(self, blocks: Sequence[Any], path: Path) -> None:
        """Texts and calls. What a model thought in earlier turns is its own affair: only its maker can read it."""
        kept = [(at, block) for at, block in enumerate(blocks) if not _is(block, "thinking", "redacted_thinking")]
        calls = [call_of(block, (*path, at), self.notes) for at, block in kept if _is(block, "tool_use")]
        parts = [part for at, block in kept if not _is(block, "tool_use")
                 for part in content_of(block, (*path, at), self.notes)]  # fmt: skip
        self._message("assistant", parts, calls=calls)

    def _user(self, role: str, blocks: Sequence[Any], path: Path) -> None:
        """Results of tools come first, each as a message, and their images with what the user says."""
        parts: list[tuple[Any, Path | None]] = []
        for at, block in enumerate(blocks):
            if not _is(block, "tool_result"):
                parts += content_of(block, (*path, at), self.notes)
                continue
            inner = block.get("content", "")
            said = texts_of(inner, (*path, at, "content"), self.notes, beside=("image",))
            self._message("tool", said, id=block.get("tool_use_id"))
            images = [one for one in inner if _is(one, "image")] if isinstance(inner, list) else []
            parts += [(image_of(one, (*path, at), self.notes), None) for one in images]
        if parts or not any(_is(block, "tool_result") for block in blocks):
            self._message(role, parts)

    def _message(
        self, role: str, parts: Sequence[tuple[Any, Path | None]], *, id: Any = None, calls: Sequence[Any] = ()
    ) -> None:
        """One message of texts and other parts. A single text is its content, several things are its parts."""
        here: Path = ("messages", len(self.messages), "content")
        content: Any = "" if not calls else None
        if len(parts) == 1 and isinstance(parts[0][0], str):
            content = parts[0][0]
            self._from(here, parts[0][1])
        elif parts:
            content = [{"type": "text", "text": one} if isinstance(one, str) else one for one, _ in parts]
            for at, (one, origin) in enumerate(parts):
                if isinstance(one, str):
                    self._from((*here, at, "text"), origin)
        extra = {"tool_calls": list(calls)} if calls else {}
        extra |= {"tool_call_id": id} if role == "tool" else {}
        self.messages.append({"role": role, "content": content, **extra})

    def _from(self, path: Path, origin: Path | None) -> None:
        if origin is not None:
            self.origins[path] = origin


def _is(block: Any, *kinds: str) -> bool:
    return isinstance(block, Mapping) and block.get("type") in kinds


def _fields(body: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The fields besides messages, by the names that Chat Completions have for them."""
    fields: dict[str, Any] = {}
    most = body.get("max_tokens")
    if type(most) is not int or most < 1:
        notes.append(BadRequest("max_tokens: must be an integer of at least 1", param="max_tokens"))
    fields["max_tokens"] = most
    stops = body.get("stop_sequences")
    if stops:
        if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops) or len(stops) > MOST_STOPS:
            notes.append(BadRequest(f"stop_sequences: must be up to {MOST_STOPS} strings here", param="stop_sequences"))
        fields["stop"] = stops
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools: must be a list", param="tools")
    if tools:
        fields["tools"] = [tool_of(tool, f"tools.{at}", notes) for at, tool in enumerate(tools)]
    fields |= _choice(body.get("tool_choice"), notes)
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("user_id"), str):
        fields["user"] = metadata["user_id"]
    config = body.get("output_config")
    asked = config.get("format") if isinstance(config, Mapping) else body.get("output_format")
    if asked is not None:
        fields["response_format"] = _format(asked, notes)
    return fields


def _choice(choice: Any, notes: Notes) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    fields: dict[str, Any] = {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        message = "tool_choice: must be an object whose type is auto, any, none, or tool with a name"
        notes.append(BadRequest(message, param="tool_choice"))
        return {}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _format(asked: Any, notes: Notes) -> dict[str, Any] | None:
    if isinstance(asked, Mapping) and asked.get("type") == "json_schema" and isinstance(asked.get("schema"), Mapping):
        schema = {"name": "answer", "schema": asked["schema"], "strict": True}
        return {"type": "json_schema", "json_schema": schema}
    message = "output_config.format: must be an object of the type json_schema with a schema"
    notes.append(BadRequest(message, param="output_config.format"))
    return None
