"""The page: tables, figures, and texts that follow the numbers."""

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
COLUMNS = (
    *("rmse", "nll", "gain", "binned_log_ratio", "slope", "decades"),
    *("spearman", "ence", "coverage"),
)
"""Scores of a table."""


def entries(found: Found) -> list[Entry]:
    """The page."""
    return [
        *opening(found),
        Picture("longitude", longitudes(found), longitude_caption(found)),
        domain_table(found, "inside", inside_caption(found)),
        limit_table(found),
        domain_table(found, "outside", OUTSIDE, "offset"),
        detection_table(found),
        difference_table(found),
        Picture("paper", both_sides(found, "paper"), parity_caption(found, "paper")),
        Picture("auto", both_sides(found, "auto"), parity_caption(found, "auto")),
        Picture("nets", of_each_net(found), NETS),
        *closing(found),
    ]


def domain_table(found: Found, domain: str, caption: str, *more: str) -> Table:
    """All calibrations and the constant bar on one side of the threshold.

    Args:
        found: the experiment's numbers.
        domain: "inside" or "outside".
        caption: above the table.
        more: scores besides `COLUMNS`.
    """
    side = {name: one[domain] for name, one in found["calibrations"].items()}
    names = [*COLUMNS, *more]
    return Table(["bars", *heads(names)], score_rows(side, names, LABELS), caption)


def detection_table(found: Found) -> Table:
    """How well the bars tell far rows, and what the validation rows knew of it."""
    rows = [
        [
            LABELS[name],
            measured(one["auroc"]),
            measured(one["auroc_of_rigidity"]),
            measured(one["farthest"]["coverage"]),
            measured(one["outside"]["scores"]["coverage"]),
            f"{one['chosen']['ridge']:.2g}",
            f"{one['chosen']['scale']:.2g}",
            f"{one['chosen']['noise']:.2g}",
        ]
        for name, one in found["calibrations"].items()
    ]
    columns = ["bars", "AUROC", "AUROC of q", "coverage of the farthest fifth"]
    columns += ["coverage outside", "ridge", "scale", "noise"]
    return Table(columns, rows, DETECTION)


def difference_table(found: Found) -> Table:
    """Each calibration minus the paper's, net by net."""
    names = ["nll", "binned_log_ratio", "slope", "spearman", "ence", "coverage"]
    rows = [
        [LABELS[name], domain, *cells(one[domain], names), measured(one["auroc"])]
        for name, one in found["differences"].items()
        for domain in ("inside", "outside")
    ]
    columns = ["bars", "rows", *heads(names), "AUROC"]
    return Table(columns, rows, DIFFERENCES)


def limit_table(found: Found) -> Table:
    """The log ratio in the domain beside that of errors which are right for the bars."""
    limits, calibrations = found["limits"], found["calibrations"]
    ratios = {name: one["inside"]["scores"] for name, one in calibrations.items()}
    ratios["constant"] = calibrations["paper"]["inside"]["constant"]["scores"]
    rows: list[list[Cell]] = [
        [LABELS.get(name, name), measured(one["binned_log_ratio"])]
        + [measured(limits["floors"][name][kind]) for kind in ("shuffled", "gaussian")]
        for name, one in ratios.items()
    ]
    rows.append(
        ["chosen in hindsight", measured(limits["hindsight"]["binned_log_ratio"]), None, None]
    )
    s = found["settings"]
    caption = (
        f"How close to the line the in-domain test rows can come. *Own errors, shuffled*: the mean "
        f"log ratio over {s['draws']} draws of errors σ z, where z are the net's own e / σ "
        "(scaled to mean square one) dealt to other rows; *Gaussian errors*: the same with normal "
        "z. Both are errors for which these bars are right: what they score is the scatter of "
        f"{s['bin_size']} squared errors a bin. *Chosen in hindsight* is the best α² q of any "
        "ridge and scale for the very test rows: no calibration, since it knows the answers."
    )
    return Table(["bars", "log ratio", "own errors, shuffled", "Gaussian errors"], rows, caption)


TITLES = {"inside": "in domain", "outside": "out of domain"}


