"""Prometheus metrics in a registry of their own. Labels are bounded: route templates, configured models, policies,
backends.
"""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..prompt import Report, Usage
from .blend_metrics import BlendCollector
from .children import Children
from .cost_metrics import CostCollector
from .engine_metrics import BackendCollector, EngineCollector
from .genai_metrics import GenAIMetrics
from .keys.key_metrics import KeyMetrics
from .rollout_metrics import RolloutMetrics, ShadowMetrics

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_WAY = ("model", "policy", "backend")


class Metrics:
    """The gateway's counters. `models` are the names that may become label values; any other is "other"."""

    def __init__(self, *, models: Collection[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._children = Children()
        self._models = frozenset(models)
        own = self.registry
        self.in_flight = Gauge("promptsluice_http_in_flight", "HTTP requests being served", registry=own)
        self._http = Counter("promptsluice_http_requests", "HTTP requests", ("route", "method", "status"), registry=own)
        self._http_seconds = Histogram(
            "promptsluice_http_seconds", "Seconds from a request's head to its last byte", ("route",),
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._completions = Counter(
            "promptsluice_completions", "Completions by outcome: ok, failed, refused, cancelled",
            (*_WAY, "outcome"), registry=own,
        )  # fmt: skip
        self._ttft = Histogram(
            "promptsluice_time_to_first_token_seconds", "Seconds from a request's body to its first content", _WAY,
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._overhead = Histogram(
            "promptsluice_overhead_seconds", "Seconds that retrieval, planning and rewriting took", ("policy",),
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._before = Histogram(
            "promptsluice_prompt_tokens_before",
            "Prompt tokens as they came",
            ("policy",),
            buckets=_TOKENS,
            registry=own,
        )
        self._after = Histogram(
            "promptsluice_prompt_tokens_after", "Prompt tokens as they were sent", ("policy",),
            buckets=_TOKENS, registry=own,
        )  # fmt: skip
        self._saved = Counter(
            "promptsluice_tokens", "Prompt tokens by fate: retrieved, pruned, cached, reused, recomputed",
            (*_WAY, "what"), registry=own,
        )  # fmt: skip
        self._billed = Counter(
            "promptsluice_billed_tokens", "Tokens as the backend billed them", (*_WAY, "type"), registry=own
        )
        self._side = Counter(
            "promptsluice_side_tokens", "Tokens billed by models that were asked for summaries", ("policy", "type"),
            registry=own,
        )  # fmt: skip
        self._step_failures = Counter(
            "promptsluice_step_failures", "Optimizer steps that failed or were late, and why",
            ("policy", "step", "why"), registry=own,
        )  # fmt: skip
        self._fallbacks = Counter(
            "promptsluice_fallbacks", "Requests handed to another backend because one could not answer",
            ("backend", "to"), registry=own,
        )  # fmt: skip
        self._recalls = Counter(
            "promptsluice_answer_cache", "Chats under policies that keep answers: hit, miss", ("policy", "outcome"),
            registry=own,
        )  # fmt: skip
        self._reloads = Counter(
            "promptsluice_policy_reloads", "New versions of the policy file: accepted, refused", ("outcome",),
            registry=own,
        )  # fmt: skip
        self._file_accepted = Gauge(
            "promptsluice_policy_file_accepted", "1 while the policy file as it lies there is in force", registry=own
        )
        self._file_accepted.set(1)
        self._rollouts = RolloutMetrics(own, seconds=_SECONDS)
        self.genai = GenAIMetrics(own)
        self.shadows = ShadowMetrics(own, seconds=_SECONDS)
        self.keys = KeyMetrics(own)
        self.engines = EngineCollector()
        own.register(self.engines)
        self.backends = BackendCollector()
        own.register(self.backends)
        self.blends = BlendCollector()
        own.register(self.blends)
        self.costs = CostCollector()
        own.register(self.costs)

    def http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP exchange; status 499 is a client that left."""
        self._children.of(self._http, route, method if method in _METHODS else "other", str(status)).inc()
        self._children.of(self._http_seconds, route).observe(seconds)

    def prepared(self, report: Report) -> None:
        """Count what the optimizer did to one request."""
        self._children.of(self._overhead, report.policy).observe(report.overhead_ms / 1000)
        self._children.of(self._before, report.policy).observe(report.tokens_in)
        self._children.of(self._after, report.policy).observe(report.tokens_out)
        self._children.of(self._side, report.policy, "prompt").inc(report.side_prompt)
        self._children.of(self._side, report.policy, "completion").inc(report.side_completion)
        for step, why in report.failed.items():
            self._children.of(self._step_failures, report.policy, step, why).inc()

    def first_token(self, model: str, report: Report, seconds: float) -> None:
        self._children.of(self._ttft, *self._way(model, report)).observe(seconds)
        self._rollouts.first_token(report, seconds)

    def finished(self, model: str, report: Report, *, outcome: str, usage: Usage | None) -> None:
        """Count one completion: how it ended, what it cost, what was saved."""
        way = self._way(model, report)
        self._children.of(self._completions, *way, outcome).inc()
        self._rollouts.finished(report, outcome=outcome, usage=usage)
        for what in ("retrieved", "pruned", "cached", "reused", "recomputed"):
            child, tokens = self._children.of(self._saved, *way, what), getattr(report, what)
            if tokens > 0:
                child.inc(tokens)
        if usage is not None:
            self._children.of(self._billed, *way, "prompt").inc(usage.prompt_tokens)
            self._children.of(self._billed, *way, "completion").inc(usage.completion_tokens)

    def known(self, model: str) -> str:
        """A model's name where it may be a label value, else "other": clients can ask for any name."""
        return model if model in self._models else "other"

    def fell_back(self, backend: str, *, to: str) -> None:
        self._children.of(self._fallbacks, backend, to).inc()

    def recalled(self, policy: str, *, hit: bool) -> None:
        self._children.of(self._recalls, policy, "hit" if hit else "miss").inc()

    def reloaded(self, *, models: Collection[str] | None) -> None:
        """Count a new version of the policy file, with the names that may be label values now; None: it was refused."""
        self._children.of(self._reloads, "refused" if models is None else "accepted").inc()
        self._file_accepted.set(models is not None)
        self._models |= frozenset(models or ())

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _way(self, model: str, report: Report) -> tuple[str, str, str]:
        return (self.known(model), report.policy, report.backend)
