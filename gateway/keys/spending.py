"""What a completion will cost at most, before it is asked for, and what it has cost once it has ended."""

from collections.abc import Callable, Mapping
from typing import Any

from .ticket import Ticket

ASSUMED_OUTPUT = 1024
"""Tokens that are reserved for an answer whose length the request leaves open."""
_MOST = 1 << 31


async def reserve(ticket: Ticket | None, *, prompt: Callable[[], int], output: int = 0) -> None:
    """Reserve the tokens of the `prompt`, which is only counted where they are limited, and those of the answers.

    TokensLimited where there is no room.
    """
    if ticket is not None and ticket.counts_tokens:
        await ticket.reserve(prompt=prompt(), output=output)


def longest_answers(body: Mapping[str, Any]) -> int:
    """Output tokens that a request may use; fields that are no such numbers are the backend's to refuse."""
    given = (_number(body.get(name)) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    longest = next((one for one in given if one is not None), ASSUMED_OUTPUT)
    return min(_MOST, longest * (_number(body.get("n")) or 1))


class Written:
    """Estimates the tokens of a stream by the text of its frames: four bytes a token, and at least one a frame."""

    def __init__(self) -> None:
        self._frames = self._bytes = 0

    def add(self, size: int) -> None:
        """A frame with so many bytes of text."""
        self._frames += 1
        self._bytes += size

    @property
    def tokens(self) -> int:
        return max(self._frames, (self._bytes + 3) // 4)


def _number(value: Any) -> int | None:
    return min(value, _MOST) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
