"""What the planner believes work to cost, and how its predictions came true, by backend."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..policies import CostModel

_LABELS = ("backend", "what")
Told = Mapping[str, tuple[float, float]]
"""By kind of work the milliseconds that were predicted, and those that it took."""


class CostCollector(Collector):
    """Gives out what `show` was told last. Kinds of work: prefill, load, retrieve and the compressors."""

    def __init__(self) -> None:
        self._costs: Mapping[str, tuple[CostModel, Told]] = {}

    def show(self, costs: Mapping[str, tuple[CostModel, Told]]) -> None:
        """By backend; what is not among them is gone."""
        self._costs = costs

    def collect(self) -> Iterator[Metric]:
        fixed = GaugeMetricFamily("promptsluice_cost_fixed_ms", "Milliseconds that a call costs", labels=_LABELS)
        each = GaugeMetricFamily("promptsluice_cost_token_ms", "Milliseconds that a token costs", labels=_LABELS)
        predicted = CounterMetricFamily(
            "promptsluice_predicted_seconds", "What steps of plans were predicted to take", labels=_LABELS
        )
        real = CounterMetricFamily("promptsluice_taken_seconds", "What the same steps took", labels=_LABELS)
        for backend, (costs, told) in self._costs.items():
            for what, line in costs.lines().items():
                fixed.add_metric((backend, what), line.fixed)
                each.add_metric((backend, what), line.per_token)
            for what, (expected_ms, taken_ms) in told.items():
                predicted.add_metric((backend, what), expected_ms / 1000)
                real.add_metric((backend, what), taken_ms / 1000)
        yield from (fixed, each, predicted, real)
