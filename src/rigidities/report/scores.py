"""The metrics of a report, with what each is for and what to compare it with.

`METRICS` holds the name, the best value and the meaning of each metric. `TargetScores` computes all
metrics of the rows of one target. For comparison it also computes those of one constant bar, and
those that the same bars would have if the true values followed them. Console, files, page and
verdict take their numbers from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .. import metrics
from ..calibration.coverage import LEVEL
from .formatting import around, number
from .rows import TargetRows

_BIN_SIZES = tuple(base * 10**power for power in range(1, 7) for base in (1, 2, 5))
_FEWEST_BINS = 3
_MOST_BINS = 600
_MOST_DRAWN_VALUES = 400_000
"""At most this many true values are redrawn, over all draws, since that takes time."""


@dataclass(frozen=True)
class Metric:
    """The description of a metric.

    Attributes:
        label: Its displayed name. "90 %" in it stands for the level of the intervals.
        ideal: Its best value, in words. "90 %" in it stands for the level of the intervals.
        sentence: An explanation for someone who does not know the metric.
        percent: Whether it is a share.
    """

    label: str
    ideal: str
    sentence: str
    percent: bool = False

    def label_at(self, level: float) -> str:
        """The name, for intervals of a level."""
        return _with_level(self.label, level)

    def ideal_at(self, level: float) -> str:
        """The best value, for intervals of a level."""
        return _with_level(self.ideal, level)

    def text(self, value: float, error: float | None = None) -> str:
        """A value as text, with its standard error where there is one."""
        if not self.percent or not math.isfinite(value):
            return around(value, error)
        if error is None:
            return f"{100 * value:.1f} %"
        if not math.isfinite(error):
            return number(value)
        return f"{100 * value:.1f} ± {100 * error:.1f} %"


def _with_level(text: str, level: float) -> str:
    """The text with another level in place of "90 %"."""
    return text.replace("90 %", f"{100 * level:.4g} %")


METRICS = {
    "rmse": Metric(
        label="RMSE",
        ideal="0",
        sentence="Typical size of the errors; large errors weigh more. It does not use the bars.",
    ),
    "mae": Metric(
        label="MAE",
        ideal="0",
        sentence="Mean size of the errors. It does not use the bars.",
    ),
    "r2": Metric(
        label="R²",
        ideal="1",
        sentence="Share of the variance of the true values that the predictions explain. The "
        "mean of the true values alone would reach 0. R² does not use the bars.",
    ),
    "nll": Metric(
        label="NLL",
        ideal="low",
        sentence="Negative log-likelihood per row: how surprising the true values are under "
        "prediction and bar. It penalises bars that are too narrow, too wide or on the wrong rows.",
    ),
    "nll_gain": Metric(
        label="NLL gain",
        ideal="above 0",
        sentence="How much lower the NLL is than that of one constant bar for all rows. At 0 or "
        "below, bars that differ from row to row are of no use.",
    ),
    "crps": Metric(
        label="CRPS",
        ideal="low",
        sentence="Like the NLL, a score for the whole predicted distribution. It has the units of "
        "the target, and outliers matter less.",
    ),
    "coverage": Metric(
        label="Coverage of 90 % intervals",
        ideal="90 %",
        sentence="Share of true values inside the intervals of the distribution (of a Gaussian, "
        "if only bars are known). Below the level, the bars are too narrow; above it, too wide.",
        percent=True,
    ),
    "interval_width": Metric(
        label="Width of 90 % intervals",
        ideal="small, at 90 % coverage",
        sentence="Mean width of these intervals, in the units of the target.",
    ),
    "interval_score": Metric(
        label="Interval score",
        ideal="low",
        sentence="Width of the intervals, plus a penalty for every true value outside.",
    ),
    "miscalibration_area": Metric(
        label="Miscalibration area",
        ideal="0",
        sentence="Mean distance between nominal and observed coverage over all levels, from 0 to "
        "0.5. Chance alone keeps it above 0.",
    ),
    "ence": Metric(
        label="ENCE",
        ideal="0",
        sentence="For groups of rows with bars of similar size: the mean relative difference "
        "between the errors of a group and its bars.",
    ),
    "sharpness": Metric(
        label="Sharpness",
        ideal="the RMSE",
        sentence="Root mean square of the bars. It does not use the errors.",
    ),
    "spearman": Metric(
        label="Rank correlation",
        ideal="high",
        sentence="Do rows with larger bars have larger errors? 0 means that the bars carry no "
        "information. Even right bars do not reach 1, because errors scatter.",
    ),
    "ause": Metric(
        label="AUSE",
        ideal="0",
        sentence="How much more error is left when the rows with the largest bars are dropped "
        "first than when the rows with the largest errors are, as a share of the RMSE.",
    ),
    "binned_log_ratio": Metric(
        label="Distance from y = x",
        ideal="0",
        sentence="In the plot of bins: powers of ten between the mean squared error and the "
        "variance. A constant bar can score well here, so also look at the slope.",
    ),
    "slope": Metric(
        label="Slope of the bins",
        ideal="1",
        sentence="Do errors grow as fast as the bars? At 0, the bars carry no information. Above "
        "1, they vary too little; between 0 and 1, they vary too much.",
    ),
    "decades": Metric(
        label="Decades of variance",
        ideal="depends on the data",
        sentence="Powers of ten between the smallest and the largest variance of a bin.",
    ),
}
"""The metrics of `metrics.summary` and R², in the order in which they are shown."""


@dataclass(frozen=True)
class TargetScores:
    """The metrics of one target's rows, those of a constant bar there, and those of right bars.

    Attributes:
        rows: The rows.
        draws: How often true values are drawn from the distribution, for right bars. With many rows
            there are fewer draws.
        level: Level of the intervals whose coverage, width and score are computed.
    """

    rows: TargetRows
    draws: int = 20
    level: float = LEVEL

    @property
    def bin_size(self) -> int:
        """Rows per bin for the metrics that need bins; with few rows, more than there are."""
        sizes = bin_sizes(len(self.rows))
        return default_bin_size(sizes) if sizes else len(self.rows) + 1

    @cached_property
    def bars(self) -> dict[str, float]:
        """The metrics of the bars as they are, under their own distribution."""
        rows = self.rows
        values = metrics.summary(
            rows.predictive, rows.target, bin_size=self.bin_size, level=self.level
        )
        # A bound of the support carries a lump of probability. In `standardised`, a target at a
        # bound is replaced by a draw from beyond the bound.
        mean, std, target = rows.standardised
        values["coverage"] = metrics.coverage(mean, std, target, self.level)
        values["miscalibration_area"] = metrics.miscalibration_area(mean, std, target)
        values["r2"] = _explained_share(rows)
        if rows.error.any():
            values["nll_gain"] = float(rows.with_constant_bar.nll.mean()) - values["nll"]
        return values

    @cached_property
    def constant(self) -> dict[str, float]:
        """The metrics of one constant bar; empty if every error is zero."""
        if not self.rows.error.any():
            return {}
        return replace(self, rows=self.rows.with_constant_bar).bars

    @cached_property
    def spearman(self) -> float:
        """Rank correlation of bar and error."""
        return metrics.spearman(self.rows.mean, self.rows.std, self.rows.target)

    @cached_property
    def right(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each metric if true values followed these bars."""
        redrawn_metrics = [scores.bars for scores in self.redrawn]
        summary = {}
        for key in redrawn_metrics[0]:
            values = torch.tensor([metric_values[key] for metric_values in redrawn_metrics])
            values = values.double()
            summary[key] = (float(values.mean()), float(values.std()))
        return summary

    @cached_property
    def redrawn(self) -> list[TargetScores]:
        """The same rows with true values redrawn from the distribution of the predictions.

        The number of rows, on which chance depends, and the spread of the bars are kept.
        """
        draws = max(3, min(self.draws, _MOST_DRAWN_VALUES // len(self.rows)))
        # A separate generator leaves the user's random numbers alone, and repeats the draws.
        generator = torch.Generator().manual_seed(0)
        targets = self.rows.predictive.sample(draws, generator).detach().double()
        return [replace(self, rows=replace(self.rows, target=target)) for target in targets]


def _explained_share(rows: TargetRows) -> float:
    """R² of the predictions; NaN where all true values are equal."""
    variance = float((rows.target - rows.target.mean()).square().mean())
    if variance == 0:
        return math.nan
    return 1 - float(rows.error.square().mean()) / variance


def bin_sizes(count: int) -> dict[int, int]:
    """Bin sizes that suit this number of rows, and the number of bins for each.

    Examples:
        >>> bin_sizes(500), bin_sizes(20)
        ({10: 50, 20: 25, 50: 10, 100: 5}, {})
    """
    bin_counts = {size: count // size for size in _BIN_SIZES}
    return {size: bins for size, bins in bin_counts.items() if _FEWEST_BINS <= bins <= _MOST_BINS}


def default_bin_size(sizes: Mapping[int, int]) -> int:
    """The largest size up to 100 that gives ten bins or more, else the smallest.

    Args:
        sizes: Bin sizes, and the number of bins for each.

    Examples:
        >>> default_bin_size(bin_sizes(300)), default_bin_size(bin_sizes(10_000))
        (20, 100)
    """
    fine_sizes = [size for size, bins in sizes.items() if size <= 100 and bins >= 10]
    return max(fine_sizes, default=min(sizes))
