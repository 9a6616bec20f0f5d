"""What blending was seen to lose, by backend and collection: at most 65 names, as the gate tells them apart."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..kv_reuse.gate import Interval, Standing

_LABELS = ("backend", "collection")


class BlendCollector(Collector):
    """Gives out what `show` was told last."""

    def __init__(self) -> None:
        self._standings: Mapping[str, Mapping[str, Standing]] = {}

    def show(self, standings: "Mapping[str, Mapping[str, Standing]]") -> None:
        """By backend, then by collection; "" is what clients sent themselves. What is not among them is gone."""
        self._standings = standings

    def collect(self) -> Iterator[Metric]:
        yield from self._estimates()
        least = GaugeMetricFamily(
            "promptsluice_blend_least_ratio", "Share of reused rows that the gate has recomputed", labels=_LABELS
        )
        off = GaugeMetricFamily("promptsluice_blend_off", "1 where blending is off for its loss", labels=_LABELS)
        checks = CounterMetricFamily(
            "promptsluice_blend_checks", "Blends compared with full prefill, or dropped", labels=(*_LABELS, "outcome")
        )
        for labels, standing in self._all():
            least.add_metric(labels, standing.least)
            off.add_metric(labels, standing.off)
            checks.add_metric((*labels, "checked"), standing.checked)
            checks.add_metric((*labels, "dropped"), standing.dropped)
        yield from (least, off, checks)

    def _estimates(self) -> Iterator[Metric]:
        labels = (*_LABELS, "bound")
        kl = GaugeMetricFamily(
            "promptsluice_blend_kl", "KL of the next token from full prefill, nats: mean, 95 % interval", labels=labels
        )
        agreement = GaugeMetricFamily(
            "promptsluice_blend_agreement", "Share of 16 greedy tokens that are full prefill's", labels=labels
        )
        for names, standing in self._all():
            for family, interval in ((kl, standing.kl), (agreement, standing.agreement)):
                _add(family, names, interval)
        yield from (kl, agreement)

    def _all(self) -> Iterator[tuple[tuple[str, str], "Standing"]]:
        for backend, standings in self._standings.items():
            for collection, standing in standings.items():
                yield (backend, collection), standing


def _add(family: GaugeMetricFamily, labels: tuple[str, str], interval: "Interval | None") -> None:
    for bound, value in zip(("mean", "low", "high"), interval or (), strict=False):
        if math.isfinite(value):
            family.add_metric((*labels, bound), value)
