"""The page: tables, figures, and texts that follow the numbers.

Everything here reads the numbers of `run.numbers`, as the JSON file has them.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import (
    SHARED_ROWS,
    WHOLE_SCALE,
    compared,
    direction,
    listed,
    measured,
    with_quartiles,
)
from experiments.judging import parity
from experiments.judging.columns import cells, heads, labels, score_rows
from experiments.studies.california.work import CALIBRATIONS

LABELS = labels(CALIBRATIONS) | {"auto": "default"}
"""What the page calls the calibrations."""

COLUMNS = (
    *("rmse", "nll", "gain", "binned_log_ratio", "slope", "decades"),
    *("spearman", "ence", "coverage"),
)
"""Scores of a table."""

TITLES = {"inside": "in domain", "outside": "out of domain"}

LEVEL = 0.9
"""The share of the targets that intervals are meant to cover."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    return [
        *opening(numbers),
        Picture("longitude", longitudes(numbers), longitude_caption(numbers)),
        domain_table(numbers, "inside", inside_caption(numbers)),
        limit_table(numbers),
        domain_table(numbers, "outside", OUTSIDE, "offset"),
        detection_table(numbers),
        difference_table(numbers),
        Picture("paper", both_sides(numbers, "paper"), parity_caption(numbers, "paper")),
        Picture("auto", both_sides(numbers, "auto"), parity_caption(numbers, "auto")),
        Picture("nets", of_each_network(numbers), NETS),
        *closing(numbers),
    ]


# --- tables --------------------------------------------------------------------------------------


def domain_table(numbers: Found, domain: str, caption: str, *more_scores: str) -> Table:
    """All calibrations and the constant bar on one side of the threshold.

    Args:
        numbers: the numbers of the page.
        domain: "inside" or "outside".
        caption: the text above the table.
        more_scores: scores besides `COLUMNS`.
    """
    score_names = [*COLUMNS, *more_scores]
    calibrations = numbers["calibrations"]
    on_this_side = {name: calibration[domain] for name, calibration in calibrations.items()}
    rows = score_rows(on_this_side, score_names, LABELS)
    return Table(["bars", *heads(score_names)], rows, caption)


def detection_table(numbers: Found) -> Table:
    """How well the bars tell far rows, and what the validation rows knew of it."""
    rows: list[list[Cell]] = []
    for name, calibration in numbers["calibrations"].items():
        chosen = calibration["chosen"]
        rows.append(
            [
                LABELS[name],
                measured(calibration["auroc"]),
                measured(calibration["auroc_of_rigidity"]),
                measured(calibration["farthest"]["coverage"]),
                measured(calibration["outside"]["scores"]["coverage"]),
                f"{chosen['ridge']:.2g}",
                f"{chosen['scale']:.2g}",
                f"{chosen['noise']:.2g}",
            ]
        )
    columns = ["bars", "AUROC", "AUROC of q", "coverage of the farthest fifth"]
    columns += ["coverage outside", "ridge", "scale", "noise"]
    return Table(columns, rows, DETECTION)


def difference_table(numbers: Found) -> Table:
    """Each calibration minus the paper's, network by network."""
    score_names = ["nll", "binned_log_ratio", "slope", "spearman", "ence", "coverage"]
    rows: list[list[Cell]] = []
    for name, differences in numbers["differences"].items():
        for domain in ("inside", "outside"):
            row = [LABELS[name], domain, *cells(differences[domain], score_names)]
            rows.append([*row, measured(differences["auroc"])])
    columns = ["bars", "rows", *heads(score_names), "AUROC"]
    return Table(columns, rows, DIFFERENCES)


