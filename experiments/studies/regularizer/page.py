"""The page: tables, the figure, and texts that follow the numbers."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.frame.figures import BLACK, BLUE, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import (
    SHARED_ROWS,
    WHOLE_SCALE,
    changed,
    listed,
    measured,
    with_quartiles,
)
from experiments.judging.columns import cells, heads
from experiments.studies.regularizer.signs import bounded, counted
from experiments.studies.regularizer.work import CALIBRATIONS, STOPPING, name_of

SCORES = ("binned_log_ratio", "spearman")
"""Whose change without the bias is shown."""

LABELS = {
    "nll": "likelihood",
    "nll, floor": "likelihood, noise floor",
    "bins": "bins",
    "bins, floor": "bins, noise floor",
}


def entries(found: Found) -> list[Entry]:
    """The page."""
    return [
        *opening(found),
        Picture("ridges", ridges(found), RIDGES),
        ridge_table(found),
        effect_table(found),
        nll_table(found),
        ratio_table(found),
        bias_table(found),
        *closing(found),
    ]


def ridge_table(found: Found) -> Table:
    """Medians and quartiles of the relative ridge, and of the absolute one by the likelihood."""
    rows: list[list[Cell]] = []
    for name, one in found["conditions"].items():
        ridges = [ridge_cell(one[way], "log_relative_ridge") for way in CALIBRATIONS]
        absolute = ridge_cell(one["nll"], "log_ridge")
        rows.append([name, *ridges, absolute, measured(one["weights"], 1)])
    columns = ["training", *LABELS.values(), "likelihood, absolute", "norm of the weights"]
    return Table(columns, rows, RIDGE_TABLE)


def effect_table(found: Found) -> Table:
    """Changes of log10 ridges, relative and absolute, and of the NLL."""
    rows: list[list[Cell]] = []
    for label, one in found["effects"].items():
        cells = [sign_cell(one[way]["log_relative_ridge"]) for way in CALIBRATIONS]
        rows.append(
            [label, *cells, sign_cell(one["nll"]["log_ridge"]), measured(one["nll"]["nll"])]
        )
    caption = (
        "Effects net by net: the change of log10 (ridge / largest eigenvalue) by calibration, then "
        "of log10 ridge by the likelihood without noise: its median (≥ or ≤ where only bounded), "
        "and in how many nets it goes up or down, stays the same, or is open, since both ridges "
        "are at the edge. Bold: a clear change, by Wilcoxon's signed ranks (two-sided, at "
        f"{found['settings']['rank_test']:g}, one test at a time; open ones are left out). Last "
        "the test NLL by the same, mean and standard error. *Decay*: against none. *Last epoch*: "
        "against the best validation weights. *Two copies*: against one."
    )
    columns = ["effect of", *LABELS.values(), "likelihood, absolute", "likelihood: NLL"]
    return Table(columns, rows, caption)


def nll_table(found: Found) -> Table:
    """RMSE, NLL and the noise floor on the test rows."""
    rows: list[list[Cell]] = []
    for name, one in found["conditions"].items():
        nlls = [measured(one[way]["scores"]["nll"]) for way in CALIBRATIONS]
        noise = with_quartiles(one["nll, floor"]["noise"])
        rows.append([name, measured(one["test_rmse"]), *nlls, noise])
    caption = (
        f"On the test rows, mean and standard error over {found['settings']['count']} nets: RMSE, "
        "then the NLL by calibration; and the standard deviation of the noise floor, median and "
        "quartiles."
    )
    columns = ["training", "RMSE", *LABELS.values(), "floor by the likelihood"]
    return Table(columns, rows, caption)


def ratio_table(found: Found) -> Table:
    """Binned log ratios on the test rows."""
    rows: list[list[Cell]] = [
        [name, *(measured(one[way]["scores"]["binned_log_ratio"]) for way in CALIBRATIONS)]
        for name, one in found["conditions"].items()
    ]
    s = found["settings"]
    caption = (
        f"The same nets and rows: log ratio, the mean over bins of {s['bin_size']} rows of "
        "|log10(MSE / variance)|, by calibration."
    )
    return Table(["training", *LABELS.values()], rows, caption)


def bias_table(found: Found) -> Table:
    """Without the bias minus with it."""
    rows: list[list[Cell]] = []
    for name, one in found["conditions"].items():
        bias = one["bias"]
        nll = with_quartiles(bias["median"]["nll"], 3)
        bars = cells(bias, (*SCORES, "log_ratio_of_bars", "rank_correlation_of_bars"))
        rows.append([name, nll, bias["ruined"], *bars])
    beyond = found["settings"]["ruined_beyond"]
    caption = (
        "Features without the column of ones that the bias of the last layer contributes, minus "
        "with it; both calibrated by the likelihood without noise. NLL: median and quartiles over "
        f"the nets, and how many rise by more than {beyond:g} (*ruined*). "
        "Then mean and standard error: log ratio, rank correlation of bar and absolute error, and "
        "the bars themselves: mean of |log10| of the ratio of the two, and their rank correlation."
    )
    columns = ["training", "NLL, median", "ruined nets", *heads(SCORES)]
    columns += ["bars: ratio", "bars: rank corr."]
    return Table(columns, rows, caption)


def ridge_cell(block: Found, name: str) -> str:
    """Median and quartiles, "≥" where one is only bounded, and how many nets are at the edge."""
    middle, low, high = (bounded(one) for one in block["bounds"][name])
    edge = block["at_upper_edge"]
    return f"{middle} ({low} to {high})" + (f"; {edge} at the edge" if edge else "")


def sign_cell(change: Found) -> str:
    """The median change and the signs, bold where the change is clear."""
    told = f"{bounded(change['median'])}; {counted(change)}"
    return told if change["says"] == "no clear change" else f"**{told}**"


PANELS = {"nll": "by the likelihood", "bins": "by the paper's bins"}
SIDES = (("", -0.16, BLUE, "no noise"), (", floor", 0.16, VERMILION, "noise floor"))


def ridges(found: Found) -> Figure:
    """One panel a criterion, one row a training."""
    conditions = found["conditions"]
    figure, axes = panels(columns=2, height=0.42 * len(conditions) + 1.4, sharey=True)
    for ax, (criterion, title) in zip(axes, PANELS.items(), strict=True):
        for suffix, shift, colour, label in SIDES:
            for place, one in enumerate(conditions.values()):
                block = one[criterion + suffix]
                values, height = block["relative_ridge_of_each"], place + shift
                named = label if place == 0 else None
                ax.plot(values, [height] * len(values), "o", color=colour, ms=3.5, alpha=0.5, mew=0)
                middle, low, high = block["log_relative_ridge"]
                ax.plot([low, high], [height] * 2, color=colour, lw=2, label=named)
                ax.plot([middle], [height], "|", color=BLACK, ms=9)
        ax.axvline(0, color=GREY, lw=1, ls="--")
        ax.set(title=title, xlabel="log10 (ridge / largest eigenvalue)")
    axes[0].set_yticks(range(len(conditions)), list(conditions))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


CLOSE_TO_ZERO = -6
"""log10 of a relative ridge below which it hardly changes any bar."""

RIDGES = (
    "The chosen ridge, relative to the largest eigenvalue of the Gram (dashed at one): every net "
    "is a dot, the bar spans the quartiles, the tick is the median. The search ends at -10 and 4: "
    "dots at its upper end are lower bounds."
)
RIDGE_TABLE = (
    "log10 of the chosen ridge relative to the largest eigenvalue of the Gram, median and "
    "quartiles over the nets; the absolute one for the likelihood; and the norm of all weights of "
    "the net. *At the edge*: nets with the largest ridge of the search, which bounds theirs from "
    "below; ≥ marks medians and quartiles that it bounds."
)


def opening(found: Found) -> tuple[str, ...]:
    """What was done."""
    s = found["settings"]
    rows = s["rows"]
    decays = ", ".join(f"{decay:g}" for decay in s["decays"])
    return (
        f"""\
