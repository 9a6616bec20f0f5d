"""Chunks of a stream that differ from one that was read in nothing but their text: most of them. They need no parsing.

A chunk is taken for alike where it begins and ends with the very bytes of the one that was read, and what lies between
is text that means itself in JSON: no quote, no backslash, no control character. So it is JSON of the same form.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

_HEAD, _END = b"data: ", b"\n\n"
_VALUE = {name: re.compile(rb'"%s"\s*:\s*"([^"\\]+)"' % name.encode()) for name in ("content", "text")}


@dataclass(frozen=True, slots=True)
class Pattern:
    """The bytes of an event around its text."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, data: bytes, chunk: Any) -> Self | None:
        """Of a chunk that says one piece of text and nothing else; None for others. `chunk` is what `data` says."""
        name = _only_text(chunk)
        if name is None:
            return None
        found = _VALUE[name].search(data)
        if found is None or data.count(b'"%s"' % name.encode()) != 1 or b"\n" in data:
            return None
        begin, end = found.span(1)
        return cls(_HEAD + data[:begin], data[end:])

    def run(self, piece: bytes, at: int) -> tuple[int, int, int]:
        """Where the events from `at` on that are alike end in a piece of a stream, how many bytes of text they have,
        and how many events they are.
        """
        before, after, size, events = self.before, self.after, 0, 0
        while (end := piece.find(_END, at)) >= 0 and piece.startswith(before, at) and piece.endswith(after, at, end):
            said = piece[at + len(before) : end - len(after)]
            try:
                text = said.decode()
            except UnicodeDecodeError:
                break
            if not text.isprintable() or '"' in text or "\\" in text or not text:
                break
            size += len(said)
            events += 1
            at = end + len(_END)
        return at, size, events


def _only_text(chunk: Any) -> str | None:
    """The field with the text, where a chunk has one choice, and that nothing but a piece of text."""
    if chunk.get("usage") or len(chunk.get("choices") or ()) != 1:
        return None
    choice = chunk["choices"][0]
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None or choice.get("logprobs"):
        return None
    holder, name = (choice, "text") if "text" in choice else (choice.get("delta"), "content")
    if not isinstance(holder, dict) or not isinstance(holder.get(name), str):
        return None
    others = [value for field, value in holder.items() if field not in (name, "index", "role")]
    return name if holder[name].isprintable() and not any(others) else None
