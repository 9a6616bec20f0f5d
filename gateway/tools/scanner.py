"""One tool call out of text that comes in pieces: its name as soon as it is there, its arguments as they come."""

import json
from collections.abc import Collection
from enum import Enum, auto

_SPACE = " \t\r\n"
_SCALAR_ENDS = ",}] \t\r\n"


class Value:
    """Where a JSON value ends. Counts brackets and minds strings; what is between them is not checked."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def feed(self, text: str, at: int) -> int:
        """Read on at `at`; return where the value's text ends, which is the text's end unless it is `done`."""
        while at < len(text) and not self.done:
            char = text[at]
            if self._begun and not self._depth and not self._in_string and char in _SCALAR_ENDS:
                self.done = True  # behind a number or a word
                return at
            self._read(char)
            self._begun = True
            at += 1
        return at

    def _read(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.done = not self._depth
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


class _At(Enum):
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class CallScanner:
    """Reads the members of a call's object, behind its brace. `named` is set once, to one of the `names`.

    `take` gives the arguments' text so far, each piece once, and only when `named` is set. `failed`: this is no call of
    any of the functions. `done`: the object's brace was read.
    """

    def __init__(self, names: Collection[str], *, arguments: str) -> None:
        self.named: str | None = None
        self.failed = False
        self.done = False
        self._names = names
        self._key_of_arguments = arguments
        self._at = _At.KEY
        self._key = ""
        self._value = Value()
        self._text = ""
        self._ready: list[str] = []
        self._has_arguments = False

    def feed(self, text: str, at: int) -> int:
        """Read on at `at`; return where this call's text ends."""
        while at < len(text) and not (self.done or self.failed):
            if self._at in (_At.KEY, _At.VALUE) and (self._text or text[at] not in _SPACE):
                at = self._in_value(text, at)
            elif text[at] in _SPACE:
                at += 1
            else:
                self._sign(text[at])
                at += 1
        return at

    def take(self) -> str:
        """More of the arguments."""
        if self.named is None:
            return ""
        taken, self._ready = "".join(self._ready), []
        return taken

    def _in_value(self, text: str, at: int) -> int:
        if self._at is _At.KEY and not self._text and text[at] != '"':
            self.done, self.failed = text[at] == "}", text[at] != "}"
            self._end_object()
            return at + 1
        end = self._value.feed(text, at)
        piece = text[at:end]
        self._text += piece
        if self._streams():
            self._ready.append(piece)
            self._has_arguments = True
        if self._value.done:
            self._end_value()
        return end

    def _streams(self) -> bool:
        """Whether the value is one whose text goes on as it comes: arguments that are an object, as they should be."""
        return self._at is _At.VALUE and self._key == self._key_of_arguments and self._text.startswith("{")

    def _end_value(self) -> None:
        try:
            if self._at is _At.KEY:
                self._key, self._at = json.loads(self._text), _At.COLON
            else:
                self._end_member()
                self._at = _At.NEXT
        except (ValueError, RecursionError):
            self.failed = True
        self._value, self._text = Value(), ""

    def _end_member(self) -> None:
        if self._key == "name":
            name = json.loads(self._text)
            self.failed = self.named is not None or not isinstance(name, str) or name not in self._names
            self.named = None if self.failed else name
        elif self._key == self._key_of_arguments and not self._streams():
            value = json.loads(self._text)
            if value is not None:  # some models write the arguments as a text of JSON
                self._ready.append(value if isinstance(value, str) else self._text)
                self._has_arguments = True

    def _sign(self, char: str) -> None:
        if self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.NEXT and char == ",":
            self._at = _At.KEY
        elif self._at is _At.NEXT and char == "}":
            self.done = True
            self._end_object()
        else:
            self.failed = True

    def _end_object(self) -> None:
        if self.named is None:
            self.failed = True
        elif not self._has_arguments:
            self._ready.append("{}")
