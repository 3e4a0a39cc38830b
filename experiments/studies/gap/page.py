"""The page: what was done, the figure of one draw, the table of scores."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.baselines import laplace, mapie
from experiments.data.gap import (
    BEYOND,
    GAP,
    LEFT,
    LENGTH,
    NOISE_LEFT,
    NOISE_RIGHT,
    RIGHT,
    TEST,
    TRAINING,
    VALIDATION,
)
from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Entry, Found, Picture, Table, with_error
from experiments.studies.gap.work import LEVEL, METHODS, REGIONS, STEPS, WIDTH

LABELS = {
    "constant": "constant bar",
    "mapie": "MAPIE",
    "laplace": "laplace-torch",
    "rigidities": "rigidities",
}
"""What tables and panels call the methods."""

REGION_LABELS = {"inside": "inside", "gap": "in the gap", "beyond": "beyond"}

HEIGHT = 2.6
"""The height of a row of panels, in inches."""


def entries(numbers: dict[str, Any]) -> list[Entry]:
    """Everything on the page, in reading order."""
    scores = numbers["draws"][numbers["shown"]]
    return [
        *OPENING,
        Picture("bars", drawn(numbers["figure"], scores), caption(numbers)),
        score_table(numbers),
        EXPECTED,
        worst_networks(numbers["summary"]),
        *missing_packages(numbers["summary"]),
    ]


def caption(numbers: dict[str, Any]) -> str:
    """What the figure shows."""
    return (
        "One network, the same training and validation rows, and 90 % intervals by each method. "
        "There are no training rows in the gap: the intervals of rigidities open there and close "
        "behind it, and they follow the noise, which is four times as large on the right. "
        f"Of {numbers['settings']['draws']} random functions this is the one in the middle, by how "
        "hard its gap is for a constant bar."
    )


def score_table(numbers: dict[str, Any]) -> Table:
    """All scores, region by region and method by method."""
    rows = []
    for region in REGIONS:
        regional = numbers["summary"][region]
        for method in METHODS:
            if method not in regional:
                continue
            scores = regional[method]
            rows.append(
                [
                    REGION_LABELS[region],
                    LABELS[method],
                    with_error(*scores["coverage"]),
                    f"{scores['least_coverage']:.2f}",
                    with_error(*scores["width"]),
                    with_error(*scores["interval_score"]),
                    _nll(scores),
                ]
            )
    columns = ["where", "error bar", "coverage", "worst", "width", "interval score", "NLL"]
    table_caption = (
        f"Coverage of 90 % intervals, the lowest coverage of any network, mean width, interval "
        f"score and negative log-likelihood (for the last three less is better): mean ± standard "
        f"error over {numbers['settings']['draws']} random functions, with one network each; "
        f"medians of the NLL in brackets."
    )
    return Table(columns, rows, table_caption)


def _nll(scores: Found) -> str | None:
    """Mean and standard error of the NLL, with its median in brackets; None without an NLL."""
    if "nll" not in scores:
        return None
    return f"{with_error(*scores['nll'])} ({scores['nll_median']:.2f})"


def drawn(curves: Found, scores: Found) -> Figure:
    """The figure: one panel for each method.

    Args:
        curves: What `work.curves` gives.
        scores: What `work.scored` gives for the same draw.
    """
    methods = [method for method in METHODS if method in curves["intervals"]]
    figure, axes = panels(
        columns=2, rows=(len(methods) + 1) // 2, height=HEIGHT, sharex=True, sharey=True
    )
    for ax, method in zip(axes, methods, strict=False):
        _draw_method(ax, curves, method)
        inside = scores["inside"][method]["coverage"]
        gap = scores["gap"][method]["coverage"]
        ax.set_title(
            f"{LABELS[method]}: covers {100 * inside:.0f} % inside, {100 * gap:.0f} % in the gap"
        )
    for ax in axes[len(methods) :]:
        ax.set_axis_off()

    low, high = _limits(curves)
    axes[0].set(xlim=(LEFT[0], RIGHT[1]), ylim=(low, high))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _limits(curves: Found) -> tuple[float, float]:
    """The least and largest value that the figure shows: all intervals between the ends."""
    shown = (curves["x"] >= LEFT[0]) & (curves["x"] <= RIGHT[1])
    low = min(float(ends["low"][shown].min()) for ends in curves["intervals"].values())
    high = max(float(ends["high"][shown].max()) for ends in curves["intervals"].values())
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def _draw_method(ax: Axes, curves: Found, method: str) -> None:
    """Draw the network with one kind of intervals, the truth, the training rows and the gap."""
    ends = curves["intervals"][method]
    train = curves["train"]
    ax.axvspan(*GAP, color=GREY, alpha=0.12, lw=0, label="no training rows")
    ax.fill_between(
        curves["x"], ends["low"], ends["high"], color=BLUE, alpha=0.3, lw=0, label="90 % interval"
    )
    ax.plot(train["x"], train["y"], ".", color=VERMILION, ms=3, label="training rows")
    ax.plot(curves["x"], curves["truth"], "--", color=BLACK, lw=1.2, label="truth")
    ax.plot(curves["x"], curves["mean"], color=BLUE, label="network")


def worst_networks(summary: Found) -> str:
    """How little rigidities covered for the network where they fared worst."""
    gap = 100 * summary["gap"]["rigidities"]["least_coverage"]
    beyond = 100 * summary["beyond"]["rigidities"]["least_coverage"]
    return (
        "None of this is a promise. Where a network maps unfamiliar inputs onto familiar features, "
        "its last layer cannot notice: the worst of these networks had "
        f"{gap:.0f} % of the values covered in the gap and {beyond:.0f} % beyond. Treat a wide bar "
        "where there are no training rows as an alarm rather than as a measurement."
    )


def missing_packages(summary: Found) -> list[str]:
    """What to install for the methods that are left out, if any are."""
    texts = []
    for method, remedy in (("mapie", mapie.REMEDY), ("laplace", laplace.REMEDY)):
        if method not in summary["inside"]:
            texts.append(f"{LABELS[method]} was not installed and is left out: `{remedy}`.")
    return texts


OPENING = (
    f"""\
