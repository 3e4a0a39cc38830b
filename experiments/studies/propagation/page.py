"""The page: tables, the figure, and texts that follow the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, PURPLE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import listed
from experiments.studies.propagation.work import CALIBRATIONS, DIFFERENCE, PROTOCOL, Sizes

LABELS = {
    "none": 'noise="none"',
    "constant": 'noise="constant"',
    "evidence": 'noise="constant", criterion="evidence"',
    "bayes": 'noise="bayes", criterion="evidence"',
}


def entries(numbers: dict[str, Any], sizes: Sizes, epochs: int) -> list[Entry]:
    """The page."""
    found, groups = numbers["sets"], numbers["groups"]
    largest = str(groups[-1])
    return [
        *opening(sizes, epochs),
        Picture("means", drawn(found, groups), CAPTION),
        mean_table(found, largest),
        spread_table(found, largest),
        difference_table(found),
        choice_table(found),
        *closing(found, largest),
    ]


def mean_table(found: Found, size: str) -> Table:
    """Error bars of means of the largest groups."""
    caption = (
        f"Means of {size} predictions against means of the observed values: root mean square over "
        "all nets, ratio of predicted to actual error, coverage of 90 % intervals. The variance "
        f"is the propagated epistemic one plus noise / {size}; *independent* ignores the "
        f"correlations (the sum of the variances / {size}²)."
    )
    return _compared(found, size, caption)


def difference_table(found: Found) -> Table:
    """Error bars of differences of neighbours."""
    caption = (
        "Differences of two similar predictions (each test row and its nearest neighbour) against "
        "the differences of the observed values; the variance is the propagated one plus twice "
        "the noise. *Independent* adds the two variances."
    )
    return _compared(found, DIFFERENCE, caption)


def spread_table(found: Found, size: str) -> Table:
    """The epistemic part alone against the spread of retrained nets on common rows."""
    rows = [
        [name, LABELS[way], one["common"], one[way]["common"], one[way]["ratio_of_common"]]
        for name, one in found.items()
        for way in CALIBRATIONS
    ]
    caption = (
        f"The epistemic part alone: the mean of the predictions for {size} rows that no net has "
        "seen, the same for all nets. *Spread* is its standard deviation over the nets (their "
        "training rows, their starts, all their weights); *predicted* the propagated standard "
        "deviation."
    )
    return Table(["set", "calibration", "spread", "predicted", "ratio"], rows, caption)


def choice_table(found: Found) -> Table:
    """What each calibration chose."""
    rows = [
        [name, LABELS[way], f"{one[way]['ridge']:.1g}", one[way]["scale"], one[way]["noise"]]
        for name, one in found.items()
        for way in CALIBRATIONS
    ]
    caption = (
        "What was chosen (medians over the nets): ridge and scale for standardised targets, "
        "standard deviation of the noise in the target's unit."
    )
    return Table(["set", "calibration", "ridge", "scale", "noise"], rows, caption)


def _compared(found: Found, quantity: str, caption: str) -> Table:
    rows: list[list[Cell]] = []
    for name, one in found.items():
        for way in CALIBRATIONS:
            joint, alone = one[way]["joint"], one[way]["independent"]
            rows.append(
                [
                    name,
                    LABELS[way],
                    one["actual"][quantity],
                    joint["std"][quantity],
                    joint["ratio"][quantity],
                    f"{joint['coverage'][quantity]:.2f}",
                    alone["ratio"][quantity],
                    f"{alone['coverage'][quantity]:.2f}",
                ]
            )
    columns = ["set", "calibration", "actual", "predicted", "ratio", "coverage"]
    columns += ["independent: ratio", "coverage"]
    return Table(columns, rows, caption)


COLOURS = {"none": VERMILION, "constant": BLUE, "evidence": GREEN, "bayes": PURPLE}


def drawn(found: Found, groups: Sequence[int]) -> Figure:
    """One panel a set, both axes logarithmic."""
    figure, axes = panels(columns=len(found), height=3.4)
    for ax, (name, one) in zip(axes, found.items(), strict=True):
        for way, colour in COLOURS.items():
            ax.loglog(groups, _along(one[way]["joint"], groups), color=colour, label=LABELS[way])
        alone = _along(one["bayes"]["independent"], groups)
        ax.loglog(groups, alone, "--", color=GREY, lw=1.2, label="correlations ignored")
        actual = [one["actual"][str(n)] for n in groups]
        ax.loglog(groups, actual, "o", color=BLACK, ms=4, label="actual")
        ax.set(title=name, xlabel="predictions in the mean")
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("error of the mean")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _along(rule: dict[str, Any], groups: Sequence[int]) -> list[float]:
    return [rule["std"][str(n)] for n in groups]


CAPTION = (
    "Error of the mean of n predictions: predicted standard deviations (root mean square over all "
    "groups and nets) beside the actual root mean square error. Correlations ignored: the sum "
    "of the variances α² (1 + q) divided by n²."
)


def opening(sizes: Sizes, epochs: int) -> tuple[str, ...]:
    """What was done."""
    return (
        f"""\
