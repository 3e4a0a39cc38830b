"""The page: what was done, the figure of the first draw, tables of scores and of choices."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.data.cosine import (
    CALIBRATION,
    CALIBRATION_REACH,
    INPUTS,
    NOISE,
    TEST,
    TEST_REACH,
)
from experiments.frame.figures import BLACK, BLUE, VERMILION, panels
from experiments.frame.outcome import Entry, Found, Picture, Table, with_error
from experiments.studies.toy.work import BARS, REGIONS

LIGHT_BLUE = "#D3E6F2"
MIDDLE_BLUE = "#8FC1DF"
"""The blue of the fit, thinned."""


def entries(numbers: dict[str, Any]) -> list[Entry]:
    """Everything on the page, in reading order."""
    models = numbers["models"]
    return [
        *OPENING,
        Picture("fits", drawn(numbers["figure"]), CAPTION),
        score_table(models),
        choice_table(models),
        *CLOSING,
    ]


def score_table(models: dict[str, Found]) -> Table:
    """Coverage and NLL of every model, rigidities beside constant bars."""
    rows = []
    for name, model in models.items():
        for bar, label in BARS.items():
            if bar not in model["inside"]:  # the network has no textbook bar
                continue
            inside = model["inside"][bar]
            outside = model["outside"][bar]
            rows.append(
                [
                    name,
                    label,
                    with_error(*inside["coverage"]),
                    with_error(*outside["coverage"]),
                    _nll(inside),
                    _nll(outside),
                ]
            )
    columns = ["model", "error bar", "coverage inside", "outside", "NLL inside", "outside"]
    draws = next(iter(models.values()))["draws"]
    caption = (
        f"Coverage of 90 % intervals and negative log-likelihood (less is better) of new noisy "
        f"points, mean ± standard error over {draws} draws of all points, medians in brackets. "
        "*Scale from residuals* is the textbook's bar of a new observation, s √(1 + 1/R) with s "
        "the residual standard deviation of the seven points. *Constant* is one bar for all "
        "inputs, the RMS error on the calibration points."
    )
    return Table(columns, rows, caption)


def _nll(scores: Found) -> str:
    """Mean and standard error of the NLL, with its median in brackets."""
    return f"{with_error(*scores['nll'])} ({scores['nll_median']:.2f})"


def choice_table(models: dict[str, Found]) -> Table:
    """What the calibration chose, and how large the errors are."""
    rows = []
    for name, model in models.items():
        chosen = model["medians"]
        rows.append(
            [
                name,
                f"{chosen['ridge']:.1g}",
                chosen["scale"],
                chosen.get("residual_scale"),
                *(with_error(*model[region]["rmse"], digits=3) for region in REGIONS),
                *(with_error(*model[region]["rigidity"]["std"], digits=3) for region in REGIONS),
            ]
        )
    columns = ["model", "ridge", "scale", "scale from residuals"]
    columns += [f"RMSE {region}" for region in REGIONS]
    columns += [f"mean bar {region}" for region in REGIONS]
    return Table(columns, rows, CHOICES)


def drawn(curves: Found) -> Figure:
    """The figure: one panel for each model.

    Args:
        curves: What `work.curves` gives.
    """
    figure, axes = panels(columns=2, rows=2, height=2.9, sharex=True, sharey=True)
    for ax, letter, name in zip(axes, "abcd", curves["models"], strict=True):
        _draw_model(ax, curves, name)
        ax.set_title(f"({letter}) {name}")
    axes[0].set(xlim=(-TEST_REACH, TEST_REACH), ylim=(-1.1, 1.6))
    for ax in axes[2:]:
        ax.set_xlabel("x")
    for ax in axes[::2]:
        ax.set_ylabel("y")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _draw_model(ax: Axes, curves: Found, name: str) -> None:
    """Draw one model's fit with its error bars, the truth and the training points."""
    x = curves["x"]
    mean = curves["models"][name]["mean"]
    std = curves["models"][name]["std"]
    train = curves["train"]
    for k, colour in ((2, LIGHT_BLUE), (1, MIDDLE_BLUE)):
        ax.fill_between(x, mean - k * std, mean + k * std, color=colour, lw=0, label=f"±{k}σ")
    ax.plot(x, mean, color=BLUE, label="fit")
    ax.plot(x, curves["truth"], "--", color=BLACK, lw=1.2, label="cos²x")
    ax.plot(train["x"], train["y"], "o", color=VERMILION, ms=5, label="training points")


CAPTION = (
    "The first draw: seven noisy points, the fits, and error bars of one and two calibrated "
    "standard deviations. The dashed line is the function without noise."
)

CHOICES = (
    "What was chosen (medians; the noise is 0.01), and how large the errors and the mean error "
    "bars are (means ± standard errors)."
)

OPENING = (
    f"""\
Seven points of y = cos²x with Gaussian noise of {NOISE}, at
x = {", ".join(map(str, INPUTS))} (paper, Sec. 4.1, Fig. 1), fitted by a cubic (least
squares), by a linear combination of two Gaussians (prefactor, mean and variance of each, L-BFGS)
and by a net with two hidden layers of 32 and SiLU. Every error bar is the root of α² gᵀH⁻¹g: g the
derivatives of the prediction by the parameters, H the Gauss-Newton Hessian of the loss. The net
has two of them, one from the weights of its last layer alone and one from all its weights. Shaded
are standard deviations; the published figure shades a constant times the *variance*.""",
    f"""\
**Calibration.** Seven points cannot spare any, and a net that passes through all of them has no
residuals to learn from. So the scale α is the likeliest one on {CALIBRATION} further noisy points,
evenly spaced in |x| ≤ {CALIBRATION_REACH}, for all models alike. They are new to every fit, and
eight of them lie outside the range of the seven: points inside it alone would say nothing about the
growth of the error bars outside. The ridge is the one of the loss that was minimised: none for the
cubic; for the Gaussians, whose six parameters seven points hardly determine (the smallest
eigenvalue of H is some 10⁻⁷ of the largest), that of a prior of width one about their start,
which at this noise is {NOISE}² and which the fit has too. The net was trained without a
regulariser; its ridge is calibrated with the scale.""",
    f"""\
**Scores.** {TEST} new noisy points in |x| ≤ {TEST_REACH}; *inside* means between the outermost of
the seven.""",
)

CLOSING = (
    """\
**What to expect.** The calibrated bars of the Gaussians and of the net hold about 90 % inside and
outside. A constant bar is too wide inside and holds 50 to 70 % outside, at an NLL that is four
units worse for the cubic and the net. The Gaussians can follow the function: their calibrated scale
is near the noise, as it should be for a model that is right, and inside they gain nothing over a
constant bar. The cubic cannot follow it. Its scale is half as large again as the noise, to cover
the missing fourth power inside, and outside its bars still hold less than they promise: no variance
of the parameters knows of a bias.""",
    """\
Without the further points, the residuals of the seven give a scale from three degrees of freedom
or fewer. It scatters so much between draws that the Gaussian intervals hold too little (those of a
Student-t distribution would be wider), and it knows nothing of a bias beyond the points. The last
layer alone and all weights give the net nearly the same bars.""",
)
