"""The metrics of a report, with what each is for and what to compare it with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .. import metrics
from ..calibration.coverage import LEVEL
from .markup import Markup, around, joined, number, table, tag, words
from .rows import Rows

Scores = Mapping[str, tuple[float, float | None]]
"""Values by metric, with standard errors where there are any."""

_SIZES = tuple(base * 10**power for power in range(1, 7) for base in (1, 2, 5))
_FEWEST_BINS, _MOST_BINS = 3, 600


@dataclass(frozen=True)
class Metric:
    """A metric's name, its best value in words, what it tells, and whether it is a share."""

    label: str
    ideal: str
    sentence: str
    percent: bool = False

    def at(self, level: float, text: str = "") -> str:
        """The label, or another text, for intervals of that level."""
        return (text or self.label).replace("90 %", f"{100 * level:.4g} %")

    def text(self, value: float) -> str:
        """A value for reading."""
        if self.percent and math.isfinite(value):
            return f"{100 * value:.1f} %"
        return number(value)


_SENTENCES = {
    "rmse": "Typical size of the errors, large ones weighing more. The bars play no part.",
    "mae": "Mean size of the errors. The bars play no part.",
    "nll": "Negative log-likelihood per row: how surprising the true values are under prediction "
    "and bar. It punishes bars that are too narrow, too wide or on the wrong rows.",
    "nll_gain": "How much the NLL is below that of one constant bar for all rows. At 0 or below, "
    "bars that differ from row to row bring nothing.",
    "crps": "Like the NLL a score for the whole prediction, in the units of the target and milder "
    "with outliers.",
    "coverage": "Share of true values inside the intervals of the distribution; of bars alone, inside those "
    "of a Gaussian. Below their level the bars are too narrow, above it too wide.",
    "interval_width": "Mean width of those intervals, in the units of the target.",
    "interval_score": "Width of the intervals plus a fine for every true value outside.",
    "miscalibration_area": "Distance between nominal and observed coverage over all levels, from 0 "
    "to 0.5. Chance alone keeps it above 0.",
    "ence": "Groups of rows with bars of similar size: by what share the errors of a group differ "
    "from what its bars promise, on average.",
    "sharpness": "Root mean square of the bars, whatever the errors.",
    "spearman": "Do rows with larger bars have larger errors? 0 means that the bars tell nothing. "
    "Right bars do not reach 1, since errors scatter.",
    "ause": "Drop the rows with the largest bars first: how much more error is left than if those "
    "with the largest errors went first, as a share of the RMSE.",
    "binned_log_ratio": "In the plot of bins: decades between the mean squared error and the "
    "variance. A constant bar can score well here, so read it beside the slope.",
    "slope": "Do errors grow as fast as the bars say? At 0 the bars tell nothing, above 1 they "
    "vary too little, between 0 and 1 too much.",
    "decades": "Powers of ten between the smallest and the largest variance of a bin.",
    "gain": "How much the NLL is below that of the constant bar beside it. At 0 or below, bars "
    "that differ from row to row bring nothing.",
    "offset": "In the plot of bins: decades by which the mean squared error lies above the "
    "variance, on average. Above 0 the bars are too narrow, below it too wide.",
    "floor": "What these bars would have as distance from y = x if nothing were wrong with them: "
    "chance in bins of this size, with errors / bars shuffled among the rows.",
    "wide_log_ratio": "The distance from y = x in bins of ten times as many rows, where single "
    "large errors count less.",
    "kurtosis": "Fourth moment of errors over bars: 3 if they were Gaussian; single errors of many "
    "bars raise it.",
    "rmse_per_atom": "Typical size of the errors over the number of atoms, in meV.",
    "bar": "Root mean square of the bars, whatever the errors.",
}
"""What a metric tells someone who has not met it."""

METRICS = {
    key: Metric(label, ideal, _SENTENCES[key], percent=key == "coverage")
    for key, label, ideal in (
        ("rmse", "RMSE", "0"),
        ("mae", "MAE", "0"),
        ("nll", "NLL", "low"),
        ("nll_gain", "NLL gain", "above 0"),
        ("crps", "CRPS", "low"),
        ("coverage", "Coverage of 90 % intervals", "90 %"),
        ("interval_width", "Width of 90 % intervals", "small, at 90 % coverage"),
        ("interval_score", "Interval score", "low"),
        ("miscalibration_area", "Miscalibration area", "0"),
        ("ence", "ENCE", "0"),
        ("sharpness", "Sharpness", "the RMSE"),
        ("spearman", "Rank correlation", "high"),
        ("ause", "AUSE", "0"),
        ("binned_log_ratio", "Distance from y = x", "0"),
        ("slope", "Slope of the bins", "1"),
        ("decades", "Decades of variance", "as the data have it"),
        ("gain", "Gain over the constant bar", "above 0"),
        ("offset", "Offset of the bins", "0"),
        ("floor", "Floor of the distance", "a yardstick"),
        ("wide_log_ratio", "Distance in wide bins", "0"),
        ("kurtosis", "Kurtosis", "3"),
        ("rmse_per_atom", "RMSE per atom", "0"),
        ("bar", "Bar", "the RMSE"),
    )
} | {
    f"coverage_{level}": Metric(
        f"Coverage of {level} % intervals",
        f"{level} %",
        "Share of true values inside. Below that the bars are too narrow, above it too wide.",
        percent=True,
    )
    for level in (68, 90, 95)
}
"""Those of `metrics.summary`, and what experiments write beside them."""