The paper's ς² is added to the Gram for numerical stability and to stand for the regularisation of
the training; it reports values close to zero without weight decay and relatively large ones with
it, and no consistent effect of early stopping. Here that is tried factor by factor on California
housing, {s["count"]} random splits into 20 % for training ({rows["train"]} rows), 20 % for
validation ({rows["valid"]}) and 60 % for the test ({rows["test"]}); two hidden layers of
{s["hidden"]} with SiLU (the paper does not say which net it used), AdamW with learning rate 0.001
(cut by ten after 100 epochs without a better validation loss), batches of 32, {s["epochs"]} epochs,
targets as they are, inputs {WHOLE_SCALE}.""",
        f"""\
The factors: weight decay ({decays}); weights of the best validation loss or of the last epoch of
the same training; each training row once or twice, in the training and in the Gram (twice with half
the epochs and half the patience of the learning rate, so that the numbers of steps are the same).
Each net is calibrated on its validation rows by the likelihood and by the paper's bins, each
without noise, which is the paper's form, and with a constant noise floor. That is the control: a
large ridge makes q almost the same for all rows, which is what a noise floor does. If a floor
lowers it, it had done some of a floor's work.""",
        SHARED_ROWS,
    )


def closing(found: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    return (_decay(found), _edge(found), _floor(found), _others(found), _bias(found))


def _decay(found: Found) -> str:
    decays = found["settings"]["decays"]
    clauses = []
    for stopping in STOPPING:
        none = found["conditions"][name_of(decays[0], 1, stopping)]["nll"]["bounds"]
        effects = [
            f"with decay {d:g} it "
            f"{_moved(found['effects'][f'decay {d:g}, {stopping}']['nll']['log_relative_ridge'])}"
            for d in decays[1:]
        ]
        clauses.append(
            f"With the {stopping} weights, its median is {bounded(none['log_relative_ridge'][0])} "
            f"without decay; against that, net by net, {listed(effects)}."
        )
    largest = max(
        found["conditions"][name_of(decays[0], 1, stopping)]["nll"]["log_relative_ridge"][0]
        for stopping in STOPPING
    )
    near = "is close to zero" if largest < CLOSE_TO_ZERO else "is not close to zero"
    return f"""\
**Weight decay.** Take log10 of the ridge by the likelihood, relative to the largest eigenvalue.
{" ".join(clauses)} Without decay the median ridge {near}."""


def _edge(found: Found) -> str:
    """Where the ridge is as large as the search allows."""
    nets = len(found["conditions"]) * found["settings"]["count"]
    counts = {name: found["at_upper_edge"][name] for name in ("nll", "bins")}
    by_decay = [
        f"{one['nll']} of {one['nets']} with decay {decay}"
        for decay, one in found["at_upper_edge_by_decay"].items()
    ]
    share = f" By the likelihood these are {listed(by_decay)}." if counts["nll"] else ""
    return f"""\
**As large as may be.** Of all {nets} nets, {counts["nll"]} by the likelihood and
{counts["bins"]} by the bins (both without noise) have the largest ridge of the search.{share} There
ς² outweighs the Gram and the variance is α² |f|² / ς²: such bars follow the length of the
feature vector and know nothing of the training data. The value itself is where the search ends, so
it is read as a lower bound only: a mean of such values, or their distance from others, would say
how far the search goes."""


def _floor(found: Found) -> str:
    counts = found["floor_counts"]
    base = found["floor"][name_of(found["settings"]["decays"][0], 1, STOPPING[0])]
    likelihood, bins = (_clearly(counts[name]) for name in ("nll", "bins"))
    ridges = [_moved(base[name]["log_relative_ridge"]) for name in ("nll", "bins")]
    nlls = [changed(base[name]["nll"]) for name in ("nll", "bins")]
    return f"""\
**The control.** With a noise floor, the ridge by the likelihood {likelihood}; the ridge by the bins
{bins}. (Clear is said of one training at a time, by signed ranks; trainings share splits and are
not independent of each other.) Without decay and with the best weights its log10 {ridges[0]} by
the likelihood and {ridges[1]} by the bins; the test NLL {nlls[0]} and {nlls[1]}. Over all
trainings the test NLL {_nll(counts["nll"])} by the likelihood and {_nll(counts["bins"])} by the
bins. {_conclusion("likelihood", counts["nll"])} {_conclusion("bins", counts["bins"])}"""


def _clearly(counts: Found) -> str:
    """In how many trainings the ridge moves."""
    told = (
        f"clearly falls in {counts['falls']} and rises in {counts['rises']} of "
        f"{counts['of']} trainings"
    )
    if counts["open"]:
        told += (
            f" (in {counts['open']} at least half of the nets are at the edge with and without "
            "the floor, which leaves the change open)"
        )
    return told


def _nll(counts: Found) -> str:
    """In how many trainings it moves, beyond two standard errors."""
    return (
        f"clearly falls in {counts['nll_falls']} and rises in {counts['nll_rises']} of "
        f"{counts['of']}"
    )


def _conclusion(criterion: str, counts: Found) -> str:
    """What a floor's effect means, as far as it is clear."""
    falls, rises, of = (counts[k] for k in ("falls", "rises", "of"))
    if rises:
        return f"By the {criterion} the effect of a floor has no one sign."
    if 2 * falls > of:
        return (
            f"By the {criterion}, in {falls} trainings of {of}, part of the ridge does the work of "
            "a noise term, which the paper's form lacks."
        )
    if falls:
        return (
            f"By the {criterion}, the ridge does some of the work of a noise term in {falls} "
            f"trainings of {of}; in the others this is not clear."
        )
    return f"By the {criterion}, it is not clear that the ridge does the work of a noise term."


def _others(found: Found) -> str:
    effects = found["effects"]
    decays = found["settings"]["decays"]
    last = [
        f"{_moved(effects[f'last epoch, decay {d:g}']['nll']['log_relative_ridge'])} with decay "
        f"{d:g}"
        for d in decays
    ]
    copies = effects[f"two copies, decay {decays[0]:g}"]["nll"]
    return f"""\
**Early stopping and copies.** The best weights were those of epoch {found["epochs"]["median"]:g}
in the median of all trainings ({found["epochs"]["smallest"]} to {found["epochs"]["largest"]};
trainings with two copies have half the epochs).
Going on to the last epoch, log10 of the relative ridge by the likelihood {listed(last)}.
Two copies of every row double the Gram of the same net: the relative ridge should stay and the
absolute one double ({found["settings"]["log_two"]:.2f} in log10). The nets are trained anew here,
and without decay the relative ridge {_moved(copies["log_relative_ridge"])}, the absolute one
{_moved(copies["log_ridge"])}."""


def _bias(found: Found) -> str:
    base = found["conditions"][name_of(found["settings"]["decays"][0], 1, STOPPING[0])]["bias"]
    ruined = found["ruined_without_bias"]
    return f"""\
**The bias.** Leaving the column of ones out of the features changes the bars by
{measured(base["log_ratio_of_bars"])} in |log10| without decay, their rank correlation with
the others is {measured(base["rank_correlation_of_bars"])}, and the test NLL changes by
{with_quartiles(base["median"]["nll"], 3)}, median and quartiles. All numbers are for
{LABELS["nll"]} without noise. Means would mislead: the column of ones keeps the features, and with
them the bar, away from zero; without it a single test row can have next to no bar and decide the
mean. The NLL rises by more than {found["settings"]["ruined_beyond"]:g} in {ruined["nets"]} of
{ruined["of"]} nets; the largest rise is {ruined["largest"]:.3g}."""


def _moved(change: Found) -> str:
    """A ridge's change in words, clear or not by its ranks."""
    verb = {"no clear change": "does not clearly change"}.get(change["says"], change["says"])
    return f"{verb} ({counted(change)}; median {bounded(change['median'])})"
