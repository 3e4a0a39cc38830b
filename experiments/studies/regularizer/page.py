"""The page: tables, the figure, and texts that follow the numbers.

Everything here reads the numbers of `run.numbers`, as the JSON file has them. A *condition* is a
training: decay, copies of the rows, and the weights of the best or the last epoch.
"""

from __future__ import annotations

from matplotlib.axes import Axes
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
"""Scores whose change without the bias is shown."""

LABELS = {
    "nll": "likelihood",
    "nll, floor": "likelihood, noise floor",
    "bins": "bins",
    "bins, floor": "bins, noise floor",
}
"""What the page calls the calibrations."""

CLOSE_TO_ZERO = -6
"""log10 of a relative ridge below which it hardly changes any bar."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    return [
        *opening(numbers),
        Picture("ridges", ridges(numbers), RIDGE_CAPTION),
        ridge_table(numbers),
        effect_table(numbers),
        nll_table(numbers),
        ratio_table(numbers),
        bias_table(numbers),
        *closing(numbers),
    ]


# --- tables --------------------------------------------------------------------------------------


def ridge_table(numbers: Found) -> Table:
    """Medians and quartiles of the relative ridge, and of the absolute one by the likelihood."""
    rows: list[list[Cell]] = []
    for name, condition in numbers["conditions"].items():
        relative = [ridge_cell(condition[key], "log_relative_ridge") for key in CALIBRATIONS]
        absolute = ridge_cell(condition["nll"], "log_ridge")
        rows.append([name, *relative, absolute, measured(condition["weights"], 1)])
    columns = ["training", *LABELS.values(), "likelihood, absolute", "norm of the weights"]
    return Table(columns, rows, RIDGE_TABLE)


def effect_table(numbers: Found) -> Table:
    """Changes of log10 ridges, relative and absolute, and of the NLL."""
    rows: list[list[Cell]] = []
    for label, effect in numbers["effects"].items():
        relative = [sign_cell(effect[key]["log_relative_ridge"]) for key in CALIBRATIONS]
        absolute = sign_cell(effect["nll"]["log_ridge"])
        rows.append([label, *relative, absolute, measured(effect["nll"]["nll"])])
    caption = (
        "Effects, network by network: the change of log10 (ridge / largest eigenvalue) for each "
        "calibration, and of log10 ridge for the likelihood without noise. A cell shows the median "
        "change (≥ or ≤ where it is only bounded) and in how many networks the ridge goes up, goes "
        "down, stays the same, or is open because both ridges are at the edge. Bold changes are "
        "clear by Wilcoxon's signed-rank test (two-sided, at "
        f"{numbers['settings']['rank_test']:g}, one test at a time, without the open networks). "
        "The last column is the change of the test NLL (negative log-likelihood) for the "
        "likelihood without noise, mean and standard error. *Decay*: compared with none. *Last "
        "epoch*: compared with the best validation weights. *Two copies*: compared with one."
    )
    columns = ["effect of", *LABELS.values(), "likelihood, absolute", "likelihood: NLL"]
    return Table(columns, rows, caption)


def nll_table(numbers: Found) -> Table:
    """RMSE, NLL and the noise floor on the test rows."""
    rows: list[list[Cell]] = []
    for name, condition in numbers["conditions"].items():
        nlls = [measured(condition[key]["scores"]["nll"]) for key in CALIBRATIONS]
        noise = with_quartiles(condition["nll, floor"]["noise"])
        rows.append([name, measured(condition["test_rmse"]), *nlls, noise])
    caption = (
        f"Test rows, mean and standard error over {numbers['settings']['count']} networks: the "
        "RMSE, then the NLL of each calibration. The last column is the standard deviation of the "
        "noise floor, median and quartiles."
    )
    columns = ["training", "RMSE", *LABELS.values(), "floor by the likelihood"]
    return Table(columns, rows, caption)


def ratio_table(numbers: Found) -> Table:
    """Binned log ratios on the test rows."""
    rows: list[list[Cell]] = []
    for name, condition in numbers["conditions"].items():
        ratios = [measured(condition[key]["scores"]["binned_log_ratio"]) for key in CALIBRATIONS]
        rows.append([name, *ratios])
    caption = (
        f"The same networks and rows: log ratio of each calibration, the mean over bins of "
        f"{numbers['settings']['bin_size']} rows of |log10(MSE / variance)|."
    )
    return Table(["training", *LABELS.values()], rows, caption)


def bias_table(numbers: Found) -> Table:
    """Scores and bars without the bias minus with it."""
    rows: list[list[Cell]] = []
    for name, condition in numbers["conditions"].items():
        bias = condition["bias"]
        nll = with_quartiles(bias["median"]["nll"], 3)
        means = cells(bias, (*SCORES, "log_ratio_of_bars", "rank_correlation_of_bars"))
        rows.append([name, nll, bias["ruined"], *means])
    beyond = numbers["settings"]["ruined_beyond"]
    caption = (
        "What changes without the column of ones that the bias of the last layer adds to the "
        "features: scores without it minus scores with it, both calibrated by the likelihood "
        "without noise. NLL: median and quartiles over the networks, and in how many it rises by "
        f"more than {beyond:g} (*ruined*). The other columns are means and standard errors: log "
        "ratio, rank correlation of bar and absolute error, the mean of |log10| of the ratio of "
        "the two bars, and the rank correlation of the two bars."
    )
    columns = ["training", "NLL, median", "ruined networks", *heads(SCORES)]
    columns += ["bars: ratio", "bars: rank corr."]
    return Table(columns, rows, caption)


def ridge_cell(calibration: Found, name: str) -> str:
    """Median and quartiles, "≥" where one is only bounded, and how many networks are at the edge.

    Args:
        calibration: the numbers of a calibration.
        name: "log_ridge" or "log_relative_ridge".
    """
    middle, low, high = (bounded(limits) for limits in calibration["bounds"][name])
    text = f"{middle} ({low} to {high})"
    if calibration["at_upper_edge"]:
        return f"{text}; {calibration['at_upper_edge']} at the edge"
    return text


def sign_cell(change: Found) -> str:
    """The median change and the signs, bold where the change is clear."""
    text = f"{bounded(change['median'])}; {counted(change)}"
    if change["says"] == "no clear change":
        return text
    return f"**{text}**"


# --- figure --------------------------------------------------------------------------------------


def ridges(numbers: Found) -> Figure:
    """The chosen ridges: one panel a criterion, one row a training."""
    conditions = numbers["conditions"]
    figure, axes = panels(columns=2, height=0.42 * len(conditions) + 1.4, sharey=True)
    titles = {"nll": "by the likelihood", "bins": "by the paper's bins"}
    for ax, (criterion, title) in zip(axes, titles.items(), strict=True):
        without_floor = [condition[criterion] for condition in conditions.values()]
        with_floor = [condition[f"{criterion}, floor"] for condition in conditions.values()]
        _draw_ridges(ax, without_floor, -0.16, BLUE, "no noise")
        _draw_ridges(ax, with_floor, 0.16, VERMILION, "noise floor")
        ax.axvline(0, color=GREY, lw=1, ls="--")
        ax.set(title=title, xlabel="log10 (ridge / largest eigenvalue)")
    axes[0].set_yticks(range(len(conditions)), list(conditions))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw_ridges(ax: Axes, trainings: list[Found], shift: float, colour: str, label: str) -> None:
    """Every network as a dot, quartiles as a bar, the median as a tick; one row a training."""
    for place, calibration in enumerate(trainings):
        height = place + shift
        values = calibration["relative_ridge_of_each"]
        ax.plot(values, [height] * len(values), "o", color=colour, ms=3.5, alpha=0.5, mew=0)
        middle, low, high = calibration["log_relative_ridge"]
        legend_label = label if place == 0 else None
        ax.plot([low, high], [height, height], color=colour, lw=2, label=legend_label)
        ax.plot([middle], [height], "|", color=BLACK, ms=9)


# --- what was done -------------------------------------------------------------------------------


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    settings = numbers["settings"]
    rows = settings["rows"]
    hidden = settings["hidden"]
    epochs = settings["epochs"]
    decays = ", ".join(f"{decay:g}" for decay in settings["decays"])
    return (
        f"""\
