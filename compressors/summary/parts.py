"""Long texts in parts that a model reads in one go. A part never depends on what stands behind it in the text, so that
a document that grows is summarized from its last part on.
"""

from collections.abc import Iterator

from ..result import Span
from ..sentences import units_of

LONGEST = 8000
"""Characters of a part, about 2,000 tokens."""


def parts_of(text: str) -> Iterator[Span]:
    """Parts that end where a sentence or a block ends, ascending and disjoint; only white space lies between them.

    A single unit that is longer than a part is one by itself.
    """
    start: int | None = None
    end = 0
    for unit in units_of(text):
        if start is not None and unit.end - start > LONGEST:
            yield start, end
            start = None
        start = unit.start if start is None else start
        end = unit.end
    if start is not None:
        yield start, end
