"""Parts of plots: points, lines, bands and axes, as plotly.js takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..plots import BLUE

Trace = dict[str, Any]

LOG, LINEAR = "logarithmic", "linear"
_BAND = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "type": "scatter"}


def points(x: Tensor, y: Tensor, name: str, hover: Trace) -> Trace:
    """Markers; the more there are, the fainter."""
    opacity = min(0.8, max(0.12, 14 / math.sqrt(max(1, len(x)))))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(x),
        "y": rounded(y),
        "name": name,
        "marker": {"color": BLUE, "size": 6, "opacity": opacity},
        "hoverinfo": "text",
        "meta": dict(hover),
        "showlegend": False,
    }


def line(
    x: Any,
    y: Any,
    name: str,
    *,
    color: str = "#000000",
    dash: str = "solid",
    width: float = 1.2,
    meta: Trace | None = None,
) -> Trace:
    """A line that hovering passes over."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(x),
        "y": rounded(y),
        "name": name,
        "line": {"color": color, "dash": dash, "width": width},
        "hoverinfo": "skip",
        "meta": meta or {},
    }


def band(x: Tensor, low: Tensor, high: Tensor, name: str) -> list[Trace]:
    """A grey band, as a lower line and one that fills down to it."""
    lower = {**_BAND, "x": rounded(x), "y": rounded(low), "showlegend": False}
    upper = {**_BAND, "x": rounded(x), "y": rounded(high), "name": name}
    return [lower, {**upper, "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.25)"}]


def limits(values: Tensor) -> tuple[float, float]:
    """Limits around positive values, a decade or more apart."""
    low, high = float(values.min()) / 1.3, float(values.max()) * 1.3
    widen = 10 ** (max(0.0, 1 - math.log10(high / low)) / 2)
    return low / widen, high * widen


def across(low: float, high: float) -> Tensor:
    """From far below the axis to above it: straight lines on both kinds of axes."""
    return torch.tensor([low / 1e3, low, high, high * 10], dtype=torch.float64)


def two_layouts(x: str, y: str, low: float, high: float) -> dict[str, dict[str, Any]]:
    """Logarithmic and linear axes of one kind, with the same limits for x and y."""
    ends = [math.log10(low), math.log10(high)]
    log: dict[str, Any] = {"type": "log", "range": ends, "exponentformat": "power"}
    log["dtick"] = 1 if ends[1] - ends[0] >= 2 else "D2"  # powers of ten, or 1, 2, 5, 10
    linear = {"type": "linear", "range": [0, high]}
    return {
        LOG: layout(axis(x, **log), axis(y, **log)),
        LINEAR: layout(axis(x, **linear), axis(y, **linear)),
    }


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **options}


def layout(x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """Both axes, the legend below them."""
    return {
        "xaxis": x,
        "yaxis": y,
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"},
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
    }


def rounded(values: Tensor | Iterable[float]) -> list[float]:
    """Six digits: more would not show, and make the page longer."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{value:.6g}") for value in listed]
