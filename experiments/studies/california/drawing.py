"""The figures: the threshold, the first net's bars on both sides of it, and all nets' bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.judging import parity
from experiments.studies.california.tables import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = dict[str, Any]

TITLES = {"inside": "in domain", "outside": "out of domain"}


def longitudes(found: Found) -> Figure:
    """The histogram that the threshold divides."""
    figure, (ax,) = panels(width=6.5, height=2.8)
    one = found["longitude"]
    edges = one["edges"]
    for side, colour in (("outside", VERMILION), ("inside", BLUE)):
        counts = [
            n if ((low + high) / 2 > one["threshold"]) == (side == "inside") else 0
            for n, low, high in zip(one["counts"], edges, edges[1:], strict=False)
        ]
        ax.stairs(counts, edges, fill=True, color=colour, label=f"{TITLES[side]}: {one[side]} rows")
    ax.axvline(one["threshold"], color=BLACK, lw=1, ls="--")
    ax.set(xlabel="standardised longitude", ylabel="rows")
    ax.set_xlim(*_occupied(one["counts"], edges))
    ax.legend()
    return figure


def both_sides(found: Found, calibration: str) -> Figure:
    """Single rows and bins of one net."""
    shown = found["shown"][calibration]
    return parity.pairs({title: shown[domain] for domain, title in TITLES.items()})


def of_each_net(found: Found) -> Figure:
    """Separation and coverage of every net, one column a calibration."""
    figure, (left, right) = panels(columns=2, height=3.4)
    calibrations = found["calibrations"]
    for place, one in enumerate(calibrations.values()):
        _dots(left, place, one["auroc_of_each"], BLUE, "of each net")
        _dots(right, place - 0.12, one["inside"]["coverage_of_each"], BLUE, TITLES["inside"])
        _dots(right, place + 0.12, one["outside"]["coverage_of_each"], VERMILION, TITLES["outside"])
    left.set(title="Far rows told by the bar", ylabel="AUROC")
    right.axhline(found["settings"]["level"], color=GREY, lw=1, ls="--")
    right.set(title="Intervals meant to hold 90 %", ylabel="coverage")
    for ax in (left, right):
        names = [LABELS[name].replace(", ", ",\n").replace(" (", "\n(") for name in calibrations]
        ax.set_xticks(range(len(calibrations)), names)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower right", ncols=2)
    return figure


def _dots(ax: Axes, place: float, values: list[float], colour: str, label: str) -> None:
    """Every net as a dot, the mean as a line."""
    mean = sum(values) / len(values)
    ax.plot([place] * len(values), values, "o", color=colour, ms=4, alpha=0.6, mew=0, label=label)
    ax.plot([place - 0.1, place + 0.1], [mean, mean], color=colour, lw=2)


def _occupied(counts: list[int], edges: list[float]) -> tuple[float, float]:
    """The ends of the bins that hold rows."""
    filled = [k for k, count in enumerate(counts) if count]
    return edges[filled[0]], edges[filled[-1] + 1]
