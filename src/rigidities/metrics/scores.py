"""Scores of error bars: likelihood, coverage, calibration and sharpness.

The formulas in the docstrings are for Gaussian bars, given by mean and std. For a `Prediction`, the
functions compute the same quantity of its distribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .alignment import Values, aligned, error_and_positive_std, judged, of_prediction, predicted
from .bins import binned_log_ratio, decades, ence, slope
from .ranking import ause, spearman


def rmse(mean: Values, target: Values) -> float:
    """Root mean squared error, sqrt(mean e^2).

    Examples:
        >>> rmse([0.0, 0.0], [3.0, -3.0])
        3.0
    """
    mean, target = aligned(mean=mean, target=target)
    return float((target - mean).square().mean().sqrt())


def mae(mean: Values, target: Values) -> float:
    """Mean absolute error, mean |e|.

    Examples:
        >>> mae([0.0, 0.0], [1.0, -3.0])
        2.0
    """
    mean, target = aligned(mean=mean, target=target)
    return float((target - mean).abs().mean())


@of_prediction
def nll(mean: Values, std: Values, target: Values) -> float:
    """Mean negative log-likelihood of a Gaussian, mean [log(2 pi sigma^2) + z^2] / 2.

    Examples:
        >>> round(nll([0.0], [1.0], [0.0]), 4)
        0.9189
    """
    p, y = judged(mean, std, target, positive=True)
    return -float(p.log_prob(y).double().mean())


@of_prediction
def nll_gain(mean: Values, std: Values, target: Values) -> float:
    """How much the NLL falls below that of the best constant bar, sigma^2 = MSE of these rows.

    It is [log(2 pi MSE) + 1] / 2 - NLL, in nats per row, and positive if varying bars are better.
    The constant bar is fitted to the same rows that it is judged on. The result is minus infinity
    if every error is zero.

    Examples:
        >>> round(nll_gain([0.0, 0.0], [1.0, 10.0], [1.0, 10.0]), 4)
        0.8097
    """
    error, _ = error_and_positive_std(mean, std, target)
    constant = float((2 * math.pi * error.square().mean()).log() + 1) / 2
    return constant - nll(mean, std, target)


@of_prediction
def crps(mean: Values, std: Values, target: Values) -> float:
    """Mean continuous ranked probability score of a Gaussian, in the units of the target.

    mean sigma [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)], where Phi is the normal distribution
    function and phi its density.

    Examples:
        >>> round(crps([0.0], [1.0], [0.0]), 4)
        0.2337
    """
    p, y = judged(mean, std, target, positive=True)
    return float(p.crps(y).double().mean())


@of_prediction
def coverage(mean: Values, std: Values, target: Values, level: float = 0.9) -> float:
    """Fraction of targets that the central Gaussian interval of this level, mu +- k sigma, covers.

    Examples:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [1.6, 1.7], level=0.9)
        0.5
    """
    p, y = judged(mean, std, target)
    low, high = p.interval(level, conformal=False)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(std: Values, level: float = 0.9) -> float:
    """Mean width 2 k sigma of the central Gaussian interval of this level.

    Examples:
        >>> round(interval_width([1.0], level=0.9), 4)
        3.2897
    """
    low, high = predicted(std, std).interval(level)
    return float((high - low).double().mean())


@of_prediction
def interval_score(mean: Values, std: Values, target: Values, level: float = 0.9) -> float:
    """Mean interval (Winkler) score: the width, plus a penalty for each target that is not covered.

    It is the mean of 2 k sigma + 2 / (1 - level) max(|e| - k sigma, 0), and lowest for the true
    quantiles.

    Examples:
        >>> round(interval_score([0.0], [1.0], [2.6449], level=0.9), 2)
        23.29
    """
    p, y = judged(mean, std, target)
    low, high = p.interval(level, conformal=False)
    outside = (low - y).clamp(min=0) + (y - high).clamp(min=0)
    return float((high - low + 2 / (1 - level) * outside).double().mean())


@of_prediction
def calibration_curve(mean: Values, std: Values, target: Values) -> tuple[Tensor, Tensor]:
    """Observed against nominal coverage of central Gaussian intervals, an exact step function.

    Row i is covered from the level p_i = erf(|z_i| / sqrt 2) on: observed(p) = #{p_i <= p} / N.

    Returns:
        (nominal, observed), N + 2 knots each, from (0, 0) to (1, 1). The curve has the value
        `observed[j]` from `nominal[j]` up to `nominal[j + 1]`.

    Examples:
        >>> nominal, observed = calibration_curve([0.0, 0.0], [1.0, 1.0], [0.6745, 2.0])
        >>> [round(p, 2) for p in nominal.tolist()], observed.tolist()
        ([0.0, 0.5, 0.95, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    p, y = judged(mean, std, target, positive=True)
    levels = 1 - p.tail(y).cpu().double().flatten().sort(descending=True).values
    level_zero = levels.new_zeros(1)
    level_one = levels.new_ones(1)
    steps = torch.arange(len(levels) + 1, dtype=torch.float64) / len(levels)
    nominal = torch.cat([level_zero, levels, level_one])
    observed = torch.cat([steps, level_one])
    return nominal, observed


@of_prediction
def miscalibration_area(mean: Values, std: Values, target: Values) -> float:
    """Area between the calibration curve and the diagonal, int_0^1 |observed(p) - p| dp.

    The curve is that of central intervals, not of the probability integral transform: the sign of
    an error does not count. The integral is exact, without a grid. It lies between 0 and 1/2. For N
    rows with right bars it is about 0.31 / sqrt(N), not zero.

    Examples:
        >>> miscalibration_area([0.0], [1.0], [0.0])
        0.5
    """
    nominal, observed = calibration_curve(mean, std, target)
    # The curve is constant between knots, and t |t| / 2 is the antiderivative of |t|.
    start = nominal[:-1] - observed[:-1]
    end = nominal[1:] - observed[:-1]
    return float((end * end.abs() - start * start.abs()).sum() / 2)


def sharpness(std: Values) -> float:
    """Root mean variance, sqrt(mean sigma^2): the size of the bars, independent of the errors.

    Examples:
        >>> sharpness([1.0, 7.0])
        5.0
    """
    (std,) = aligned(std=std)
    return float(std.square().mean().sqrt())


@of_prediction
def summary(
    mean: Values, std: Values, target: Values, bin_size: int = 100, level: float = 0.9
) -> dict[str, float]:
    """The main metrics by name.

    With fewer than ten rows, `ence` is nan. With fewer than `bin_size` rows, `binned_log_ratio`,
    `slope` and `decades` are nan.

    Args:
        mean: Predictions, or a `Prediction`.
        std: Their error bars; leave them out if `mean` is a `Prediction`.
        target: True values.
        bin_size: Rows in each bin of the binned metrics.
        level: Level of the intervals for coverage, width and interval score.

    Examples:
        >>> summary([0.0], [1.0], [2.0])["rmse"]
        2.0
    """
    rows = len(aligned(mean=mean, std=std, target=target)[0])
    scores = {
        "rmse": rmse(mean, target),
        "mae": mae(mean, target),
        "nll": nll(mean, std, target),
        "nll_gain": nll_gain(mean, std, target),
        "crps": crps(mean, std, target),
        "miscalibration_area": miscalibration_area(mean, std, target),
        "spearman": spearman(mean, std, target),
        "ause": ause(mean, std, target),
        "coverage": coverage(mean, std, target, level),
        "interval_score": interval_score(mean, std, target, level),
        "interval_width": interval_width(std, level),
        "sharpness": sharpness(std),
        "ence": math.nan,
        "binned_log_ratio": math.nan,
        "slope": math.nan,
        "decades": math.nan,
    }
    if rows >= 10:
        scores["ence"] = ence(mean, std, target)
    if rows >= bin_size:
        scores["binned_log_ratio"] = binned_log_ratio(mean, std, target, bin_size)
        scores["slope"] = slope(mean, std, target, bin_size)
        scores["decades"] = decades(std, bin_size)
    return scores
