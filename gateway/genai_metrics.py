"""The series that OpenTelemetry's conventions for generative AI name, as Prometheus writes such names.

`gen_ai.server.*` as the gateway's clients see it, whoever answers; `gen_ai.client.token.usage` as it was billed.
Labels are bounded as everywhere here; the buckets are those of the conventions (1.41, gen-ai-metrics).
"""

from prometheus_client import CollectorRegistry, Histogram

from ..prompt import Usage
from .children import Children

_WHO = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATIONS = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKENS = tuple(4**power for power in range(14))


class GenAIMetrics:
    """`who` is operation, provider and model, in this order."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._children = Children()
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds", "Seconds from a request's body to the end of its answer",
            (*_WHO, "error_type"), buckets=_DURATIONS, registry=registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds", "Seconds from a request's body to its first content",
            _WHO, buckets=_FIRST_TOKENS, registry=registry,
        )  # fmt: skip
        self._tokens = Histogram(
            "gen_ai_client_token_usage", "Tokens of a request as the backend billed them: input, output",
            (*_WHO, "gen_ai_token_type"), buckets=_TOKENS, registry=registry,
        )  # fmt: skip

    def first_token(self, who: tuple[str, str, str], seconds: float) -> None:
        """The first content of an answer, so long after the request came."""
        self._children.of(self._first_token, *who).observe(seconds)

    def finished(self, who: tuple[str, str, str], *, outcome: str, seconds: float, usage: Usage | None) -> None:
        """Count one completion. `error_type` is empty where it went well, else how it ended."""
        self._children.of(self._duration, *who, "" if outcome == "ok" else outcome).observe(seconds)
        if usage is not None:
            self._children.of(self._tokens, *who, "input").observe(usage.prompt_tokens)
            self._children.of(self._tokens, *who, "output").observe(usage.completion_tokens)
