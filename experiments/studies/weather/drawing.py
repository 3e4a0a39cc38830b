"""The figures: single rows and bins of one net, and what the stations' bars are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.frame.figures import BLACK, BLUE, panels
from experiments.judging import parity
from experiments.studies.weather.tables import LABELS
from experiments.studies.weather.work import SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = dict[str, Any]


def rows_and_bins(found: Found) -> Figure:
    """One column a calibration: absolute errors above, bins below."""
    return parity.pairs({LABELS[name]: found["calibrations"][name] for name in SHOWN}, height=3.3)


def stations(found: Found) -> Figure:
    """The error of each station against its bar."""
    figure, (ax,) = panels(width=5.0, height=4.4)
    bars, errors = ([one[k][0] for one in found.values()] for k in ("bar", "rmse"))
    spread = [one["rmse"][1] for one in found.values()]
    ax.errorbar(bars, errors, yerr=spread, fmt="o", color=BLUE, ms=4, lw=1)
    low, high = min(bars + errors), max(bars + errors)
    margin = 0.08 * (high - low)
    ends = [low - margin, high + margin]
    ax.plot(ends, ends, color=BLACK, lw=1)
    names = list(found)
    for place in {0, len(names) - 1}:
        ax.annotate(
            names[place],
            (bars[place], errors[place]),
            xytext=(6, -10),
            textcoords="offset points",
            fontsize=8,
        )
    ax.set(xlim=ends, ylim=ends, xlabel="bar (°C)", ylabel="RMSE (°C)")
    ax.set_box_aspect(1)
    return figure
