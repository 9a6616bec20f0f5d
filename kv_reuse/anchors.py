"""Anchors: token ids that stood before a chunk while its KV was computed, and that were dropped afterwards.

Without one, the first tokens of a chunk behave like the start of a text: attention sinks that a prompt has only once.
"""

from collections.abc import Sequence

Anchor = tuple[int, ...]
BARE: Anchor = ()

MOST_TOKENS = 2048
"""Of a prompt's own anchor; a longer one costs more, each time that chunks are computed, than it gains."""


class Anchors:
    """Which anchors serve a chunk in a prompt, best first.

    `sinks` serve any prompt: what every prompt of the model begins with, then more or less text. The nearer their
    length to what stands before the chunk in the prompt, the more the chunk is as if it had been computed there. A
    prompt's own anchor, which it begins with, is nearer still to what the chunk will see.
    """

    def __init__(self, sinks: Sequence[Sequence[int]] = ()) -> None:
        self._sinks = sorted({tuple(sink) for sink in sinks if sink}, key=lambda sink: (len(sink), sink))

    @property
    def general(self) -> Anchor:
        """The one for chunks of which nobody knows yet where they will stand: that of a middle length."""
        return self._sinks[len(self._sinks) // 2] if self._sinks else BARE

    def own(self, ids: Sequence[int], named: Sequence[Sequence[int]], *, before: int) -> tuple[Anchor, ...]:
        """Those of `named` that `ids` begins with and that end `before` its first chunk, the longest one first."""
        beginning = tuple(ids[:before])
        fits = {tuple(one) for one in named if 0 < len(one) <= MOST_TOKENS and beginning[: len(one)] == tuple(one)}
        return tuple(sorted(fits, key=len, reverse=True))

    def fitting(self, place: int, own: Sequence[Anchor] = ()) -> tuple[Anchor, ...]:
        """Best first, for a chunk with `place` tokens before it: the prompt's `own`, then sinks by how near their
        length is (the shorter one of two that are as near), then bare."""
        sinks = sorted(self._sinks, key=lambda sink: abs(len(sink) - place))
        return (*own, *(sink for sink in sinks if sink not in own), BARE)
