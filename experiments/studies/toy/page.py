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


def _label(name: str) -> str:
    """What the page calls a model.

    >>> _label("net, last layer"), _label("cubic")
    ('network, last layer', 'cubic')
    """
    return name.replace("net,", "network,")


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
                    _label(name),
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
        "Coverage of 90 % intervals and negative log-likelihood (NLL, lower is better) on new "
        f"noisy points: mean ± standard error over {draws} draws of all points, medians in "
        "brackets. *Scale from residuals* is the textbook bar of a new observation, s √(1 + 1/R), "
        "where R is the rigidity and s the residual standard deviation of the seven points. "
        "*Constant* is one bar for all inputs, the root mean square error on the calibration "
        "points."
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
                _label(name),
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
        ax.set_title(f"({letter}) {_label(name)}")
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
    "The chosen ridge and scale (medians; the noise is 0.01), and the size of the errors and of "
    "the mean error bars (means ± standard errors)."
)

OPENING = (
    f"""\
Three models fit seven points of y = cos²x with Gaussian noise of {NOISE}, at
x = {", ".join(map(str, INPUTS))} (paper, Sec. 4.1, Fig. 1). The models are a cubic
(least squares), a linear combination of two Gaussians (prefactor, mean and variance of each,
L-BFGS), and a network with two hidden layers of 32 units and SiLU. Every error bar is the square
root of α² gᵀH⁻¹g. Here g contains the derivatives of the prediction with respect to the parameters,
and H is the Gauss-Newton Hessian of the loss. The network has two error bars: one from the weights
of its last layer alone, one from all its weights. The figure shades standard deviations; the
published figure shades a constant times the *variance*.""",
    f"""\
**Calibration.** None of the seven points can be spared for calibration, and a network that passes
through all of them has no residuals to learn from. So, for all models, the scale α is the one with
the highest likelihood on {CALIBRATION} further noisy points, evenly spaced in
|x| ≤ {CALIBRATION_REACH}. No fit has seen these points, and eight of them lie outside the range of
the seven. Points inside that range say nothing about how the error bars grow outside. The ridge is
that of the minimised loss. The cubic has none. Seven points hardly determine the six parameters of
the Gaussians (the smallest eigenvalue of H is some 10⁻⁷ of the largest), so their fit has a prior
of width one around the starting values; at this noise, the ridge of that prior is {NOISE}². The
network was trained without a regulariser, and its ridge is calibrated together with the scale.""",
    f"""\
**Scores.** The models are judged on {TEST} new noisy points in |x| ≤ {TEST_REACH}. *Inside* means
between the outermost of the seven points.""",
)

CLOSING = (
    """\
**What to expect.** The calibrated 90 % intervals of the Gaussians and of the network cover about
90 % inside and outside. A constant bar is too wide inside and covers 50 to 70 % outside, where its
NLL is four units worse for the cubic and the network. The Gaussians can follow the function: their
calibrated scale is near the noise, as it should be for a correct model, and inside they gain
nothing over a constant bar. The cubic cannot follow the function. Its scale is half as large again
as the noise, to make up for the missing fourth power inside. Outside, its intervals still cover
less than they promise: no variance of the parameters can account for a bias.""",
    """\
Without the further points, the residuals of the seven points give a scale from three degrees of
freedom or fewer. This scale scatters so much between draws that the Gaussian intervals cover too
little (those of a Student-t distribution would be wider). It also cannot detect a bias beyond the
points. For the network, the last layer alone and all weights give nearly the same bars.""",
)
