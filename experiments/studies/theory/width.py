"""How fast the Gram of the last features tends to the NNGP with the width (paper, Sec. 3.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from experiments.frame.outcome import Picture, Table, mean_and_error, with_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from experiments.studies.theory.section import Section
from rigidities.kernels import FullyConnected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIVATIONS = ("erf", "silu", "relu")
POINTS, DIMENSION, DEPTH, NARROW = 32, 6, 3, 64
GROWN = ("all layers", "last layer alone")


def section(*, quick: bool, seed: int) -> Section:
    """All activations, widths and seeds."""
    widths = (32, 64, 128) if quick else (32, 64, 128, 256, 512, 1024, 2048)
    numbers = measured(widths, seeds=4 if quick else 10, seed=seed)
    picture = Picture("width", drawn(numbers), CAPTION)
    return Section("width", numbers, [HEAD, picture, table(numbers), says(numbers)])


def measured(widths: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Relative errors of F F^T for every activation, width and seed, and fitted slopes."""
    x = sphere(POINTS, DIMENSION, generator(seed))
    found: dict[str, Any] = {
        "setting": {
            "points": POINTS,
            "dimension": DIMENSION,
            "depth": DEPTH,
            "narrow": NARROW,
            "seeds": seeds,
            "widths": widths,
        }
    }
    for name in steps(ACTIVATIONS, "nets of growing width"):
        exact = FullyConnected(DEPTH, name, input_scale=1.0, normalised=True).nngp(x)
        found[name] = {}
        for grown in GROWN:
            errors = torch.empty(len(widths), seeds, dtype=torch.float64)
            for i, width in enumerate(widths):
                before = width if grown == "all layers" else NARROW
                layers = [*[before] * (DEPTH - 1), width]
                for j in range(seeds):
                    f = last_features(x, layers, name, generator(seed, width, j))
                    errors[i, j] = (f @ f.mT - exact).norm() / exact.norm()
            found[name][grown] = summary(torch.tensor(widths), errors)
    return found


def summary(widths: torch.Tensor, errors: torch.Tensor) -> dict[str, Any]:
    """Root mean square over the seeds, and the slope with its standard error between seeds."""
    slopes = [slope(widths, errors[:, j]) for j in range(errors.shape[1])]
    mean, error = mean_and_error(slopes)
    return {
        "error": errors.square().mean(1).sqrt(),
        "spread": errors.std(1),
        "slope": (mean, error),
        "slope_of_rms": slope(widths, errors.square().mean(1).sqrt()),
    }


def slope(widths: torch.Tensor, errors: torch.Tensor) -> float:
    """Least squares of log error on log width."""
    x, y = widths.to(torch.float64).log(), errors.log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def drawn(numbers: dict[str, Any]) -> Figure:
    """One panel for each way to grow."""
    figure, axes = panels(columns=2, height=3.2, sharey=True)
    widths = numbers["setting"]["widths"]
    for ax, grown, letter in zip(axes, GROWN, "ab", strict=True):
        for name, colour, marker in zip(ACTIVATIONS, COLOURS, "osv", strict=False):
            one = numbers[name][grown]
            ax.errorbar(
                widths,
                one["error"],
                one["spread"],
                color=colour,
                marker=marker,
                ms=5,
                lw=1.3,
                label=name,
            )
        start = max(float(numbers[name]["all layers"]["error"][0]) for name in ACTIVATIONS)
        guide = [1.3 * start * math.sqrt(widths[0] / w) for w in widths]
        ax.plot(widths, guide, "--", color=BLACK, lw=1.2, label="width^(-1/2)")
        ax.set(xscale="log", yscale="log", title=f"({letter}) {grown}")
        ax.set_xlabel(
            "width" if grown == "all layers" else f"width of the last layer, others {NARROW}"
        )
        ax.set_xticks(widths, [str(w) for w in widths])
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
            one = numbers[name][grown]
            ends = float(one["error"][0]), float(one["error"][-1])
            rows.append([grown, name, with_error(*one["slope"], 3), *ends])
    return Table(
        ["what grows", "activation", "slope", f"error at {widths[0]}", f"error at {widths[-1]}"],
        rows,
        f"Slope of log error on log width ({numbers['setting']['seeds']} nets a width, standard "
        "error between seeds), and the relative Frobenius error at both ends.",
    )


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    spans = []
    for grown in GROWN:
        slopes = sorted(numbers[name][grown]["slope"][0] for name in ACTIVATIONS)
        spans.append(f"{slopes[0]:.2f} to {slopes[-1]:.2f}")
    return (
        f"Where *all* hidden layers grow the slope is {spans[0]}, close to -1/2 already at these "
        f"widths. Where the last layer alone grows it is {spans[1]}: behind layers of {NARROW} the "
        "error stops falling, because F Fᵀ then converges to the kernel of that narrow net and not "
        "to the NNGP. So the width that the rate speaks of is that of the whole net. (For an error "
        "bar this is no loss: the features of the net at hand are what one has.)"
    )


HEAD = f"""\
## How wide is wide enough?

σ_w² F Fᵀ estimates the NNGP, with an error that the paper says falls as N_L^(-1/2). Random nets of
{DEPTH} hidden layers, {POINTS} inputs on the sphere in {DIMENSION} dimensions, error
‖FFᵀ - K_NNGP‖ / ‖K_NNGP‖ (Frobenius)."""

CAPTION = (
    "Relative error of the Gram of the last features (root mean square and standard deviation over "
    "seeds) when (a) all hidden layers grow, (b) the last one alone does."
)
