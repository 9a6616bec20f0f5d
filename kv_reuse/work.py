"""What a way to serve a prompt makes the engine run: counted before it runs, in the engine's own terms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..backend_engine.types import Reuse
from .selectors import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`tokens` in all, of which the first `prefix` are in the prefix tree; `spans` (start, tokens) have stored KV.

    The first `kept` are there as part of a blended prompt, which a full prefill must not use.
    """

    tokens: int
    prefix: int
    spans: tuple[tuple[int, int], ...]
    kept: int = 0

    @property
    def begun(self) -> int:
        """Where the rows begin of a way that may use what was blended."""
        return max(self.prefix, self.kept)

    @property
    def left(self) -> tuple[tuple[int, int], ...]:
        """The spans behind what the tree has, without the last token, which always runs."""
        cut = ((max(start, self.begun), min(start + length, self.tokens - 1)) for start, length in self.spans)
        return tuple((start, stop - start) for start, stop in cut if start < stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Steps, rows that run, and the keys that they see together."""

    steps: int
    rows: float
    pairs: float

    def __add__(self, other: "Work") -> "Work":
        return Work(steps=self.steps + other.steps, rows=self.rows + other.rows, pairs=self.pairs + other.pairs)

    def quantities(self) -> dict[str, float]:
        """As costs.py takes it."""
        return {"steps": float(self.steps), "rows": self.rows, "pairs": self.pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Counts the work of one engine: a model of `layers` in steps of at most `step_tokens` rows."""

    layers: int
    step_tokens: int

    def full(self, prompt: Prompt) -> Work:
        """Everything behind the exact prefix."""
        return self._of([(prompt.prefix, prompt.tokens - prompt.prefix)])

    def continued(self, prompt: Prompt) -> Work:
        """Everything behind the prefix that may be a blended prompt's."""
        return self._of([(prompt.begun, prompt.tokens - prompt.begun)])

    def reused(self, prompt: Prompt, *, ratio: float = 0.0, repair: Repair | Reuse | None = None) -> Work:
        """What is not reused, and the share `ratio` of what is, with what naming these rows costs.

        A chooser with a depth has the rows behind the first span run twice; a selector has all rows run up to its
        layer.
        """
        spans = prompt.left
        if not spans:
            return self.continued(prompt)
        fresh, total = _gaps(spans, prompt.begun, prompt.tokens), sum(length for _, length in spans)
        quota = math.ceil(ratio * total - 1e-9)
        share = quota / total
        chosen = [(start + (length - length * share) / 2, length * share) for start, length in spans]
        if repair is None or not 0 < quota < total:
            return self._of([*fresh, *chosen] if quota else fresh)
        if repair.selector is not None:
            passed = (repair.selector.layer + 1) / self.layers
            rest = [(start, length * (1 - share) * passed) for start, length in spans]
            return self._of([*fresh, *chosen, *rest])
        if repair.chooser is None or repair.chooser.depth is None:
            return self._of([*fresh, *chosen])
        again = [(start, length) for start, length in fresh if start >= spans[0][0]]
        return self._of(fresh) + self._of([*again, *chosen])

    def _of(self, parts: Sequence[tuple[float, float]]) -> Work:
        """Rows at consecutive places: (start, rows)."""
        rows = sum(length for _, length in parts)
        pairs = sum(length * (start + (length + 1) / 2) for start, length in parts)
        return Work(steps=math.ceil(rows / self.step_tokens), rows=rows, pairs=pairs)


def _gaps(spans: Sequence[tuple[int, int]], first: int, stop: int) -> list[tuple[int, int]]:
    """What lies between `first` and `stop` outside the spans."""
    gaps, at = [], first
    for start, length in spans:
        if start > at:
            gaps.append((at, start - at))
        at = start + length
    return [*gaps, (at, stop - at)] if at < stop else gaps
