"""A metric's children by their label values, kept: prometheus_client's own look-up is slow."""

from typing import Any, TypeVar

from prometheus_client import Counter, Histogram

M = TypeVar("M", Counter, Histogram)


class Children:
    """As many as there are label values, which are bounded."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}

    def of(self, metric: M, *values: str) -> M:
        """The child of `metric` with these label values, in the order of its labels."""
        child: M | None = self._kept.get((metric, *values))
        if child is None:
            child = self._kept[metric, *values] = metric.labels(*values)
        return child
