"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.data.cosine import NOISE
from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Table
from experiments.studies.theory.bayesian.work import (
    INPUTS,
    WEIGHT_VARIANCE,
    interpolated,
)


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: profile and Laplace densities of the first draw, a row for each input."""
    models = numbers["models"]
    inputs = numbers["setting"]["inputs"]
    figure, axes = panels(columns=len(models), rows=len(inputs), height=2.6)
    for row, place in enumerate(inputs):
        for column, (name, places) in enumerate(models.items()):
            ax = axes[row * len(models) + column]
            _draw_profile(ax, places[place][0])
            ax.set_title(f"{_label(name)}, x = {INPUTS[place]:g}")
            ax.set_yticks([0, 1])
            ax.axvline(math.cos(INPUTS[place]) ** 2, color=GREY, lw=1, ls=":")
    for ax in axes[-len(models) :]:
        ax.set_xlabel("prediction fixed at ε")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _draw_profile(ax: Axes, entry: dict[str, Any]) -> None:
    """Draw the profile of one prediction and both Laplace approximations."""
    y = entry["prediction"]
    std = entry["std"]
    z = torch.linspace(-4, 4, 400, dtype=torch.float64)
    exact = torch.exp(-z.square() / 2)
    gauss_newton = torch.exp(-(z / entry["gauss_newton"]).square() / 2)
    ax.plot(y + std * z, exact, color=BLUE, ls="-", label="Laplace, exact Hessian")
    ax.plot(y + std * z, gauss_newton, color=VERMILION, ls="--", label="Laplace, Gauss-Newton")

    offsets = entry["offsets"]
    heights = entry["heights"]
    grid, heights_between = interpolated(offsets, heights, entry["slopes"])
    ax.plot(y + std * grid, torch.exp(-heights_between), color=BLACK, lw=1, label="profile")
    ax.plot(y + std * offsets, torch.exp(-heights), "o", color=BLACK, ms=2.5)
    ax.set_xlim(y - 4 * std, y + 4 * std)


def table(numbers: dict[str, Any]) -> Table:
    """Means over the draws, by model and input."""
    rows = []
    for name, places in numbers["means"].items():
        for place, means in places.items():
            rows.append(
                [
                    _label(name),
                    f"{INPUTS[place]:g} ({place})",
                    means["std"],
                    means["gauss_newton"],
                    f"{means['low_90']:.2f} to {means['high_90']:.2f}",
                    means["held_90"],
                    means["total_variation"],
                    means["skewness"],
                ]
            )
    return Table(COLUMNS, rows, TABLE.format(**numbers["setting"]))


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    linear = _all_entries(numbers, ["cubic"])
    nonlinear_names = [name for name in numbers["models"] if name != "cubic"]
    nonlinear = _all_entries(numbers, nonlinear_names)

    linear_distance = max(entry["total_variation"] for entry in linear)
    coverages = [entry["levels"]["0.9"]["held"] for entry in nonlinear]
    ratios = [entry["gauss_newton"] for entry in nonlinear]
    distances = [entry["total_variation"] for entry in nonlinear]
    first_heights = [float(entry["heights"][0]) for entry in nonlinear]
    last_heights = [float(entry["heights"][-1]) for entry in nonlinear]
    tail = max(math.exp(-height) for height in first_heights + last_heights)
    names = ", ".join(map(_label, nonlinear_names))
    return (
        "For the cubic, the profile is Gaussian and the interpretation is exact (the total "
        f"variation of {linear_distance:.1g} comes from the tails that were cut off). For the "
        f"other models ({names}), the curvature at the top is the same by definition, but the "
        "shape is not. On at least one side, the constrained loss grows more slowly than its "
        f"parabola, and the Gaussian 90 % interval contains {min(coverages):.0%} to "
        f"{max(coverages):.0%} of the profile (total variation {min(distances):.2f} to "
        f"{max(distances):.2f}). For the two Gaussians, other parameters take over on the way, and "
        f"the profile can stay flat. It is up to {tail:.2f} of its maximum where it was cut, so "
        "masses and distances depend on the cut. The ends of the interval inside the cut do not. "
        f"The Gauss-Newton standard deviation is {min(ratios):.2f} to {max(ratios):.2f} times the "
        "exact one, because it leaves out the residuals times the model's second derivatives. A "
        "profile is not a marginal distribution: it follows the best parameters for each value and "
        "does not count how many others there are."
    )


def _label(name: str) -> str:
    """What the page calls a model.

    >>> _label("net 1-2-1"), _label("cubic")
    ('network 1-2-1', 'cubic')
    """
    return name.replace("net ", "network ")


def _all_entries(numbers: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The profiles of some models at all inputs and draws."""
    profiles = []
    for name in names:
        for entries in numbers["models"][name].values():
            profiles += entries
    return profiles


COLUMNS = [
    "model",
    "x",
    "Laplace std",
    "Gauss-Newton / exact std",
    "90 % profile interval, in std",
    "profile mass in ± 1.64 std",
    "total variation",
    "skewness",
]

TABLE = (
    "Means over {draws} draw(s) of the noise. The Gaussian 90 % interval is -1.64 to 1.64 standard "
    "deviations of the Laplace approximation with the exact Hessian. The profile interval contains "
    "the values where L_c - min L is at most 1.64² σ² / 2, as far as the profile could be "
    "followed (at most {reach} standard deviations to either side)."
)

HEAD = f"""\
## The rigidity as a likelihood

With Gaussian noise of variance σ², the constrained loss of a prediction is a profile log-posterior,
p(ε) ∝ exp(-L_c(ε)/σ²), and N(ỹ, σ²/R) is its Laplace approximation (paper, Sec. 3.3, with σ² = 1).
Here L_c is solved numerically (`rigidities.theory`), from the minimum outwards, for the seven
points of the `toy` experiment and σ = {NOISE:g}. There are three models: a cubic, for which both
are the same; two Gaussians with the prior of that experiment; and a 1-2-1 tanh network whose
weights have a normal prior of variance {WEIGHT_VARIANCE:g} (a quick run leaves the network out).

Two choices were made because of the solver. First, the network is this small because larger ones
are slow to follow and their fits stop short of a minimum. With eight hidden units, the fits stop
near saddles, where the exact Hessian is indefinite and no rigidity exists. Second, the input
outside the data is x = {INPUTS["outside"]:g}, not far beyond the last point (0.73). At 1.2, the
profiles of the two Gaussians could be followed to one side only in each of three draws, and no more
than 1 to 4 standard deviations to the other."""

CAPTION = (
    "Profile likelihood of a prediction between the points (above) and beyond them (below), "
    "relative to its maximum, with the Laplace approximations of the exact and of the Gauss-Newton "
    "Hessian. Dotted: the truth."
)
