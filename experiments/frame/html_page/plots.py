"""The plots of an experiment's page that the library's reports do not have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from rigidities.plots import BLUE
from rigidities.report.figures import Plot, axis, layout, plotly_text
from rigidities.report.formatting import around

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

MethodValues: TypeAlias = Mapping[str, tuple[float, float | None]]
"""Mean and standard error of one metric, by method."""


def methods_plot(data_set: str, panels: Mapping[str, MethodValues]) -> Plot:
    """Means with standard errors of methods on a data set, with a choice of the metric.

    Args:
        data_set: Its name.
        panels: Values of the methods by metric; none for a metric that the data set lacks.
    """
    method_count = max(len(methods) for methods in panels.values())
    method_axis = axis("")
    method_axis["type"] = "category"
    method_axis["autorange"] = "reversed"
    plain_layout = layout(axis(""), method_axis)
    plain_layout.showlegend = False
    return Plot(
        name="methods",
        title=data_set,
        caption="",
        label=f"Means with standard errors of {method_count} methods on {data_set}.",
        traces={metric: [_method_points(methods)] for metric, methods in panels.items()},
        layouts={"": plain_layout},
        height=90 + 34 * method_count,
    )


def _method_points(methods: MethodValues) -> Scatter:
    """One point with its error for each method that has a finite mean."""
    from plotly.graph_objects import Scatter

    names, means, errors = [], [], []
    for name, (mean, error) in methods.items():
        if math.isfinite(mean):
            names.append(name)
            means.append(mean)
            errors.append(error if error is not None and math.isfinite(error) else 0.0)
    texts = []
    for name, mean, error in zip(names, means, errors, strict=True):
        texts.append(f"{plotly_text(name)}: {around(mean, error)}")
    return Scatter(
        mode="markers",
        x=means,
        y=[plotly_text(label, 40) for label in distinct_labels(names)],
        error_x={"type": "data", "array": errors, "thickness": 1.5, "width": 4, "color": BLUE},
        marker={"color": BLUE, "size": 9},
        hoverinfo="text",
        hovertext=texts,
    )


def distinct_labels(names: Iterable[str], most: int = 24) -> list[str]:
    """Names cut in the middle where they are long, numbered where they would be alike.

    Examples:
        >>> distinct_labels(["an ensemble of ten nets, first", "an ensemble of ten nets, last"])
        ['an ensemble …nets, first', 'an ensemble … nets, last']
        >>> distinct_labels(["abcdefgh", "abcxefgh"], most=6)
        ['abc…gh', 'abc…gh (2)']
    """
    labels: list[str] = []
    tail = (most - 1) // 2
    for name in names:
        short = name
        if len(name) > most:
            short = f"{name[: most - 1 - tail]}…{name[-tail:]}"
        label, count = short, 1
        while label in labels:
            count += 1
            label = f"{short} ({count})"
        labels.append(label)
    return labels
