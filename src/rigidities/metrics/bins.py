"""Errors and bars bin by bin: rows sorted by their bar, equal numbers in each bin.

Where bars are right, the mean squared error of a bin is its mean predicted variance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .alignment import Values, aligned, error_and_positive_std, of_prediction

_CONSTANT_DECADES = 1e-9
"""Variances that span fewer decades are constant up to rounding: their slope would be noise."""


@of_prediction
def ence(mean: Values, std: Values, target: Values, bins: int = 10) -> float:
    """Expected normalised calibration error: the mean over bins of |RMV - RMSE| / RMV.

    Rows are sorted by sigma and cut into bins whose sizes differ by one row at most; RMV is the
    root of the mean predicted variance of a bin.

    Examples:
        >>> ence([0.0, 0.0], [1.0, 2.0], [1.0, 3.0], bins=2)
        0.25
    """
    error, std = error_and_positive_std(mean, std, target)
    _require_from_one_to_rows("bins", bins, rows=len(std))
    rows_by_bin = std.argsort(stable=True).tensor_split(bins)
    variance = torch.stack([std[rows].square().mean() for rows in rows_by_bin])
    mse = torch.stack([error[rows].square().mean() for rows in rows_by_bin])
    return float((1 - (mse / variance).sqrt()).abs().mean())


@of_prediction
def binned(mean: Values, std: Values, target: Values, bin_size: int = 100) -> tuple[Tensor, Tensor]:
    """Mean predicted variance and mean squared error (MSE) of bins of rows.

    Rows are sorted by predicted variance and cut into bins of `bin_size` rows. The rows of largest
    variance that do not fill a bin are left out.

    Returns:
        (variance, mse), one entry per bin, in ascending order of variance.

    Examples:
        >>> variance, mse = binned([0, 0, 0], [3, 1, 2], [5, 1, 4], bin_size=1)
        >>> variance.tolist(), mse.tolist()
        ([1.0, 4.0, 9.0], [1.0, 16.0, 25.0])
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    _require_from_one_to_rows("bin_size", bin_size, rows=len(std))
    binned_rows = len(std) // bin_size * bin_size
    rows = std.argsort(stable=True)[:binned_rows].reshape(-1, bin_size)  # (bins, bin_size)
    variance = std.square()[rows].mean(1)
    mse = (target - mean).square()[rows].mean(1)
    return variance, mse


@of_prediction
def binned_log_ratio(mean: Values, std: Values, target: Values, bin_size: int = 100) -> float:
    """Mean over bins of |log10(MSE / variance)|: decades from y = x in the binned plot.

    A constant bar can score as well as good bars, because it spans no decades: read this together
    with `nll_gain`, `slope`, `decades` and `spearman`. The result is infinite if all errors of a
    bin are zero.

    Examples:
        >>> binned_log_ratio([0.0, 0.0], [1.0, 1.0], [10.0, 0.1], bin_size=1)
        2.0
    """
    variance, mse = _positive_bins(mean, std, target, bin_size)
    return float((mse / variance).log10().abs().mean())


@of_prediction
def slope(mean: Values, std: Values, target: Values, bin_size: int = 100) -> float:
    """Least-squares slope of log MSE on log variance over bins.

    It is 1 for right bars and 0 for bars without information. It is nan if it is undefined: for a
    single bin, for constant bars, or if all errors of a bin are zero.

    Examples:
        >>> round(slope([0.0, 0.0], [1.0, 100.0], [3.0, 30.0], bin_size=1), 4)
        0.5
    """
    variance, mse = _positive_bins(mean, std, target, bin_size)
    log_variance = variance.log10()
    log_mse = mse.log10()
    if log_variance.max() - log_variance.min() < _CONSTANT_DECADES:
        return math.nan
    x = log_variance - log_variance.mean()
    y = log_mse - log_mse.mean()
    return float(x @ y / x.square().sum())


def decades(std: Values, bin_size: int = 100) -> float:
    """The number of decades that the binned variances span, log10(largest / smallest).

    Examples:
        >>> decades([1.0, 100.0], bin_size=1)
        4.0
    """
    (flat_std,) = aligned(std=std)
    variance, _ = _positive_bins(flat_std, flat_std, flat_std, bin_size)
    return float((variance[-1] / variance[0]).log10())


def _positive_bins(
    mean: Values, std: Values, target: Values, bin_size: int
) -> tuple[Tensor, Tensor]:
    """The result of `binned`; bars of zero are refused."""
    error_and_positive_std(mean, std, target)
    return binned(mean, std, target, bin_size)


def _require_from_one_to_rows(name: str, value: int, *, rows: int) -> None:
    """Refuse a number of bins or rows in a bin that the rows do not allow."""
    if not 1 <= value <= rows:
        raise ValueError(
            f"Expected {name} from 1 to the number of rows, {rows}, got {value}. "
            f"Pass another {name}, or more rows."
        )
