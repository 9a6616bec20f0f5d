"""Sets of characters as ascending, disjoint (start, end) spans."""

from collections.abc import Iterable, Sequence

from .result import Span, touching_joined


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """All characters that lie in any span; overlapping spans become one, spans that only touch as well."""
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif start < end:
            merged.append([start, end])
    return tuple((start, end) for start, end in merged)


def without(length: int, holes: Sequence[Span]) -> tuple[Span, ...]:
    """The characters of a text of this length that lie in no hole. `holes` ascending and disjoint."""
    edges = [0, *(edge for hole in holes for edge in hole), length]
    return tuple(touching_joined(zip(edges[::2], edges[1::2], strict=True)))