The paper adds a ridge ς² to the Gram matrix, for numerical stability and to represent the
regularisation of the training. It reports values close to zero without weight decay, relatively
large values with it, and no consistent effect of early stopping. This study tests these statements
factor by factor on California housing. There are {settings["count"]} random splits into 20 % for
training ({rows["train"]} rows), 20 % for validation ({rows["valid"]}) and 60 % for the test
({rows["test"]}). The networks have two hidden layers of {hidden} units with SiLU (the paper does
not say which network it used). They are trained with AdamW for {epochs} epochs in batches of 32, at
learning rate 0.001, which falls tenfold after 100 epochs without a better validation loss. Targets
stay as they are. Inputs are {WHOLE_SCALE}.""",
        f"""\
There are three factors: the weight decay ({decays}); the weights, which are those of the best
validation loss or of the last epoch of the same training; and the number of copies of each training
row, one or two, in the training and in the Gram matrix. (Trainings with two copies have half the
epochs and half the patience of the learning rate, so that the numbers of steps are the same.) Each
network is calibrated on its validation rows, by the likelihood and by the paper's bins. Each
calibration is done without noise, which is the paper's form, and with a constant noise floor. The
noise floor is the control. A large ridge makes q almost the same for all rows, as a noise floor
would. If a noise floor lowers the ridge, the ridge had done some of the floor's work.""",
        SHARED_ROWS,
    )


