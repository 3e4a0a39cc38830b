"""What the page says around its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.frame.quartiles import with_quartiles
from experiments.frame.wording import SHARED_ROWS, WHOLE_SCALE, listed, measured
from experiments.studies.width.tables import LABELS, NAMES

Found = dict[str, Any]

WORDS = ("improves", "gets worse")

TREND = (
    "Trends with the width, none of which a single net can decide. *Rank corr.*: Spearman's of "
    "the score with the width for each split by itself, mean and standard error over the splits; "
    "a trend is called one beyond two standard errors. *Per doubling* of the width: the median of "
    "the slopes between the medians of any two widths."
)


def opening(found: Found) -> tuple[str, ...]:
    """What was done."""
    s, widths = found["settings"], list(found["widths"])
    rows = s["rows"]
    return (
        f"""\
The theory behind last-layer error bars is that of wide nets, and the paper's appendix on the width
finds them better as nets grow, by the look of binned plots for one net each. Here that is
measured: widths {listed([str(width) for width in widths])} for both hidden layers, {s["count"]}
nets of each on random splits of California housing that all widths share: 20 % for training
({rows["train"]} rows), 20 % for validation ({rows["valid"]}) and 60 % for the test
({rows["test"]}).""",
        f"""\
SiLU; the last layer has no bias, so that the features are the last hidden layer alone, and the
level of the targets, which are not standardised, must be learnt (the paper disables biases; those
of the hidden layers are kept here). Inputs are {WHOLE_SCALE}.
AdamW with learning rate 0.001 (cut by ten after 100 epochs without a better validation loss) and
weight decay {s["decay"]:g}, batches of 32, {s["epochs"]} epochs, the weights of the best validation
loss. Ridge and scale are chosen by the paper's bins and by the likelihood of the validation
rows, without noise; and as a control the ridge by the evidence of the training rows, scale and a
constant noise floor by the likelihood. The constant bar is the root mean square of the
validation residuals.""",
        SHARED_ROWS,
    )


def quality_caption(beyond: Mapping[str, bool]) -> str:
    """Of the first figure, as it is drawn.

    Args:
        beyond: whether "points" and "bars" leave an axis.
    """
    edges = {
        "points": "A triangle at the edge is a median beyond it, where bars close to zero ruin "
        "most nets. ",
        "bars": "A quartile bar that ends at the edge without a cap goes on beyond it: bars close "
        "to zero ruin some of those nets. ",
    }
    return (
        "Scores on the test rows against the width of both hidden layers: median and quartiles "
        "over the splits, for the rank correlation mean and standard error. "
        + "".join(text for name, text in edges.items() if beyond[name])
        + "The log ratio is the distance from y = x in the binned plots, where a constant bar can "
        "do as well; gain, rank correlation and slope (dashed: 0 gain, slope 1) tell good bars "
        "from it."
    )


def width_caption(found: Found, calibration: str) -> str:
    """Of the tables."""
    s = found["settings"]
    return (
        f"Calibration: {LABELS[calibration]}. Over {s['count']} splits: median and quartiles of "
        "NLL, gain, log ratio and slope, mean and standard error of the others. "
        f"*Log ratio*: mean over bins of {s['bin_size']} rows of |log10(MSE / variance)|; *gain*: "
        "NLL of the constant bar minus NLL; *slope* of log MSE on log variance over bins; "
        "*decades* of variance that the bins span; *rank corr.* of bar and absolute error; "
        "*coverage* of 90 % intervals."
    )


def narrow_caption(found: Found) -> str:
    """Of the table of bars close to zero."""
    s = found["settings"]
    return (
        f"Bars close to zero. *Ruined nets*: of {s['count']}, those with a gain below "
        f"{s['ruined_below']:g}. *Least bar*: the smallest bar of a test row relative to the "
        "median bar of its net, over all nets."
    )


def binned_caption(found: Found) -> str:
    """Of the panels."""
    s = found["settings"]
    return (
        f"Test rows of the first split in bins of {s['bin_size']} by predicted variance, for "
        f"{listed([str(width) for width in found['shown']])} neurons a layer. The grey band is "
        "twice the scatter that Gaussian errors would have."
    )


def closing(found: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    widths = list(found["widths"])
    blocks = [_narrow(found)]
    blocks += [
        f"**{LABELS[calibration].capitalize()}.** From {widths[0]} to {widths[-1]} neurons the "
        f"RMSE goes from {_at(found, widths[0], calibration, 'rmse')} to "
        f"{_at(found, widths[-1], calibration, 'rmse')}. " + _sentences(found, calibration)
        for calibration in LABELS
    ]
    blocks.append(
        "Closeness to the line, which the paper looks at, and usefulness of the bars are different "
        "things: the grey curve is a constant bar, which carries no information about single rows "
        "and whose median log ratio is "
        + listed([_constant(found, width) for width in (widths[0], widths[-1])])
        + f" for {widths[0]} and {widths[-1]} neurons."
    )
    return tuple(blocks)


def _narrow(found: Found) -> str:
    """Why medians."""
    s, narrow = found["settings"], found["narrow"]
    counts = [f"{narrow[name]['ruined']} (*{label}*)" for name, label in LABELS.items()]
    least = [f"{narrow[name]['least_bar']:.2g} (*{label}*)" for name, label in LABELS.items()]
    where = [
        str(width)
        for width, one in found["widths"].items()
        if any(one[name]["ruined"] for name in LABELS)
    ]
    widths = f" (at width {listed(where)})" if where else ""
    return f"""\
**Why medians.** Without a last bias nothing keeps the features of a test row away from zero, least
of all in a narrow net; where they are close to it, so are q and the bar, and the likelihood of that
one row decides the mean over all. Of {s["nets"]} nets, {listed(counts)} have a gain below
{s["ruined_below"]:g}{widths}; the smallest bar of a row, relative to the median bar of its net, is
{listed(least)}. A noise floor, which the paper's form has not, keeps bars from zero."""


def _sentences(found: Found, calibration: str) -> str:
    """One clause a score that says how good bars are."""
    trends = found["trends"][calibration]
    names = ("binned_log_ratio", "gain", "spearman", "slope_error", "coverage_error")
    clauses = [
        f"{NAMES[name]}: {trends[name]['says']} "
        f"(rank correlation with the width {measured(trends[name]['rank_correlation'], 2)})"
        for name in names
    ]
    count = {word: sum(trends[name]["says"] == word for name in names) for word in WORDS}
    listed = "; ".join(clauses)
    return f"{listed[0].upper()}{listed[1:]}. {_whole(count['improves'], count['gets worse'])}"


def _whole(better: int, worse: int) -> str:
    """All scores in one sentence."""
    if better and worse:
        return (
            f"Of these five scores, {better} clearly improve with the width, {worse} clearly get "
            "worse."
        )
    if better:
        return f"Of these five scores, {better} clearly improve with the width and none gets worse."
    if worse:
        return f"Of these five scores, {worse} clearly get worse with the width and none improves."
    return "None of these five scores clearly changes with the width."


def _at(found: Found, width: str, calibration: str, name: str) -> str:
    return measured(found["widths"][width][calibration]["scores"][name])


def _constant(found: Found, width: str) -> str:
    block = found["widths"][width]["paper"]["constant"]
    return with_quartiles(block["median"]["binned_log_ratio"], 3)
