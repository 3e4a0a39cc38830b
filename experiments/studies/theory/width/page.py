"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from experiments.frame.outcome import Table, with_error
from experiments.studies.theory.width.work import (
    ACTIVATIONS,
    DEPTH,
    DIMENSION,
    GROWN,
    NARROW,
    POINTS,
)


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: one panel for each way to grow."""
    figure, axes = panels(columns=2, height=3.2, sharey=True)
    widths = numbers["setting"]["widths"]
    for ax, grown, letter in zip(axes, GROWN, "ab", strict=True):
        for name, colour, marker in zip(ACTIVATIONS, COLOURS, "osv", strict=False):
            entry = numbers[name][grown]
            ax.errorbar(
                widths,
                entry["error"],
                entry["spread"],
                color=colour,
                marker=marker,
                ms=5,
                lw=1.3,
                label=name,
            )
        # A line of the paper's rate, a little above the largest error.
        largest = max(float(numbers[name]["all layers"]["error"][0]) for name in ACTIVATIONS)
        guide = [1.3 * largest * math.sqrt(widths[0] / width) for width in widths]
        ax.plot(widths, guide, "--", color=BLACK, lw=1.2, label="width^(-1/2)")
        ax.set(xscale="log", yscale="log", title=f"({letter}) {grown}")
        if grown == "all layers":
            ax.set_xlabel("width")
        else:
            ax.set_xlabel(f"width of the last layer, others {NARROW}")
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.minorticks_off()
        ax.grid(axis="y", color=GREY, alpha=0.2)
    axes[0].set_ylabel("relative error of FFᵀ")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """Slopes and the error at both ends."""
    widths = numbers["setting"]["widths"]
    rows = []
    for grown in GROWN:
        for name in ACTIVATIONS:
            entry = numbers[name][grown]
            first_error = float(entry["error"][0])
            last_error = float(entry["error"][-1])
            rows.append([grown, name, with_error(*entry["slope"], 3), first_error, last_error])
    return Table(
        ["what grows", "activation", "slope", f"error at {widths[0]}", f"error at {widths[-1]}"],
        rows,
        f"Slope of log error against log width ({numbers['setting']['seeds']} networks per width, "
        "standard error between seeds), and the relative Frobenius error at both ends.",
    )


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    spans = []
    for grown in GROWN:
        slopes = sorted(numbers[name][grown]["slope"][0] for name in ACTIVATIONS)
        spans.append(f"{slopes[0]:.2f} to {slopes[-1]:.2f}")
    return (
        f"If *all* hidden layers grow, the slope is {spans[0]}, already close to -1/2 at these "
        f"widths. If the last layer alone grows, the slope is {spans[1]}. Behind layers of "
        f"{NARROW}, the error stops falling, because F Fᵀ then converges to the kernel of that "
        "narrow network and not to the NNGP. So the rate refers to the width of the whole network. "
        "(This does not harm an error bar, which uses the features of the network at hand.)"
    )


HEAD = f"""\
## How wide is wide enough?

σ_w² F Fᵀ estimates the NNGP kernel. According to the paper, the error of this estimate falls as
N_L^(-1/2). Here random networks have {DEPTH} hidden layers and see {POINTS} inputs on the sphere in
{DIMENSION} dimensions. The error is ‖FFᵀ - K_NNGP‖ / ‖K_NNGP‖ in the Frobenius norm."""

CAPTION = (
    "Relative error of the Gram matrix of the last features (root mean square and standard "
    "deviation over seeds) when (a) all hidden layers grow, (b) only the last one grows."
)
