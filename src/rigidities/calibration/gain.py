r"""What error bars are worth beside one constant bar, on rows that neither was fitted to.

The constant bar is a Gaussian distribution around the model's predictions whose standard deviation
is the root mean square error of calibration rows. Both it and the bars are fitted to all folds of
the calibration rows but one, and judged on that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FOLDS = 5
FEWEST_ROWS = 3
"""Rows without which nothing can be left out and judged."""
_LOG_ROOT = 0.5 * math.log(2 * math.pi)


def folds(rows: int, device: torch.device | None = None) -> Tensor:
    """The fold of each row, (rows,): neighbours are in different ones."""
    return torch.arange(rows, device=device) % min(FOLDS, rows)


def constant_nll(error: Tensor, side: Tensor | None = None) -> Tensor:
    """NLL of each row (n,) under the constant bar of the other folds.

    Rows at a bound of the support, by their `side` (-1 below, 1 above, 0 inside), count by the
    mass beyond it.
    """
    fold = folds(len(error), error.device)
    square = error.square()
    found = torch.empty_like(square)
    for k in range(int(fold.max()) + 1):
        out = fold == k
        variance = square[~out].mean().clamp(min=1e-300)
        found[out] = 0.5 * (variance.log() + square[out] / variance) + _LOG_ROOT
        if side is not None:
            beyond = -torch.special.log_ndtr(-side[out] * error[out] / variance.sqrt())
            found[out] = torch.where(side[out] == 0, found[out], beyond)
    return found


def error_of_sum(values: Sequence[Tensor], fold: Sequence[int | None] | None = None) -> float:
    """The standard error of the sum of the targets' means, of values (n,) for each target.

    Values of several targets at the same rows may be wholly correlated, so that their standard
    errors add up. Values at different rows are independent: the squares of their errors add up.
    `fold` says which rows the values of each target belong to; without it, all to the same.
    """
    errors: dict[int | None, float] = {}
    for each, own in zip(values, fold or [None] * len(values), strict=True):
        errors[own] = errors.get(own, 0.0) + float(each.std()) / len(each) ** 0.5
    return math.hypot(*errors.values())


@dataclass(frozen=True)
class Gain:
    """Nats per row by which error bars beat the constant bar.

    Attributes:
        mean: over rows; NaN where there were too few to leave any out.
        error: its standard error.
        without: the mean without the one row that moves it most.
    """

    mean: float = math.nan
    error: float = math.nan
    without: float = math.nan

    @classmethod
    def of(cls, differences: Sequence[Tensor], fold: Sequence[int | None] | None = None) -> Gain:
        """From the gain of each left-out row, one tensor (n,) per target.

        Targets count alike. `fold` says which rows each target has, as in `error_of_sum`.
        """
        if any(len(each) < FEWEST_ROWS for each in differences):
            return cls()
        means = [each.mean() for each in differences]
        mean = float(torch.stack(means).mean())
        error = error_of_sum(differences, fold) / len(differences)
        # a mean of n values moves by (mean - value) / (n - 1) without that value
        moves = [(m - each) / (len(each) - 1) for m, each in zip(means, differences, strict=True)]
        joined = torch.cat(moves) / len(differences)
        farthest = float(joined[joined.abs().argmax()])
        return cls(mean, error, mean + farthest)
