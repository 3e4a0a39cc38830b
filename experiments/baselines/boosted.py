"""Boosted quantiles of a net's residual on raw inputs, conformalised.

Gradient-boosted trees learn the lower and upper quantile of the residuals of the training rows from
the inputs; the interval is then widened or narrowed by one number, so that it holds the level on
hold-out rows (split conformal: the ceil((n + 1) level)-th smallest of max(low - r, r - high)).

More than an error bar of the net's prediction: the intervals need not lie about it, and a third
regression, of the residual itself, corrects the mean.

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
"""Inputs (n, d) and residuals of the net (n,)."""


def installed() -> bool:
    """Whether scikit-learn can be imported."""
    return find_spec("sklearn") is not None


def intervals(
    train: Rows, valid: Rows, x: Tensor, level: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the residuals of other rows: their mean, and the ends of an interval, (n,) each.

    Args:
        train: that fit the trees.
        valid: that conformalise.
        x: the other rows.
        level: that the intervals hold.
        seed: of the trees.
    """
    losses: list[dict[str, Any]] = [{"loss": "squared_error"}]
    losses += [{"loss": "quantile", "quantile": (1 + sign * level) / 2} for sign in (-1, 1)]
    trees = [_fitted(train, seed, **loss) for loss in losses]
    low, high = (_predicted(one, valid[0]) for one in trees[1:])
    residual = valid[1].double().flatten()
    widened = conformal(torch.maximum(low - residual, residual - high), level)
    mean, low, high = (_predicted(one, x) for one in trees)
    middle, half = (low + high) / 2, ((high - low) / 2 + widened).clamp_min(0)
    return mean, middle - half, middle + half


def conformal(scores: Tensor, level: float) -> float:
    """The quantile of n hold-out scores that a further one stays below with the probability.

    >>> conformal(torch.arange(1.0, 10.0), 0.9), conformal(torch.arange(1.0, 9.0), 0.9)
    (9.0, inf)
    """
    place = math.ceil((len(scores) + 1) * level - 1e-9)
    return float(scores.sort().values[place - 1]) if place <= len(scores) else math.inf


def _fitted(rows: Rows, seed: int, **loss: Any) -> Any:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as error:
        raise ImportError(f"scikit-learn cannot be imported ({error}): {REMEDY}") from error
    trees = HistGradientBoostingRegressor(random_state=seed, **loss)
    return trees.fit(rows[0].double().numpy(), rows[1].double().flatten().numpy())


def _predicted(trees: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(trees.predict(x.double().numpy()), dtype=np.float64))