@dataclass(frozen=True)
class Judged:
    """The metrics of some rows, of a constant bar there, and of right bars in so many draws.

    Everything that tells a figure takes it from here: console, files, page and verdict.

    Attributes:
        rows: of one target.
        draws: of true values from the distribution, for right bars.
        level: of the intervals whose coverage, width and score are told.
    """

    rows: Rows
    draws: int = 20
    level: float = LEVEL

    @property
    def bin_size(self) -> int:
        """Rows per bin of the metrics that need bins."""
        sizes = bin_sizes(len(self.rows))
        return default_bin_size(sizes) if sizes else len(self.rows) + 1

    @cached_property
    def bars(self) -> dict[str, float]:
        """Of the bars as they are, under their own distribution."""
        rows = self.rows
        found = metrics.summary(rows.own, rows.target, bin_size=self.bin_size, level=self.level)
        # of targets at a bound, where probability is in a lump, as the distribution has them beyond
        # it
        found["coverage"] = metrics.coverage(*rows.standard, self.level)
        found["miscalibration_area"] = metrics.miscalibration_area(*rows.standard)
        if rows.error.any():
            found["nll_gain"] = float(rows.plain.nll.mean()) - found["nll"]
        return found

    @cached_property
    def constant(self) -> dict[str, float]:
        """Of one constant bar, `Rows.plain`, by the same function; empty if every error is zero."""
        if not self.rows.error.any():
            return {}
        return replace(self, rows=self.rows.plain).bars

    @cached_property
    def spearman(self) -> float:
        """Rank correlation of bar and error."""
        return metrics.spearman(self.rows.mean, self.rows.std, self.rows.target)

    @cached_property
    def right(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each metric if true values followed these bars."""
        found = [each.bars for each in self.redrawn]
        values = {key: torch.tensor([one[key] for one in found]).double() for key in found[0]}
        return {key: (float(value.mean()), float(value.std())) for key, value in values.items()}

    @cached_property
    def redrawn(self) -> list[Judged]:
        """With true values drawn anew from the distribution of the predictions.

        So the chance in so many rows and the spread of the bars are those of the data.
        """
        draws = max(3, min(self.draws, 400_000 // len(self.rows)))
        drawn = self.rows.own.sample(draws, torch.Generator().manual_seed(0)).detach().double()
        return [replace(self, rows=replace(self.rows, target=target)) for target in drawn]


def bin_sizes(count: int) -> dict[int, int]:
    """Sizes of bins that make sense for so many rows, and how many there are; none for too few.

    Examples:
        >>> bin_sizes(500), bin_sizes(20)
        ({10: 50, 20: 25, 50: 10, 100: 5}, {})
    """
    return {n: count // n for n in _SIZES if _FEWEST_BINS <= count // n <= _MOST_BINS}


def default_bin_size(sizes: Mapping[int, int]) -> int:
    """The largest up to 100 that leaves ten bins or more, else the smallest.

    Examples:
        >>> default_bin_size(bin_sizes(300)), default_bin_size(bin_sizes(10_000))
        (20, 100)
    """
    fine = (size for size, bins in sizes.items() if size <= 100 and bins >= 10)
    return max(fine, default=min(sizes))


def score_table(judged: Judged) -> Markup:
    """Every metric, beside its value for a constant bar and for right bars."""
    header = ["Metric", "These bars", "Constant bar", "Right bars", "Ideal"]
    body = []
    for key, metric in METRICS.items():
        if key not in judged.bars:
            continue
        constant = metric.text(judged.constant[key]) if key in judged.constant else "-"
        name = joined([metric.at(judged.level), tag("span", metric.sentence, class_="note")])
        own, right = tag("strong", metric.text(judged.bars[key])), judged.right[key]
        ideal = metric.at(judged.level, metric.ideal)
        body.append([name, own, constant, _around(metric, *right), ideal])
    return table(header, body, label="Metrics", classes="scores")


def plain_score_table(columns: Mapping[str, Scores]) -> Markup:
    """Metrics of cases computed elsewhere, with their standard errors where there are any."""
    keys = list(dict.fromkeys(key for scores in columns.values() for key in scores))
    body = []
    for key in keys:
        metric = METRICS.get(key, Metric(words(key), "", ""))
        cells = (_score_cell(metric, scores.get(key)) for scores in columns.values())
        body.append([metric.label, *cells, metric.ideal])
    header = ["Metric", *map(words, columns), "Ideal"]
    return table(header, body, label="Metrics", classes="several")


def glossary(keys: Iterable[str]) -> Markup:
    """What metrics tell, each once, in an entry that opens; unknown ones are left out."""
    present = set(keys)
    known = [metric for key, metric in METRICS.items() if key in present]
    if not known:
        return Markup()
    entries = (joined([tag("dt", m.label), tag("dd", m.sentence)]) for m in known)
    return tag("details", tag("summary", "What the metrics tell"), tag("dl", joined(entries)))


def _score_cell(metric: Metric, pair: tuple[float, float | None] | None) -> Markup:
    if pair is None:
        return Markup()
    value, error = pair
    text = metric.text(value) if error is None else _around(metric, value, error)
    return tag("strong", text)


def _around(metric: Metric, value: float, error: float) -> str:
    if metric.percent and math.isfinite(value) and math.isfinite(error):
        return f"{100 * value:.1f} ± {100 * error:.1f} %"
    return around(value, error)
