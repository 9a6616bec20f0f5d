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
A small harbour town on the northern coast had, for most of its history, lived from fishing and from trade in \
salt. In 1843 the first stone pier was built, and twenty years later a railway joined the town to the capital, \
two hundred miles to the south. The population grew from about 900 to more than 7,000 within a generation. Among \
those who came were John Miller, an engineer, and his sister Anna, who opened the first school for girls.

The school is still in use today, although the building was changed several times: the roof was replaced after a \
fire in 1911, and a library was added by the architect Peter Lang between 1926 and 1931. It holds some 40,000 \
books, letters and maps. The novel "The Salt Road", which won a prize in 1958 and was made into a film by an \
American director, is set in these rooms.

Since the end of the fishing industry the town has lived mainly from visitors. A festival of music takes place \
every second summer; the first one, in 1974, was attended by only three hundred people, the latest by over \
twenty thousand.

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