RIDGE_CAPTION = (
    "The chosen ridge, relative to the largest eigenvalue of the Gram matrix (dashed at one). Each "
    "dot is a network, the bar spans the quartiles, and the tick is the median. The search ends at "
    "-10 and 4; dots at its upper end are lower bounds."
)
RIDGE_TABLE = (
    "log10 of the chosen ridge relative to the largest eigenvalue of the Gram matrix, median and "
    "quartiles over the networks. The last columns are the absolute ridge by the likelihood and "
    "the norm of all weights of the network. *At the edge*: networks with the largest ridge of the "
    "search, which is a lower bound of their ridge; ≥ marks medians and quartiles that are only "
    "bounded."
)


# --- what came out -------------------------------------------------------------------------------


def closing(numbers: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    return (
        _decay(numbers),
        _edge(numbers),
        _floor(numbers),
        _stopping_and_copies(numbers),
        _bias(numbers),
    )


def _decay(numbers: Found) -> str:
    """How the ridge follows the weight decay."""
    no_decay, *decays = numbers["settings"]["decays"]
    sentences = []
    medians = []
    for stopping in STOPPING:
        without_decay = numbers["conditions"][name_of(no_decay, 1, stopping)]["nll"]
        medians.append(without_decay["log_relative_ridge"][0])
        clauses = []
        for decay in decays:
            effect = numbers["effects"][f"decay {decay:g}, {stopping}"]["nll"]
            clauses.append(f"with decay {decay:g} it {_moved(effect['log_relative_ridge'])}")
        median = bounded(without_decay["bounds"]["log_relative_ridge"][0])
        sentences.append(
            f"With the {stopping} weights, its median is {median} without decay. Compared with "
            f"that, network by network, {listed(clauses)}."
        )
    verdict = "is not close to zero"
    if max(medians) < CLOSE_TO_ZERO:
        verdict = "is close to zero"
    return f"""\
**Weight decay.** Take log10 of the ridge by the likelihood, relative to the largest eigenvalue.
{" ".join(sentences)} Without decay, the median ridge {verdict}."""


def _edge(numbers: Found) -> str:
    """Where the ridge is as large as the search allows."""
    count = len(numbers["conditions"]) * numbers["settings"]["count"]
    by_likelihood = numbers["at_upper_edge"]["nll"]
    by_bins = numbers["at_upper_edge"]["bins"]
    by_decay = ""
    if by_likelihood:
        clauses = [
            f"{counts['nll']} of {counts['nets']} with decay {decay}"
            for decay, counts in numbers["at_upper_edge_by_decay"].items()
        ]
        by_decay = f" For the likelihood, these are {listed(clauses)}."
    return f"""\
**Ridges at the edge of the search.** Of all {count} networks, {by_likelihood} by the likelihood and
{by_bins} by the bins (both without noise) have the largest ridge of the search.{by_decay} In these
networks, ς² outweighs the Gram matrix and the variance is α² |f|² / ς². Such bars follow the length
of the feature vector and carry no information about the training data. The value of the ridge is
where the search ends, so it is only a lower bound. A mean of such values, or their distance from
others, would only show how far the search goes."""


def _floor(numbers: Found) -> str:
    """Whether a noise floor takes over the work of the ridge."""
    by_likelihood = numbers["floor_counts"]["nll"]
    by_bins = numbers["floor_counts"]["bins"]
    base = numbers["floor"][_unregularised(numbers)]
    likelihood_ridge = _moved(base["nll"]["log_relative_ridge"])
    bins_ridge = _moved(base["bins"]["log_relative_ridge"])
    likelihood_nll = changed(base["nll"]["nll"])
    bins_nll = changed(base["bins"]["nll"])
    likelihood_counts = _ridge_counts(by_likelihood)
    bins_counts = _ridge_counts(by_bins)
    likelihood_nlls = _nll_counts(by_likelihood)
    conclusion = f"{_conclusion('likelihood', by_likelihood)} {_conclusion('bins', by_bins)}"
    return f"""\
**The control.** With a noise floor, the ridge by the likelihood {likelihood_counts}. The ridge by
the bins {bins_counts}. ("Clearly" refers to one training at a time, by signed ranks. The trainings
share splits and are not independent of each other.) Without decay and with the best weights, log10
of the ridge {likelihood_ridge} by the likelihood and {bins_ridge} by the bins. The test NLL
{likelihood_nll} by the likelihood and {bins_nll} by the bins. Over all trainings, the test NLL
{likelihood_nlls} by the likelihood and {_nll_counts(by_bins)} by the bins. {conclusion}"""


def _unregularised(numbers: Found) -> str:
    """The name of the condition without decay and copies, with the best weights."""
    return name_of(numbers["settings"]["decays"][0], 1, STOPPING[0])


def _ridge_counts(counts: Found) -> str:
    """In how many trainings the ridge moves."""
    text = (
        f"clearly falls in {counts['falls']} and rises in {counts['rises']} of "
        f"{counts['of']} trainings"
    )
    if counts["open"]:
        text += (
            f" (in {counts['open']} at least half of the networks are at the edge with and without "
            "the floor, which leaves the change open)"
        )
    return text


def _nll_counts(counts: Found) -> str:
    """In how many trainings the NLL moves, beyond two standard errors."""
    return (
        f"clearly falls in {counts['nll_falls']} and rises in {counts['nll_rises']} of "
        f"{counts['of']}"
    )


def _conclusion(criterion: str, counts: Found) -> str:
    """What a floor's effect means, as far as it is clear."""
    falls = counts["falls"]
    trainings = counts["of"]
    if counts["rises"]:
        return f"By the {criterion}, the effect of a floor has no one sign."
    if 2 * falls > trainings:
        return (
            f"By the {criterion}, in {falls} trainings of {trainings}, part of the ridge does the "
            "work of "
            "a noise term, which the paper's form lacks."
        )
    if falls:
        return (
            f"By the {criterion}, the ridge does some of the work of a noise term in {falls} "
            f"trainings of {trainings}; in the others this is not clear."
        )
    return f"By the {criterion}, it is not clear that the ridge does the work of a noise term."


def _stopping_and_copies(numbers: Found) -> str:
    """How the ridge follows early stopping and copies of the rows."""
    effects = numbers["effects"]
    decays = numbers["settings"]["decays"]
    epochs = numbers["epochs"]
    last = []
    for decay in decays:
        ridge = effects[f"last epoch, decay {decay:g}"]["nll"]["log_relative_ridge"]
        last.append(f"{_moved(ridge)} with decay {decay:g}")
    copies = effects[f"two copies, decay {decays[0]:g}"]["nll"]
    return f"""\
**Early stopping and copies.** In the median over all trainings, the best weights were those of
epoch {epochs["median"]:g} ({epochs["smallest"]} to {epochs["largest"]}; trainings with two copies
have half the epochs). From there to the last epoch, log10 of the relative ridge by the likelihood
{listed(last)}. Two copies of every row double the Gram matrix of the same network: the relative
ridge should stay the same, and the absolute ridge should double
({numbers["settings"]["log_two"]:.2f} in log10). The networks are trained again here. Without decay,
the relative ridge {_moved(copies["log_relative_ridge"])}, and the absolute ridge
{_moved(copies["log_ridge"])}."""


def _bias(numbers: Found) -> str:
    """What the column of ones contributes."""
    base = numbers["conditions"][_unregularised(numbers)]["bias"]
    ruined = numbers["ruined_without_bias"]
    limit = numbers["settings"]["ruined_beyond"]
    return f"""\
**The bias.** Without decay, leaving the column of ones out of the features changes the bars by
{measured(base["log_ratio_of_bars"])} in |log10|. Their rank correlation with the original bars is
{measured(base["rank_correlation_of_bars"])}. The test NLL changes by
{with_quartiles(base["median"]["nll"], 3)}, median and quartiles. All numbers are for
{LABELS["nll"]} without noise. Means would be misleading: the column of ones keeps the features, and
with them the bar, away from zero. Without it, a single test row can have almost no bar and dominate
the mean. The NLL rises by more than {limit:g} in {ruined["nets"]} of {ruined["of"]} networks; the
largest rise is {ruined["largest"]:.3g}."""


def _moved(change: Found) -> str:
    """A ridge's change in words, clear or not by its ranks."""
    verb = change["says"]
    if verb == "no clear change":
        verb = "does not clearly change"
    return f"{verb} ({counted(change)}; median {bounded(change['median'])})"
