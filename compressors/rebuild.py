"""A text from the units of a source that were kept, in order, with the source's own white space between them.

Units are disjoint ascending spans with nothing but white space (or nothing) between them. What stood before the first
unit and after the last one stays, because the text is cut from a larger one.
"""

from collections.abc import Sequence

from .result import Span

# A mark of bold text closes or opens, as it touches what stands left or right of it.
_CLOSING = frozenset("*.,;:!?%)]}»”’。，、；：！？）】》」』…،؛؟।")
_OPENING = frozenset("*([{«“‘（【《「『")


class Rebuilder:
    """One source with its units; what does not depend on the choice is worked out once."""

    def __init__(self, source: str, units: Sequence[Span]) -> None:
        self._source, self._units = source, units
        ends = [0, *(end for _, end in units)]
        self._gaps: list[Span] = list(zip(ends, [*(start for start, _ in units), len(source)], strict=True))
        self._ranks = [0 if low == high else 1 + source.count("\n", low, high) for low, high in self._gaps]

    def spans(self, keep: Sequence[bool]) -> list[Span]:
        """The kept spans: kept units, and between two of them one of the gaps that the source has there.

        Where units were dropped in between, the gap with the most line breaks is taken, so that paragraphs and lines
        stay apart; none before closing or after opening punctuation. If two words would run into one, the unit before
        the second one stays too.
        """
        spans: list[Span] = [self._gaps[0]]
        last, best = -1, 0
        for i, kept in enumerate(keep):
            if last >= 0 and (i == last + 1 or self._ranks[i] > self._ranks[best]):
                best = i
            if not kept:
                continue
            if last >= 0:
                spans += [self._gaps[i]] if last == i - 1 else self._bridge(last, i, best)
            spans.append(self._units[i])
            last = i
        if self._units:
            spans.append(self._gaps[-1])
        return spans

    def _bridge(self, last: int, this: int, best: int) -> list[Span]:
        """What to put between two kept units when others between them were dropped; gap `best` is the widest."""
        before, after = self._source[self._units[last][1] - 1], self._source[self._units[this][0]]
        touches_left, touches_right = not self._ranks[this], not self._ranks[last + 1]
        if (touches_left and after in _CLOSING) or (touches_right and before in _OPENING):
            return []
        if not self._ranks[best] and _would_fuse(before, after):
            return [self._units[this - 1]]
        return [self._gaps[best]]


def _would_fuse(before: str, after: str) -> bool:
    return not (before in _OPENING or after in _CLOSING or is_cjk(before) or is_cjk(after))


def is_cjk(char: str) -> bool:
    """Whether a character belongs to a script written without spaces between words: Han, kana and their marks."""
    return (
        "\u2e80" <= char <= "\u9fff"
        or "\uf900" <= char <= "\ufaff"
        or "\uff00" <= char <= "\uff9f"
        or char >= "\U00020000"
    )