def limit_table(numbers: Found) -> Table:
    """The log ratio in the domain beside that of errors which are right for the bars."""
    limits = numbers["limits"]
    calibrations = numbers["calibrations"]
    scores = {name: calibration["inside"]["scores"] for name, calibration in calibrations.items()}
    scores["constant"] = calibrations["paper"]["inside"]["constant"]["scores"]
    rows: list[list[Cell]] = []
    for name, of_bars in scores.items():
        floors = limits["floors"][name]
        rows.append(
            [
                LABELS.get(name, name),
                measured(of_bars["binned_log_ratio"]),
                measured(floors["shuffled"]),
                measured(floors["gaussian"]),
            ]
        )
    hindsight = measured(limits["hindsight"]["binned_log_ratio"])
    rows.append(["chosen in hindsight", hindsight, None, None])
    settings = numbers["settings"]
    caption = (
        "How close the in-domain test rows can come to the line. *Own errors, shuffled*: the mean "
        f"log ratio over {settings['draws']} draws of errors σ z, where z are the network's own "
        "ratios e / σ (scaled to mean square one), dealt to other rows. *Gaussian errors*: the "
        "same with normal z. The bars are right for both kinds of errors, so their scores show "
        f"only the scatter of {settings['bin_size']} squared errors per bin. *Chosen in hindsight* "
        "is the best α² q of any ridge and scale for these very test rows. It is not a "
        "calibration, because it knows the answers."
    )
    return Table(["bars", "log ratio", "own errors, shuffled", "Gaussian errors"], rows, caption)


# --- figures -------------------------------------------------------------------------------------


def longitudes(numbers: Found) -> Figure:
    """The histogram that the threshold divides."""
    figure, (ax,) = panels(width=6.5, height=2.8)
    longitude = numbers["longitude"]
    edges = longitude["edges"]
    counts: dict[str, list[int]] = {"outside": [], "inside": []}
    for count, low, high in zip(longitude["counts"], edges, edges[1:], strict=False):
        is_inside = (low + high) / 2 > longitude["threshold"]
        counts["inside"].append(count if is_inside else 0)
        counts["outside"].append(0 if is_inside else count)
    for side, colour in (("outside", VERMILION), ("inside", BLUE)):
        label = f"{TITLES[side]}: {longitude[side]} rows"
        ax.stairs(counts[side], edges, fill=True, color=colour, label=label)
    ax.axvline(longitude["threshold"], color=BLACK, lw=1, ls="--")
    ax.set(xlabel="standardised longitude", ylabel="rows")
    ax.set_xlim(*_occupied(longitude["counts"], edges))
    ax.legend()
    return figure


def both_sides(numbers: Found, calibration: str) -> Figure:
    """Single rows and bins of one network."""
    shown = numbers["shown"][calibration]
    return parity.pairs({title: shown[domain] for domain, title in TITLES.items()})


def of_each_network(numbers: Found) -> Figure:
    """Separation and coverage of every network, one column a calibration."""
    figure, (left, right) = panels(columns=2, height=3.4)
    calibrations = numbers["calibrations"]
    for place, calibration in enumerate(calibrations.values()):
        inside = calibration["inside"]["coverage_of_each"]
        outside = calibration["outside"]["coverage_of_each"]
        _dots(left, place, calibration["auroc_of_each"], BLUE, "of each network")
        _dots(right, place - 0.12, inside, BLUE, TITLES["inside"])
        _dots(right, place + 0.12, outside, VERMILION, TITLES["outside"])
    left.set(title="Far rows found by the bar", ylabel="AUROC")
    right.axhline(numbers["settings"]["level"], color=GREY, lw=1, ls="--")
    right.set(title="Intervals meant to cover 90 %", ylabel="coverage")
    # Long labels are broken into lines.
    names = [LABELS[name].replace(", ", ",\n").replace(" (", "\n(") for name in calibrations]
    for ax in (left, right):
        ax.set_xticks(range(len(calibrations)), names)
    handles, legend_labels = right.get_legend_handles_labels()
    figure.legend(handles[:2], legend_labels[:2], loc="outside lower right", ncols=2)
    return figure


def _dots(ax: Axes, place: float, values: list[float], colour: str, label: str) -> None:
    """Every network as a dot, the mean as a line."""
    mean = sum(values) / len(values)
    ax.plot([place] * len(values), values, "o", color=colour, ms=4, alpha=0.6, mew=0, label=label)
    ax.plot([place - 0.1, place + 0.1], [mean, mean], color=colour, lw=2)


