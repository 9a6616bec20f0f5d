"""Cutting a request into segments: which text leaves there are, what kind each piece is, and which may be rewritten.

Without loss: the pieces of a leaf, joined, are the leaf. What is not understood (unknown roles, part types, odd tool
calls) becomes a segment that nobody may rewrite, or none at all, and is forwarded as it came.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .segment import Kind, Path, Segment

_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[^\n]*$", re.MULTILINE)
# How clients hand documents over inside a user's message: in tags, or before a line that begins the question.
_TAG = re.compile(r"<(/?)(documents?|context|sources?|passages?|chunks?)\b[^<>\n]{0,200}>", re.IGNORECASE)
_QUESTION_LABEL = re.compile(
    r"^(?:#{1,6} +)?\**(?:question|query|user question|user query|q|问题|問題|質問)\**[ \t]*[:：]",
    re.MULTILINE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What no step may rewrite. Code, tool schemas, tool calls and the question itself are always protected.

    `last_user=False` opens the documents inside the last user message (tagged, in a part of their own, or before a line
    that begins with "Question:"), never the question.
    """

    system: bool = True
    last_user: bool = True


def units_of(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Number the units: an assistant turn with tool calls and the tool messages after it are one."""
    units: list[int] = []
    open_call = False
    for message in messages:
        role = message.get("role")
        if role in ("tool", "function") and open_call:
            units.append(units[-1])
            continue
        units.append(units[-1] + 1 if units else 0)
        open_call = bool(message.get("tool_calls") or message.get("function_call"))
    return units


def cut(body: Mapping[str, Any], protection: Protection) -> tuple[Segment, ...]:
    """All segments of a Chat Completions body, in the order tools, then messages."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    cutter = _Cutter(protection, last_user=users[-1] if users else -1)
    for i, tool in enumerate(body.get("tools") or ()):
        text = json.dumps(tool, ensure_ascii=False, separators=(",", ":"))
        cutter.add("system", Kind.TOOL_SCHEMA, text, ("tools", i), message=-1, unit=-1, rewritable=False)
    for i, (message, unit) in enumerate(zip(messages, units_of(messages), strict=True)):
        cutter.message(i, unit, message)
    return tuple(cutter.segments)


class _Cutter:
    """Collects segments and numbers them."""

    def __init__(self, protection: Protection, *, last_user: int) -> None:
        self.segments: list[Segment] = []
        self._protection = protection
        self._last_user = last_user

    def add(self, role: str, kind: Kind, text: str, path: Path, *, message: int, unit: int, rewritable: bool) -> None:
        self.segments.append(
            Segment(
                id=len(self.segments),
                role=role,
                kind=kind,
                text=text,
                path=path,
                message=message,
                unit=unit,
                rewritable=rewritable,
                original=text,
            )
        )

    def message(self, i: int, unit: int, message: Mapping[str, Any]) -> None:
        role = str(message.get("role"))
        content = message.get("content")
        path: Path = ("messages", i, "content")
        if isinstance(content, str):
            self._leaf(role, content, path, i, unit, last_part=True)
        elif isinstance(content, Sequence):
            texts = [j for j, part in enumerate(content) if _is_text(part)]
            for j, part in enumerate(content):
                if _is_text(part):
                    self._leaf(role, part["text"], (*path, j, "text"), i, unit, last_part=j == texts[-1])
                else:
                    kind = Kind.IMAGE if _part_type(part).endswith("image_url") else Kind.OTHER
                    self.add(role, kind, "", (*path, j), message=i, unit=unit, rewritable=False)
        for call_path, arguments in _call_arguments(message):
            where: Path = ("messages", i, *call_path)
            self.add(role, Kind.TOOL_CALL, arguments, where, message=i, unit=unit, rewritable=False)

    def _leaf(self, role: str, text: str, path: Path, i: int, unit: int, *, last_part: bool) -> None:
        for kind, piece in self._kinds(role, text, i, last_part):
            closed = kind in (Kind.QUESTION, Kind.OTHER) or (
                (kind is Kind.SYSTEM and self._protection.system)
                or (i == self._last_user and self._protection.last_user)
            )
            for is_code, part in split_fences(piece):
                self.add(
                    role,
                    Kind.CODE if is_code else kind,
                    part,
                    path,
                    message=i,
                    unit=unit,
                    rewritable=not (closed or is_code),
                )

    def _kinds(self, role: str, text: str, i: int, last_part: bool) -> Iterator[tuple[Kind, str]]:
        """Every user message is cut alike, so that a turn's pieces stay the same when the next turn follows it."""
        if role != "user":
            yield _KIND_OF_ROLE.get(role, Kind.OTHER), text
            return
        for kind, piece in split_question(text) if last_part else [(Kind.DOCUMENT, text)]:
            yield Kind.HISTORY if kind is Kind.QUESTION and i != self._last_user else kind, piece


_KIND_OF_ROLE = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "assistant": Kind.HISTORY,
    "tool": Kind.TOOL_RESULT,
    "function": Kind.TOOL_RESULT,
}


def _part_type(part: Any) -> str:
    return str(part.get("type", "")) if isinstance(part, Mapping) else ""


def _is_text(part: Any) -> bool:
    return _part_type(part) == "text" and isinstance(part.get("text"), str)


def _call_arguments(message: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Paths and texts of well-formed tool-call arguments; odd ones (null, an object) are left alone."""
    calls = message.get("tool_calls")
    for j, call in enumerate(calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            yield ("tool_calls", j, "function", "arguments"), function["arguments"]
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping) and isinstance(legacy.get("arguments"), str):
        yield ("function_call", "arguments"), legacy["arguments"]


def split_question(text: str) -> Iterator[tuple[Kind, str]]:
    """Cut the text of a user message into DOCUMENT and QUESTION pieces; all of it is QUESTION when no documents
    are marked.
    """
    done = 0
    for start, end in _tagged(text):
        yield from _nonempty(Kind.QUESTION, text[done:start])
        yield from _nonempty(Kind.DOCUMENT, text[start:end])
        done = end
    if done:
        yield from _nonempty(Kind.QUESTION, text[done:])
        return
    labels = [match.start() for match in _QUESTION_LABEL.finditer(text)]
    border = labels[-1] if labels else 0
    yield from _nonempty(Kind.DOCUMENT, text[:border])
    yield from [(Kind.QUESTION, text[border:])]


def _tagged(text: str) -> Iterator[tuple[int, int]]:
    """Where the insides of outermost document tags stand. One pass: a million open tags cost no more than that."""
    opened: tuple[str, int] | None = None
    for tag in _TAG.finditer(text):
        name = tag[2].lower()
        if opened is None and not tag[1]:
            opened = name, tag.end()
        elif opened is not None and tag[1] and name == opened[0]:
            yield opened[1], tag.start()
            opened = None


def _nonempty(kind: Kind, text: str) -> Iterator[tuple[Kind, str]]:
    if text:
        yield kind, text


def split_fences(text: str) -> Iterator[tuple[bool, str]]:
    """Cut into (is_code, piece): fenced blocks with their fence lines, and what lies between.

    An open fence runs to the end.
    """
    done, opened = 0, None
    for match in _FENCE.finditer(text):
        if opened is None:
            if match.start() > done:
                yield False, text[done : match.start()]
            opened, done = match[1], match.start()
        elif match[1][0] == opened[0] and len(match[1]) >= len(opened):
            yield True, text[done : match.end()]
            opened, done = None, match.end()
    if done < len(text) or not text:
        yield opened is not None, text[done:]