The simplest picture of what an error bar should do. A network with two hidden layers of {WIDTH}
and tanh learns a random smooth function of one input (length scale {LENGTH}) from {TRAINING} noisy
rows, half of them with x between {LEFT[0]:g} and {LEFT[1]:g} and half between {RIGHT[0]:g} and
{RIGHT[1]:g}. In the gap between them there are none. The noise is {NOISE_LEFT} on the left and
{NOISE_RIGHT} on the right. The network is trained once, by {STEPS} steps of Adam. It then gets
{100 * LEVEL:.0f} % intervals of four kinds from the same training rows and {VALIDATION} validation
rows, which lie on both sides of the gap as the training rows do. No method sees a row in the
gap.""",
    """\
- **constant bar**: one Gaussian for all rows, with the RMS error on the validation rows.
- **MAPIE**: `SplitConformalRegressor(prefit=True)` with its default score. It guarantees
  coverage for rows like the validation rows. It gives intervals without a distribution, so there
  is no NLL.
- **laplace-torch**: `Laplace(network, "regression", subset_of_weights="last_layer",
  hessian_structure="full")`, prior precision and noise by the marginal likelihood.
- **rigidities**: `LastLayerRigidity(network).fit(x_train, y_train)` and
  `calibrate(x_valid, y_valid)`, with all defaults.""",
    f"""\
Each method is judged on {TEST} new rows in each of three regions: *inside*, where the training rows
lie; *in the gap*; and *beyond*, up to {BEYOND:g} past the outermost training rows.""",
)

EXPECTED = """\
**What to expect.** Inside, all methods cover about 90 %, and rigidities have the narrowest
intervals and the best NLL, because they follow the noise. In the gap the network is wrong by much
more than its validation errors. A constant bar cannot know that, and neither can a conformal
interval, whose guarantee ends with the validation rows. The bars of laplace-torch open, but too
little. Those of rigidities open until they are as wide as the spread of the training targets
suggests, since nothing was measured there: the flat stretch in the middle of the gap."""
