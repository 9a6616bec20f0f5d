"""What staged rollouts and shadows come to, as Prometheus metrics. Labels: names in the policy file, and groups."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..prompt import Report, ShadowReport, Usage

_WHO = ("rollout", "group", "policy")


class RolloutMetrics:
    """The groups of each rollout beside each other. A request that is part of none is not counted here."""

    def __init__(self, registry: CollectorRegistry, *, seconds: tuple[float, ...]) -> None:
        self._requests = Counter(
            "promptsluice_rollout_requests", "Completions in a staged rollout by outcome", (*_WHO, "outcome"),
            registry=registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "promptsluice_rollout_time_to_first_token_seconds", "Seconds from a request's body to its first content",
            _WHO, buckets=seconds, registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "promptsluice_rollout_tokens",
            "Tokens in a staged rollout: before, after (rewriting), prompt, cached, completion (as billed)",
            (*_WHO, "what"), registry=registry,
        )  # fmt: skip

    def first_token(self, report: Report, seconds: float) -> None:
        if report.rollout:
            self._ttft.labels(report.rollout, report.group, report.policy).observe(seconds)

    def finished(self, report: Report, *, outcome: str, usage: Usage | None) -> None:
        """Count one completion, if it is part of a rollout."""
        if not report.rollout:
            return
        who = (report.rollout, report.group, report.policy)
        self._requests.labels(*who, outcome).inc()
        billed = usage or Usage()
        counted = {
            "before": report.tokens_in, "after": report.tokens_out, "prompt": billed.prompt_tokens,
            "cached": billed.cached_tokens, "completion": billed.completion_tokens,
        }  # fmt: skip
        for what, tokens in counted.items():
            self._tokens.labels(*who, what).inc(max(0, tokens))


class ShadowMetrics:
    """What policies would have done that were carried out in shadow."""

    def __init__(self, registry: CollectorRegistry, *, seconds: tuple[float, ...]) -> None:
        self._ended = Counter(
            "promptsluice_shadows", "Policies carried out in shadow by outcome: done, failed, dropped",
            ("policy", "outcome"), registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "promptsluice_shadow_tokens", "Prompt tokens in shadow: before and after rewriting", ("policy", "what"),
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "promptsluice_shadow_seconds", "Seconds that retrieval, planning and rewriting took in shadow", ("policy",),
            buckets=seconds, registry=registry,
        )  # fmt: skip

    def ended(self, report: ShadowReport) -> None:
        """Count one; any thread."""
        self._ended.labels(report.policy, report.state).inc()
        if report.state == "dropped":
            return
        self._tokens.labels(report.policy, "before").inc(max(0, report.tokens_in))
        self._tokens.labels(report.policy, "after").inc(max(0, report.tokens_out))
        self._seconds.labels(report.policy).observe(report.ms / 1000)
