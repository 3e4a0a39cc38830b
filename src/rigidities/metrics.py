"""How good error bars are, in numbers.

Throughout, mu is the predicted `mean`, sigma the predicted `std`, y the `target`, e = y - mu and
z = e / sigma. Each argument is a tensor, an array or a list. All have one shape, up to dimensions
of size one; they are flattened and the sums are done in float64 on the CPU. Empty, non-finite or
differently shaped input raises ValueError, as does a `std` below zero, or equal to zero where a
division or a logarithm needs it.

References:
    Scores: Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation",
        JASA 2007.
    ENCE: Levi et al., "Evaluating and calibrating uncertainty prediction in regression tasks",
        Sensors 2022.
    AUSE: Ilg et al., "Uncertainty estimates and multi-hypotheses networks for optical flow",
        ECCV 2018.
    Bins: Bigi et al., "A prediction rigidity formalism for low-cost uncertainties in trained
        neural networks", 2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .alignment import Values, aligned, error_and_positive_std
from .ranks import ranks, retained_rmse

# Bars that span less than this are constant up to rounding: a slope on them would be noise.
_CONSTANT_DECADES = 1e-9


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


def nll(mean: Values, std: Values, target: Values) -> float:
    """Mean negative log-likelihood of a Gaussian, mean [log(2 pi sigma^2) + z^2] / 2.

    Examples:
        >>> round(nll([0.0], [1.0], [0.0]), 4)
        0.9189
    """
    error, std = error_and_positive_std(mean, std, target)
    return float((std.log() + (error / std).square() / 2).mean()) + math.log(2 * math.pi) / 2


def nll_gain(mean: Values, std: Values, target: Values) -> float:
    """How much the NLL falls below that of the best constant bar, sigma^2 = MSE of these rows.

    [log(2 pi MSE) + 1] / 2 - NLL: above zero where bars that vary are worth having. The constant
    is fitted to the very rows it is judged on. Minus infinity where every error is zero.

    Examples:
        >>> round(nll_gain([0.0, 0.0], [1.0, 10.0], [1.0, 10.0]), 4)
        0.8097
    """
    error, std = error_and_positive_std(mean, std, target)
    constant = float((2 * math.pi * error.square().mean()).log() + 1) / 2
    return constant - nll(mean, std, target)


def crps(mean: Values, std: Values, target: Values) -> float:
    """Mean continuous ranked probability score of a Gaussian, in the units of the target.

    mean sigma [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)], where Phi is the normal distribution
    function and phi its density.

    Examples:
        >>> round(crps([0.0], [1.0], [0.0]), 4)
        0.2337
    """
    error, std = error_and_positive_std(mean, std, target)
    z = error / std
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return float((std * (z * _central(z) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def coverage(mean: Values, std: Values, target: Values, level: float = 0.9) -> float:
    """Fraction of targets within mu +- k sigma, the central Gaussian interval of that level.

    Examples:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [1.6, 1.7], level=0.9)
        0.5
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    return float(((target - mean).abs() <= _half_width(level) * std).double().mean())


def interval_width(std: Values, level: float = 0.9) -> float:
    """Mean width 2 k sigma of the central Gaussian interval of that level.

    Examples:
        >>> round(interval_width([1.0], level=0.9), 4)
        3.2897
    """
    (std,) = aligned(std=std)
    return float(2 * _half_width(level) * std.mean())


