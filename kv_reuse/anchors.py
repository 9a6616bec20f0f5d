"""Anchors: token ids that stood before a chunk while its KV was computed, and that were dropped afterwards.

Without one, the first tokens of a chunk behave like the start of a text: attention sinks that a prompt has only once.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

Anchor = tuple[int, ...]
BARE: Anchor = ()

MOST_TOKENS = 1024  # a longer one costs more, each time that chunks are computed, than it gains
_REMEMBERED = 256

FILLER = """\
Minutes of the monthly meeting, room 214, begun at 9:30. Present: Ms Okafor (chair), Mr Lindqvist, Dr Ramos and two \
guests from the supplier. The chair reported that the new pumps had been delivered on 12 March, nine days late, and \
that three of the forty valves were found to be faulty. Mr Lindqvist explained the test in detail: each valve is held \
at 16 bar for ten minutes, then opened and closed a hundred times. He proposed to return the whole lot. Dr Ramos \
thought that this would cost more than it saves, since the plant must be running again before the end of the quarter. \
It was agreed to replace the three valves only, and to check the others again in June.

"""
"""Any prose: a chunk behind it is computed in the midst of text, as it will stand in a prompt, not at a beginning."""


class Anchors:
    """Which anchors serve a prompt, and which of them are worth computing chunks for.

    `sinks` serve any prompt, best first: what every prompt of the model begins with. A prompt's own anchor, which it
    begins with, is nearer to what the chunk will see, but pays only if it comes again: from its second sight on.
    """

    def __init__(self, sinks: Sequence[Sequence[int]] = ()) -> None:
        self._sinks = tuple(tuple(sink) for sink in sinks if sink)
        self._seen: OrderedDict[tuple[str, Anchor], int] = OrderedDict()  # longest unseen first
        self._lock = threading.Lock()

    @property
    def general(self) -> Anchor:
        """The one for chunks whose prompts are not known yet."""
        return self._sinks[0] if self._sinks else BARE

    def fitting(self, ids: Sequence[int], own: Sequence[Sequence[int]], *, before: int) -> tuple[Anchor, ...]:
        """Best first: those of `own` that `ids` begins with and that end `before` its first chunk, then sinks, bare."""
        beginning = tuple(ids[:before])
        fits = {tuple(one) for one in own if 0 < len(one) <= MOST_TOKENS and beginning[: len(one)] == tuple(one)}
        return tuple(dict.fromkeys((*sorted(fits, key=len, reverse=True), *self._sinks, BARE)))

    def worth(self, fitting: Sequence[Anchor], *, salt: str) -> Anchor:
        """The best of `fitting` that chunks should be computed after now; counts as a sight of the prompt's own one."""
        best = fitting[0]
        return best if best in (*self._sinks, BARE) or self._sighted(salt, best) > 1 else self.general

    def _sighted(self, salt: str, anchor: Anchor) -> int:
        with self._lock:
            count = self._seen[salt, anchor] = self._seen.pop((salt, anchor), 0) + 1
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return count
