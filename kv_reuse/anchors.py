"""Anchors: token ids that stood before a chunk while its KV was computed, and that were dropped afterwards.

Without one, the first tokens of a chunk behave like the start of a text: attention sinks that a prompt has only once.
"""

import sys
from collections.abc import Sequence

Anchor = tuple[int, ...]
BARE: Anchor = ()

MOST_TOKENS = 2048
"""Of a prompt's own anchor; a longer one costs more, each time that chunks are computed, than it gains."""


class Anchors:
    """Which anchors serve a chunk in a prompt, best first, and after which one it is computed.

    `sinks` serve any prompt: what every prompt of the model begins with, then more or less text. The nearer their
    length to what stands before the chunk in the prompt, the more the chunk is as if it had been computed there. A
    prompt's own anchor, which it begins with, is nearer still to what the chunk will see.

    A chunk is computed only after an anchor that leaves room for it: together they have at most `room` tokens. And only
    after sinks of at most `longest` tokens, or the shortest one: the others are looked up, for what somebody else
    computed after them.
    """

    def __init__(
        self, sinks: Sequence[Sequence[int]] = (), *, room: int = sys.maxsize, longest: int = sys.maxsize
    ) -> None:
        self.sinks = tuple(sorted({tuple(sink) for sink in sinks if sink}, key=lambda sink: (len(sink), sink)))
        self._room = room
        self._used = [sink for sink in self.sinks if len(sink) <= longest] or self.sinks[:1]
        self._unused = frozenset(self.sinks).difference(self._used)

    def general(self, tokens: int = 0) -> Anchor:
        """The one for a chunk of so many tokens of which nobody knows yet where it will stand: that of a middle length,
        or the longest below it that leaves room; bare where none does."""
        shorter = reversed(self._used[: len(self._used) // 2 + 1])
        return next((sink for sink in shorter if self._leaves_room(sink, tokens)), BARE)

    def computed_after(self, fitting: Sequence[Anchor], tokens: int, *, first: int = 0) -> int:
        """The place of the first of `fitting[first:]`, best first and bare at their end, after which a chunk of so many
        tokens is computed."""
        last = len(fitting) - 1
        usable = (n for n in range(first, last) if fitting[n] not in self._unused)
        return next((n for n in usable if self._leaves_room(fitting[n], tokens)), last)

    def _leaves_room(self, anchor: Anchor, tokens: int) -> bool:
        return len(anchor) + tokens <= self._room

    def own(self, ids: Sequence[int], named: Sequence[Sequence[int]], *, before: int) -> tuple[Anchor, ...]:
        """Those of `named` that `ids` begins with and that end `before` its first chunk, the longest one first."""
        beginning = tuple(ids[:before])
        fits = {tuple(one) for one in named if 0 < len(one) <= MOST_TOKENS and beginning[: len(one)] == tuple(one)}
        return tuple(sorted(fits, key=len, reverse=True))

    def fitting(self, place: int, own: Sequence[Anchor] = ()) -> tuple[Anchor, ...]:
        """Best first, for a chunk with `place` tokens before it: the prompt's `own`, then sinks by how near their
        length is (the shorter one of two that are as near), then bare."""
        sinks = sorted(self.sinks, key=lambda sink: abs(len(sink) - place))
        return (*own, *(sink for sink in sinks if sink not in own), BARE)
