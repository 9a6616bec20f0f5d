"""How the prefills of a step share its rows: the shortest first, but a quarter is the oldest one's.

The shortest first keeps the mean wait for a first token low: a short prompt does not wait for a long one. The quarter
keeps a long prompt going, whatever comes after it: it takes at most four times as long as alone.
"""

from collections.abc import Sequence as List

from .sequence import Sequence

_OLDEST = 4  # the part of the rows that is the oldest one's


def shares(prefills: List[Sequence], rows: int) -> list[int]:
    """How many of `rows` each of `prefills` runs now. Higher priorities come before shorter ones; ties by arrival."""
    if not prefills or rows <= 0:
        return [0] * len(prefills)
    given = [0] * len(prefills)
    oldest = min(range(len(prefills)), key=lambda place: prefills[place].order)
    given[oldest] = min(prefills[oldest].remaining, -(-rows // _OLDEST))
    rows -= given[oldest]
    for place in sorted(range(len(prefills)), key=lambda place: _urgency(prefills[place])):
        more = min(rows, prefills[place].remaining - given[place])
        given[place] += more
        rows -= more
    return given


def _urgency(sequence: Sequence) -> tuple[int, int, int]:
    return -sequence.priority, sequence.remaining, sequence.order
