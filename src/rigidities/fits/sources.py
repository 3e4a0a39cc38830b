r"""Fits from their Jacobian, or from their parameter covariance.

$(J^\top W J + \Sigma)^{-1}$ comes from the singular values of $[\sqrt W J; \Sigma^{1/2}]$ with
columns scaled to length one, so that neither the parameters' units nor a squared condition number
spoils it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from ..posterior.posterior import check_ridge
from .arrays import Values, column, float64
from .fit_rigidity import FitRigidity


def from_jacobian(
    jacobian: Values,
    residuals: Values | None = None,
    *,
    weights: Values | None = None,
    ridge: float = 0.0,
    penalty: Values | None = None,
    scale: float | None = None,
    parameters: Values | None = None,
) -> FitRigidity:
    r"""The fit whose training rows have these derivatives.

    Args:
        jacobian: (N, P) derivatives of the predictions by the parameters, or the design matrix of
            a linear fit.
        residuals: (N,) target minus prediction, from which s is estimated.
        weights: (N,) loss weights, $1/\sigma_i^2$ for known noise; default ones.
        ridge: added to the diagonal of $J^\top W J$.
        penalty: (P, P) symmetric positive semi-definite, added too.
        scale: the residual standard deviation s of an observation of weight one, where it is known
            (1.0 with weights $1/\sigma_i^2$). Without it and without residuals s is 1.
        parameters: (P,) the fitted values, for `sample` and `propagate`.

    Raises:
        ValueError: singular without a penalty; no degrees of freedom to estimate s from; shapes
            that do not fit, NaN.
    """
    check_scale(scale)
    rows = float64(jacobian, "jacobian", 2)
    n, width = rows.shape
    root = weight_roots(weights, n)
    rows = rows * root[:, None]
    extra = penalty_rows(ridge, penalty, width)
    inverse = _inverse_root(torch.cat([rows, *extra]), n)
    taken = float((rows @ inverse).square().sum()) if extra else float(width)
    freedom, noise = math.inf, None if scale is None else scale**2
    if scale is None and residuals is not None:
        errors = root * column(residuals, "residuals", n)
        freedom = float(root.count_nonzero()) - taken
        noise = residual_variance(float(errors.square().sum()), freedom)
    return FitRigidity(
        root=inverse,
        scale=1.0 if noise is None else math.sqrt(noise),
        parameters=_parameters(parameters, width),
        noise=noise,
        sigma=shared_sigma(root),
        degrees_of_freedom=freedom,
    )


def from_covariance(
    covariance: Values,
    *,
    parameters: Values | None = None,
    scale: float | None = None,
    degrees_of_freedom: float = math.inf,
) -> FitRigidity:
    r"""The fit whose parameters have this covariance: $\sigma^2(g) = g^\top C g$.

    Args:
        covariance: (P, P), as the fit reports it (with the residual variance inside).
        parameters: (P,) the fitted values, for `sample` and `propagate`.
        scale: the residual standard deviation s, where known: then $q = g^\top C g / s^2$, and
            `predict(noise=True)` can add $s^2$.
        degrees_of_freedom: of $s^2$.

    Negative eigenvalues of the correlation matrix, which no covariance has, count as zero: silently
    within the rounding of its entries, with a warning down to -1e-8 of the largest.

    Raises:
        ValueError: an eigenvalue below that; not symmetric, NaN.

    Examples:
        >>> from_covariance([[4.0, 0.0], [0.0, 1.0]]).std([1.0, 0.0]).item()
        2.0
    """
    matrix = _checked_covariance(covariance)
    check_scale(scale)
    std = matrix.diagonal().clamp(min=0).sqrt()
    safe = torch.where(std > 0, std, 1.0)
    variances, vectors = torch.linalg.eigh(matrix / safe / safe[:, None])
    _check_semidefinite(variances)
    s = 1.0 if scale is None else scale
    return FitRigidity(
        root=std[:, None] * vectors * variances.clamp(min=0).sqrt() / s,
        scale=s,
        parameters=_parameters(parameters, len(std)),
        noise=None if scale is None else scale**2,
        degrees_of_freedom=degrees_of_freedom,
    )


def check_scale(scale: float | None) -> None:
    """Refuse a residual standard deviation that is none."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"Expected scale above zero and finite, got {scale}.")


def held(fit: FitRigidity, fixed: tuple[int, ...], stacklevel: int) -> FitRigidity:
    """The fit of the free parameters among others that are fixed; says so in a warning."""
    if fixed:
        warnings.warn(
            f"Parameters {list(fixed)} are at a bound and held there: their uncertainty is not in "
            "the error bars.",
            stacklevel=stacklevel,
        )
    root = fit.root.new_zeros(fit.width + len(fixed), fit.root.shape[1])
    root[[i for i in range(len(root)) if i not in fixed]] = fit.root
    return replace(fit, root=root, fixed=fixed)


