"""What an answer is made of while it is written: text, and tool calls of which each begins once and then grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function `name`; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | CallBegun | CallArguments


class Reader(Protocol):
    """Reads one answer's text as it comes."""

    def feed(self, text: str) -> Sequence[Part]:
        """What more text brings; some of it may be held back."""
        ...

    def finish(self) -> Sequence[Part]:
        """What was held back; the text has ended."""
        ...

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        ...


class PlainReader:
    """Takes everything for text."""

    calls = 0

    def feed(self, text: str) -> Sequence[Part]:
        return [Said(text)] if text else []

    def finish(self) -> Sequence[Part]:
        return []


NewReader = Callable[[], Reader]
