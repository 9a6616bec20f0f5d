"""What a request cost and what was saved: the counters that every room fills in and the gateway reports."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens as the engine or the provider billed them; never adjusted by us."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_wire(self) -> dict[str, Any]:
        """The `usage` object of Chat Completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of the plan as it was carried out. Times in milliseconds, sizes in tokens of the backend's tokenizer.

    `saved_ms` is what it is predicted to have saved elsewhere, its own time not taken off; None where nobody predicts.
    """

    name: str
    ms: float
    tokens_before: int
    tokens_after: int
    predicted_ms: float | None = None
    saved_ms: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpan:
    """Tokens of the prompt, from `start` on, whose KV was loaded from `tier`. `segment` is the id of the segment that
    they are a part of, None where that is not known.
    """

    start: int
    tokens: int
    tier: str
    segment: int | None = None


@dataclass(slots=True, kw_only=True)
class ShadowReport:
    """What a policy would have done that was carried out beside a request, but not sent.

    `state`: "running" until it has ended; "done", "failed" (`failed` has the steps, and why), or "dropped" where there
    was no room for it.
    """

    policy: str
    state: str = "running"
    tokens_in: int = 0
    tokens_out: int = 0
    ms: float = 0.0
    steps: list[StepReport] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def header(self) -> str:
        """For a response header, as `balanced=1200>640` once it has ended, else `balanced=running`."""
        ended = self.state in ("done", "failed")
        return f"{self.policy}={f'{self.tokens_in}>{self.tokens_out}' if ended else self.state}"


@dataclass(slots=True, kw_only=True)
class Report:
    """What was done to one request. Filled along the pipeline, then read by headers, metrics and the response field.

    `tokens_in` counts the prompt as it came, `tokens_out` as it was sent (both in the backend's tokens where a
    tokenizer is known, else estimated). `reused` tokens came from stored chunk KV, `recomputed` were loaded with them
    and repaired, `tiers` has the number of both by where they were loaded from and `kv_spans` their places, `cached`
    came from the prefix cache (`loaded` of them from its host memory or disk), `retrieved` were added, `pruned` were
    removed. `failed` has the steps that the request went on without, each with a slug that says why. `rollout` and
    `group` name the staged rollout that the request is part of, and how; `shadow` is what another policy would have
    done.
    Models that were asked for summaries billed `side_prompt` and `side_completion`. `originals` are the ids of texts
    that were kept.
    """

    policy: str = "off"
    backend: str = ""
    reason: str = ""
    steps: list[StepReport] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0
    retrieved: int = 0
    pruned: int = 0
    cached: int = 0
    loaded: int = 0
    blended: int = 0  # of those cached, a blended prompt's, which this one goes on from
    reused: int = 0
    recomputed: int = 0
    side_prompt: int = 0
    side_completion: int = 0
    originals: list[str] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)
    kv_spans: list[KVSpan] = field(default_factory=list)
    overhead_ms: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    rollout: str = ""
    group: str = ""
    shadow: ShadowReport | None = None

    def headers(self) -> dict[str, str]:
        """The `x-promptsluice-*` response headers known before the first token. Values are plain ASCII."""
        values = {
            "policy": self.policy,
            "backend": self.backend,
            "tokens-in": self.tokens_in,
            "tokens-out": self.tokens_out,
            "tokens-retrieved": self.retrieved,
            "tokens-pruned": self.pruned,
            "tokens-side": self.side_prompt + self.side_completion,
            "overhead-ms": f"{self.overhead_ms:.1f}",
            "kv-tiers": ",".join(f"{tier}={tokens}" for tier, tokens in self.tiers.items()) or "none",
            "steps": ",".join(step.name for step in self.steps) or "none",
        }
        if self.failed:
            values["failed"] = ",".join(f"{step}={why}" for step, why in self.failed.items())
        if self.rollout:
            values["rollout"] = f"{self.rollout}={self.group}"
        if self.shadow is not None:
            values["shadow"] = self.shadow.header
        return {
            f"x-promptsluice-{name}": str(value).encode("ascii", "replace").decode() for name, value in values.items()
        }

    def to_wire(self) -> dict[str, Any]:
        """The optional `promptsluice` field of a response."""
        return asdict(self)
