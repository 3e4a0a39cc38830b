"""The figures: paired differences of the NLL, and ratios of RMSE and CRPS.

Both take the entries of the sets, pick a mean and its error for each method and set, and draw the
methods of a set beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from experiments.frame.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    panels,
)
from experiments.frame.outcome import Found
from experiments.studies.uci.summaries import likelihood

STYLES = {
    "best": (BLUE, "o"),
    "best_refitted": (BLUE, "s"),
    "best_of_five": (BLUE, "*"),
    "constant": (GREY, "o"),
    "floor_t": (SKY, "o"),
    "variance_head": (BLACK, "o"),
    "laplace": (GREEN, "o"),
    "boosted": (GREEN, "s"),
    "mc_dropout": (ORANGE, "o"),
    "deep_ensemble": (VERMILION, "o"),
    "deep_ensemble_400": (PURPLE, "o"),
}
"""Colour and marker of each method."""

TICKS = (0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
"""Ratios that may be marked on the axis."""

LINEAR = 0.1
"""Differences up to this are drawn to scale, larger ones logarithmically."""

Values = dict[str, list[list[float] | None]]
"""By method, one entry a set: a mean and its error, or None where the method has no score."""


def likelihoods(sets: Found, labels: Mapping[str, str]) -> Figure:
    """Draw the differences of the NLL from LLPR's.

    Args:
        sets: the entries of the sets.
        labels: what the methods are called.
    """
    figure, (ax,) = panels(height=4.2)
    values: Values = {}
    for method in STYLES:
        key = f"{method} - llpr"
        values[method] = [
            entry["paired"].get(key, {}).get(likelihood(entry)) for entry in sets.values()
        ]
    _draw_beside_each_other(ax, values, list(sets), labels)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(1.4 * low, 1.4 * high)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("NLL - NLL of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def ratios(sets: Found, metric: str, labels: Mapping[str, str], head: str) -> Figure:
    """Draw the ratios of a score to LLPR's.

    Args:
        sets: the entries of the sets.
        metric: the score.
        labels: what the methods are called.
        head: what the score is called.
    """
    figure, (ax,) = panels(height=3.6)
    values: Values = {}
    for method in STYLES:
        key = f"{method} / llpr"
        values[method] = [entry["ratio"].get(key, {}).get(metric) for entry in sets.values()]
    _draw_beside_each_other(ax, values, list(sets), labels)
    ax.axhline(1, color="black", lw=0.8)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in TICKS if low <= tick <= high])
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(f"{head} / {head} of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def _draw_beside_each_other(
    ax: Axes, values: Values, set_names: Sequence[str], labels: Mapping[str, str]
) -> None:
    """Draw points with two standard errors, the methods of a set beside each other."""
    by_method = {method: of_sets for method, of_sets in values.items() if any(of_sets)}
    for place, (method, of_sets) in enumerate(by_method.items()):
        # The methods share the middle 80 % of a set's width.
        offset = 0.8 * ((place + 0.5) / len(by_method) - 0.5)
        positions = []
        means = []
        bars = []
        for k, value in enumerate(of_sets):
            if value:
                mean, error = value
                positions.append(k + offset)
                means.append(mean)
                bars.append(0 if math.isnan(error) else 2 * error)
        colour, marker = STYLES[method]
        ax.errorbar(
            positions,
            means,
            bars,
            fmt=marker,
            ms=6 if marker == "*" else 4,
            lw=1.2,
            color=colour,
            label=labels[method],
        )
    for border in range(1, len(set_names)):
        ax.axvline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    ax.set_xticks(range(len(set_names)), set_names)
    ax.set_xlim(-0.5, len(set_names) - 0.5)
