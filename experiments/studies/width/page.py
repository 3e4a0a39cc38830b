"""The page: tables, figures, and texts that follow the numbers.

Everything here reads the numbers of `run.numbers`, as the JSON file has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Scores of the tables by width."""

NAMES = {
    **dict(zip(COLUMNS, heads(COLUMNS), strict=True)),
    "gain": "NLL gain over a constant bar",
    "spearman": "rank correlation of bar and error",
    "slope_error": "distance of the slope from 1",
    "coverage_error": "distance of the coverage from 0.9",
}
"""What the page calls the scores."""

MEDIANS = ("nll", "gain", "binned_log_ratio", "slope")
"""Scores that a single network can ruin: they have medians and quartiles, the others means and
standard errors."""

LABELS = labels(CALIBRATIONS)
"""What the page calls the calibrations."""

PANELS = ("binned_log_ratio", "gain", "spearman", "slope")
"""Scores that are drawn."""

COLOURS = {"paper": BLUE, "nll": VERMILION, "floor": GREEN}
LIMITS = {"gain": (-0.15, 1.0), "binned_log_ratio": (0.0, 0.25), "slope": (-0.5, 2.0)}
"""Values beyond these are only said to be so: ruined networks may lie anywhere."""


def entries(numbers: Found) -> list[Entry]:
    """The page."""
    quality_figure = quality(numbers)
    return [
        *opening(numbers),
        Picture("quality", quality_figure, quality_caption(beyond_axes(quality_figure))),
        *(width_table(numbers, calibration) for calibration in LABELS),
        narrow_table(numbers),
        trend_table(numbers),
        Picture("binned", binned(numbers), binned_caption(numbers)),
        *closing(numbers),
    ]


# --- tables --------------------------------------------------------------------------------------


def width_table(numbers: Found, calibration: str) -> Table:
    """The scores of one calibration, one row a width."""
    rows: list[list[Cell]] = []
    for width, calibrations in numbers["widths"].items():
        summary = calibrations[calibration]
        cells = [score_cell(summary, name) for name in COLUMNS]
        constant = score_cell(summary["constant"], "binned_log_ratio")
        rows.append([str(width), *cells, constant])
    settings = numbers["settings"]
    caption = (
        f"Calibration: {LABELS[calibration]}. Over {settings['count']} splits: median and "
        "quartiles of NLL (negative log-likelihood), gain, log ratio and slope; mean and standard "
        f"error of the others. *Log ratio*: mean over bins of {settings['bin_size']} rows of "
        "|log10(MSE / variance)|. *Gain*: NLL of the constant bar minus NLL. *Slope*: slope of log "
        "MSE against log variance over bins. *Decades*: decades of variance that the bins span. "
        "*Rank corr.*: rank correlation of bar and absolute error. *Coverage*: share of the "
        "targets that 90 % intervals cover."
    )
    return Table(["width", *heads(COLUMNS), "constant: log ratio"], rows, caption)


def narrow_table(numbers: Found) -> Table:
    """Bars close to zero, all calibrations."""
    columns = ["width"]
    for label in LABELS.values():
        columns += [f"{label}: ruined networks", f"{label}: smallest bar"]
    rows: list[list[Cell]] = []
    for width, calibrations in numbers["widths"].items():
        row: list[Cell] = [str(width)]
        for calibration in LABELS:
            summary = calibrations[calibration]
            row += [summary["ruined"], f"{summary['least_bar']:.2g}"]
        rows.append(row)
    settings = numbers["settings"]
    caption = (
        f"Bars close to zero. *Ruined networks*: how many of {settings['count']} have a gain below "
        f"{settings['ruined_below']:g}. *Smallest bar*: the smallest bar of a test row relative to "
        "the median bar of its network, over all networks."
    )
    return Table(columns, rows, caption)


