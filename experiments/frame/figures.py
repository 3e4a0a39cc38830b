"""One look for all figures: colour-blind safe, readable at the width of a README.

A page shows a picture about 850 pixels wide. Panels are laid out on at most nine inches, so that
ten points stay readable there.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people tell apart; the first two as in
# `rigidities.plots`.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, BLACK, GREY = "#56B4E9", "#E69F00", "#000000", "#666666"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)

WIDTH = 9.0
"""The largest width of a figure in inches."""

DPI = 130
"""Pixels an inch."""

LARGEST = 300_000
"""The largest number of bytes of a picture."""


def style() -> dict[str, Any]:
    """Matplotlib's settings during an experiment."""
    from cycler import cycler

    return {
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.labelsize": 10,
        "axes.grid": False,
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.framealpha": 0.8,
        "legend.edgecolor": "none",
        "lines.linewidth": 1.8,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
    }


def panels(
    columns: int = 1, rows: int = 1, *, width: float = WIDTH, height: float = 3.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row.

    Args:
        columns: The number of panels in a row.
        rows: The number of rows.
        width: The width of the figure in inches, at most nine.
        height: The height of one row in inches.
        options: Options of `Figure.subplots`, such as ``sharey=True``.
    """
    from matplotlib.figure import Figure

    # Without pyplot there is no backend to choose, and no screen is needed.
    figure = Figure(figsize=(min(width, WIDTH), rows * height))
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def png(figure: Figure) -> bytes:
    """The picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
