"""The plan for one request, as data: what is done to each segment, why, and what that should cost and save.

Made by planner.py, carried out by the gateway, shown by a dry run. Holds data, decides nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

from ..prompt import Kind


class Action(StrEnum):
    """What happens to a segment."""

    LEAVE = "leave"
    COMPRESS = "compress"
    REUSE = "reuse"
    BLEND = "blend"


class Reason(NamedTuple):
    """Why something is done or not: a slug for programs, and the same for a person."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one of the policy's compressors is used on a segment, and why."""

    method: str
    used: bool
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done to one segment. `uses` are labels of compressors, in order; where there are any, `tokens_after` is
    predicted, and at most `removed` of the tokens go in lossy steps.

    `ms` is the cost of doing it, `saved_ms` the gross worth of what it saves. `code` is `reason` for programs;
    `methods` has the compressors one by one, where any was considered.
    """

    segment: int
    message: int
    role: str
    kind: Kind
    source: str | None
    tokens: int
    tokens_after: int
    action: Action = Action.LEAVE
    uses: tuple[str, ...] = ()
    ms: float = 0.0
    saved_ms: float = 0.0
    removed: int = 0
    code: str = ""
    reason: str = ""
    methods: tuple[Verdict, ...] = ()

    def because(self, reason: Reason) -> Self:
        """The same decision with its reason."""
        return replace(self, code=reason.code, reason=reason.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One piece of work over some segments, in the order of doing.

    `name` is "retrieve", "reuse", "blend" or a compressor's label in the policy. `use` is the compressor's name, "" for
    other steps, `options` what it is to be made with; hand it `segments` as `CompressionContext.only`. `saved_ms` is
    the gross worth of the saved tokens, `predicted_ms` not yet taken off. `asked_rate` is the share of tokens that the
    compressor is made to leave (None: it has no target), `cost_name` what its runs are entered as; `embeds`: it may ask
    an embedder, where it would work without one.
    """

    name: str
    segments: frozenset[int]
    tokens_before: int
    tokens_after: int
    predicted_ms: float
    saved_ms: float
    use: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    asked_rate: float | None = 1.0
    cost_name: str = ""
    embeds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions and the steps that carry them out. Equal inputs give equal plans.

    `prefill_ms` is what the prompt would cost as it is, `predicted_ms` what it costs by this plan, steps included.
    """

    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...]
    tokens_before: int
    tokens_after: int
    prefill_ms: float
    predicted_ms: float

    @property
    def passthrough(self) -> bool:
        """Whether nothing is done."""
        return not self.steps

    def to_wire(self) -> dict[str, Any]:
        """As JSON for logs and dry runs."""
        wire = asdict(self)
        for step in wire["steps"]:
            step["segments"] = sorted(step["segments"])
        return wire
