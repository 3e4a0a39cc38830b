"""The section on the page: figure, table, and what the numbers say."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, COLOURS, GREY, panels
from experiments.frame.outcome import Table
from experiments.studies.theory.rows.work import NOISE, WIDTH


def drawn(numbers: dict[str, Any]) -> Figure:
    """The figure: variances, and the errors that they should describe."""
    figure, (left, right) = panels(columns=2, height=3.4, sharey=True)
    counts = numbers["setting"]["rows"]
    limit = numbers["limit"]
    floor = 1e-6
    for ax in (left, right):
        ax.axvline(WIDTH, color=GREY, lw=1, ls=":")
        ax.set(xscale="log", yscale="log", ylim=(floor, 100), xlabel="training rows N")
        ticks = [n for n in (8, 16, 32, 64, 128, 256) if min(counts) <= n <= max(counts)]
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.minorticks_off()
    left.text(WIDTH * 1.05, 30, f"N = D = {WIDTH}", fontsize=9, color=GREY)

    # A variance of zero has no place on a logarithmic axis: a triangle at its lower edge.
    variances = dict(zip(counts, limit["variance"].tolist(), strict=True))
    positive = {count: variance for count, variance in variances.items() if variance > 0}
    zero = [count for count, variance in variances.items() if variance == 0]
    left.plot(list(positive), list(positive.values()), color=BLACK, marker="o", ms=4, label="t → ∞")
    left.plot(zero, [1.3 * floor] * len(zero), "v", color=BLACK, ms=5, clip_on=False)
    for (ridge, entry), colour in zip(numbers["ridges"].items(), COLOURS, strict=False):
        left.plot(
            counts,
            entry["variance"],
            color=colour,
            marker="s",
            ms=3,
            lw=1.3,
            label=f"ridge {ridge}",
        )
        right.plot(counts, entry["squared_error"], color=colour, marker="s", ms=3, lw=1.3)
    right.plot(counts, limit["squared_error"], color=BLACK, marker="o", ms=4)
    left.set(ylabel="mean over test points", title="(a) predicted variance")
    right.set_title("(b) squared error against the noise-free truth")
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def table(numbers: dict[str, Any]) -> Table:
    """Variances and squared errors for some numbers of rows."""
    counts = numbers["setting"]["rows"]
    shown = [count for count in (16, 48, 64, 68, 96, 256) if count in counts]
    rows = []
    for count in shown:
        i = counts.index(count)
        row: list[float] = [count]
        for entry in (numbers["limit"], *numbers["ridges"].values()):
            row += [float(entry["variance"][i]), float(entry["squared_error"][i])]
        rows.append(row)
    columns = ["rows", "t → ∞: variance", "error"]
    for ridge in numbers["ridges"]:
        columns += [f"ridge {ridge}: variance", "error"]
    return Table(columns, rows, TABLE)


def says(numbers: dict[str, Any]) -> str:
    """What the numbers mean."""
    # Variance over squared error at the largest number of rows, in the order of the ridges.
    small, right, large = (
        float(entry["variance"][-1]) / float(entry["squared_error"][-1])
        for entry in numbers["ridges"].values()
    )
    return (
        f"From N = {WIDTH} on, the variance at t → ∞ is zero to the last bit, for every test point "
        "and any noise. But the squared error of that prediction is largest just there, because it "
        "interpolates noise. The theory has no noise, so its variance has nothing left to "
        "describe, and the ridge that the paper inserts afterwards is a modelling choice. With "
        f"ς² = {NOISE**2:g}, the noise variance over the prior variance of a weight, the form is "
        "the Bayesian posterior variance, which follows the error on both sides of N = D "
        f"(variance over squared error is {right:.2f} at the largest N). With a ridge a hundred "
        f"times smaller, this ratio is {small:.2g}; with one a hundred times larger, {large:.2g}. "
        "A calibrated α² corrects the level but not the shape. Therefore ridge and α² are both "
        "calibrated."
    )


TABLE = (
    f"Mean variance and mean squared error of the test points, with {WIDTH} features, weights "
    f"drawn from the prior N(0, 1), and noise of standard deviation {NOISE:g}."
)

HEAD = f"""\
## Rows against features

In the last-layer form with K_NTK = c F Fᵀ and K_NNGP = σ_w² F Fᵀ, the variance at t → ∞ is
σ_w² (fᵀf - fᵀFᵀ(FFᵀ)⁻¹Ff): the part of f that the training rows do not span. Here a random network
gives {WIDTH} features, the weights are drawn from the prior, and the targets have noise of standard
deviation {NOISE:g}. This variance is compared with the form that has a ridge ς² inserted by hand,
σ_w² ς² fᵀ(FᵀF + ς²)⁻¹f."""

CAPTION = (
    "(a) Mean variance of the test points against the number of training rows. At t → ∞, it is "
    "exactly zero from N = D on (triangles at the lower edge). (b) Squared errors of the same "
    "predictions."
)
