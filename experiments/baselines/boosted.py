"""Boosted quantiles of a network's residual on raw inputs, conformalised.

Gradient-boosted trees learn the lower and upper quantile of the residuals of the training rows from
the inputs. The interval is then widened or narrowed by one number, so that it covers the level on
hold-out rows (split conformal: the ceil((n + 1) level)-th smallest of max(low - r, r - high)).

This is more than an error bar of the network's prediction: the intervals need not lie about it, and
a third regression, of the residual itself, corrects the mean.

References:
    Romano, Patterson and Candès, "Conformalized quantile regression", NeurIPS 2019.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

REMEDY = "pip install scikit-learn"

Rows = tuple[Tensor, Tensor]
"""Inputs (n, d) and residuals of the network (n,)."""


def installed() -> bool:
    """Whether scikit-learn can be imported."""
    return find_spec("sklearn") is not None


def intervals(
    train: Rows, valid: Rows, x: Tensor, level: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the residuals of other rows.

    Args:
        train: Rows that fit the trees.
        valid: Rows that conformalise.
        x: Inputs of the other rows.
        level: The probability that the intervals cover.
        seed: Seed of the trees.

    Returns:
        The mean of the residuals and both ends of an interval, (n,) each.
    """
    mean_trees = _fitted(train, seed, loss="squared_error")
    low_trees = _fitted(train, seed, loss="quantile", quantile=(1 - level) / 2)
    high_trees = _fitted(train, seed, loss="quantile", quantile=(1 + level) / 2)

    valid_x, residual = valid
    residual = residual.double().flatten()
    low = _predicted(low_trees, valid_x)
    high = _predicted(high_trees, valid_x)
    widening = conformal(torch.maximum(low - residual, residual - high), level)

    low = _predicted(low_trees, x)
    high = _predicted(high_trees, x)
    middle = (low + high) / 2
    half_width = ((high - low) / 2 + widening).clamp_min(0)
    return _predicted(mean_trees, x), middle - half_width, middle + half_width


def conformal(scores: Tensor, level: float) -> float:
    """The quantile of n hold-out scores that a further score stays below with the probability.

    >>> conformal(torch.arange(1.0, 10.0), 0.9), conformal(torch.arange(1.0, 9.0), 0.9)
    (9.0, inf)
    """
    place = math.ceil((len(scores) + 1) * level - 1e-9)
    if place > len(scores):
        return math.inf
    return float(scores.sort().values[place - 1])


def _fitted(rows: Rows, seed: int, *, loss: str, quantile: float | None = None) -> Any:
    """Trees of scikit-learn, fitted to residuals."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as error:
        raise ImportError(f"scikit-learn cannot be imported ({error}): {REMEDY}") from error
    trees = HistGradientBoostingRegressor(random_state=seed, loss=loss, quantile=quantile)
    return trees.fit(rows[0].double().numpy(), rows[1].double().flatten().numpy())


def _predicted(trees: Any, x: Tensor) -> Tensor:
    """The trees' prediction in float64, (n,)."""
    return torch.from_numpy(np.asarray(trees.predict(x.double().numpy()), dtype=np.float64))
