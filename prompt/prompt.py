"""Prompt: a Chat Completions request as an ordered list of segments, changed only where somebody asked for it.

Immutable: every change returns a new Prompt. An untouched prompt renders to the very bytes (or the very message
objects) that came in.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from . import jsontext
from .cut import Protection, cut, units_of
from .errors import BadRequest
from .segment import Kind, Path, Segment


class Prompt:
    """A request's messages, cut into segments. Make one with `from_body` or `from_messages`."""

    __slots__ = ("_body", "_dropped", "_edited", "_fields", "_originals", "_protection", "_raw", "_segments")

    def __init__(
        self,
        *,
        body: Mapping[str, Any],
        originals: Sequence[Any],
        raw: bytes | None,
        segments: tuple[Segment, ...],
        protection: Protection,
        dropped: frozenset[int] = frozenset(),
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._body = body
        self._originals = originals
        self._raw = raw
        self._segments = segments
        self._protection = protection
        self._dropped = dropped
        self._fields = dict(fields or {})
        self._edited: dict[Path, str] | None = None

    @classmethod
    def from_body(cls, raw: bytes, *, max_depth: int = 128) -> Self:
        """Read a request body. BadRequest for broken or too deep JSON, lone surrogates and malformed `messages`."""
        body = jsontext.parse(jsontext.decode_text(raw), max_depth=max_depth)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", code="invalid_json")
        check_messages(body)
        protection = Protection()
        return cls(
            body=body, originals=body["messages"], raw=raw, segments=cut(body, protection), protection=protection
        )

    @classmethod
    def from_messages(cls, messages: Iterable[Any], **fields: Any) -> Self:
        """Wrap messages that are in memory: mappings, or objects with `model_dump()` such as the OpenAI SDK's.

        `fields` are the request's other fields (model, tools, ...).
        """
        originals = list(messages)
        body = {**fields, "messages": [_plain(message, i) for i, message in enumerate(originals)]}
        check_messages(body)
        protection = Protection()
        return cls(body=body, originals=originals, raw=None, segments=cut(body, protection), protection=protection)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._segments

    @property
    def body(self) -> Mapping[str, Any]:
        """The request as it would go out now, `messages` included."""
        return {**self._body, **self._fields, "messages": self.messages}

    @property
    def messages(self) -> list[Any]:
        """The messages as they would go out now; an unchanged one is the same object that came in."""
        if not self._dropped and not self._edits():
            return list(self._originals)
        edits: dict[int, dict[Path, str]] = {}
        for path, text in self._edits().items():
            edits.setdefault(int(path[1]), {})[path[2:]] = text
        return [
            _with_leaves(self._body["messages"][i], edits[i]) if i in edits else original
            for i, original in enumerate(self._originals)
            if i not in self._dropped
        ]

    @property
    def arrived(self) -> Sequence[Mapping[str, Any]]:
        """The messages as they came, as plain objects."""
        return self._body["messages"]

    @property
    def dropped(self) -> frozenset[int]:
        """The numbers of messages that were taken out."""
        return self._dropped

    @property
    def question(self) -> str:
        """What the user asks: the last user message without the documents that it carries.

        All of the message where nothing else is in it; "" when there is no user message.
        """
        asked = "".join(segment.text for segment in self._segments if segment.kind is Kind.QUESTION).strip()
        if asked:
            return asked
        users = [segment for segment in self._segments if segment.role == "user"]
        return "".join(segment.text for segment in users if segment.message == users[-1].message).strip()

    @property
    def changed(self) -> bool:
        """Whether rendering gives anything else than what came in."""
        return bool(self._dropped or self._fields or self._edits())

    @property
    def edits(self) -> Mapping[Path, str]:
        """By its path, the new text of each leaf whose text is not what came in."""
        return self._edits()

    @property
    def chars(self) -> int:
        """Characters in all text segments."""
        return sum(len(segment.text) for segment in self._segments)

    def segment(self, segment_id: int) -> Segment:
        """The segment with this id; KeyError when there is none."""
        for segment in self._segments:
            if segment.id == segment_id:
                return segment
        raise KeyError(segment_id)

    def text_of(self, path: Path) -> str:
        """The present text of the leaf at `path`."""
        return "".join(segment.text for segment in self._segments if segment.path == path)

    def rendered_index(self, message: int) -> int:
        """Where message number `message` of the original stands in `messages` now (it must not have been dropped)."""
        assert message not in self._dropped, f"message {message} was dropped"
        return message - sum(1 for gone in self._dropped if gone < message)

    def replace(self, texts: Mapping[int, str]) -> Self:
        """Exchange the texts of segments by id. Protected segments must not be named."""
        for segment in self._segments:
            assert segment.id not in texts or segment.rewritable or segment.original is None, f"{segment} is protected"
        return self._with(
            segments=tuple(
                replace(segment, text=texts[segment.id]) if segment.id in texts else segment
                for segment in self._segments
            )
        )

    def settled(self, texts: Mapping[int, str]) -> Self:
        """Put in what went out before, protected or not, by the ids of segments. Only before their first change."""
        assert not self._edits() and not self._dropped, "segments were changed already"
        return self._with(
            segments=tuple(replace(segment, text=texts.get(segment.id, segment.text)) for segment in self._segments)
        )

    def insert_before(
        self, segment_id: int, texts: Sequence[tuple[str, str | None]], *, kind: Kind = Kind.DOCUMENT
    ) -> Self:
        """Put new pieces of text into the leaf of a segment, before it. `texts` are (text, source) pairs.

        Pieces without a source (tags, separators) become protected segments of kind OTHER.
        """
        at = next(i for i, segment in enumerate(self._segments) if segment.id == segment_id)
        target = self._segments[at]
        first = max(segment.id for segment in self._segments) + 1
        fresh = tuple(
            replace(
                target,
                id=first + n,
                kind=Kind.OTHER if source is None else kind,
                text=text,
                original=None,
                source=source,
                rewritable=source is not None,
            )
            for n, (text, source) in enumerate(texts)
        )
        return self._with(segments=(*self._segments[:at], *fresh, *self._segments[at:]))

    def drop_units(self, units: Iterable[int]) -> Self:
        """Take out whole units (see Segment.unit) with all their messages."""
        gone = frozenset(units)
        lost = frozenset(i for i, unit in enumerate(units_of(self._body["messages"])) if unit in gone)
        kept = tuple(segment for segment in self._segments if segment.message not in lost)
        return self._with(segments=kept, dropped=self._dropped | lost)

    def with_fields(self, **fields: Any) -> Self:
        """Set top-level fields of the request, such as `model`."""
        assert "messages" not in fields, "messages change through segments"
        fresh = {name: value for name, value in fields.items() if self._body.get(name, _MISSING) != value}
        kept = {name: value for name, value in self._fields.items() if name not in fields}
        return self._with(fields={**kept, **fresh}) if fresh or len(kept) < len(self._fields) else self

    def with_protection(self, protection: Protection) -> Self:
        """Cut anew under other rules of protection. Only before the first change of a segment."""
        assert not self._edits() and not self._dropped, "segments were changed already"
        return self._with(segments=cut(self._body, protection), protection=protection)

    def render(self) -> bytes:
        """The request body.

        Byte-identical to what came in when nothing changed; else only the changed places differ.
        """
        if self._raw is None:
            body = {**self._body, **self._fields, "messages": [_plain(m, i) for i, m in enumerate(self.messages)]}
            return json.dumps(body, ensure_ascii=False).encode("utf-8")
        if not self.changed:
            return self._raw
        edits = {path: json.dumps(text, ensure_ascii=False) for path, text in self._edits().items()}
        fields: dict[Path, str] = {
            (name,): json.dumps(value, ensure_ascii=False) for name, value in self._fields.items()
        }
        gone: list[Path] = [("messages", i) for i in sorted(self._dropped)]
        return jsontext.splice(self._raw.decode("utf-8"), replace={**edits, **fields}, remove=gone).encode("utf-8")

    def _with(self, **changes: Any) -> Self:
        state = {
            "body": self._body,
            "originals": self._originals,
            "raw": self._raw,
            "segments": self._segments,
            "protection": self._protection,
            "dropped": self._dropped,
            "fields": self._fields,
        }
        return type(self)(**{**state, **changes})

    def _edits(self) -> Mapping[Path, str]:
        """The leaves whose text differs from what came in; worked out once."""
        if self._edited is None:
            self._edited = self._edits_now()
        return self._edited

    def _edits_now(self) -> dict[Path, str]:
        touched = {segment.path for segment in self._segments if segment.changed}
        if not touched:
            return {}
        texts: dict[Path, list[str]] = {path: [] for path in touched}
        originals: dict[Path, list[str]] = {path: [] for path in touched}
        for segment in self._segments:
            if segment.path in touched:
                texts[segment.path].append(segment.text)
                originals[segment.path].append(segment.original or "")
        joined = {path: "".join(parts) for path, parts in texts.items()}
        return {path: text for path, text in joined.items() if text != "".join(originals[path])}


_MISSING = object()


def _plain(message: Any, i: int) -> dict[str, Any]:
    if isinstance(message, Mapping):
        return dict(message)
    if hasattr(message, "model_dump"):
        return message.model_dump(exclude_none=True)
    raise BadRequest(f"messages[{i}] must be an object, not {type(message).__name__}", param=f"messages[{i}]")


def _with_leaves(message: Mapping[str, Any], leaves: Mapping[Path, str]) -> dict[str, Any]:
    fresh: Any = copy.deepcopy(dict(message))
    for path, text in leaves.items():
        holder = fresh
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = text
    return fresh


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise BadRequest, naming the field, unless `messages` has the outer form of Chat Completions messages."""
    messages = body.get("messages")
    if messages is None:
        raise BadRequest("messages is required", param="messages")
    if not isinstance(messages, list):
        raise BadRequest(f"messages must be an array, not {_json_type(messages)}", param="messages")
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRequest(f"tools must be an array, not {_json_type(tools)}", param="tools")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be an object, not {_json_type(message)}", param=where)
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}.role must be a string", param=f"{where}.role")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise BadRequest(
            f"{where}.content must be a string, an array of parts or null, not {_json_type(content)}",
            param=f"{where}.content",
        )
    for j, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise BadRequest(
                f"{where}.content[{j}] must be an object with a string type", param=f"{where}.content[{j}]"
            )


def _json_type(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null" if value is None else type(value).__name__)
