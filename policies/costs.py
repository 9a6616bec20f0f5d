"""What things cost on this machine, in milliseconds: the planner's only knowledge of speed. Straight lines, no more.

The defaults are rough figures for a 135-million-parameter chat model in float32 on two cores; `calibrate` replaces
them by what was measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, Self

EMBEDDING: Mapping[str, str] = {"extractive-auto": "extractive-meaning"}
"""Methods that may ask an embedder, or not, by what they find in a text; and what they cost when they do."""


class Measurement(NamedTuple):
    """One observation. `what`: "prefill", "load", "retrieve" or a compressor's name. Tokens that went in; wall time."""

    what: str
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True)
class Line:
    """`fixed` ms a call, and `per_token` ms for each token that goes in."""

    fixed: float
    per_token: float

    def ms(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs by kind of work. `rates`: the shares of tokens that methods without a target rate are expected to leave.

    `missed`: the share of what a method was to take away that it left, as lately seen (protected text, for example).
    `passes`: how often a method has the backend's own model read what it rewrites; it costs at least so many prefills.
    """

    prefill: Line = Line(0.0, 4.0)
    load: Line = Line(1.0, 0.02)
    retrieve: Line = Line(15.0, 0.0)
    methods: Mapping[str, Line] = field(
        default_factory=lambda: {
            "identity": Line(0.0, 0.0),
            "lossless": Line(0.05, 0.001),
            "html": Line(0.2, 0.002),
            "diff": Line(0.05, 0.001),
            "code": Line(0.5, 0.004),
            # Where the summary is not there yet; one that is kept costs next to nothing in all later turns.
            "summarize": Line(200.0, 2.0),
            "extractive-words": Line(1.0, 0.015),
            "extractive-auto": Line(1.0, 0.05),
            "extractive-meaning": Line(4.0, 0.8),
            "perplexity": Line(4.0, 4.0),
            "perplexity-contrast": Line(8.0, 8.0),
        }
    )
    unknown_method: Line = Line(5.0, 1.0)
    rates: Mapping[str, float] = field(default_factory=lambda: {"identity": 1.0})
    unknown_rate: float = 0.95
    missed: Mapping[str, float] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=lambda: {"perplexity": 1.0, "perplexity-contrast": 2.0})

    @classmethod
    def upstream(cls) -> Self:
        """Before anything was measured: a server with a GPU, which prefills about 8,000 tokens a second."""
        return cls(prefill=Line(0.0, 0.125), passes={})

    def lines(self) -> Mapping[str, Line]:
        """All costs by kind of work."""
        return {"prefill": self.prefill, "load": self.load, "retrieve": self.retrieve, **self.methods}

    def compress_ms(self, method: str, tokens: int, *, begun: bool = False) -> float:
        """Running a compressor over so many tokens. `begun`: it runs anyway, so that what a run costs once is paid."""
        least = self.passes.get(method, 0.0) * self.prefill.per_token * tokens
        of_its_kind = self.methods.get(method.partition("-")[0], self.unknown_method)
        line = self.methods.get(method, of_its_kind)
        return max(least, line.ms(tokens) - (line.fixed if begun and tokens > 0 else 0.0))

    def expected_rate(self, method: str) -> float:
        """The share of tokens that a method leaves when it has no target."""
        return self.rates.get(method, self.unknown_rate)

    def reached_rate(self, method: str, asked: float) -> float:
        """The share of tokens that a method will leave where `asked` is what it is made for."""
        return asked + self.missed.get(method, 0.0) * (1.0 - asked)

    def reuse_ms(self, tokens: int, ratio: float) -> float:
        """Loading a chunk's KV and recomputing the share `ratio` of its rows."""
        return self.load.ms(tokens) + self.prefill.per_token * ratio * tokens

    def calibrate(self, measurements: Iterable[Measurement]) -> Self:
        """A model in which every kind of work that was measured has its line fitted anew; the rest stays."""
        grouped: dict[str, list[Measurement]] = {}
        for seen in measurements:
            if seen.tokens > 0 and seen.ms >= 0:
                grouped.setdefault(seen.what, []).append(seen)
        lines = {what: _fit(seen) for what, seen in grouped.items()}
        known = {what: lines.pop(what) for what in ("prefill", "load", "retrieve") if what in lines}
        return replace(self, methods={**self.methods, **lines}, **known)


def _fit(seen: list[Measurement]) -> Line:
    """A line through the points by the median of pairwise slopes (Theil 1950, Sen 1968): one stalled run moves nothing.

    Measured at one size only, everything counts as cost per token.
    """
    slopes = [
        (b.ms - a.ms) / (b.tokens - a.tokens) for i, a in enumerate(seen) for b in seen[i + 1 :] if b.tokens != a.tokens
    ]
    if not slopes:
        return Line(0.0, median(one.ms / one.tokens for one in seen))
    slope = max(0.0, median(slopes))
    return Line(max(0.0, median(one.ms - slope * one.tokens for one in seen)), slope)
