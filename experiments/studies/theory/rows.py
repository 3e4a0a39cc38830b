"""What is left at t = infinity when rows outnumber features (law of the limit; paper, Sec. 3.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from experiments.frame.outcome import Picture, Table
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from experiments.studies.theory.section import Section
from rigidities import Gram, Posterior
from rigidities.kernels import last_layer_process_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, DIMENSION, NOISE, TEST = 64, 6, 0.1, 200
RIDGES = (NOISE**2 / 100, NOISE**2, 100 * NOISE**2)


def section(*, quick: bool, seed: int) -> Section:
    """Variances and true errors for growing data."""
    counts = (
        (16, 48, 64, 96)
        if quick
        else (8, 16, 24, 32, 40, 48, 56, 60, 64, 68, 72, 80, 96, 128, 192, 256)
    )
    numbers = measured(counts, seeds=3 if quick else 40, seed=seed)
    return Section(
        "rows",
        numbers,
        [HEAD, Picture("rows", drawn(numbers), CAPTION), table(numbers), says(numbers)],
    )


def measured(counts: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Means over test points and draws of inputs, prior weights and noise."""
    limit, error = (torch.zeros(len(counts), dtype=torch.float64) for _ in range(2))
    formed = torch.zeros(len(RIDGES), len(counts), dtype=torch.float64)
    fitted = torch.zeros_like(formed)
    for j in steps(range(seeds), "draws of the data"):
        source = generator(seed, j)
        x = sphere(max(counts) + TEST, DIMENSION, source)
        f = last_features(x, [256, WIDTH], "silu", source)
        weights = torch.randn(WIDTH, generator=source, dtype=torch.float64)
        noise = NOISE * torch.randn(len(f), generator=source, dtype=torch.float64)
        truth = f @ weights
        test, target = f[-TEST:], truth[-TEST:]
        for i, n in enumerate(counts):
            process = last_layer_process_at(math.inf, f[:n], test, (truth + noise)[:n])
            limit[i] += process.variance.mean() / seeds
            error[i] += (process.mean - target).square().mean() / seeds
            for k, ridge in enumerate(RIDGES):
                mean, variance = ridge_form(f[:n], test, (truth + noise)[:n], ridge)
                formed[k, i] += variance.mean() / seeds
                fitted[k, i] += (mean - target).square().mean() / seeds
    return {
        "setting": {
            "features": WIDTH,
            "noise": NOISE,
            "test": TEST,
            "draws": seeds,
            "rows": counts,
        },
        "prior": 1.0,
        "limit": {"variance": limit, "squared_error": error},
        "ridges": {
            f"{ridge:g}": {"variance": formed[k], "squared_error": fitted[k]}
            for k, ridge in enumerate(RIDGES)
        },
    }


def ridge_form(f: Tensor, test: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression and the paper's variance, ridge times f^T (F^T F + ridge)^-1 f."""
    gram = Gram(f.shape[1])
    gram.update(f, residuals=y)
    posterior = Posterior.from_gram(gram, ridge=ridge)
    assert gram.cross is not None
    mean = posterior.covariance(test, gram.cross.mT)[:, 0]
    return mean, ridge * posterior.quadratic(test)


def drawn(numbers: dict[str, Any]) -> Figure:
    """Variances, and the errors that they should describe."""
    figure, (left, right) = panels(columns=2, height=3.4, sharey=True)
    counts = numbers["setting"]["rows"]
    limit = numbers["limit"]
    seen = [(n, v) for n, v in zip(counts, limit["variance"].tolist(), strict=True) if v > 0]
    floor = 1e-6
    for ax in (left, right):
        ax.axvline(WIDTH, color=GREY, lw=1, ls=":")
        ax.set(xscale="log", yscale="log", ylim=(floor, 100), xlabel="training rows N")
        ticks = [n for n in (8, 16, 32, 64, 128, 256) if min(counts) <= n <= max(counts)]
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.minorticks_off()
    left.text(WIDTH * 1.05, 30, f"N = D = {WIDTH}", fontsize=9, color=GREY)
    left.plot(*zip(*seen, strict=True), color=BLACK, marker="o", ms=4, label="t → ∞")
    zero = [n for n, v in zip(counts, limit["variance"].tolist(), strict=True) if v == 0]
    left.plot(zero, [1.3 * floor] * len(zero), "v", color=BLACK, ms=5, clip_on=False)
    for (ridge, entry), colour in zip(numbers["ridges"].items(), COLOURS, strict=False):
        style = {"color": colour, "marker": "s", "ms": 3, "lw": 1.3}
        left.plot(counts, entry["variance"], **style, label=f"ridge {ridge}")
        right.plot(counts, entry["squared_error"], **style)
    right.plot(counts, limit["squared_error"], color=BLACK, marker="o", ms=4)
    left.set(ylabel="mean over test points", title="(a) predicted variance")
    right.set_title("(b) squared error against the noise-free truth")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """Some numbers of rows."""
    counts = numbers["setting"]["rows"]
    chosen = [n for n in (16, 48, 64, 68, 96, 256) if n in counts]
    rows = []
    for n in chosen:
        i = counts.index(n)
        limit = numbers["limit"]
        rows.append([n, float(limit["variance"][i]), float(limit["squared_error"][i])])
        for entry in numbers["ridges"].values():
            rows[-1] += [float(entry["variance"][i]), float(entry["squared_error"][i])]
    columns = ["rows", "t → ∞: variance", "error"]
    for ridge in numbers["ridges"]:
        columns += [f"ridge {ridge}: variance", "error"]
    return Table(columns, rows, TABLE)


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    last = {
        ridge: float(entry["variance"][-1]) / float(entry["squared_error"][-1])
        for ridge, entry in numbers["ridges"].items()
    }
    small, right, large = last.values()
    return (
        f"From N = {WIDTH} on the variance at t → ∞ is zero to the last bit, for every test point "
        "and whatever the noise, while the squared error of that prediction is largest just there: "
        "it interpolates noise. The theory has no noise, so nothing is left for its variance to "
        "describe, and the ridge that the paper inserts afterwards is a modelling choice. "
        f"ς² = {NOISE**2:g}, the noise variance over the prior variance of a weight, makes the "
        "form the Bayesian posterior variance, which follows the error on both sides of N = D "
        f"(variance over squared error {right:.2f} at the largest N); with a ridge a hundred "
        f"times smaller that ratio is {small:.2g}, with one a hundred times larger {large:.2g}. "
        "A calibrated α² mends the level and not the shape, which is why both are calibrated."
    )


TABLE = (
    f"Mean variance and mean squared error of the test points, {WIDTH} features; weights drawn "
    f"from the prior N(0, 1), noise of standard deviation {NOISE:g}."
)

HEAD = f"""\
## Rows against features

In the last-layer form K_NTK = c F Fᵀ, K_NNGP = σ_w² F Fᵀ the variance at t → ∞ is
σ_w² (fᵀf - fᵀFᵀ(FFᵀ)⁻¹Ff): the part of f that the training rows do not span. {WIDTH} features
of a random net, weights drawn from the prior, targets with noise of standard deviation {NOISE:g}.
Beside it the form with a ridge ς² inserted by hand, σ_w² ς² fᵀ(FᵀF + ς²)⁻¹f."""

CAPTION = (
    "(a) Mean variance of the test points against the number of training rows: at t → ∞ it is "
    "exactly zero from N = D on (triangles at the lower edge). (b) The squared errors of the same "
    "predictions."
)
