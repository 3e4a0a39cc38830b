"""The page: tables, the figure, and texts that follow the numbers.

"Sets" are the numbers of the smaller training sets by name, "larger" those of the larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.frame.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import listed
from experiments.studies.propagation.work import CALIBRATIONS, DEFAULT, DIFFERENCE, PROTOCOL, Sizes

LABELS = {
    "none": 'noise="none"',
    "constant": 'noise="constant"',
    "evidence": 'noise="constant", criterion="evidence"',
    "bayes": 'noise="bayes", criterion="evidence"',
    DEFAULT: "default",
}
"""What the page calls the calibrations."""

COLOURS = {
    "none": VERMILION,
    "constant": BLUE,
    "evidence": GREEN,
    "bayes": PURPLE,
    DEFAULT: ORANGE,
}
TARGETS = {"common": (0.7, 1.5), "single": (0.5, 1.5)}
"""Within which the default's epistemic part over the spread of retrained networks was to be, for
means and for single predictions."""

KINDS = {"common": "means", "single": "single predictions"}
"""The kinds of predictions for common rows, with what the page calls them."""


def entries(numbers: dict[str, Any], sizes: Sequence[Sizes], epochs: int) -> list[Entry]:
    """Everything on the page, in reading order.

    Args:
        numbers: What `run.run` collects.
        sizes: Sizes of the splits, with few and with more training rows.
        epochs: Epochs of the training.
    """
    sets = numbers["sets"]
    larger = numbers["larger"]
    groups = numbers["groups"]
    largest = str(groups[-1])
    return [
        *opening(sizes, epochs),
        default_table(sets, larger, largest),
        spread(sets, larger),
        Picture("means", drawn(sets, groups), CAPTION),
        mean_table(sets, largest),
        spread_table([sets, larger], largest),
        difference_table(sets),
        choice_table(sets),
        *closing(sets, largest),
    ]


def default_table(sets: Found, larger: Found, size: str) -> Table:
    """The default's epistemic part against the spread of retrained networks."""
    rows: list[list[Cell]] = []
    for name in sets:
        for numbers in (sets[name], larger[name]):
            default = numbers[DEFAULT]
            cells: list[Cell] = [name, numbers["rows"], numbers["nets"]]
            for kind in KINDS:
                ratio = default[f"ratio_of_{kind}"]
                cells += [numbers[kind], default[kind], f"{ratio:.2f}"]
            rows.append([*cells, f"{numbers['independence']:.2f}"])
    judged = next(iter(sets.values()))[DEFAULT]["nets"]
    caption = (
        f"The default against retrained networks: predictions, without noise, for {size} rows that "
        "no network has seen, the same for all networks. *Mean of all*: the standard deviation of "
        "the mean prediction over the networks (actual), and the result of "
        "`uq.propagate(torch.mean, rows)` (predicted). *Single*: the root mean square over rows of "
        "the standard deviation over networks (actual), and of the epistemic part (predicted). "
        f"Predicted values are root mean squares over the first {judged} networks. *Shared rows*: "
        "√(1 - n / rows to draw from). The training rows of the networks overlap. Their "
        "contribution to the actual spread is therefore too small by this factor, and the ratio is "
        "too large by up to its inverse."
    )
    columns = ["set", "training rows", "networks"]
    columns += ["mean of all: actual", "predicted", "ratio"]
    columns += ["single: actual", "predicted", "ratio", "shared rows"]
    return Table(columns, rows, caption)


def spread(sets: Found, larger: Found) -> str:
    """Whether the default's ratios are where they were to be."""
    ranges = [_within(sets, larger, kind) for kind in KINDS]
    least = []
    for kind, words in KINDS.items():
        ratios = [f"{numbers['least'][kind]:.2f} ({name})" for name, numbers in larger.items()]
        least.append(f"{listed(ratios)} for {words}")
    return f"""\
**The default against retrained networks.** The default's covariance has two scales: α for the error
of a single prediction, and α_B for the error that predictions share. {" ".join(ranges)} The larger
training sets overlap. If the rows alone caused the spread, and not also the initial weights, the
ratios there would be {" and ".join(least)}. Retrained networks differ in all weights, but the last
layer knows nothing about the weights of the other layers. A ratio below one shows what it may
miss."""


