"""The page and the dashboard show the metrics that there are, all of them and no others."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinsmith.telemetry import EXPORT_PREFIX, METRICS, SPAN_CALL, SPAN_COMMAND, SPAN_REQUEST, MetricKind

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "observability.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "tinsmith.json").read_text())
LABEL = re.compile(r"\b(?:by|without) \(([^)]*)\)|([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"")


def series() -> dict[str, str]:
    """Name of a series in Prometheus -> metric."""
    found: dict[str, str] = {}
    for metric in METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        found |= {metric.exported_name + suffix: metric.name for suffix in suffixes}
    return found


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def names_in(expression: str) -> list[str]:
    return re.findall(rf"\b{EXPORT_PREFIX}[a-z_]+", expression)


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    shown = [name for expression in expressions() for name in names_in(expression)]
    unknown = sorted(set(shown) - set(series()))
    assert unknown == []
    assert {series()[name] for name in shown} == set(METRICS)


def test_the_dashboard_asks_for_labels_that_the_metrics_have() -> None:
    for expression in expressions():
        allowed = {"le"}.union(*(METRICS[series()[name]].labels for name in names_in(expression)))
        asked = {label.strip() for listed, one in LABEL.findall(expression) for label in (one or listed).split(",")}
        assert asked <= allowed, expression


def test_panels_do_not_overlap_and_have_one_id_each() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_page_lists_every_metric_with_its_type_labels_and_meaning() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{EXPORT_PREFIX}")]
    assert rows == [
        f"| `{metric.exported_name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in METRICS.values()
    ]


def test_the_page_names_every_span() -> None:
    assert re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", PAGE, re.MULTILINE) == [SPAN_REQUEST, SPAN_COMMAND, SPAN_CALL]