def _occupied(counts: list[int], edges: list[float]) -> tuple[float, float]:
    """The ends of the range of bins that contain rows."""
    filled = [k for k, count in enumerate(counts) if count]
    return edges[filled[0]], edges[filled[-1] + 1]


# --- what was done -------------------------------------------------------------------------------


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    settings = numbers["settings"]
    rows = numbers["rows"]
    longitude = numbers["longitude"]
    source = NETWORK_SOURCES[settings["committed"]]
    hidden = settings["hidden"]
    return (
        f"""\
How good are error bars where there were no training data? Networks are trained and calibrated on
houses in the east of California and then also predict the west (paper, Sec. 4.5). The paper divides
the rows by the eighth column of the set and calls it the distance from the ocean. In fact, this
column is the **longitude**. Its two peaks are the regions of Los Angeles and San Francisco, and
"far from the ocean" is the south-east. A row belongs to the domain if its longitude exceeds
{longitude["threshold"]} ({longitude["degrees"]:.1f} degrees). As in the paper, the longitude is
standardised with the mean and standard deviation of the whole set.""",
        f"""\
For each of {settings["count"]} networks, the rows are split at random into 60 % for training, 20 %
for validation and 20 % for the test. Training and validation keep only the rows of the domain. The
networks were trained together as one stack, which requires equal numbers of rows. All splits are
therefore cut to the smallest: {rows["train"]} rows for training and {rows["valid"]} for validation.
All inputs are {WHOLE_SCALE}. Targets stay in their unit of 100,000 dollars.
The networks have two hidden layers of {hidden} units with SiLU. They are trained with AdamW for
{settings["epochs"]} epochs in batches of 32, with weight decay {settings["decay"]:g} and learning
rate 0.001, which falls tenfold after 100 epochs without a better validation loss. The weights with
the best validation loss are kept. {source}""",
        f"""\
Four ways to choose the error bars are compared. All of them use the validation rows, which lie in
the domain.

- **{LABELS["paper"]}** chooses ridge and scale by the paper's bins.
- **{LABELS["nll"]}** chooses the same two numbers by the likelihood.
- **{LABELS["auto"]}** is the library's default. It takes the ridge that maximises the evidence (the
  marginal likelihood) of the training rows. It gives every row a noise and a distribution of its
  own, fitted to training rows left out and to validation rows. A guard widens the bars where q, the
  inverse of the rigidity, is large, up to the targets' standard deviation.
- **{LABELS["bayes"]}** is Bayesian linear regression: the ridge that maximises the evidence, and α²
  as the noise. It is shown as a warning.

*Constant* is one bar for all rows, the root mean square of the validation residuals. It scores well
in a binned plot because it spans no decades; only the other columns show that it is not a good
error bar. NLL (negative log-likelihood), gain, CRPS (continuous ranked probability score) and
coverage refer to each form's own distribution, which is Gaussian for all but the default. Scores
over bins refer to the standard deviations.""",
        SHARED_ROWS,
    )


def longitude_caption(numbers: Found) -> str:
    """The caption of the histogram."""
    longitude = numbers["longitude"]
    return (
        f"The standardised longitude of all rows and the threshold {longitude['threshold']}: "
        f"{longitude['inside']} rows belong to the domain, {longitude['outside']} do not."
    )


def inside_caption(numbers: Found) -> str:
    """The caption of the first table."""
    settings = numbers["settings"]
    rows = numbers["rows"]
    return (
        f"In domain: mean and standard error over {settings['count']} networks with "
        f"{rows['smallest_test']} to {rows['largest_test']} test rows each. *Gain*: NLL of the "
        "constant bar minus NLL. "
        f"*Log ratio*: mean over bins of {settings['bin_size']} rows of |log10(MSE / variance)|. "
        "*Slope*: slope of log MSE against log variance over bins (1 is right). *Decades*: decades "
        "of variance that the bins span. *Rank corr.*: rank correlation of bar and absolute error. "
        "*ENCE*: expected normalised calibration error over as many bins. *Coverage*: share of the "
        "targets inside 90 % intervals."
    )