def _within(sets: Found, larger: Found, kind: str) -> str:
    """From where to where the default's ratios go, and which are not where they were to be."""
    low, high = TARGETS[kind]
    ratios = {}
    for sets_of_size in (sets, larger):
        for name, numbers in sets_of_size.items():
            label = f"{name}, {numbers['rows']} rows"
            ratios[label] = numbers[DEFAULT][f"ratio_of_{kind}"]
    beyond = [
        f"{ratio:.2f} ({label})" for label, ratio in ratios.items() if not low <= ratio <= high
    ]
    verdict = f"all do, except {listed(beyond)}" if beyond else "all do"
    smallest = min(ratios.values())
    largest = max(ratios.values())
    return (
        f"For {KINDS[kind]}, predicted over actual ranges from {smallest:.2f} to {largest:.2f}. "
        f"The ratios should lie between {low:g} and {high:g}; {verdict}."
    )


def mean_table(sets: Found, size: str) -> Table:
    """Error bars of means of the largest groups, against observed values."""
    caption = (
        f"Means of {size} predictions against means of the observed values: root mean square over "
        "all networks, ratio of predicted to actual error, coverage of 90 % intervals. The "
        f"variance is the propagated epistemic variance plus noise / {size}, and the intervals are "
        "Gaussian. *Independent* ignores the correlations (the sum of the variances / "
        f"{size}²). "
        f"{_judged_networks(sets)}"
    )
    return _quantity_table(sets, size, caption)


def difference_table(sets: Found) -> Table:
    """Error bars of differences of neighbours, against observed values."""
    caption = (
        "Differences of two similar predictions (each test row and its nearest neighbour) against "
        "the differences of the observed values. The variance is the propagated variance plus "
        "twice the noise, and the intervals are Gaussian. *Independent* adds the two variances. "
        f"{_judged_networks(sets)}"
    )
    return _quantity_table(sets, DIFFERENCE, caption)


def spread_table(both: Sequence[Found], size: str) -> Table:
    """The epistemic part of every calibration against the spread of retrained networks.

    Args:
        both: The numbers of the smaller and of the larger training sets.
        size: Number of the common rows.
    """
    rows: list[list[Cell]] = []
    for sets in both:
        for name, numbers in sets.items():
            for way in CALIBRATIONS:
                cells: list[Cell] = [name, numbers["rows"], LABELS[way]]
                for kind in KINDS:
                    cells += [numbers[way][kind], numbers[way][f"ratio_of_{kind}"]]
                rows.append(cells)
    caption = (
        "The epistemic part alone for every calibration, against the spreads of the first table: "
        f"for the mean of the predictions for {size} common rows, and for single predictions. "
        "Without a noise floor, this part also contains the noise. " + _judged_networks(both[0])
    )
    columns = ["set", "training rows", "calibration"]
    columns += ["mean of all: predicted", "ratio", "single: predicted", "ratio"]
    return Table(columns, rows, caption)


def _judged_networks(sets: Found) -> str:
    """A sentence on how many networks the default was judged."""
    judged = next(iter(sets.values()))[DEFAULT]["nets"]
    return f"Predictions and coverage of the default are those of the first {judged} networks."


def choice_table(sets: Found) -> Table:
    """What each calibration chose."""
    rows: list[list[Cell]] = []
    for name, numbers in sets.items():
        for way in CALIBRATIONS:
            chosen = numbers[way]
            rows.append(
                [
                    name,
                    LABELS[way],
                    f"{chosen['ridge']:.1g}",
                    chosen["scale"],
                    chosen["shared_scale"],
                    chosen["noise"],
                ]
            )
    caption = (
        "What was chosen, as medians over the networks: the ridge, the scale and the scale of the "
        "shared error, for standardised targets; and the standard deviation of the noise, a mean "
        "over rows, in the target's unit."
    )
    return Table(["set", "calibration", "ridge", "scale", "shared scale", "noise"], rows, caption)


