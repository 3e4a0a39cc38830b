r"""Linear regression with any penalty: loss $\frac12 |y - X w|^2 + \frac12 w^\top \Sigma w$."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fits.arrays import Values, column, float64
from ..fits.fit_rigidity import FitRigidity
from ..fits.sources import from_jacobian, penalty_rows, weight_roots


def linear_regression(
    X: Values,
    y: Values,
    *,
    penalty: Values | None = None,
    ridge: float = 0.0,
    weights: Values | None = None,
    scale: float | None = None,
) -> FitRigidity:
    r"""Penalised linear least squares, its coefficients and its error bars.

    $w = (X^\top W X + \Sigma)^{-1} X^\top W y$, and $\sigma^2 x^\top (X^\top W X + \Sigma)^{-1} x$
    as the variance of a prediction: with $\Sigma$ the Bayesian one (prior $N(0, \sigma^2
    \Sigma^{-1})$), without it that of the textbook.

    Args:
        X: (N, P) design matrix; add a column of ones for an intercept.
        y: (N,) targets.
        penalty: $\Sigma$, any symmetric positive semi-definite (P, P).
        ridge: added to its diagonal.
        weights: (N,) loss weights.
        scale: $\sigma$, where known; otherwise from the residuals.

    Examples:
        >>> fit = linear_regression([[1.0], [2.0]], [1.0, 2.0], penalty=[[5.0]], scale=1.0)
        >>> round(fit.predict([[2.0]]).mean.item(), 12), round(fit.variance([10.0]).item(), 12)
        (1.0, 10.0)
    """
    design = float64(X, "X", 2)
    target = column(y, "y", len(design))
    root = weight_roots(weights, len(design))
    extra = penalty_rows(ridge, penalty, design.shape[1])
    rows = torch.cat([root[:, None] * design, *extra])
    zeros = rows.new_zeros(len(rows) - len(design))
    parameters = torch.linalg.lstsq(
        rows, torch.cat([root * target, zeros])[:, None], driver="gelsd"
    ).solution[:, 0]
    fit = from_jacobian(
        design,
        target - design @ parameters,
        weights=weights,
        ridge=ridge,
        penalty=penalty,
        scale=scale,
        parameters=parameters,
    )

    def model(x: Any) -> tuple[Tensor, Tensor]:
        rows = float64(x, "x", 2)
        return rows @ parameters, rows

    return replace(fit, model=model)
