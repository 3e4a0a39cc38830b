"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, COLOURS, GREY, VERMILION, panels
from experiments.frame.outcome import Table
from experiments.studies.theory.stopping.work import GROUPS, REACH, TEST


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: filters at three times, variances along the time, and the mismatch."""
    figure, (left, middle, right) = panels(columns=3, height=3.5)
    draw_filters(left, numbers)
    times = numbers["time"]
    for group, colour in zip(GROUPS, (BLUE, VERMILION), strict=True):
        middle.plot(times, numbers["filter"][group], color=colour, label=f"time t, {group}")
        middle.plot(
            times, numbers["ridge_form"][group], ":", color=colour, label=f"best ridge, {group}"
        )
    middle.set(xscale="log", yscale="log", title="(b) variance", ylim=(1e-7, 30))
    middle.legend(loc="lower left")
    matches = numbers["matches"]
    right.plot(times, matches["spread"], color=BLUE, label="ridge and scale fitted")
    right.plot(times, matches["rms_alone"], "--", color=VERMILION, label="ridge alone")
    right.set(xscale="log", yscale="log", title="(c) rms of log ratio")
    right.legend(loc="upper left")
    for ax in (middle, right):
        ax.set_xlabel("time η c λ_max t")
    return figure


def draw_filters(ax: Axes, numbers: dict[str, Any]) -> None:
    """Draw what is left of each direction's prior variance, by its eigenvalue."""
    eigenvalues = numbers["eigenvalues"]
    smallest = float(eigenvalues[0])
    largest = float(eigenvalues[-1])
    lam = torch.logspace(math.log10(smallest) - 1, math.log10(largest), 200, dtype=torch.float64)
    colours = (COLOURS[2], COLOURS[4], COLOURS[3])
    for i, colour in zip(times_shown(numbers), colours, strict=True):
        time = float(numbers["time"][i]) / largest
        ridge = numbers["matches"]["ridge"][i]
        scale = numbers["matches"]["scale"][i]
        label = f"{float(f'{time * largest:.2g}'):g}"  # two digits, written out
        ax.plot(lam / largest, torch.exp(-2 * lam * time), color=colour, label=label)
        ax.plot(lam / largest, scale / (lam + ridge), ":", color=colour)
    ax.plot(eigenvalues / largest, [1.4e-6] * len(eigenvalues), "|", color=BLACK, ms=5)
    ax.set(xscale="log", yscale="log", ylim=(1e-6, 10), xlabel="λ / λ_max", title="(a) share left")
    ax.legend(title="time", loc="center left", bbox_to_anchor=(0.0, 0.24))
    ax.axhline(1, color=GREY, lw=0.8)


def times_shown(numbers: dict[str, Any]) -> list[int]:
    """Places of three times: early, in the middle of the spectrum, late."""
    count = len(numbers["time"])
    return [round(count * share) for share in (0.2, 0.5, 0.8)]


def table(numbers: dict[str, Any]) -> Table:
    """The best ridge at every few times."""
    matches = numbers["matches"]
    count = len(numbers["time"])
    rows = []
    for i in range(0, count, max(1, count // 7)):
        cells = [matches[key][i] for key in COLUMNS.values()]
        rows.append([float(numbers["time"][i]), *cells])
    return Table(
        ["time", *COLUMNS],
        rows,
        "The ridge that comes closest to the variance at each time (in units of 1 / η c λ_max). "
        "*Spread*: the standard deviation of the log ratio, with a free scale. *Rms, ridge alone*: "
        "the root mean square of the log ratio without a scale. *Decades*: the range that the "
        "exact variances of the test points span.",
    )


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    matches = numbers["matches"]
    times = [float(time) for time in numbers["time"]]
    without_ridge = [
        time for time, ridge in zip(times, matches["ridge"], strict=True) if ridge == 0
    ]
    limit = ""
    if without_ridge:
        limit = f" From time {without_ridge[0]:.0f} on, the best ridge is zero."
    early_spread = max(
        spread for time, spread in zip(times, matches["spread"], strict=True) if time <= 100
    )
    return (
        "Up to time 100, a ridge imitates the training time with a spread of at most "
        f"{early_spread:.2f} in log variance. The best ridge starts at ς² = 1/(2ηct), where both "
        "filters agree to first order. It then falls faster, because an exponential empties the "
        f"learned directions sooner than a ridge does.{limit} After that, the exact variances "
        "spread exponentially, direction by direction. At "
        f"time {times[-1]:.0f}, they span {matches['decades'][-1]:.1f} decades. The best ridge is "
        f"then off by {matches['spread'][-1]:.2f} (standard deviation of the log ratio, scale "
        f"fitted) and orders the points with a rank correlation of {matches['spearman'][-1]:.2f}. "
        "At t → ∞, nothing is left to imitate. A ridge is a fair substitute for *early stopping*, "
        "not for the limit that the paper takes."
    )


COLUMNS = {
    "best ridge / λ_max": "relative_ridge",
    "ridge × 2ηct": "ridge_times_twice_the_time",
    "spread": "spread",
    "rms, ridge alone": "rms_alone",
    "rank correlation": "spearman",
    "decades": "decades",
}
"""Headings of the table, and the matches' names for them."""

HEAD = f"""\
## Stopping is not a ridge

With K_NTK = c F Fᵀ and K_NNGP = σ_w² F Fᵀ, the four terms of the variance at time t reduce to
Σ_j (v_j·f)² exp(-2ηcλ_j t) plus the part of f outside the span of the data. The paper's form with a
ridge is Σ_j (v_j·f)² ς²/(λ_j + ς²). At each time, the ridge (and the scale α², which calibration
would choose) is fitted to the log variance of {TEST} test points. Half of these are inputs
{REACH:g} times as long as those of the training data."""

CAPTION = (
    "(a) Share of a direction's prior variance that is left, by its eigenvalue, at three times: "
    "exponential filter (solid) and best ridge with its scale (dotted). Ticks are the eigenvalues. "
    "(b) Variance of test points inside and outside the data over time (geometric mean). (c) How "
    "far the best ridge is off."
)