def _quantity_table(sets: Found, quantity: str, caption: str) -> Table:
    """Predicted and actual errors of a quantity, by set and calibration."""
    rows: list[list[Cell]] = []
    for name, numbers in sets.items():
        for way in CALIBRATIONS:
            joint = numbers[way]["joint"]
            independent = numbers[way]["independent"]
            rows.append(
                [
                    name,
                    LABELS[way],
                    numbers["actual"][quantity],
                    joint["std"][quantity],
                    joint["ratio"][quantity],
                    f"{joint['coverage'][quantity]:.2f}",
                    independent["ratio"][quantity],
                    f"{independent['coverage'][quantity]:.2f}",
                ]
            )
    columns = ["set", "calibration", "actual", "predicted", "ratio", "coverage"]
    columns += ["independent: ratio", "coverage"]
    return Table(columns, rows, caption)


def drawn(sets: Found, groups: Sequence[int]) -> Figure:
    """The figure: one panel for each set, errors against the size of the group."""
    figure, axes = panels(columns=len(sets), height=3.4)
    for ax, (name, numbers) in zip(axes, sets.items(), strict=True):
        for way, colour in COLOURS.items():
            joint = _std_by_size(numbers[way]["joint"], groups)
            ax.loglog(groups, joint, color=colour, label=LABELS[way])
        independent = _std_by_size(numbers["bayes"]["independent"], groups)
        ax.loglog(groups, independent, "--", color=GREY, lw=1.2, label="correlations ignored")
        actual = [numbers["actual"][str(size)] for size in groups]
        ax.loglog(groups, actual, "o", color=BLACK, ms=4, label="actual")
        ax.set(title=name, xlabel="predictions in the mean")
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("error of the mean")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _std_by_size(rule: dict[str, Any], groups: Sequence[int]) -> list[float]:
    """Predicted standard deviations, in the order of the sizes."""
    return [rule["std"][str(size)] for size in groups]


CAPTION = (
    "Error of the mean of n predictions: predicted standard deviations (root mean square over all "
    "groups and networks) beside the actual root mean square error. *Correlations ignored*: the "
    "sum of the variances α² (1 + q), divided by n²."
)


def opening(sizes: Sequence[Sizes], epochs: int) -> tuple[str, ...]:
    """What was done."""
    few, many = sizes
    return (
        f"""\
`uq.propagate(torch.mean, x)` gives a mean of many predictions an error bar that accounts for their
correlations. Is it right? For each set, {few.nets} networks were trained, each on {few.train} rows
of its own random split, calibrated on {few.valid} others and judged on {few.test} more. Then
{many.nets} networks were trained on {many.train} rows each. If the training rows are few compared
with the whole set, the networks are nearly independent repetitions of the same experiment. The
networks have one hidden layer of {PROTOCOL.hidden[0]} units with ReLU. They are trained with AdamW
at learning rate {PROTOCOL.rate:g} with a cosine schedule, weight decay {PROTOCOL.decay:g}, in
batches of {PROTOCOL.batch} for {epochs} epochs. Inputs and targets are standardised. All networks
of a set train at once, with stacked weights.""",
        """\
Five calibrations are compared.

- `noise="none"` is the paper's form: the likelihood of single predictions chooses ridge and scale.
- `noise="constant"` adds a noise floor, chosen by the same likelihood.
- `noise="constant", criterion="evidence"` instead takes the ridge that maximises the evidence (the
  marginal likelihood) of the training data.
- `noise="bayes", criterion="evidence"` is Bayesian linear regression on the last layer's features:
  the same ridge, and a noise equal to α², so that the variance is α² (1 + q).
- The *default* is the library's: `calibrate(valid)` without further arguments.

Errors are in the target's unit. The third and the fourth calibration were added after earlier runs
with other random numbers had shown that the first two fail. Figures and tables refer to the smaller
training sets unless they say otherwise.""",
    )


