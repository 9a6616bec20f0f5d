"""What a completion will cost at most, before it is asked for, and what it has cost once it has ended."""

from collections.abc import Callable, Mapping
from typing import Any

from ...prompt import BadRequest
from .ticket import Ticket

ASSUMED_OUTPUT = 1024
"""Tokens that are reserved for an answer whose length the request leaves open."""
_MOST = 1 << 31
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
_CHOICES = ("n", "best_of")


async def reserve(ticket: Ticket | None, *, prompt: Callable[[], int], output: Callable[[], int] = lambda: 0) -> None:
    """Reserve the tokens of the `prompt` and of what comes beside it, the `output`; both are only counted where there
    are limits of tokens.

    TokensLimited where there is no room; BadRequest where the request says in no whole number how many there may be.
    """
    if ticket is not None and ticket.counts_tokens:
        await ticket.reserve(prompt=prompt(), output=output())


def longest_answers(body: Mapping[str, Any], *, prompts: int = 1) -> int:
    """Output tokens that a request may use, for so many prompts. Which of several lengths holds, and how many choices
    are made, is the backend's to say: the largest counts.

    BadRequest for what is no whole number: some servers would read one out of it. One below 1 leaves the length open.
    """
    lengths = [_whole(body, name) for name in _LENGTHS if body.get(name) is not None]
    longest = max((one if one > 0 else ASSUMED_OUTPUT for one in lengths), default=ASSUMED_OUTPUT)
    choices = max(_whole(body, name) for name in _CHOICES)
    return min(_MOST, longest * max(1, choices) * max(1, prompts))


class Written:
    """Estimates the tokens of a stream by the text of its events: four bytes a token, and at least one an event."""

    def __init__(self) -> None:
        self._events = self._bytes = 0

    def add(self, size: int, *, events: int = 1) -> None:
        """Events with so many bytes of text together."""
        self._events += events
        self._bytes += size

    @property
    def tokens(self) -> int:
        return max(self._events, (self._bytes + 3) // 4)


def _whole(body: Mapping[str, Any], name: str) -> int:
    """A field's number; 0 where it is absent or null."""
    value = body.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise BadRequest(f"{name} must be a whole number, such as 128, where tokens are limited", param=name)
    return min(int(value), _MOST)