def interval_score(mean: Values, std: Values, target: Values, level: float = 0.9) -> float:
    """Mean interval (Winkler) score: the width, and a fine for each target outside.

    mean 2 k sigma + 2 / (1 - level) max(|e| - k sigma, 0). Lowest for the true quantiles.

    Examples:
        >>> round(interval_score([0.0], [1.0], [2.6449], level=0.9), 2)
        23.29
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    half = _half_width(level) * std
    outside = ((target - mean).abs() - half).clamp(min=0)
    return float((2 * half + 2 / (1 - level) * outside).mean())


def calibration_curve(mean: Values, std: Values, target: Values) -> tuple[Tensor, Tensor]:
    """Observed against nominal coverage of central Gaussian intervals, an exact step function.

    Row i is covered from the level p_i = erf(|z_i| / sqrt 2) on: observed(p) = #{p_i <= p} / N.

    Returns:
        (nominal, observed), N + 2 knots each, that begin at (0, 0) and end at (1, 1):
        `observed[j]` holds from `nominal[j]` up to `nominal[j + 1]`.

    Examples:
        >>> nominal, observed = calibration_curve([0.0, 0.0], [1.0, 1.0], [0.6745, 2.0])
        >>> [round(p, 2) for p in nominal.tolist()], observed.tolist()
        ([0.0, 0.5, 0.95, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    error, std = error_and_positive_std(mean, std, target)
    levels = _central(error.abs() / std).sort().values
    zero, one = levels.new_zeros(1), levels.new_ones(1)
    steps = torch.arange(len(levels) + 1, dtype=torch.float64) / len(levels)
    return torch.cat([zero, levels, one]), torch.cat([steps, one])


def miscalibration_area(mean: Values, std: Values, target: Values) -> float:
    """Area between the calibration curve and the diagonal, int_0^1 |observed(p) - p| dp.

    The curve is that of central intervals, not of the PIT: the sign of an error does not count.
    The integral is exact, without a grid. It lies between 0 and 1/2, and N rows with the right
    bars give about 0.31 / sqrt(N), not zero.

    Examples:
        >>> miscalibration_area([0.0], [1.0], [0.0])
        0.5
    """
    nominal, observed = calibration_curve(mean, std, target)
    start, end = nominal[:-1] - observed[:-1], nominal[1:] - observed[:-1]
    # t |t| / 2 is the antiderivative of |t|
    return float((end * end.abs() - start * start.abs()).sum() / 2)


def ence(mean: Values, std: Values, target: Values, bins: int = 10) -> float:
    """Expected normalised calibration error, mean over bins of |RMV - RMSE| / RMV.

    Rows are sorted by sigma and cut into bins whose sizes differ by one row at most; RMV is the
    root mean variance of a bin.

    Examples:
        >>> ence([0.0, 0.0], [1.0, 2.0], [1.0, 3.0], bins=2)
        0.25
    """
    error, std = error_and_positive_std(mean, std, target)
    _require_between_one_and("bins", bins, rows=len(std))
    order = std.argsort(stable=True).tensor_split(bins)
    variance = torch.stack([std[rows].square().mean() for rows in order])
    mse = torch.stack([error[rows].square().mean() for rows in order])
    return float((1 - (mse / variance).sqrt()).abs().mean())


def sharpness(std: Values) -> float:
    """Root mean variance, sqrt(mean sigma^2): the size of the bars, whatever the errors.

    Examples:
        >>> sharpness([1.0, 7.0])
        5.0
    """
    (std,) = aligned(std=std)
    return float(std.square().mean().sqrt())


def spearman(mean: Values, std: Values, target: Values) -> float:
    """Rank correlation of |e| and sigma, ties at their average rank.

    Right bars do not reach 1, because |e| scatters about sigma. nan where |e| or sigma is constant.

    Examples:
        >>> spearman([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.1, -0.2, 0.3])
        1.0
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    centre = (len(std) + 1) / 2
    a, b = ranks((target - mean).abs()) - centre, ranks(std) - centre
    return float(a @ b / (a.square().sum() * b.square().sum()).sqrt())


def ause(mean: Values, std: Values, target: Values) -> float:
    """Area under the sparsification error, as a fraction of the RMSE.

    Let S_k be the RMSE without the k rows of largest sigma, and O_k without those of largest |e|
    (the oracle): mean over k = 0 ... N - 1 of (S_k - O_k) / S_0. Zero where sigma ranks the errors.
    Rows tied in sigma each count with the mean of their e^2, so that their order does not matter.
    Zero where every error is zero.

    Examples:
        >>> ause([0.0, 0.0], [1.0, 2.0], [3.0, 4.0])
        0.0
        >>> round(ause([0.0, 0.0], [2.0, 1.0], [3.0, 4.0]), 4)  # (4 - 3) / 2 / sqrt(12.5)
        0.1414
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    squared = (target - mean).square()
    if not squared.any():
        return 0.0
    gap = retained_rmse(squared, by=std) - retained_rmse(squared, by=squared)
    return float(gap.mean() / squared.mean().sqrt())


def auroc(std_in: Values, std_out: Values) -> float:
    """Probability that a row outside the domain has the larger bar, P(out > in) + P(out = in) / 2.

    Args:
        std_in: bars inside the domain, of any shape.
        std_out: bars outside it, of any shape.

    Examples:
        >>> auroc([1.0, 2.0], [2.0, 3.0])
        0.875
    """
    (inside,), (outside,) = aligned(std=std_in), aligned(std=std_out)
    n, m = len(inside), len(outside)
    rank = ranks(torch.cat([inside, outside]))
    return float((rank[n:].sum() - m * (m + 1) / 2) / (n * m))


def binned(mean: Values, std: Values, target: Values, bin_size: int = 100) -> tuple[Tensor, Tensor]:
    """Mean predicted variance and MSE of bins of rows sorted by predicted variance.

    All complete bins are kept. The N mod `bin_size` rows of largest variance fill none and are
    left out.

    Returns:
        (variance, mse), one entry per bin, in ascending order of variance.

    Examples:
        >>> variance, mse = binned([0, 0, 0], [3, 1, 2], [5, 1, 4], bin_size=1)
        >>> variance.tolist(), mse.tolist()
        ([1.0, 4.0, 9.0], [1.0, 16.0, 25.0])
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    _require_between_one_and("bin_size", bin_size, rows=len(std))
    rows = std.argsort(stable=True)[: len(std) // bin_size * bin_size].reshape(-1, bin_size)
    return std.square()[rows].mean(1), (target - mean).square()[rows].mean(1)


def binned_log_ratio(mean: Values, std: Values, target: Values, bin_size: int = 100) -> float:
    """Mean over bins of |log10(MSE / variance)|: decades from y = x in the binned plot.

    A constant bar can score as well as a good one, since it spans no decades: read this beside
    `nll_gain`, `slope`, `decades` and `spearman`. Infinite where the errors of a bin are all zero.

    Examples:
        >>> binned_log_ratio([0.0, 0.0], [1.0, 1.0], [10.0, 0.1], bin_size=1)
        2.0
    """
    variance, mse = _positive_bins(mean, std, target, bin_size)
    return float((mse / variance).log10().abs().mean())


def slope(mean: Values, std: Values, target: Values, bin_size: int = 100) -> float:
    """Least-squares slope of log MSE on log variance over bins.

    1 for the right bars, 0 for bars that tell nothing. nan where it is undefined: a single bin,
    constant bars, or a bin whose errors are all zero.

    Examples:
        >>> round(slope([0.0, 0.0], [1.0, 100.0], [3.0, 30.0], bin_size=1), 4)
        0.5
    """
    variance, mse = _positive_bins(mean, std, target, bin_size)
    x, y = variance.log10(), mse.log10()
    if x.max() - x.min() < _CONSTANT_DECADES:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / x.square().sum())


def decades(std: Values, bin_size: int = 100) -> float:
    """Decades that the binned variances span, log10(largest / smallest).

    Examples:
        >>> decades([1.0, 100.0], bin_size=1)
        4.0
    """
    variance, _ = _positive_bins(std, std, std, bin_size)
    return float((variance[-1] / variance[0]).log10())


def summary(mean: Values, std: Values, target: Values, bin_size: int = 100) -> dict[str, float]:
    """The main metrics by name, intervals at level 0.9.

    With fewer rows than they need, `ence` (ten) and `binned_log_ratio`, `slope` and `decades`
    (`bin_size`) are nan.

    Examples:
        >>> summary([0.0], [1.0], [2.0])["rmse"]
        2.0
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    scores = (nll, nll_gain, crps, coverage, interval_score, miscalibration_area, spearman, ause)
    enough = len(std) >= bin_size
    return {
        "rmse": rmse(mean, target),
        "mae": mae(mean, target),
        **{score.__name__: score(mean, std, target) for score in scores},
        "interval_width": interval_width(std),
        "sharpness": sharpness(std),
        "ence": ence(mean, std, target) if len(std) >= 10 else math.nan,
        "binned_log_ratio": binned_log_ratio(mean, std, target, bin_size) if enough else math.nan,
        "slope": slope(mean, std, target, bin_size) if enough else math.nan,
        "decades": decades(std, bin_size) if enough else math.nan,
    }


def _positive_bins(
    mean: Values, std: Values, target: Values, bin_size: int
) -> tuple[Tensor, Tensor]:
    error_and_positive_std(mean, std, target)
    return binned(mean, std, target, bin_size)


def _require_between_one_and(name: str, value: int, *, rows: int) -> None:
    if not 1 <= value <= rows:
        raise ValueError(
            f"Expected {name} from 1 to the number of rows, {rows}, got {value}. "
            f"Pass another {name}, or more rows."
        )


def _central(z: Tensor) -> Tensor:
    """Probability of the central interval +- z, 2 Phi(z) - 1."""
    return torch.erf(z / math.sqrt(2))


def _half_width(level: float) -> float:
    """The k of the central interval +- k, the inverse of `_central`."""
    if not 0 < level < 1:
        raise ValueError(f"Expected 0 < level < 1, got {level}. Pass 0.9 for 90 % intervals.")
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