def trend_table(numbers: Found) -> Table:
    """The trends with the width, one row a score, all calibrations."""
    columns = ["score"]
    for label in LABELS.values():
        columns += [label, "per doubling"]
    rows: list[list[Cell]] = []
    for name, label in NAMES.items():
        row: list[Cell] = [label]
        for calibration in LABELS:
            trend = numbers["trends"][calibration][name]
            row.append(f"{trend['says']}, {measured(trend['rank_correlation'], 2)}")
            row.append(trend["per_doubling"])
        rows.append(row)
    return Table(columns, rows, TREND)


def score_cell(summary: dict[str, Any], name: str) -> str:
    """The cell of a score of one width: median and quartiles, or mean and standard error."""
    if name in MEDIANS:
        return with_quartiles(summary["median"][name], 3)
    return measured(summary["scores"][name])


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A value and both ends of its bar: quartiles of the networks, or one standard error."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class BeyondAxes:
    """What of a figure lies beyond its axes.

    Attributes:
        points: whether there are such points, which are drawn as triangles.
        bars: whether some error bars end there.
    """

    points: bool
    bars: bool


def quality(numbers: Found) -> Figure:
    """Four scores with their spread over the networks, one curve a calibration."""
    figure, axes = panels(columns=2, rows=2, height=2.8)
    widths = [int(width) for width in numbers["widths"]]
    by_width = numbers["widths"].values()
    for ax, name in zip(axes, PANELS, strict=True):
        for side, (calibration, colour) in zip((-1, 0, 1), COLOURS.items(), strict=True):
            # A little to each side of the width, so that the bars do not hide one another.
            places = [width * 2 ** (0.06 * side) for width in widths]
            spreads = [_spread(calibrations[calibration], name) for calibrations in by_width]
            _draw_curve(ax, places, spreads, colour, LABELS[calibration])
        if name == "binned_log_ratio":
            spreads = [
                _spread(calibrations["paper"]["constant"], name) for calibrations in by_width
            ]
            _draw_curve(ax, widths, spreads, GREY, "constant bar")
        if name == "gain":
            ax.axhline(0.0, color=GREY, lw=1, ls="--")
        if name == "slope":
            ax.axhline(1.0, color=GREY, lw=1, ls="--")
        if name in LIMITS:
            _cut(ax, LIMITS[name])
        ax.set_xscale("log", base=2)
        ax.set_xticks(widths, [str(width) for width in widths])
        statistic = "median" if name in MEDIANS else "mean"
        ax.set_title(f"{NAMES[name]}, {statistic}")
    for ax in axes[2:]:
        ax.set_xlabel("neurons per layer")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def beyond_axes(figure: Figure) -> BeyondAxes:
    """Whether points, drawn as triangles, or ends of bars lie beyond the axes of a figure."""
    points = False
    bars = False
    for ax in figure.axes:
        low, high = ax.get_ylim()
        for line in ax.lines:
            if line.get_marker() in ("v", "^"):
                points = True
            if line.get_marker() == "_":  # the caps of error bars
                bars |= any(not low <= float(y) <= high for y in line.get_ydata())
    return BeyondAxes(points, bars)


