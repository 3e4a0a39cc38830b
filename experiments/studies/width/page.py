"""The page: tables, figures, and texts that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.frame.figures import BLUE, GREEN, GREY, VERMILION, panels
from experiments.frame.outcome import Cell, Entry, Found, Picture, Table
from experiments.frame.wording import SHARED_ROWS, WHOLE_SCALE, listed, measured, with_quartiles
from experiments.judging import parity
from experiments.judging.columns import heads, labels
from experiments.studies.width.work import CALIBRATIONS

COLUMNS = ("rmse", "nll", "gain", "binned_log_ratio", "slope", "decades", "spearman", "coverage")
NAMES = {
    **dict(zip(COLUMNS, heads(COLUMNS), strict=True)),
    "gain": "NLL gain over a constant bar",
    "spearman": "rank correlation of bar and error",
    "slope_error": "distance of the slope from 1",
    "coverage_error": "distance of the coverage from 0.9",
}
MEDIANS = ("nll", "gain", "binned_log_ratio", "slope")
"""Scores that a single net can ruin: medians and quartiles, means and standard errors elsewhere."""

LABELS = labels(CALIBRATIONS)


def entries(found: Found) -> list[Entry]:
    """The page."""
    drawn = quality(found)
    return [
        *opening(found),
        Picture("quality", drawn, quality_caption(beyond(drawn))),
        *(width_table(found, name) for name in LABELS),
        narrow_table(found),
        trend_table(found),
        Picture("binned", binned(found), binned_caption(found)),
        *closing(found),
    ]


def width_table(found: Found, calibration: str) -> Table:
    """One row a width."""
    rows = []
    for width, one in found["widths"].items():
        block = one[calibration]
        cells = [score(block, name) for name in COLUMNS]
        rows.append([str(width), *cells, score(block["constant"], "binned_log_ratio")])
    s = found["settings"]
    caption = (
        f"Calibration: {LABELS[calibration]}. Over {s['count']} splits: median and quartiles of "
        "NLL, gain, log ratio and slope, mean and standard error of the others. "
        f"*Log ratio*: mean over bins of {s['bin_size']} rows of |log10(MSE / variance)|; *gain*: "
        "NLL of the constant bar minus NLL; *slope* of log MSE on log variance over bins; "
        "*decades* of variance that the bins span; *rank corr.* of bar and absolute error; "
        "*coverage* of 90 % intervals."
    )
    return Table(["width", *heads(COLUMNS), "constant: log ratio"], rows, caption)


def narrow_table(found: Found) -> Table:
    """Bars close to zero, all calibrations."""
    rows: list[list[Cell]] = [
        [
            str(width),
            *(
                cell
                for name in LABELS
                for cell in (one[name]["ruined"], f"{one[name]['least_bar']:.2g}")
            ),
        ]
        for width, one in found["widths"].items()
    ]
    told = ("ruined nets", "least bar")
    columns = [f"{label}: {what}" for label in LABELS.values() for what in told]
    s = found["settings"]
    caption = (
        f"Bars close to zero. *Ruined nets*: of {s['count']}, those with a gain below "
        f"{s['ruined_below']:g}. *Least bar*: the smallest bar of a test row relative to the "
        "median bar of its net, over all nets."
    )
    return Table(["width", *columns], rows, caption)


def trend_table(found: Found) -> Table:
    """One row a score, all calibrations."""
    trends = found["trends"]
    rows = []
    for name, label in NAMES.items():
        cells: list[Cell] = [label]
        for calibration in LABELS:
            one = trends[calibration][name]
            cells += [f"{one['says']}, {measured(one['rank_correlation'], 2)}", one["per_doubling"]]
        rows.append(cells)
    columns = [head for label in LABELS.values() for head in (label, "per doubling")]
    return Table(["score", *columns], rows, TREND)


def score(block: dict[str, Any], name: str) -> str:
    """A score of one width in a cell."""
    if name in MEDIANS:
        return with_quartiles(block["median"][name], 3)
    return measured(block["scores"][name])


PANELS = ("binned_log_ratio", "gain", "spearman", "slope")
COLOURS = {"paper": BLUE, "nll": VERMILION, "floor": GREEN}
LIMITS = {"gain": (-0.15, 1.0), "binned_log_ratio": (0.0, 0.25), "slope": (-0.5, 2.0)}
"""Beyond these a score is only said to be so: ruined nets may lie anywhere."""


def quality(found: Found) -> Figure:
    """Four scores with their spread over the nets, one curve a calibration."""
    figure, axes = panels(columns=2, rows=2, height=2.8)
    widths = [int(width) for width in found["widths"]]
    for ax, name in zip(axes, PANELS, strict=True):
        for side, (calibration, colour) in zip((-1, 0, 1), COLOURS.items(), strict=True):
            blocks = [one[calibration] for one in found["widths"].values()]
            # A little to each side of the width, so that the bars do not hide one another.
            places = [width * 2 ** (0.06 * side) for width in widths]
            _curve(ax, places, [_spread(one, name) for one in blocks], colour, LABELS[calibration])
        if name == "binned_log_ratio":
            blocks = [one["paper"]["constant"] for one in found["widths"].values()]
            _curve(ax, widths, [_spread(one, name) for one in blocks], GREY, "constant bar")
        if name in ("gain", "slope"):
            ax.axhline(float(name == "slope"), color=GREY, lw=1, ls="--")
        if name in LIMITS:
            _cut(ax, LIMITS[name])
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [str(width) for width in widths])
        ax.set_title(f"{NAMES[name]}, {'median' if name in MEDIANS else 'mean'}")
    for ax in axes[2:]:
        ax.set_xlabel("neurons a layer")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def beyond(figure: Figure) -> dict[str, bool]:
    """Whether the figure has points, as triangles, and ends of bars that lie beyond its axes."""
    found = {"points": False, "bars": False}
    for ax in figure.axes:
        low, high = ax.get_ylim()
        for line in ax.lines:
            found["points"] |= line.get_marker() in ("v", "^")
            if line.get_marker() == "_":  # the caps of error bars
                found["bars"] |= any(not low <= float(y) <= high for y in line.get_ydata())
    return found


def binned(found: Found) -> Figure:
    """The paper's panels: one width each, by the paper's calibration."""
    shown = found["shown"]
    figure, axes = panels(columns=2, rows=(len(shown) + 1) // 2, height=4.0)
    for ax, (width, bins) in zip(axes, shown.items(), strict=False):
        parity.binned(ax, {LABELS["paper"]: bins}, f"{width} neurons a layer")
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    return figure


def _spread(block: Found, name: str) -> tuple[float, float, float]:
    """Value, and both ends of its bar: quartiles of the nets, or one standard error."""
    if name in MEDIANS:
        middle, low, high = block["median"][name]
        return middle, low, high
    mean, error = block["scores"][name]
    return mean, mean - error, mean + error


def _curve(
    ax: Axes,
    places: Sequence[float],
    spreads: list[tuple[float, float, float]],
    colour: str,
    label: str,
) -> None:
    middles = [middle for middle, _, _ in spreads]
    ends = [[m - low for m, low, _ in spreads], [high - m for m, _, high in spreads]]
    ax.errorbar(places, middles, ends, color=colour, marker="o", ms=4, capsize=2, label=label)


def _cut(ax: Axes, limits: tuple[float, float]) -> None:
    """Axes for what lies within the limits; a triangle stands for a point beyond."""
    drawn = [float(y) for line in ax.lines for y in line.get_ydata()]
    within = [y for y in drawn if limits[0] <= y <= limits[1]]
    room = 0.06 * (max(within) - min(within))
    low, high = max(min(within) - room, limits[0]), min(max(within) + room, limits[1])
    for line in [line for line in ax.lines if line.get_marker() == "o"]:
        values = [float(y) for y in line.get_ydata()]
        for x, y in zip(line.get_xdata(), values, strict=True):
            if not low <= y <= high:
                edge, marker = (low, "v") if y < low else (high, "^")
                ax.plot([x], [edge], marker, color=line.get_color(), ms=7, clip_on=False)
        line.set_ydata([y if low <= y <= high else math.nan for y in values])
    ax.set_ylim(low, high)


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