def residual_variance(squares: float, freedom: float) -> float:
    """Sum of squared residuals over the degrees of freedom left."""
    if freedom <= 1e-9:
        raise ValueError(
            f"No degrees of freedom are left to estimate the residual variance ({freedom:.3g}): as "
            "many parameters as rows. Pass scale=, the residual standard deviation, or more data."
        )
    return squares / freedom


def _inverse_root(rows: Tensor, samples: int) -> Tensor:
    """(P, P), whose Gram is (rows^T rows)^-1."""
    lengths = torch.linalg.vector_norm(rows, dim=0)
    units = torch.where(lengths > 0, lengths, 1.0)
    triangle = torch.linalg.qr(rows / units, mode="r").R
    _, singular, vectors = torch.linalg.svd(triangle, full_matrices=False)
    width = rows.shape[1]
    floor = max(rows.shape) * torch.finfo(torch.float64).eps * singular[0]
    if len(singular) < width or bool(singular[-1] <= floor):
        dead = (lengths == 0).nonzero().flatten().tolist()
        cause = f" Nothing depends on parameters {dead}." if dead else ""
        raise ValueError(
            f"The Jacobian is singular: {samples} rows for {width} parameters, whose directions "
            f"they do not all determine.{cause} Pass ridge > 0, a penalty or more data, or drop "
            "parameters (of dummies one each: OneHotEncoder(drop='first'))."
        )
    return torch.div(vectors.mT / singular, units[:, None])


def weight_roots(weights: Values | None, rows: int) -> Tensor:
    """Square roots of checked weights, (N,); ones without weights."""
    if weights is None:
        return torch.ones(rows, dtype=torch.float64)
    values = column(weights, "weights", rows)
    if bool((values < 0).any()):
        raise ValueError(f"Expected weights >= 0, got {float(values.min()):.3g}.")
    return values.sqrt()


def shared_sigma(roots: Tensor) -> float | None:
    """1 / root of the weights, where all rows that count have the same; else None."""
    least, most = roots[roots > 0].aminmax()
    return float(1 / most) if float(most) <= 1.000001 * float(least) else None


def penalty_rows(ridge: float, penalty: Values | None, width: int) -> list[Tensor]:
    """Rows whose Gram is ridge I + penalty; none where both are absent."""
    check_ridge(ridge)
    rows = [math.sqrt(ridge) * torch.eye(width, dtype=torch.float64)] if ridge else []
    if penalty is None:
        return rows
    matrix = float64(penalty, "penalty", 2)
    if tuple(matrix.shape) != (width, width) or not torch.allclose(matrix, matrix.mT):
        raise ValueError(
            f"Expected a symmetric penalty ({width}, {width}), got {tuple(matrix.shape)}"
            f"{', not symmetric' * (matrix.shape[0] == matrix.shape[1])}. Pass (P + P.T) / 2."
        )
    values, vectors = torch.linalg.eigh(matrix)
    if bool(values[0] < -1e-9 * matrix.abs().max()):
        raise ValueError("penalty must be positive semi-definite.")
    return [*rows, values.clamp(min=0).sqrt()[:, None] * vectors.mT]


def _checked_covariance(covariance: Values) -> Tensor:
    matrix = float64(covariance, "covariance")
    matrix = matrix.reshape(1, 1) if matrix.numel() == 1 else matrix
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Expected a covariance (P, P), got {tuple(matrix.shape)}.")
    spread = matrix.diagonal().abs().sqrt()
    if bool(((matrix - matrix.mT).abs() > 1e-6 * spread * spread[:, None]).any()):
        raise ValueError("Expected a symmetric covariance. Pass (C + C.T) / 2.")
    if bool((matrix.diagonal() < 0).any()):
        raise ValueError("Expected variances >= 0 on the covariance's diagonal, got negative ones.")
    return (matrix + matrix.mT) / 2


def _check_semidefinite(eigenvalues: Tensor) -> None:
    """Of a correlation matrix, ascending."""
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1].abs())
    if smallest >= -10 * len(eigenvalues) * torch.finfo(torch.float64).eps * largest:
        return
    symptom = (
        "Expected a positive semi-definite covariance, got one whose smallest eigenvalue (as a "
        f"correlation matrix) is {smallest:.3g}."
    )
    if smallest < -1e-8 * largest:
        raise ValueError(f"{symptom} The fit did not end in a minimum.")
    warnings.warn(
        f"{symptom} It counts as zero: predictions along its direction get no error bar. Pass the "
        "covariance in full precision, or the Jacobian to from_jacobian.",
        stacklevel=3,
    )


def _parameters(parameters: Values | None, width: int) -> Tensor | None:
    return None if parameters is None else column(parameters, "parameters", width)
