r"""Linear regression with any penalty: loss $\frac12 |y - X w|^2 + \frac12 w^\top \Sigma w$.

`linear_regression` solves it and passes the Jacobian, which is X, to `fits.from_jacobian`. The
other functions are Woodbury's two forms of $q = f^\top (F^\top F + s I)^{-1} f$, and the limit
$s \to 0$.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...fits.arrays import Values, column, float64
from ...fits.fit_rigidity import FitRigidity, LinearModel
from ...fits.sources import from_jacobian, penalty_rows, weight_roots
from ...posterior.row_span import RowSpan

__all__ = [
    "dual_quadratic",
    "kernel_quadratic",
    "linear_regression",
    "primal_quadratic",
    "unexplained",
]


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

    $w = (X^\top W X + \Sigma)^{-1} X^\top W y$, and the variance of a prediction is
    $\sigma^2 x^\top (X^\top W X + \Sigma)^{-1} x$. With $\Sigma$ this is the Bayesian variance
    (prior $N(0, \sigma^2 \Sigma^{-1})$); without it, the textbook one.

    Args:
        X: Design matrix (N, P); add a column of ones for an intercept.
        y: Targets (N,).
        penalty: $\Sigma$, any symmetric positive semi-definite (P, P).
        ridge: A number that is added to the diagonal of the penalty.
        weights: Loss weights (N,).
        scale: $\sigma$, where known; otherwise it is estimated from the residuals.

    Raises:
        ValueError: The design matrix is singular and there is no penalty, shapes do not match, or
            values are not finite.

    Examples:
        >>> fit = linear_regression([[1.0], [2.0]], [1.0, 2.0], penalty=[[5.0]], scale=1.0)
        >>> round(fit.predict([[2.0]]).mean.item(), 12), round(fit.variance([[10.0]]).item(), 12)
        (1.0, 10.0)
    """
    design = float64(X, "X", 2)
    target = column(y, "y", len(design))
    # A penalised fit is a plain one with additional rows, whose targets are zero.
    root_weights = weight_roots(weights, len(design))
    penalties = penalty_rows(ridge, penalty, design.shape[1])
    rows = torch.cat([root_weights[:, None] * design, *penalties])
    zeros = rows.new_zeros(len(rows) - len(design))
    right_side = torch.cat([root_weights * target, zeros])[:, None]
    w = torch.linalg.lstsq(rows, right_side, driver="gelsd").solution[:, 0]
    fit = from_jacobian(
        design,
        residuals=target - design @ w,
        weights=weights,
        ridge=ridge,
        penalty=penalty,
        scale=scale,
        parameters=w,
    )
    return replace(fit, model=LinearModel(_design_rows, w))


def primal_quadratic(F: Values, f: Values, ridge: float) -> Tensor:
    r"""$f^\top (F^\top F + s I)^{-1} f$ with as many unknowns as features.

    Args:
        F: Training features (N, D).
        f: Features of the predictions (M, D).
        ridge: s > 0, or zero for N >= D of full rank.

    Examples:
        >>> round(primal_quadratic([[1.0], [2.0]], [[10.0]], 5.0).item(), 12)
        10.0
        >>> round(dual_quadratic([[1.0], [2.0]], [[10.0]], 5.0).item(), 12)
        10.0
    """
    return from_jacobian(F, ridge=ridge).variance(f)


def dual_quadratic(F: Values, f: Values, ridge: float) -> Tensor:
    r"""The same with as many unknowns as rows: $[f^\top f - k^\top (F F^\top + s I)^{-1} k] / s$.

    Here $k = F f$. Its relative rounding error is about machine epsilon times $f^\top f / s q$.
    """
    rows, features = _training_and_test(F, f)
    return kernel_quadratic(rows @ rows.mT, rows @ features.mT, features.square().sum(1), ridge)


def kernel_quadratic(kernel: Values, cross: Values, own: Values, ridge: float) -> Tensor:
    r"""The dual form from kernels alone: $[k_{**} - k^\top (K + s I)^{-1} k] / s$.

    Args:
        kernel: K, (N, N) of the training rows.
        cross: k, (N, M) between training rows and predictions.
        own: $k_{**}$, (M,): the kernel of each prediction with itself.
        ridge: s > 0.

    Raises:
        ValueError: The ridge is not positive, or shapes do not match.
    """
    if not 0 < ridge < math.inf:
        raise ValueError(
            f"The dual form divides by the ridge: expected ridge > 0, got {ridge}. Its limit times "
            "the ridge is unexplained(F, f)."
        )
    matrix = float64(kernel, "kernel", 2)
    columns = float64(cross, "cross", 2)
    if tuple(matrix.shape) != (len(columns), len(columns)):
        raise ValueError(
            "Expected kernel (N, N) and cross (N, M), got "
            f"{tuple(matrix.shape)} and {tuple(columns.shape)}."
        )
    factor = torch.linalg.cholesky(matrix + ridge * torch.eye(len(matrix), dtype=torch.float64))
    whitened = torch.linalg.solve_triangular(factor, columns, upper=False)
    explained: Tensor = whitened.square().sum(0)
    return (column(own, "own", columns.shape[1]) - explained) / ridge


def unexplained(F: Values, f: Values) -> Tensor:
    r"""$\lim_{s \to 0} s\, q(s) = f^\top f - f^\top F^\top (F F^\top)^{-1} F f$.

    This is the squared distance of f from the span of the training rows. Times $\sigma_w^2$ it is
    the variance of a Gaussian process with kernels $\sigma_w^2 F F^\top$ and $c F F^\top$ after
    infinitely long training: exactly zero for any f, once the rows span all features. A ridge that
    is added after this limit is a modelling choice. Distances within rounding,
    $(D \epsilon |f|)^2$, are set to zero.

    Examples:
        >>> unexplained([[1.0, 0.0]], [[3.0, 2.0]])
        tensor([4.], dtype=torch.float64)
    """
    rows, features = _training_and_test(F, f)
    squared_distances, _ = RowSpan.of(rows).outside(features)
    return squared_distances


def _design_rows(x: Any) -> Tensor:
    """New rows of the design matrix, (M, P)."""
    return float64(x, "x", 2)


def _training_and_test(F: Values, f: Values) -> tuple[Tensor, Tensor]:
    """Features (N, D) and (M, D), their shapes checked."""
    rows = float64(F, "F", 2)
    features = float64(f, "f", 2)
    if rows.shape[1] != features.shape[1]:
        raise ValueError(
            f"Expected F (N, D) and f (M, D), got {tuple(rows.shape)} and {tuple(features.shape)}."
        )
    return rows, features
