"""Anthropic's content blocks and tools, each as what Chat Completions have for it.

A function that finds something which has no counterpart there adds a BadRequest to the notes, and leaves it out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...prompt import BadRequest, Path

Notes = list[BadRequest]
Part = tuple[Any, Path | None]
"""A text, or a part of another kind, and the place of the text in the Messages body."""


def content_of(block: Any, path: Path, notes: Notes) -> list[Part]:
    """What one block of a message says."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return [(block["text"], (*path, "text"))]
    if kind == "image":
        return [(image_of(block, path, notes), None)]
    if kind == "document":
        return _document(block, path, notes)
    if kind == "search_result":
        return texts_of(block.get("content", []), (*path, "content"), notes)
    _note(notes, path, f"blocks of the type {str(kind)[:40]!r} cannot be sent to this model")
    return []


def texts_of(content: Any, path: Path, notes: Notes, *, beside: Sequence[str] = ()) -> list[Part]:
    """Texts with their places, of a string or of text blocks. Blocks of the kinds `beside` are passed over."""
    if isinstance(content, str):
        return [(content, path)]
    texts: list[Part] = []
    for at, block in enumerate(content if isinstance(content, list) else [content]):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append((block["text"], (*path, at, "text")))
        elif kind not in beside:
            _note(notes, (*path, at), "must be a text block here")
    return texts


def image_of(block: Mapping[str, Any], path: Path, notes: Notes) -> dict[str, Any]:
    """An image, as data or by its address, which nobody here ever calls."""
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    url = ""
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        _note(notes, (*path, "source"), "must be an image as base64 or by its url here")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any], path: Path, notes: Notes) -> list[Part]:
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return [(source["data"], (*path, "source", "data"))]
    if source.get("type") == "content":
        return texts_of(source.get("content", []), (*path, "source", "content"), notes)
    if source.get("type") == "base64":
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        name = block.get("title") if isinstance(block.get("title"), str) else "document"
        return [({"type": "file", "file": {"filename": name, "file_data": data}}, None)]
    _note(notes, (*path, "source"), "must be a document as text, content or base64 here")
    return []


def call_of(block: Mapping[str, Any], path: Path, notes: Notes) -> dict[str, Any]:
    """A tool call of an earlier turn."""
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        _note(notes, (*path, "input"), "must be an object")
    function = {"name": block.get("name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def tool_of(tool: Any, where: str, notes: Notes) -> Any:
    """A tool that the client runs. Those that Anthropic runs have no counterpart."""
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        notes.append(BadRequest(f"{where}: tools of the type {str(kind)[:40]!r} do not run here", param="tools"))
        return tool
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {theirs: tool[ours] for ours, theirs in names.items() if ours in tool}}


def _note(notes: Notes, path: Path, message: str) -> None:
    place = ".".join(map(str, path))
    notes.append(BadRequest(f"{place}: {message}", param=place, code="unsupported_value"))
