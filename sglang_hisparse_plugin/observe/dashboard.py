"""``examples/dashboard.json``: a Grafana dashboard (schema 39, Grafana 10.4 and later) of the metrics' table."""

from __future__ import annotations

from typing import Any

from .metrics import (
    ABORTS,
    BYTES,
    HITS,
    MISSES,
    MISSES_PER_CALL,
    OVERLAY,
    POOL_SIZE,
    POOL_USED,
    REFUSED,
    RETRACTIONS,
    STAGING,
)

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = '{model_name=~"$model_name"}'
WIDTH, HEIGHT = 12, 8  # of a panel, in the 24 columns of Grafana's grid


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{CHOSEN}[$__rate_interval]))"


def _quantile(q: float) -> str:
    return f"histogram_quantile({q}, {_rate(f'{MISSES_PER_CALL.full}_bucket', 'le')})"


HIT_RATE_QUERY = f"{_rate(HITS.full)} / ({_rate(HITS.full)} + {_rate(MISSES.full)})"
BY_LAYERS = (
    f"{_rate(HITS.full, 'layers')} / ({_rate(HITS.full, 'layers')} + {_rate(MISSES.full, 'layers')})"  # same labels
)

#: Title, unit of Grafana, and query by legend of each panel.
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Hit rate", "percentunit", {"all layers": HIT_RATE_QUERY, "layers {{layers}}": BY_LAYERS}),
    (
        "Misses of one request in one step of one layer",
        "short",
        {f"p{int(q * 100)}": _quantile(q) for q in (0.5, 0.9, 0.99)},
    ),
    ("Swap-in traffic", "Bps", {"layers {{layers}}": _rate(BYTES.full, "layers")}),
    (
        "Pools in use",
        "percentunit",
        {
            "{{pool}}": f"sum by (pool) ({POOL_USED.full}{CHOSEN}) / sum by (pool) ({POOL_SIZE.full}{CHOSEN})",
        },
    ),
    ("Staging queue", "short", {"requests": f"sum ({STAGING.full}{CHOSEN})"}),
    (
        "Retractions, refusals and aborts in five minutes",
        "short",
        {
            "retracted, {{stage}}": f"sum by (stage) (increase({RETRACTIONS.full}{CHOSEN}[5m]))",
            "refused, {{reason}}": f"sum by (reason) (increase({REFUSED.full}{CHOSEN}[5m]))",
            "aborted, {{reason}}": f"sum by (reason) (increase({ABORTS.full}{CHOSEN}[5m]))",
        },
    ),
)


def dashboard() -> dict[str, Any]:
    """What Grafana imports; it asks for the Prometheus data source and offers the model names it finds."""
    panels = [_panel(i, *panel) for i, panel in enumerate(PANELS)]
    return {
        "title": "SGLang HiSparse",
        "uid": "sglang-hisparse",
        "tags": ["sglang", "hisparse"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _model_name()]},
        "annotations": {"list": []},
        "panels": [*panels, _overlays(len(panels))],
    }


def _panel(i: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + n), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for n, (legend, query) in enumerate(queries.items())
    ]
    return {
        "id": i + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": _place(i),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        "targets": targets,
    }


def _overlays(i: int) -> dict[str, Any]:
    query = f"max by (overlay, outcome) ({OVERLAY.full}{CHOSEN})"
    target = {"refId": "A", "expr": query, "format": "table", "instant": True, "range": False, "datasource": SOURCE}
    hidden = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}
    return {
        "id": i + 1,
        "type": "table",
        "title": "Overlays",
        "datasource": SOURCE,
        "gridPos": _place(i) | {"w": 2 * WIDTH},
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [hidden],
        "targets": [target],
    }


def _place(i: int) -> dict[str, int]:
    return {"x": WIDTH * (i % 2), "y": HEIGHT * (i // 2), "w": WIDTH, "h": HEIGHT}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _model_name() -> dict[str, Any]:
    return {
        "name": "model_name",
        "type": "query",
        "label": "Model",
        "datasource": SOURCE,
        "query": f"label_values({POOL_SIZE.full}, model_name)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
