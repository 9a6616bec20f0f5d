"""The dashboard and the metrics registry: every query names a metric that the gateway exports, with its labels."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promptsluice.gateway.metrics import Metrics
from promptsluice.policies import CostModel

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/promptsluice.json").read_text())
SERIES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
FUNCTIONS = {"sum", "min", "rate", "increase", "histogram_quantile", "by", "label_values"}


def exported() -> dict[str, frozenset[str]]:
    """Series name to its label names: from the collectors where they hold labels before the first sample."""
    metrics = Metrics()
    metrics.backends.show({"local": {"running": 1.0}})
    metrics.costs.show({"local": (CostModel(), {"lossless": (1.0, 1.0)})})
    names = {
        sample.name: frozenset(sample.labels)
        for family in (*metrics.backends.collect(), *metrics.costs.collect())
        for sample in family.samples
    }
    registry: Any = metrics.registry
    for collector in set(registry._names_to_collectors.values()):
        labels = frozenset(collector._labelnames)
        for family in collector.describe():
            for suffix in SERIES[family.type]:
                names[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return names


def queries() -> Iterator[tuple[str, str, str]]:
    """(panel title, query, legend) of all panels, and the variables' queries."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        yield f"variable {variable['name']}", variable["query"], ""


def mentioned(query: str) -> tuple[set[str], set[str]]:
    """The series and the labels that a query names."""
    bare = re.sub(r"\"[^\"]*\"|\[[^\]]*\]|\$\w+", " ", query)
    grouped = {name for group in re.findall(r"\bby \(([^)]*)\)", bare) for name in re.findall(r"\w+", group)}
    matched = set(re.findall(r"(\w+)\s*[=!]~?", bare))
    valued = set(re.findall(r"label_values\(\w+, (\w+)\)", bare))
    words = set(re.findall(r"[A-Za-z_]\w*", bare))
    labels = grouped | matched | valued
    return words - labels - FUNCTIONS, labels


@pytest.mark.parametrize(("title", "query", "legend"), [*queries()])
def test_every_query_uses_what_the_gateway_exports(title: str, query: str, legend: str) -> None:
    known = exported()
    series, labels = mentioned(query)
    assert series, f"{title}: no metric in {query}"
    assert series <= known.keys(), f"{title}: {series - known.keys()} is not exported"
    for name in series:
        assert labels <= known[name], f"{title}: {name} has no label {labels - known[name]}"
    shown = set(re.findall(r"{{(\w+)}}", legend))
    assert shown <= frozenset().union(*(known[name] for name in series)), f"{title}: the legend shows unknown labels"


def test_every_exported_metric_is_on_the_dashboard() -> None:
    used = {name for _, query, _ in queries() for name in mentioned(query)[0]}
    missing = {name for name in exported() if name.endswith("_total") or "_bucket" in name} - used
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in used}
    assert {name for name in missing if name.removesuffix("_bucket") not in families} == set()


def test_a_wrong_query_would_be_noticed() -> None:
    series, labels = mentioned('sum by (nothing) (rate(promptsluice_gone_total{policy="off"}[5m]))')
    assert series == {"promptsluice_gone_total"}
    assert labels == {"nothing", "policy"}


def test_panels_have_ids_places_and_the_provisioned_data_source() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
