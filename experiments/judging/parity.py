"""The paper's two pictures of error bars, drawn from the numbers that an experiment keeps.

`experiments.judging.scores.points` and `bins` make those numbers: a block "points" has the
estimated and the absolute errors of single rows, a block "bins" the variances and the mean squared
errors of bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from rigidities import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Block = Mapping[str, Any]
"""Numbers of one plot, by name."""

MARKERS = "osD^v*"

MARGIN = 1.3
"""Factor between the outermost values and the ends of the axes."""


def errors(ax: Axes, points: Block, title: str = "") -> None:
    """Absolute against estimated errors, with the lines of 1, 2 and 3 sigma.

    Args:
        ax: The panel to draw on.
        points: A block with "std" and "error".
        title: The title of the panel.
    """
    error = points["error"]
    plots.errors([0.0] * len(error), points["std"], error, ax=ax)
    ax.set_title(title)


def binned(ax: Axes, series: Mapping[str, Block], title: str = "") -> None:
    """Mean squared errors against variances of bins, one colour a series.

    The band about y = x is twice the standard error sqrt(2 / bin size) of log MSE that Gaussian
    errors have. It is drawn for the bin size of the first series.

    Args:
        ax: The panel to draw on.
        series: Blocks with "bin_size", "variance" and "mse", by their label.
        title: The title of the panel.
    """
    low, high = _limits(list(series.values()))
    first_series = next(iter(series.values()))
    size = first_series["bin_size"]
    band = math.exp(2 * math.sqrt(2 / size))
    ends = [low, high]
    below = [end * (1 / band) for end in ends]
    above = [end * band for end in ends]
    ax.fill_between(ends, below, above, color=GREY, alpha=0.2, lw=0)
    ax.plot(ends, ends, color=BLACK, lw=1)
    for (label, bins), colour, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
        ax.plot(
            bins["variance"], bins["mse"], marker, color=colour, ms=4, alpha=0.8, mew=0, label=label
        )
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title)
    ax.set(xlabel="predicted variance", ylabel="mean squared error")
    ax.set_box_aspect(1)
    _label_ticks(ax, math.log10(high / low))
    ax.legend(loc="upper left", title=f"bins of {size}", alignment="left")


def pairs(series: Mapping[str, Block], *, height: float = 4.2) -> Figure:
    """Two panels a series: single rows above, bins below.

    Args:
        series: Blocks with "points" and "bins", by the label above them; at most three.
        height: The height of a row of panels in inches.
    """
    figure, axes = panels(columns=len(series), rows=2, height=height)
    upper_axes = axes[: len(series)]
    lower_axes = axes[len(series) :]
    for (label, block), upper, lower in zip(series.items(), upper_axes, lower_axes, strict=True):
        errors(upper, block["points"], label)
        binned(lower, {label: block["bins"]})
    return figure


def _limits(blocks: Sequence[Block]) -> tuple[float, float]:
    """The ends of both axes: around all positive values, a decade or more apart."""
    values: list[float] = []
    for block in blocks:
        values += [*block["variance"], *block["mse"]]
    positive = [float(value) for value in values if value > 0]
    low = min(positive) / MARGIN
    high = max(positive) * MARGIN
    widen = max(0.0, 1 - math.log10(high / low)) / 2
    return low / 10**widen, high * 10**widen


def _label_ticks(ax: Axes, decades: float) -> None:
    """Label 1, 2, 5, 10, ... where there are few decades, else powers of ten alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
        if decades < 2:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
