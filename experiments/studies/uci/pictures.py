"""The figures: paired differences of the NLL, and ratios of RMSE and CRPS."""

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
from experiments.studies.uci.entries import likelihood

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
TICKS = (0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
LINEAR = 0.1
"""Differences up to this are drawn to scale, larger ones logarithmically."""

Values = dict[str, list[list[float] | None]]
"""Of each method and set: a mean and its error."""


def likelihoods(found: Found, labels: Mapping[str, str]) -> Figure:
    """Paired differences of the NLL."""
    figure, (ax,) = panels(height=4.2)
    values: Values = {
        method: [
            one["paired"].get(f"{method} - llpr", {}).get(likelihood(one)) for one in found.values()
        ]
        for method in STYLES
    }
    _dodged(ax, values, list(found), labels)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(1.4 * low, 1.4 * high)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("NLL - NLL of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def ratios(found: Found, metric: str, labels: Mapping[str, str], head: str) -> Figure:
    """Of a score to LLPR's."""
    figure, (ax,) = panels(height=3.6)
    values: Values = {
        method: [one["ratio"].get(f"{method} / llpr", {}).get(metric) for one in found.values()]
        for method in STYLES
    }
    _dodged(ax, values, list(found), labels)
    ax.axhline(1, color="black", lw=0.8)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.set_yticks([tick for tick in TICKS if low <= tick <= high])
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(f"{head} / {head} of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def _dodged(ax: Axes, values: Values, names: Sequence[str], labels: Mapping[str, str]) -> None:
    """Points with two standard errors, the methods of a set beside each other."""
    shown = {method: row for method, row in values.items() if any(row)}
    for place, (method, row) in enumerate(shown.items()):
        offset = 0.8 * ((place + 0.5) / len(shown) - 0.5)
        at = [(k + offset, *value) for k, value in enumerate(row) if value]
        spread = [0 if math.isnan(error) else 2 * error for _, _, error in at]
        colour, marker = STYLES[method]
        ax.errorbar(
            [x for x, _, _ in at],
            [mean for _, mean, _ in at],
            spread,
            fmt=marker,
            ms=6 if marker == "*" else 4,
            lw=1.2,
            color=colour,
            label=labels[method],
        )
    for border in range(1, len(names)):
        ax.axvline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.5, len(names) - 0.5)