def longitudes(found: Found) -> Figure:
    """The histogram that the threshold divides."""
    figure, (ax,) = panels(width=6.5, height=2.8)
    one = found["longitude"]
    edges = one["edges"]
    for side, colour in (("outside", VERMILION), ("inside", BLUE)):
        counts = [
            n if ((low + high) / 2 > one["threshold"]) == (side == "inside") else 0
            for n, low, high in zip(one["counts"], edges, edges[1:], strict=False)
        ]
        ax.stairs(counts, edges, fill=True, color=colour, label=f"{TITLES[side]}: {one[side]} rows")
    ax.axvline(one["threshold"], color=BLACK, lw=1, ls="--")
    ax.set(xlabel="standardised longitude", ylabel="rows")
    ax.set_xlim(*_occupied(one["counts"], edges))
    ax.legend()
    return figure


def both_sides(found: Found, calibration: str) -> Figure:
    """Single rows and bins of one net."""
    shown = found["shown"][calibration]
    return parity.pairs({title: shown[domain] for domain, title in TITLES.items()})


def of_each_net(found: Found) -> Figure:
    """Separation and coverage of every net, one column a calibration."""
    figure, (left, right) = panels(columns=2, height=3.4)
    calibrations = found["calibrations"]
    for place, one in enumerate(calibrations.values()):
        _dots(left, place, one["auroc_of_each"], BLUE, "of each net")
        _dots(right, place - 0.12, one["inside"]["coverage_of_each"], BLUE, TITLES["inside"])
        _dots(right, place + 0.12, one["outside"]["coverage_of_each"], VERMILION, TITLES["outside"])
    left.set(title="Far rows told by the bar", ylabel="AUROC")
    right.axhline(found["settings"]["level"], color=GREY, lw=1, ls="--")
    right.set(title="Intervals meant to hold 90 %", ylabel="coverage")
    for ax in (left, right):
        names = [LABELS[name].replace(", ", ",\n").replace(" (", "\n(") for name in calibrations]
        ax.set_xticks(range(len(calibrations)), names)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower right", ncols=2)
    return figure


def _dots(ax: Axes, place: float, values: list[float], colour: str, label: str) -> None:
    """Every net as a dot, the mean as a line."""
    mean = sum(values) / len(values)
    ax.plot([place] * len(values), values, "o", color=colour, ms=4, alpha=0.6, mew=0, label=label)
    ax.plot([place - 0.1, place + 0.1], [mean, mean], color=colour, lw=2)


def _occupied(counts: list[int], edges: list[float]) -> tuple[float, float]:
    """The ends of the bins that hold rows."""
    filled = [k for k, count in enumerate(counts) if count]
    return edges[filled[0]], edges[filled[-1] + 1]


LEVEL = 0.9

OUTSIDE = (
    "Out of domain: the same bars on test rows west of the threshold, of which no net, validation "
    "row or calibration has seen any, but for the scale of the inputs. *Offset* is the mean over "
    "bins of log10(MSE / variance): above zero the bars are too narrow, below it too wide."
)
DETECTION = (
    "Telling far rows by their bars. *AUROC*: the probability that a row outside has the larger "
    "bar; *AUROC of q*: the larger q, the inverse of the rigidity, at the ridge chosen. "
    "*Coverage of the farthest fifth*: 90 % intervals of the fifth of the validation rows with the "
    "largest bars, calibrated on the others; that can be known without a row from outside. "
    "Then what was chosen, medians over the nets, noise as a standard deviation (of a typical row "
    "where it differs between rows)."
)
DIFFERENCES = (
    "Differences from the paper's calibration, net by net: the same nets and rows, so that these "
    "standard errors are those of the comparison."
)
NETS = (
    "Every net is a dot, the means are lines. Left: how well the bar tells a row outside the "
    "domain from one inside. Right: how many test values lie within the 90 % intervals."
)


SOURCES = {
    True: "These nets come with the project (`experiments/nets`).",
    False: "These nets were trained for this run.",
}