def binned(numbers: Found) -> Figure:
    """The paper's panels: one width each, by the paper's calibration."""
    bins_by_width = numbers["shown"]
    figure, axes = panels(columns=2, rows=(len(bins_by_width) + 1) // 2, height=4.0)
    for ax, (width, bins) in zip(axes, bins_by_width.items(), strict=False):
        parity.binned(ax, {LABELS["paper"]: bins}, f"{width} neurons per layer")
    for ax in axes[len(bins_by_width) :]:
        ax.set_axis_off()
    return figure


def _spread(summary: Found, name: str) -> Spread:
    """A score of one width with its bar."""
    if name in MEDIANS:
        middle, low, high = summary["median"][name]
        return Spread(middle, low, high)
    mean, error = summary["scores"][name]
    return Spread(mean, mean - error, mean + error)


def _draw_curve(
    ax: Axes, places: Sequence[float], spreads: Sequence[Spread], colour: str, label: str
) -> None:
    """Draw points with their bars, joined by a line."""
    middles = [spread.middle for spread in spreads]
    below = [spread.middle - spread.low for spread in spreads]
    above = [spread.high - spread.middle for spread in spreads]
    lengths = [below, above]
    ax.errorbar(places, middles, lengths, color=colour, marker="o", ms=4, capsize=2, label=label)


def _cut(ax: Axes, limits: tuple[float, float]) -> None:
    """Fit the axis to what lies within the limits; a triangle stands for a point beyond."""
    lowest, highest = limits
    values = [float(y) for line in ax.lines for y in line.get_ydata()]
    within = [y for y in values if lowest <= y <= highest]
    margin = 0.06 * (max(within) - min(within))
    low = max(min(within) - margin, lowest)
    high = min(max(within) + margin, highest)
    curves = [line for line in ax.lines if line.get_marker() == "o"]
    for line in curves:
        visible = []
        for x, y in zip(line.get_xdata(), map(float, line.get_ydata()), strict=True):
            if y < low:
                ax.plot([x], [low], "v", color=line.get_color(), ms=7, clip_on=False)
            elif y > high:
                ax.plot([x], [high], "^", color=line.get_color(), ms=7, clip_on=False)
            visible.append(y if low <= y <= high else math.nan)
        line.set_ydata(visible)
    ax.set_ylim(low, high)


# --- what was done -------------------------------------------------------------------------------


def opening(numbers: Found) -> tuple[str, ...]:
    """What was done."""
    settings = numbers["settings"]
    rows = settings["rows"]
    epochs = settings["epochs"]
    decay = settings["decay"]
    widths = [str(width) for width in numbers["widths"]]
    return (
        f"""\
Do last-layer error bars improve as networks get wider? Their theory is that of wide networks. The
paper's appendix on the width finds that they improve, from binned plots of one network per width.
This study measures it. Both hidden layers have widths of {listed(widths)}. For each width,
{settings["count"]} networks are trained on random splits of California housing, which all widths
share: 20 % for training ({rows["train"]} rows), 20 % for validation ({rows["valid"]}) and 60 % for
the test ({rows["test"]}).""",
        f"""\
The activation is SiLU. The last layer has no bias, so the features are the last hidden layer alone,
and the networks must learn the level of the targets, which are not standardised. (The paper
disables biases; those of the hidden layers are kept here.) Inputs are {WHOLE_SCALE}.
The networks are trained with AdamW for {epochs} epochs in batches of 32, with weight decay
{decay:g} and learning rate 0.001, which falls tenfold after 100 epochs without a better validation
loss. The weights with the best validation loss are kept. Ridge and scale are chosen without noise,
by the paper's bins or by the likelihood of the validation rows. As a control, the evidence (the
marginal likelihood) of the training rows chooses the ridge, and the likelihood chooses the scale
and a constant noise floor. The constant bar is the root mean square of the validation
residuals.""",
        SHARED_ROWS,
    )


def quality_caption(beyond: BeyondAxes) -> str:
    """The caption of the first figure, as it is drawn."""
    edges = ""
    if beyond.points:
        edges += (
            "A triangle at the edge stands for a median beyond it: there, bars close to zero ruin "
            "most networks. "
        )
    if beyond.bars:
        edges += (
            "A quartile bar that ends at the edge without a cap continues beyond it: bars close to "
            "zero ruin some of those networks. "
        )
    return (
        "Scores on the test rows against the width of both hidden layers: median and quartiles "
        "over the splits (mean and standard error for the rank correlation). "
        f"{edges}"
        "The log ratio is the distance from y = x in the binned plots, where a constant bar can "
        "do as well. Gain, rank correlation and slope (dashed: 0 gain, slope 1) show the "
        "difference between good bars and a constant bar."
    )


def binned_caption(numbers: Found) -> str:
    """The caption of the panels of bins."""
    widths = [str(width) for width in numbers["shown"]]
    return (
        f"Test rows of the first split in bins of {numbers['settings']['bin_size']} by predicted "
        f"variance, for {listed(widths)} neurons per layer. The grey band extends two standard "
        "errors to each side, for Gaussian errors."
    )


TREND = (
    "Trends with the width. No single network can decide them. Each trend has Spearman's rank "
    "correlation of the score with the width, computed for each split by itself: mean and standard "
    "error over the splits. A trend counts as clear beyond two standard errors. *Per doubling* of "
    "the width: the median of the slopes between the medians of any two widths."
)


# --- what came out -------------------------------------------------------------------------------


def closing(numbers: Found) -> tuple[str, ...]:
    """What came out, in words that the numbers choose."""
    of_calibrations = [_calibration_text(numbers, calibration) for calibration in LABELS]
    return (_narrow(numbers), *of_calibrations, _constant_bar(numbers))


def _narrow(numbers: Found) -> str:
    """Why the page shows medians."""
    settings = numbers["settings"]
    limit = settings["ruined_below"]
    counts = []
    least_bars = []
    for calibration, label in LABELS.items():
        narrow = numbers["narrow"][calibration]
        counts.append(f"{narrow['ruined']} (*{label}*)")
        least_bars.append(f"{narrow['least_bar']:.2g} (*{label}*)")
    ruined_widths = [
        str(width)
        for width, calibrations in numbers["widths"].items()
        if any(calibrations[calibration]["ruined"] for calibration in LABELS)
    ]
    where = ""
    if ruined_widths:
        where = f" (at width {listed(ruined_widths)})"
    return f"""\
**Why medians.** Without a bias in the last layer, the features of a test row can come close to
zero, most easily in a narrow network. Then q and the bar are also close to zero, and the likelihood
of that one row dominates the mean over all rows. Of {settings["nets"]} networks, {listed(counts)}
have a gain below {limit:g}{where}. The smallest bar of a row, relative to the median bar of its
network, is {listed(least_bars)}. A noise floor, which the paper's form lacks, keeps bars away from
zero."""


def _calibration_text(numbers: Found, calibration: str) -> str:
    """The RMSE of the narrowest and widest networks, and the trends of a calibration's scores."""
    widths = list(numbers["widths"])
    first, last = (
        measured(numbers["widths"][width][calibration]["scores"]["rmse"])
        for width in (widths[0], widths[-1])
    )
    return (
        f"**{LABELS[calibration].capitalize()}.** From {widths[0]} to {widths[-1]} neurons, the "
        f"RMSE changes from {first} to {last}. {_trend_sentences(numbers, calibration)}"
    )


def _trend_sentences(numbers: Found, calibration: str) -> str:
    """One clause for each score that says how good bars are, and all of them counted."""
    trends = numbers["trends"][calibration]
    clauses = []
    verdicts = []
    for name in ("binned_log_ratio", "gain", "spearman", "slope_error", "coverage_error"):
        trend = trends[name]
        verdicts.append(trend["says"])
        clauses.append(
            f"{NAMES[name]}: {trend['says']} "
            f"(rank correlation with the width {measured(trend['rank_correlation'], 2)})"
        )
    sentence = "; ".join(clauses)
    counted = _counted(verdicts.count("improves"), verdicts.count("gets worse"))
    return f"{sentence[0].upper()}{sentence[1:]}. {counted}"


def _counted(better: int, worse: int) -> str:
    """How many of the five scores improve and get worse."""
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


def _constant_bar(numbers: Found) -> str:
    """How close to the line a constant bar comes."""
    widths = list(numbers["widths"])
    log_ratios = []
    for width in (widths[0], widths[-1]):
        constant = numbers["widths"][width]["paper"]["constant"]
        log_ratios.append(with_quartiles(constant["median"]["binned_log_ratio"], 3))
    return (
        "The paper looks at how close the bins are to the line. That is not the same as useful "
        "bars. The grey curve is a constant bar, which carries no information about single rows. "
        f"Its median log ratio is {listed(log_ratios)} for {widths[0]} and {widths[-1]} neurons."
    )
