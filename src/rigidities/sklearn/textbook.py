r"""Textbook standard errors of a linear regressor, for `method="textbook"`.

The variance is $s^2 x^\top (X^\top W X + \Sigma)^{-1} x$, where the intercept is a column of ones
that is not penalised, and $s^2$ comes from the residuals over n minus the effective number of
parameters. With a penalty it is the Bayesian variance (prior variance $s^2 / \alpha$), which
includes the bias of the penalised fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge, RidgeCV
from torch import Tensor

from ..fits.arrays import float64
from ..fits.fit_rigidity import FitRigidity, LinearModel
from ..fits.normal_equations import misfit
from ..fits.sources import from_jacobian, with_fixed
from .data import as_tensor
from .readouts import own_ridge


@dataclass(frozen=True)
class _DesignRows:
    """Inputs (M, P) -> rows of the design matrix, (M, P), or (M, P + 1) with an intercept."""

    has_intercept: bool

    def __call__(self, X: Any) -> Tensor:
        rows = float64(X, "x", 2)
        if not self.has_intercept:
            return rows
        return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def textbook_fit(model: Any, X: Any, y: Any, weight: Any) -> FitRigidity:
    """Error bars of a fitted linear regressor, from its coefficients and its training rows.

    With `positive=True`, coefficients at zero stay there, with a warning.

    Args:
        model: A `LinearRegression`, `Ridge`, `RidgeCV` or `BayesianRidge`.
        X: The inputs that it was fitted on, (N, P).
        y: The targets, (N,).
        weight: Weights of the rows, (N,), or None.

    Raises:
        TypeError: The model is of another kind.
        ValueError: It has several targets or penalties, or was not fitted on these rows.
    """
    if not isinstance(model, (LinearRegression, Ridge, RidgeCV, BayesianRidge)):
        raise TypeError(
            "method='textbook' expects a LinearRegression, Ridge, RidgeCV or BayesianRidge, got "
            f"{type(model).__name__}. Use method='full'."
        )
    coefficients = as_tensor(np.atleast_2d(model.coef_))  # (K, P)
    ridge = own_ridge(model)
    if len(coefficients) > 1 or ridge is None:
        raise ValueError(
            "method='textbook' expects one target and one alpha, got coefficients of shape "
            f"{tuple(coefficients.shape)}. Fit each target separately."
        )

    parameters = coefficients[0]
    penalties = torch.full_like(parameters, ridge)
    is_free = torch.ones_like(parameters, dtype=torch.bool)
    if getattr(model, "positive", False):
        is_free = parameters != 0
    if model.fit_intercept:
        intercept = as_tensor(model.intercept_).reshape(1)
        parameters = torch.cat([parameters, intercept])
        penalties = torch.cat([penalties, torch.zeros_like(intercept)])
        is_free = torch.cat([is_free, is_free.new_ones(1)])
    if not is_free.any():
        raise ValueError("All coefficients are fixed at zero, so no prediction can vary.")

    design = _DesignRows(bool(model.fit_intercept))
    rows = design(X)
    target = as_tensor(y).reshape(-1)
    free_rows = rows[:, is_free]
    fit = from_jacobian(
        free_rows,
        residuals=target - rows @ parameters,
        weights=weight,
        penalty=penalties[is_free].diag() if ridge else None,
        parameters=parameters[is_free],
    )
    defect = misfit(fit, free_rows, target, weight, penalties[is_free])
    if defect is not None:
        raise ValueError(
            f"{defect} Pass X, y and sample_weight exactly as they were given to fit(), or fit "
            "with a smaller tol."
        )
    fixed = tuple((~is_free).nonzero().flatten().tolist())
    return replace(
        with_fixed(fit, fixed), parameters=parameters, model=LinearModel(design, parameters)
    )