`uq.propagate(torch.mean, x)` gives a mean of many predictions an error bar that knows their
correlations. Is it right? For each set {sizes.nets} nets were trained, each on {sizes.train} rows
of its own random split, calibrated on {sizes.valid} others and judged on {sizes.test} more. The
training rows are few beside the whole set, so that the nets are nearly independent repetitions of
the same experiment. The nets have one hidden layer of {PROTOCOL.hidden[0]} with ReLU; AdamW,
learning rate {PROTOCOL.rate:g} with a cosine schedule, weight decay {PROTOCOL.decay:g}, batches of
{PROTOCOL.batch}, {epochs} epochs, inputs and targets standardised. All nets of a set train at
once, with stacked weights.""",
        """\
Four calibrations are compared. `noise="none"` is the paper's: ridge and scale by the likelihood of
single predictions. `noise="constant"` adds a noise floor, chosen by the same likelihood. The third
takes the ridge of the greatest evidence of the training data instead. `noise="bayes"` is Bayesian
linear regression on the last layer's features: that ridge, and the noise equal to α², so that the
variance is α² (1 + q). Errors are in the target's unit. The last two were added after earlier runs
with other random numbers had shown the first two to fail.""",
    )


def closing(found: Found, size: str) -> tuple[str, ...]:
    """What came out, with the numbers of this run."""
    commons = [f"{one['bayes']['ratio_of_common']:.2f} ({name})" for name, one in found.items()]
    return (
        f"""\
**Without a noise floor the mean looks far too uncertain.** The likelihood of single predictions
sets α² so that α²q covers all of the residual, noise included. The noise of {size} observations
averages out, α²q hardly does: the predicted error of the mean is {_ratios(found, "none", size)}
times the actual one.""",
        f"""\
**A floor alone is no sure cure.** With `noise="constant"` the factor is
{_ratios(found, "constant", size)}. The likelihood looks at one prediction at a time and cannot see
how the variance is shared between the floor and α²q: with a large ridge q is almost the same
everywhere, and an almost constant α²q, which is fully correlated, fits single predictions about as
well as a constant floor, which is not correlated at all. Where the ridge came out large, means look
too uncertain and differences of neighbours too certain: predicted over actual is
{_ratios(found, "none", DIFFERENCE)} without a floor, {_ratios(found, "constant", DIFFERENCE)} with
one.""",
        f"""\
**The evidence of the training data tells them apart.** With its ridge and a floor, the factor is
{_ratios(found, "evidence", size)} for means and {_ratios(found, "evidence", DIFFERENCE)} for
differences. The scale is still set by single predictions, which determine it badly: a misfit that
changes from row to row raises it, though it averages out in a mean, and where the floor explains
everything it is near zero (on power for half of the nets, whose intervals hold too little). With
`noise="bayes"`, which leaves no such choice, the factor is {_ratios(found, "bayes", size)} for
means and {_ratios(found, "bayes", DIFFERENCE)} for differences.""",
        """\
**What to do.** Before propagating to means, sums or differences, call
`calibrate(valid, criterion="evidence", noise="bayes")`. With a floor of its own instead, compare
`uq.scale` squared with `uq.noise.level`: in linear regression they are equal; where the square is
many times larger, as on kin8nm here, a mean's error bar is too wide.""",
        f"""\
**Ignoring the correlations** (sum of the variances / n²) looks right up to tens of predictions,
because the noise dominates there whatever it is called, and falls short for {size}: predicted over
actual is {_ratios(found, "bayes", size, "independent")} with `noise="bayes"`, since the common
error of a net does not average out.""",
        f"""\
**What a last layer cannot know.** Retrained nets differ in all their weights. The second table
separates that from the noise: it is the spread of one and the same mean over the nets. The
posterior of the last layer with `noise="bayes"` predicts {listed(commons)} of it. With
this many nets such a ratio is known to a few per cent (6 % with 120), so that little is left to the
trunk here; it would be missing below one.""",
    )


def _ratios(found: Found, way: str, quantity: str, rule: str = "joint") -> str:
    """Predicted over actual, of all sets in their order."""
    return listed(
        [f"{one[way][rule]['ratio'][quantity]:.2f} ({name})" for name, one in found.items()]
    )
