"""The table of metrics is what the docs and the dashboard show, and Grafana and Prometheus can read the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from sglang_hisparse_plugin.observe import metrics
from sglang_hisparse_plugin.observe.dashboard import dashboard

NAMES = {m.full: m for m in metrics.METRICS}
REMEDY = "python -m sglang_hisparse_plugin.observe.metrics"


@pytest.mark.parametrize("file", [*metrics.documents()], ids=lambda path: path.name)
def test_what_is_written_from_the_table_is_up_to_date(file: Any) -> None:
    assert file.read_text("utf-8") == metrics.documents()[file], REMEDY


def lost(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """What of `given` is not in `known`."""
    if isinstance(given, dict):
        for key, value in given.items():
            if isinstance(known, dict) and key in known:
                yield from lost(value, known[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(given, list):
        if len(given) != len(known):
            yield path
        for i, (a, b) in enumerate(zip(given, known, strict=False)):
            yield from lost(a, b, f"{path}/{i}")
    elif given != known:
        yield path


def known_to_grafana(given: dict[str, Any]) -> Any:
    """`given` as Grafana's own types, generated from its schema, keep it: what they do not know they drop."""
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(given)))


def test_grafanas_schema_knows_every_field() -> None:
    given = dashboard()
    assert [*lost(given, known_to_grafana(given))] == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    given = dashboard()
    given["panels"][0]["targets"][0]["expression"] = "1"
    given["panels"][1]["grid"] = {}
    found = [*lost(given, known_to_grafana(given))]
    assert found == ["/panels/0/targets/0/expression", "/panels/1/grid"]


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def selectors(node: Any) -> Iterator[tuple[str, list[str]]]:
    """Metric and the calls around it, outermost first, of each selector in a parsed query."""
    match type(node).__name__:
        case "VectorSelector":
            yield node.name, []
        case "MatrixSelector":
            yield node.vector_selector.name, []
        case "Call":
            for arg in node.args:
                yield from ((name, [node.func.name, *calls]) for name, calls in selectors(arg))
        case "AggregateExpr" | "ParenExpr":
            yield from selectors(node.expr)
        case "BinaryExpr":
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)


@pytest.mark.parametrize("query", queries())
def test_a_query_is_right_for_the_type_of_its_metric(query: str) -> None:
    """Counters through rate() or increase(), histograms by bucket in histogram_quantile(), gauges as they are."""
    parsed = promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$model_name", ".*"))
    found = [*selectors(parsed)]
    assert found
    for name, calls in found:
        metric = NAMES[name.removesuffix("_bucket")]
        if metric.kind == "gauge":
            assert calls == []
        elif metric.kind == "counter":
            assert calls in (["rate"], ["increase"])
        else:
            assert name.endswith("_bucket") and calls == ["histogram_quantile", "rate"] and "by (le)" in query


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(queries())
    assert [name for name in NAMES if name not in shown and name != metrics.HIT_RATE.full] == []
