"""One request as the page shows it: who asked, what it came to, how long it took. No content beside the outline's."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...policies import Plan, Resolution
from ...prompt import PromptsluiceError, Report, Usage
from ..caller import Caller
from .outline import Outline

CACHE_HEADER = "x-promptsluice-cache"
_NAME_CHARS = 200
_OWN_BYTES, _STEP_BYTES = 4000, 400  # about what a record takes without its outline


def _id() -> str:
    """Tells records apart; the request id may come from the client, twice."""
    return secrets.token_hex(8)


@dataclass(slots=True, kw_only=True)
class Record:
    """Begun when a request arrives, filled in on its way, kept when it has ended.

    `at` is seconds since the epoch, `began` a reading of time.perf_counter. `plan_ms` is what the prompt would have
    cost as it was, and by its plan. `headers` are the reply's own. An error is kept by its type, code and field; its
    message may quote a prompt.
    """

    request_id: str
    path: str = ""
    tenant: str = ""
    key_name: str | None = None
    id: str = field(default_factory=_id)
    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    model: str = ""
    stream: bool = False
    report: Report = field(default_factory=lambda: Report(policy=""))
    outline: Outline | None = None
    plan_ms: tuple[float, float] | None = None
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    outcome: str = ""
    usage: Usage | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    nbytes: int = 0

    @classmethod
    def of(cls, caller: Caller) -> "Record":
        """For a request that has just arrived."""
        return cls(request_id=caller.request_id, path=caller.path, tenant=caller.tenant)

    def measure(self) -> None:
        """Work out `nbytes`, about what it takes in memory."""
        self.nbytes = _OWN_BYTES + (self.outline.nbytes if self.outline else 0) + _STEP_BYTES * len(self.report.steps)

    def matched(self, resolution: Resolution, report: Report, *, stream: bool) -> None:
        """It is known which way it goes; `report` is filled in along it."""
        self.model, self.key_name = resolution.model[:_NAME_CHARS], resolution.key_name
        self.report, self.stream = report, stream

    def planned(self, plan: Plan | None) -> None:
        """Of a plan only its sums; the outline has its decisions."""
        if plan is not None:
            self.plan_ms = (plan.prefill_ms, plan.predicted_ms)

    def ended(self, outcome: str) -> None:
        """It is over, in one of the ways that the metrics count. The answer may still be on its way to the client."""
        self.outcome, self.total_s = outcome, time.perf_counter() - self.began

    def failed(self, error: PromptsluiceError) -> None:
        """It ended with an error object."""
        self.status = error.status
        self.error = {name: value for name, value in error.to_wire()["error"].items() if name != "message"}

    def summary(self) -> dict[str, Any]:
        """A line of a list, as JSON; times in milliseconds."""
        report = self.report
        return {
            "id": self.id,
            "request_id": self.request_id,
            "at": self.at,
            "path": self.path,
            "key": self.key_name,
            "model": self.model,
            "policy": report.policy,
            "backend": report.backend,
            "stream": self.stream,
            "outcome": self.outcome,
            "status": self.status,
            "tokens_in": report.tokens_in,
            "tokens_out": report.tokens_out,
            "retrieved": report.retrieved,
            "pruned": report.pruned,
            "cached": report.cached,
            "reused": report.reused,
            "recomputed": report.recomputed,
            "completion": self.usage.completion_tokens if self.usage else None,
            "cache": self.headers.get(CACHE_HEADER),
            "ttft_ms": None if self.ttft_s is None else 1000 * self.ttft_s,
            "total_ms": 1000 * self.total_s,
        }

    def detail(self) -> dict[str, Any]:
        """All of it, as JSON. `segments` is None where a prompt has none."""
        outline = self.outline
        return {
            **self.summary(),
            "error": self.error,
            "report": self.report.to_wire(),
            "plan_ms": None if self.plan_ms is None else {"untouched": self.plan_ms[0], "planned": self.plan_ms[1]},
            "headers": {**self.headers, **self.report.headers()} if self.report.policy else dict(self.headers),
            "usage": None if self.usage is None else self.usage.to_wire(),
            "segments": None if outline is None else [segment.to_wire() for segment in outline.segments],
            "left_out": outline.left_out if outline else 0,
        }
