"""The figures: every method against LLPR, split by split."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from experiments.frame.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, panels
from experiments.studies.uci.tables import LABELS, Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "best": BLUE,
    "constant": GREY,
    "laplace": GREEN,
    "mc_dropout": ORANGE,
    "deep_ensemble": VERMILION,
    "deep_ensemble_400": PURPLE,
}
TICKS = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
LINEAR = 0.1
"""Differences up to this are drawn to scale, larger ones logarithmically."""


def likelihoods(found: Found) -> Figure:
    """Paired differences of the NLL."""
    figure, (ax,) = panels(height=3.8)
    values = {
        method: [one["paired"].get(f"{method} - llpr", {}).get("nll") for one in found.values()]
        for method in COLOURS
    }
    _dodged(ax, values, list(found))
    ax.axhline(0, color="black", lw=0.8)
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(1.4 * low, 1.4 * high)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("NLL - NLL of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def errors(found: Found) -> Figure:
    """Ratios of the RMSE."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, (ax,) = panels(height=3.2)
    values = {
        method: [one["ratio"].get(f"{method} / llpr") for one in found.values()]
        for method in COLOURS
    }
    _dodged(ax, values, list(found))
    ax.axhline(1, color="black", lw=0.8)
    ax.set_yscale("log")
    ax.set_yticks([tick for tick in TICKS if _inside(ax, tick)])
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("RMSE / RMSE of LLPR")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def _dodged(ax: Axes, values: dict[str, list[list[float] | None]], names: list[str]) -> None:
    """Points with two standard errors, the methods of a set beside each other."""
    shown = {method: row for method, row in values.items() if any(row)}
    for place, (method, row) in enumerate(shown.items()):
        offset = 0.7 * ((place + 0.5) / len(shown) - 0.5)
        at = [(k + offset, *value) for k, value in enumerate(row) if value]
        spread = [0 if math.isnan(error) else 2 * error for _, _, error in at]
        ax.errorbar(
            [x for x, _, _ in at],
            [mean for _, mean, _ in at],
            spread,
            fmt="o",
            ms=4,
            lw=1.2,
            color=COLOURS[method],
            label=LABELS[method],
        )
    for border in range(1, len(names)):
        ax.axvline(border - 0.5, color="0.9", lw=0.8, zorder=0)
    ax.set_xticks(range(len(names)), names)
    ax.set_xlim(-0.5, len(names) - 0.5)


def _inside(ax: Axes, tick: float) -> bool:
    low, high = ax.get_ylim()
    return low <= tick <= high
