"""The backends' own gauges, and embedded engines under the names that vLLM gives its metrics, where the meaning is the
same: dashboards fit both.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..backend_engine.readings import Distribution, Readings

_LABELS = ("model_name", "engine")


class BackendCollector(Collector):
    """Gives out the gauges that `show` was told last."""

    def __init__(self) -> None:
        self._stats: Mapping[str, Mapping[str, float]] = {}

    def show(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        """By backend; what is not among them is gone."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("promptsluice_backend", "A backend's own gauges", labels=("backend", "name"))
        for backend, stats in self._stats.items():
            for name, value in stats.items():
                family.add_metric((backend, name), value)
        yield family


class EngineCollector(Collector):
    """Gives out what `show` was told last."""

    def __init__(self) -> None:
        self._readings: Mapping[tuple[str, str], Readings] = {}

    def show(self, readings: "Mapping[tuple[str, str], Readings]") -> None:
        """All engines by model and backend; what is not among them is gone."""
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        for name, text, read in (
            ("num_requests_running", "Requests that hold KV", lambda one: one.stats.running),
            ("num_requests_waiting", "Requests that wait to be admitted", lambda one: one.stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool in use by requests; 1 is all", lambda one: one.kv_usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for labels, readings in self._readings.items():
                family.add_metric(labels, read(readings))
            yield family

    def _counters(self) -> Iterator[Metric]:
        for name, text, read in (
            ("num_preemptions", "Requests put back into the queue", lambda one: one.stats.preemptions),
            ("prompt_tokens", "Prompt tokens, cached ones included", lambda one: one.latencies.prompt_tokens),
            ("generation_tokens", "Generated tokens", lambda one: one.stats.generated_tokens),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                lambda one: one.stats.queried_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda one: one.stats.cached_tokens),
            ("spec_decode_num_draft_tokens", "Tokens guessed ahead", lambda one: one.stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Guesses that were drawn", lambda one: one.stats.accepted_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for labels, readings in self._readings.items():
                family.add_metric(labels, read(readings))
            yield family
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended by themselves or were aborted",
            labels=(*_LABELS, "finished_reason"),
        )
        for labels, readings in self._readings.items():
            for reason, count in list(readings.latencies.ended.items()):
                ended.add_metric((*labels, reason), count)
        yield ended

    def _histograms(self) -> Iterator[Metric]:
        for name, text, read in (
            ("time_to_first_token_seconds", "From submission to the first token", lambda one: one.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request", lambda one: one.inter_token),
            ("request_queue_time_seconds", "From submission to admission", lambda one: one.queue),
            ("e2e_request_latency_seconds", "From submission to the end", lambda one: one.whole),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for labels, readings in self._readings.items():
                distribution = read(readings.latencies)
                family.add_metric(labels, _buckets(distribution), sum_value=distribution.total)
            yield family


def _buckets(distribution: "Distribution") -> list[tuple[str, float]]:
    bounds = (*map(str, distribution.bounds), "+Inf")
    return [(bound, float(count)) for bound, count in zip(bounds, distribution.cumulative(), strict=True)]