def parity_caption(numbers: Found, name: str) -> str:
    """The caption of the figures of one network."""
    settings = numbers["settings"]
    return (
        f'The first network (number {settings["shown"]}), bars by "{LABELS[name]}". '
        "Above: single test rows. If the bars are right and the errors Gaussian, the pairs of "
        "lines enclose 68.3, 95.4 and 99.7 % of the errors, with equal density at both ends. "
        f"Below: bins of {settings['bin_size']} rows by predicted variance. The grey band extends "
        "two standard errors to each side, for Gaussian errors."
    )


# --- what came out -------------------------------------------------------------------------------


def closing(numbers: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    return (_inside(numbers), _limits(numbers), _outside(numbers), _detection(numbers))


def _inside(numbers: Found) -> str:
    """The bars on rows like those of the training."""
    calibrations = numbers["calibrations"]
    paper = calibrations["paper"]["inside"]["scores"]
    auto = calibrations["auto"]["inside"]["scores"]
    constant = calibrations["paper"]["inside"]["constant"]["scores"]
    nll = numbers["differences"]["auto"]["inside"]["nll"]
    coverage = numbers["differences"]["auto"]["inside"]["coverage"]
    return f"""\
**In domain.** The paper's form lies {measured(paper["binned_log_ratio"])} decades from the line,
the default {measured(auto["binned_log_ratio"])} and a constant bar
{measured(constant["binned_log_ratio"])}. The gain in NLL over the constant bar is
{measured(paper["gain"])} for the paper's form and {measured(auto["gain"])} for the default. The NLL
of the default {compared(nll)} that of the paper's form ({measured(nll)}, network by network). Its
coverage, {measured(auto["coverage"])}, {compared(coverage)} the paper's
{measured(paper["coverage"])}. The MSE grows with the variance to the power
{measured(paper["slope"])} for the paper's form and {measured(auto["slope"])} for the default. A
slope below one means that the bars differ more between rows than the errors do. Some errors do not
depend on the distance from the data: a noise term can describe them, and α² q cannot."""


def _limits(numbers: Found) -> str:
    """How much of the distance from the line is scatter."""
    limits = numbers["limits"]
    gaussian_kurtosis = numbers["settings"]["gaussian_kurtosis"]
    bin_size = numbers["settings"]["bin_size"]
    floors = limits["floors"]["paper"]
    paper = numbers["calibrations"]["paper"]["inside"]["scores"]
    return f"""\
**How close to the line bars can be.** The errors in the domain have a kurtosis of
{with_quartiles(limits["kurtosis"], 1)}, median and quartiles over the networks; Gaussian errors
have {gaussian_kurtosis}. The mean of {bin_size} squared errors scatters, and the log ratio counts
this scatter as a distance. Errors that fit the paper's bars exactly score
{measured(floors["shuffled"])} if they have the observed shape and {measured(floors["gaussian"])} if
they are Gaussian. The best ridge and scale in hindsight reach
{measured(limits["hindsight"]["binned_log_ratio"])}; the calibration on validation rows reaches
{measured(paper["binned_log_ratio"])}. The share of the log ratio that is only scatter lies between
the number for Gaussian errors and the number for the observed shape, because wrong bars can make
the observed shape look more peaked than it is."""


def _outside(numbers: Found) -> str:
    """The bars on rows that the training did not reach."""
    calibrations = numbers["calibrations"]
    coverages = []
    worst = []
    ridges = []
    for name, calibration in calibrations.items():
        scores = calibration["outside"]["scores"]
        label = LABELS[name]
        coverages.append(
            f"{measured(scores['coverage'])} with *{label}* (offset {measured(scores['offset'])})"
        )
        worst.append(f"{calibration['outside']['lowest_coverage']:.3f} (*{label}*)")
        ridges.append(f"{calibration['chosen']['ridge']:.2g} (*{label}*)")
    constant = calibrations["paper"]["outside"]["constant"]["scores"]["coverage"]
    nll = numbers["differences"]["auto"]["outside"]["nll"]
    return f"""\
**Out of domain.** Intervals meant to cover 0.9 of the targets cover {listed(coverages)}. Those of a
constant bar cover {measured(constant)}. The lowest coverage of a single network is {listed(worst)}.
Out of domain, the NLL of the default {compared(nll)} that of the paper's form
({measured(nll)}). In α² q, the bars widen because q grows away from the data. A noise floor does
not change that growth, but a large ridge removes it; the median ridges are {listed(ridges)}. Where
the noise is α² itself, the bars hardly grow until q is near one: {_bayes(numbers)}."""


def _bayes(numbers: Found) -> str:
    """How the bars of Bayesian linear regression did out of domain."""
    change = numbers["differences"]["bayes"]["outside"]["coverage"]
    sign = direction(change)
    if sign > 0:
        return f"this form covers more than the paper's form (by {measured(change)})"
    if sign < 0:
        return f"this form covers less than the paper's form (by {measured(change)})"
    return (
        "the coverage of this form does not clearly differ from that of the paper's form "
        f"({measured(change)})"
    )


def _detection(numbers: Found) -> str:
    """How well far rows are told, and whether the validation rows warn of it."""
    calibrations = numbers["calibrations"]
    aurocs = []
    aurocs_of_q = []
    farthest = []
    farthest_coverage = {}
    outside_coverage = {}
    for name, calibration in calibrations.items():
        label = f"(*{LABELS[name]}*)"
        coverage = calibration["farthest"]["coverage"]
        aurocs.append(f"{measured(calibration['auroc'])} {label}")
        aurocs_of_q.append(f"{measured(calibration['auroc_of_rigidity'])} {label}")
        farthest.append(f"{measured(coverage)} {label}")
        farthest_coverage[name] = coverage[0]
        outside_coverage[name] = calibration["outside"]["scores"]["coverage"][0]
    lowest_farthest = min(farthest_coverage, key=farthest_coverage.__getitem__)
    lowest_outside = min(outside_coverage, key=outside_coverage.__getitem__)
    verdict = "do not have"
    if lowest_farthest == lowest_outside:
        verdict = "also have"
    return f"""\
**Finding rows that are far away.** The AUROC (area under the ROC curve) is {listed(aurocs)} for the
bars. It is {listed(aurocs_of_q)} for q alone, which ignores the noise. The AUROC measures the order
of the bars and not their size. The likelihood of rows in the domain says little about far rows. One
check needs no far row: calibrate on the validation rows with small bars, and look at the rows with
the largest bars. There, 0.9 intervals cover {listed(farthest)}. The bars with the lowest coverage
in this check {verdict} the lowest coverage out of domain."""


# --- captions ------------------------------------------------------------------------------------

OUTSIDE = (
    "Out of domain: the same bars on test rows west of the threshold. Neither training nor "
    "calibration has seen any of them, except through the scale of the inputs. *Offset* is the "
    "mean over bins of log10(MSE / variance): above zero, the bars are too narrow; below zero, too "
    "wide."
)
DETECTION = (
    "Finding far rows by their bars. *AUROC*: the probability that a row outside has a larger bar "
    "than a row inside. *AUROC of q*: the same for q, the inverse of the rigidity, at the chosen "
    "ridge. *Coverage of the farthest fifth*: coverage of 90 % intervals on the fifth of the "
    "validation rows with the largest bars, calibrated on the other rows; this needs no row from "
    "outside. The last columns show what was chosen, as medians over the networks. The noise is a "
    "standard deviation (that of a typical row where it differs between rows)."
)
DIFFERENCES = (
    "Differences from the paper's calibration, network by network. The networks and rows are the "
    "same, so these standard errors apply to the comparison."
)
NETS = (
    "Each dot is a network; the lines are means. Left: how well the bar separates rows outside the "
    "domain from rows inside. Right: the share of test values that the 90 % intervals cover."
)


NETWORK_SOURCES = {
    True: "These networks come with the project (`experiments/nets`).",
    False: "These networks were trained for this run.",
}
