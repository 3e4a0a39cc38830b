r"""How much better error bars are than one constant bar, on rows used to fit neither.

The constant bar is a Gaussian distribution around the model's predictions whose standard deviation
is the root mean square error of calibration rows. Both it and the bars are fitted to all folds of
the calibration rows but one, and judged on that one. The differences of the rows' negative
log-likelihoods make the `Gain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prediction.distribution import Distribution, Gaussian

FOLDS = 5
"""Number of folds of a cross-validation; with fewer rows, one fold for each."""
FEWEST_ROWS = 3
"""Least number of rows of which some can be left out and judged."""
_LEAST_MASS = 1e-300
"""Probabilities below this count as this."""


def folds(rows: int, device: torch.device | None = None, sample: Tensor | None = None) -> Tensor:
    """The fold of each row, (rows,): neighbouring samples are in different ones.

    Args:
        rows: How many rows there are.
        device: Where the result is to be.
        sample: The sample of each row, (rows,), where a sample has several rows, which then are in
            one fold; None where each row is a sample. Fewer than `FEWEST_ROWS` samples are torn
            apart, since they could not be left out.
    """
    if sample is not None:
        distinct, place = torch.unique(sample, return_inverse=True)
        if len(distinct) >= FEWEST_ROWS:
            # Samples are counted as they first appear: their numbers depend on how they came.
            numbers = torch.arange(rows, device=sample.device)
            first = torch.full_like(distinct, rows).scatter_reduce_(0, place, numbers, "amin")
            rank = first.argsort().argsort()
            return torch.remainder(rank[place], min(FOLDS, len(distinct)))
    return torch.arange(rows, device=device) % min(FOLDS, rows)


def row_nll(
    distribution: Distribution,
    residual: Tensor,
    s2: Tensor,
    side: Tensor | None = None,
    step: float = 0.0,
) -> Tensor:
    """The negative logarithm of what each row shows, (n,): a density, or a probability.

    A row at a bound of its support shows the mass beyond. A target on a grid shows the mass of its
    cell, which reaches half a step to both sides.

    Args:
        distribution: The distribution, in units of its scale.
        residual: Target minus prediction, (n,).
        s2: Squared scales, (n,) or ().
        side: -1 or 1 for a row at the lower or the upper bound, else 0, (n,); None where no row is.
        step: The step of the grid that the targets lie on; 0 where they lie on none.
    """
    scale = s2.sqrt()
    z = residual / scale
    mirrored = distribution.mirrored
    if step > 0:
        # Where both ends lie above zero, their probabilities are those of the other tail.
        low = (residual - step / 2) / scale
        high = (residual + step / 2) / scale
        below = distribution.cdf(high) - distribution.cdf(low)
        above = mirrored.cdf(-low) - mirrored.cdf(-high)
        value = -torch.where(z > 0, above, below).clamp(min=_LEAST_MASS).log()
    else:
        value = scale.log() - distribution.log_density(z)
    if side is None or not bool(side.any()):
        return value
    mass = torch.where(side < 0, distribution.cdf(z), mirrored.cdf(-z))
    return torch.where(side == 0, value, -mass.clamp(min=_LEAST_MASS).log())


def constant_nll(
    error: Tensor,
    side: Tensor | None = None,
    sample: Tensor | None = None,
    step: float = 0.0,
) -> Tensor:
    """The score of each row (n,) under the constant bar of the other folds; see `row_nll`.

    Args:
        error: Target minus prediction, (n,).
        side: As in `row_nll`.
        sample: The sample of each row, (n,), as in `folds`.
        step: As in `row_nll`.
    """
    fold = folds(len(error), error.device, sample)
    square = error.square()
    nll = torch.empty_like(square)
    for k in range(int(fold.max()) + 1):
        in_fold = fold == k
        variance = square[~in_fold].mean().clamp(min=1e-300)
        fold_side = None if side is None else side[in_fold]
        nll[in_fold] = row_nll(Gaussian(), error[in_fold], variance, fold_side, step)
    return nll


def error_of_sum(values: Sequence[Tensor]) -> float:
    """The standard error of the sum of the targets' means.

    Values of several targets at the same rows may be wholly correlated, so that their standard
    errors add up.

    Args:
        values: The values (n,) of each target.
    """
    return math.fsum(float(rows.std()) / len(rows) ** 0.5 for rows in values)


@dataclass(frozen=True)
class Gain:
    """Nats per row by which error bars beat the constant bar.

    Attributes:
        mean: The mean over rows; NaN where there were too few to leave any out.
        error: Its standard error.
        without: The mean without the one row that moves it most.
    """

    mean: float = math.nan
    error: float = math.nan
    without: float = math.nan

    @classmethod
    def of(cls, differences: Sequence[Tensor]) -> Gain:
        """The mean gain of all targets, which have equal weight.

        Args:
            differences: The gain of each left-out row, (n,), for each target.
        """
        if any(len(rows) < FEWEST_ROWS for rows in differences):
            return cls()
        targets = len(differences)
        means = [rows.mean() for rows in differences]
        mean = float(torch.stack(means).mean())
        # A mean of n values moves by (mean - value) / (n - 1) without that value.
        moves = [
            (target_mean - rows) / (len(rows) - 1)
            for target_mean, rows in zip(means, differences, strict=True)
        ]
        moves_of_mean = torch.cat(moves) / targets
        farthest = float(moves_of_mean[moves_of_mean.abs().argmax()])
        return cls(
            mean=mean,
            error=error_of_sum(differences) / targets,
            without=mean + farthest,
        )