def opening(found: Found) -> tuple[str, ...]:
    """What was done."""
    s, rows = found["settings"], found["rows"]
    return (
        f"""\
How do error bars fare where the training data do not reach? Nets are trained and calibrated on the
houses in the east of California and asked about the west too (paper, Sec. 4.5). The paper divides
by its eighth column and calls that the distance from the ocean; it is the **longitude**. Its two
peaks are the regions of Los Angeles and San Francisco, and "far from the ocean" is the south-east.
A row is in the domain where the longitude, standardised with the mean and spread of the whole
set as in the paper, exceeds {found["longitude"]["threshold"]}
({found["longitude"]["degrees"]:.1f} degrees).""",
        f"""\
For each of {s["count"]} nets the rows are split at random into 60 % for training, 20 % for
validation and 20 % for the test; training and validation keep the rows of the domain alone. The
nets were trained as one stack, which takes equal numbers of rows: all are cut to the smallest,
{rows["train"]} for training and {rows["valid"]} for validation.
All inputs are {WHOLE_SCALE}; targets are left as they are, in 100,000 dollars.
Two hidden layers of {s["hidden"]} with SiLU, AdamW with learning rate 0.001 (cut by ten after 100
epochs without a better validation loss) and weight decay {s["decay"]:g}, batches of 32,
{s["epochs"]} epochs, the weights of the best validation loss. {SOURCES[s["committed"]]}""",
        f"""\
Four ways to choose the error bars are compared. All see the validation rows, which lie
in the domain: **{LABELS["paper"]}**, ridge and scale by the paper's bins; **{LABELS["nll"]}**, the
same two by the likelihood; **{LABELS["auto"]}**, the library's: the ridge of the greatest evidence
of the training rows, a noise and a distribution of every row, fitted to training rows left out and
to validation rows, and a guard that widens the bars where q is large, up to the targets' spread;
and **{LABELS["bayes"]}**, Bayesian linear regression: the ridge of the greatest evidence, and α² as
the noise, here as a warning.
*Constant* is one bar for all rows, the root mean square of the validation residuals: it
scores well in a binned plot, since it spans no decades, and only the other columns tell it from
good bars. NLL, gain, CRPS and coverage are those of each form's own distribution, which is a
Gaussian for all but the default; what is said of bins is of the standard deviations.""",
        SHARED_ROWS,
    )


def longitude_caption(found: Found) -> str:
    """Of the histogram."""
    one = found["longitude"]
    return (
        f"The standardised longitude of all rows and the threshold {one['threshold']}: "
        f"{one['inside']} rows are in the domain, {one['outside']} are not."
    )


def inside_caption(found: Found) -> str:
    """Of the first table."""
    s, rows = found["settings"], found["rows"]
    return (
        f"In domain: mean and standard error over {s['count']} nets, {rows['smallest_test']} to "
        f"{rows['largest_test']} test rows each. *Gain*: NLL of the constant bar minus NLL. "
        f"*Log ratio*: mean over bins of {s['bin_size']} rows of |log10(MSE / variance)|. *Slope* "
        "of log MSE on log variance over bins (1 is right), *decades* of variance that the bins "
        "span, *rank corr.* of bar and absolute error, *ENCE* over as many bins, *coverage* of "
        "90 % intervals."
    )


def parity_caption(found: Found, name: str) -> str:
    """Of the figures of one net."""
    s = found["settings"]
    return (
        f'The first net (number {s["shown"]}), bars by "{LABELS[name]}". Above: single test rows; '
        "the lines hold 68.3, 95.4 and 99.7 % of right bars' errors if they are Gaussian, with "
        f"equal density at both ends. Below: bins of {s['bin_size']} rows by predicted variance; "
        "the grey band is twice the scatter that Gaussian errors would have."
    )


