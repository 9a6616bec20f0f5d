"""Metrics of API keys. Labels are the names of the policy file's keys, "anonymous" and "unknown"."""

from prometheus_client import CollectorRegistry, Counter, Gauge

UNKNOWN = "unknown"
"""Stands for whoever brought no key, or none that is known."""


class KeyMetrics:
    """Counters in a registry that is shared with others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "promptsluice_key_requests",
            "Requests by API key and what came of them at the door: admitted, unauthorized, forbidden, or the limit "
            "that was reached",
            ("key", "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            "promptsluice_key_tokens", "Tokens that were charged to an API key", ("key",), registry=registry
        )
        self._active = Gauge(
            "promptsluice_key_active", "Requests of an API key being served", ("key",), registry=registry
        )
        self._up = Gauge(
            "promptsluice_limit_counters_up", "1 while the server that counts limits answers, or none is used",
            registry=registry,
        )  # fmt: skip
        self._up.set(1)
        self._failures = Counter(
            "promptsluice_limit_counters_failures", "Failures of the server that counts limits", registry=registry
        )

    def at_the_door(self, key: str, outcome: str) -> None:
        self._requests.labels(key, outcome).inc()

    def began(self, key: str) -> None:
        self._active.labels(key).inc()

    def ended(self, key: str) -> None:
        self._active.labels(key).dec()

    def charged(self, key: str, tokens: int) -> None:
        self._tokens.labels(key).inc(max(0, tokens))

    def counters_failed(self) -> None:
        self._up.set(0)
        self._failures.inc()

    def counters_answer(self) -> None:
        self._up.set(1)