def closing(sets: Found, size: str) -> tuple[str, ...]:
    """What came out, with the numbers of this run."""
    ratios_of_common = [
        f"{numbers['bayes']['ratio_of_common']:.2f} ({name})" for name, numbers in sets.items()
    ]
    return (
        f"""\
**Without a noise floor, the mean looks far too uncertain.** The likelihood of single predictions
sets α² so that α²q accounts for the whole residual, including the noise. The noise of {size}
observations averages out, but α²q hardly does. The predicted error of the mean is
{_ratios(sets, "none", size)} times the actual error.""",
        f"""\
**A floor alone is not a reliable fix.** With `noise="constant"`, the factor is
{_ratios(sets, "constant", size)}. The likelihood looks at one prediction at a time, so it cannot
see how the variance is divided between the floor and α²q. With a large ridge, q is almost the same
everywhere. An almost constant α²q is fully correlated, and a constant floor is not correlated at
all, but both fit single predictions about equally well. Where the chosen ridge is large, means look
too uncertain and differences of neighbours too certain. For these differences, predicted over
actual is {_ratios(sets, "none", DIFFERENCE)} without a floor and
{_ratios(sets, "constant", DIFFERENCE)} with a floor.""",
        f"""\
**The evidence of the training data separates the two.** With the ridge by evidence and a floor, the
factor is {_ratios(sets, "evidence", size)} for means and {_ratios(sets, "evidence", DIFFERENCE)}
for differences. Single predictions still set the scale, and they determine it badly. A misfit that
changes from row to row raises the scale, although it averages out in a mean. If the floor explains
everything, the scale is near zero (on power for half of the networks, whose intervals cover too
little). `noise="bayes"` leaves no such choice. With it, the factor is
{_ratios(sets, "bayes", size)} for means and {_ratios(sets, "bayes", DIFFERENCE)} for
differences.""",
        f"""\
**The default** has its own noise for every row and two scales. Predicted over actual is
{_ratios(sets, DEFAULT, size)} for means of observed values and
{_ratios(sets, DEFAULT, DIFFERENCE)} for differences. In a comparison with observations, the noise
of {size} rows hides much of the error of a mean. The first table, without noise, is the sharper
test.""",
        f"""\
**What to do.** Before you propagate to means, sums or differences, choose a calibration whose means
come out right: {_right(sets, size)}. If you use a separate noise floor instead, compare `uq.scale`
squared with `uq.noise_model.level`. In linear regression they are equal. If the square is many
times larger, the error bar of a mean is too wide.""",
        f"""\
**Ignoring the correlations** (sum of the variances / n²) looks right up to tens of predictions,
because the noise dominates there. For {size} predictions, it is too small: predicted over actual is
{_ratios(sets, "bayes", size, "independent")} with `noise="bayes"`, because the common error of a
network does not average out.""",
        f"""\
**What a last layer cannot know.** Retrained networks differ in all their weights. The spread of the
same mean over the networks separates this difference from the noise. The posterior of the last
layer with `noise="bayes"` predicts {listed(ratios_of_common)} of that spread. With this many
networks, such a ratio is known to a few per cent (6 % with 120). A ratio below one would show the
part of the other layers, which the last layer misses; here little is left for them.""",
    )


def _right(sets: Found, size: str) -> str:
    """The calibrations whose means of observed values have about the right error on every set."""
    low, high = TARGETS["common"]
    right = []
    for way, label in LABELS.items():
        ratios = [numbers[way]["joint"]["ratio"][size] for numbers in sets.values()]
        if all(low <= ratio <= high for ratio in ratios):
            right.append(f"`{label}`" if "=" in label else f"the {label}")
    names = listed(right) if right else "no calibration"
    return f"between {low:g} and {high:g} times the actual error on every set, {names}"


def _ratios(sets: Found, way: str, quantity: str, rule: str = "joint") -> str:
    """Predicted over actual error of a quantity, of all sets in their order."""
    ratios = {name: numbers[way][rule]["ratio"][quantity] for name, numbers in sets.items()}
    return listed([f"{ratio:.2f} ({name})" for name, ratio in ratios.items()])