def closing(found: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    return (_inside(found), _limits(found), _outside(found), _detection(found))


def _inside(found: Found) -> str:
    ways = found["calibrations"]
    paper, auto = (ways[name]["inside"]["scores"] for name in ("paper", "auto"))
    constant = ways["paper"]["inside"]["constant"]["scores"]
    nll, coverage = (found["differences"]["auto"]["inside"][name] for name in ("nll", "coverage"))
    return f"""\
**In domain.** The paper's form is {measured(paper["binned_log_ratio"])} decades from the line, the
default {measured(auto["binned_log_ratio"])}, a constant bar
{measured(constant["binned_log_ratio"])}. The gain in NLL over that bar is
{measured(paper["gain"])} and {measured(auto["gain"])}; the NLL of the default
{compared(nll)} that of the paper's form ({measured(nll)} net by net), and its coverage,
{measured(auto["coverage"])}, {compared(coverage)} the paper's {measured(paper["coverage"])}. With
the paper's form the MSE grows with the variance to the power {measured(paper["slope"])}, with the
default to the power {measured(auto["slope"])}: a slope below one means that the bars differ more
between rows than the errors do. Errors that do not depend on the distance from the data are what a
noise can hold and α² q cannot."""


def _limits(found: Found) -> str:
    limits, s = found["limits"], found["settings"]
    floors = limits["floors"]["paper"]
    return f"""\
**How close the line can be.** The errors in the domain have a kurtosis of
{with_quartiles(limits["kurtosis"], 1)}, median and quartiles over the nets; Gaussian ones
have {s["gaussian_kurtosis"]}. The mean of {s["bin_size"]} such squares scatters, and the log ratio
counts that as a distance. With the paper's bars, errors that suit them score
{measured(floors["shuffled"])} if shaped as the observed ones and {measured(floors["gaussian"])} if
Gaussian. The best ridge and scale in hindsight reach
{measured(limits["hindsight"]["binned_log_ratio"])}; the calibration on validation rows has
{measured(found["calibrations"]["paper"]["inside"]["scores"]["binned_log_ratio"])}. What is scatter
alone lies between the Gaussian number and that of the observed shape, which wrong bars can
make more pointed than it is."""


def _outside(found: Found) -> str:
    ways = found["calibrations"]
    parts = [
        f"{measured(one['outside']['scores']['coverage'])} with *{LABELS[name]}* "
        f"(offset {measured(one['outside']['scores']['offset'])})"
        for name, one in ways.items()
    ]
    constant = ways["paper"]["outside"]["constant"]["scores"]["coverage"]
    worst = [f"{ways[name]['outside']['lowest_coverage']:.3f} (*{LABELS[name]}*)" for name in ways]
    ridges = [f"{ways[name]['chosen']['ridge']:.2g} (*{LABELS[name]}*)" for name in ways]
    nll = found["differences"]["auto"]["outside"]["nll"]
    return f"""\
**Out of domain.** Intervals meant to hold 0.9 hold {listed(parts)}; a constant bar's hold
{measured(constant)}. The worst single net holds {listed(worst)}.
The NLL of the default {compared(nll)} that of the paper's form there
({measured(nll)}). In α² q it is the growth of q away from the data that widens the bars. A noise
floor leaves that growth alone, a large ridge takes it away; the median ridges are {listed(ridges)}.
Where the noise is α² itself, q must be compared with one, and the bars hardly grow until q is that
large: {_bayes(found)}."""


def _bayes(found: Found) -> str:
    """How Bayesian linear regression's bars did out of domain."""
    change = found["differences"]["bayes"]["outside"]["coverage"]
    sign = direction(change)
    if not sign:
        told = "its coverage does not clearly differ from that of the paper's form"
        return f"here {told} ({measured(change)})"
    way = "more" if sign > 0 else "less"
    return f"here it covers {way} than the paper's form (by {measured(change)})"


def _detection(found: Found) -> str:
    ways = found["calibrations"]
    aurocs, of_q = (
        listed([f"{measured(one[kind])} (*{LABELS[name]}*)" for name, one in ways.items()])
        for kind in ("auroc", "auroc_of_rigidity")
    )
    far = {name: one["farthest"]["coverage"] for name, one in ways.items()}
    outside = {name: one["outside"]["scores"]["coverage"] for name, one in ways.items()}
    told = [f"{measured(value)} (*{LABELS[name]}*)" for name, value in far.items()]
    lowest = [min(values, key=lambda name: values[name][0]) for values in (far, outside)]
    same = "are those" if lowest[0] == lowest[1] else "are not those"
    return f"""\
**Telling which rows are far.** The area under the curve is {aurocs} for the bars and
{of_q} for q alone, which knows nothing of the noise. It is about the order
of the bars and says nothing of their size, and the likelihood of rows in the domain says little
about far ones. A check that needs no far row is to calibrate on the validation rows of small bars
and to look at those with the largest: there 0.9 intervals hold {listed(told)}. The bars with
the lowest coverage in this check {same} with the lowest out of domain."""
