"""The figures: quality against width, and the binned plots of four widths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLUE, GREEN, GREY, VERMILION, panels
from experiments.judging import parity
from experiments.studies.width.tables import LABELS, MEDIANS, NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = dict[str, Any]

PANELS = ("binned_log_ratio", "gain", "spearman", "slope")
COLOURS = {"paper": BLUE, "nll": VERMILION, "floor": GREEN}
LIMITS = {"gain": (-0.15, 1.0), "binned_log_ratio": (0.0, 0.25), "slope": (-0.5, 2.0)}
"""Beyond these a score is only said to be so: ruined nets may lie anywhere."""


def quality(found: Found) -> Figure:
    """Four scores with their spread over the nets, one curve a calibration."""
    figure, axes = panels(columns=2, rows=2, height=2.8)
    widths = [int(width) for width in found["widths"]]
    for ax, name in zip(axes, PANELS, strict=True):
        for side, (calibration, colour) in zip((-1, 0, 1), COLOURS.items(), strict=True):
            blocks = [one[calibration] for one in found["widths"].values()]
            # A little to each side of the width, so that the bars do not hide one another.
            places = [width * 2 ** (0.06 * side) for width in widths]
            _curve(ax, places, [_spread(one, name) for one in blocks], colour, LABELS[calibration])
        if name == "binned_log_ratio":
            blocks = [one["paper"]["constant"] for one in found["widths"].values()]
            _curve(ax, widths, [_spread(one, name) for one in blocks], GREY, "constant bar")
        if name in ("gain", "slope"):
            ax.axhline(float(name == "slope"), color=GREY, lw=1, ls="--")
        if name in LIMITS:
            _cut(ax, LIMITS[name])
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.set_title(f"{NAMES[name]}, {'median' if name in MEDIANS else 'mean'}")
    for ax in axes[2:]:
        ax.set_xlabel("neurons a layer")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def beyond(figure: Figure) -> dict[str, bool]:
    """Whether the figure has points, as triangles, and ends of bars that lie beyond its axes."""
    found = {"points": False, "bars": False}
    for ax in figure.axes:
        low, high = ax.get_ylim()
        for line in ax.lines:
            found["points"] |= line.get_marker() in ("v", "^")
            if line.get_marker() == "_":  # the caps of error bars
                found["bars"] |= any(not low <= float(y) <= high for y in line.get_ydata())
    return found


def binned(found: Found) -> Figure:
    """The paper's panels: one width each, by the paper's calibration."""
    shown = found["shown"]
    figure, axes = panels(columns=2, rows=(len(shown) + 1) // 2, height=4.0)
    for ax, (width, bins) in zip(axes, shown.items(), strict=False):
        parity.binned(ax, {LABELS["paper"]: bins}, f"{width} neurons a layer")
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    return figure


def _spread(block: Found, name: str) -> tuple[float, float, float]:
    """Value, and both ends of its bar: quartiles of the nets, or one standard error."""
    if name in MEDIANS:
        middle, low, high = block["median"][name]
        return middle, low, high
    mean, error = block["scores"][name]
    return mean, mean - error, mean + error


def _curve(
    ax: Axes,
    places: Sequence[float],
    spreads: list[tuple[float, float, float]],
    colour: str,
    label: str,
) -> None:
    middles = [middle for middle, _, _ in spreads]
    ends = [[m - low for m, low, _ in spreads], [high - m for m, _, high in spreads]]
    ax.errorbar(places, middles, ends, color=colour, marker="o", ms=4, capsize=2, label=label)


def _cut(ax: Axes, limits: tuple[float, float]) -> None:
    """Axes for what lies within the limits; a triangle stands for a point beyond."""
    drawn = [float(y) for line in ax.lines for y in line.get_ydata()]
    within = [y for y in drawn if limits[0] <= y <= limits[1]]
    room = 0.06 * (max(within) - min(within))
    low, high = max(min(within) - room, limits[0]), min(max(within) + room, limits[1])
    for line in [line for line in ax.lines if line.get_marker() == "o"]:
        values = [float(y) for y in line.get_ydata()]
        for x, y in zip(line.get_xdata(), values, strict=True):
            if not low <= y <= high:
                edge, marker = (low, "v") if y < low else (high, "^")
                ax.plot([x], [edge], marker, color=line.get_color(), ms=7, clip_on=False)
        line.set_ydata([y if low <= y <= high else math.nan for y in values])
    ax.set_ylim(low, high)
