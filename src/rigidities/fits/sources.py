r"""Fits from their Jacobian, or from their parameter covariance.

$(J^\top W J + \Sigma)^{-1}$ comes from the singular values of $[\sqrt W J; \Sigma^{1/2}]$ with
columns scaled to length one, so that neither the parameters' units nor a squared condition number
spoils it. A covariance is factorised as a correlation matrix, for the same reason.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..notices import notify
from ..posterior.posterior import check_ridge
from .arrays import Values, column, float64
from .fit_rigidity import FitRigidity

__all__ = ["from_covariance", "from_jacobian"]


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
    r"""A fit from the derivatives of its training predictions.

    Args:
        jacobian: (N, P) derivatives of the predictions with respect to the parameters, or the
            design matrix of a linear fit.
        residuals: (N,) target minus prediction, from which s is estimated.
        weights: (N,) loss weights, $1/\sigma_i^2$ for known noise; ones by default.
        ridge: A number that is added to the diagonal of $J^\top W J$.
        penalty: A symmetric positive semi-definite matrix (P, P) that is added as well.
        scale: The residual standard deviation s of an observation of weight one, where it is known
            (1.0 with weights $1/\sigma_i^2$). Without both `scale` and `residuals`, s is 1.
        parameters: (P,) the fitted values, for `sample` and `propagate`.

    Raises:
        ValueError: The Jacobian is singular and there is no penalty, no degrees of freedom are left
            to estimate s, shapes do not match, or values are not finite.
    """
    check_scale(scale)
    rows = float64(jacobian, "jacobian", 2)
    n, width = rows.shape
    root_weights = weight_roots(weights, n)
    rows = rows * root_weights[:, None]
    penalties = penalty_rows(ridge, penalty, width)
    inverse_root = _inverse_root(torch.cat([rows, *penalties]), n)
    degrees_of_freedom = math.inf
    noise = None
    if scale is not None:
        noise = scale**2
    elif residuals is not None:
        errors = root_weights * column(residuals, "residuals", n)
        effective_parameters = float(width)
        if penalties:
            effective_parameters = float((rows @ inverse_root).square().sum())  # tr H
        degrees_of_freedom = float(root_weights.count_nonzero()) - effective_parameters
        noise = residual_variance(float(errors.square().sum()), degrees_of_freedom)
    return FitRigidity(
        root=inverse_root,
        scale=1.0 if noise is None else math.sqrt(noise),
        parameters=_parameters(parameters, width),
        noise=noise,
        sigma=shared_sigma(root_weights),
        degrees_of_freedom=degrees_of_freedom,
    )


def from_covariance(
    covariance: Values,
    *,
    parameters: Values | None = None,
    scale: float | None = None,
    degrees_of_freedom: float = math.inf,
) -> FitRigidity:
    r"""A fit from the covariance of its parameters: $\sigma^2(g) = g^\top C g$.

    Negative eigenvalues of the correlation matrix, which no true covariance has, are set to zero:
    silently within the rounding of its entries, with a warning down to -1e-8 of the largest.

    Args:
        covariance: (P, P), as the fit reports it (including the residual variance).
        parameters: (P,) the fitted values, for `sample` and `propagate`.
        scale: The residual standard deviation s, where known: then $q = g^\top C g / s^2$, and
            `predict(noise=True)` can add $s^2$.
        degrees_of_freedom: Those of $s^2$.

    Raises:
        ValueError: An eigenvalue is more negative, the matrix is not symmetric, or values are not
            finite.

    Examples:
        >>> from_covariance([[4.0, 0.0], [0.0, 1.0]]).std([1.0, 0.0]).item()
        2.0
    """
    matrix = _checked_covariance(covariance)
    check_scale(scale)
    noise = None
    if scale is None:
        scale = 1.0
    else:
        noise = scale**2
    std = matrix.diagonal().clamp(min=0).sqrt()
    safe_std = torch.where(std > 0, std, 1.0)
    eigenvalues, vectors = torch.linalg.eigh(matrix / safe_std / safe_std[:, None])
    _check_semidefinite(eigenvalues)
    return FitRigidity(
        root=std[:, None] * vectors * eigenvalues.clamp(min=0).sqrt() / scale,
        scale=scale,
        parameters=_parameters(parameters, len(std)),
        noise=noise,
        degrees_of_freedom=degrees_of_freedom,
    )


def check_scale(scale: float | None) -> None:
    """Refuse a residual standard deviation that is not positive and finite."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"Expected scale above zero and finite, got {scale}.")


def with_fixed(fit: FitRigidity, fixed: tuple[int, ...]) -> FitRigidity:
    """The fit of all parameters from that of the free ones; warns about fixed ones.

    Args:
        fit: The fit of the free parameters alone.
        fixed: Numbers of the fixed ones among all parameters.
    """
    if fixed:
        notify(
            f"Parameters {list(fixed)} are at a bound and fixed there. Their uncertainty is not "
            "in the error bars."
        )
    root = fit.root.new_zeros(fit.width + len(fixed), fit.root.shape[1])
    free = [i for i in range(len(root)) if i not in fixed]
    root[free] = fit.root
    return replace(fit, root=root, fixed=fixed)


def residual_variance(squares: float, degrees_of_freedom: float) -> float:
    """Sum of squared residuals over the degrees of freedom; an error where none are left."""
    if degrees_of_freedom <= 1e-9:
        raise ValueError(
            "No degrees of freedom are left to estimate the residual variance "
            f"({degrees_of_freedom:.3g}): there are as many parameters as rows. Pass scale= (the "
            "residual standard deviation), or more data."
        )
    return squares / degrees_of_freedom


def _inverse_root(rows: Tensor, samples: int) -> Tensor:
    """A matrix C (P, P) such that C C^T = (rows^T rows)^-1.

    Args:
        rows: Weighted rows of the Jacobian and of the penalty, (N + ..., P).
        samples: Number N of rows of the Jacobian, for the message.

    Raises:
        ValueError: The inverse does not exist.
    """
    lengths = torch.linalg.vector_norm(rows, dim=0)
    units = torch.where(lengths > 0, lengths, 1.0)
    triangle = torch.linalg.qr(rows / units, mode="r").R
    _, singular, vectors = torch.linalg.svd(triangle, full_matrices=False)
    width = rows.shape[1]
    floor = max(rows.shape) * torch.finfo(torch.float64).eps * singular[0]
    if len(singular) < width or bool(singular[-1] <= floor):
        idle = (lengths == 0).nonzero().flatten().tolist()
        cause = f" No row depends on the parameters {idle}." if idle else ""
        raise ValueError(
            f"The Jacobian is singular: {samples} rows do not determine all directions of {width} "
            f"parameters.{cause} Pass ridge > 0, a penalty or more data, or drop parameters (one "
            "per set of dummy variables: OneHotEncoder(drop='first'))."
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
    """1 / root of the weight that all rows with a nonzero weight share; None if they differ."""
    least, most = roots[roots > 0].aminmax()
    if float(most) > 1.000001 * float(least):
        return None
    return float(1 / most)


def penalty_rows(ridge: float, penalty: Values | None, width: int) -> list[Tensor]:
    """Matrices A (P, P) whose A^T A add up to ridge I + penalty; an empty list without both."""
    check_ridge(ridge)
    roots = []
    if ridge:
        roots.append(math.sqrt(ridge) * torch.eye(width, dtype=torch.float64))
    if penalty is not None:
        matrix = _checked_penalty(penalty, width)
        values, vectors = torch.linalg.eigh(matrix)
        if bool(values[0] < -1e-9 * matrix.abs().max()):
            raise ValueError("penalty must be positive semi-definite.")
        roots.append(values.clamp(min=0).sqrt()[:, None] * vectors.mT)
    return roots


def _checked_penalty(penalty: Values, width: int) -> Tensor:
    """A symmetric matrix (P, P)."""
    matrix = float64(penalty, "penalty", 2)
    expected = f"Expected a symmetric penalty ({width}, {width}), got {tuple(matrix.shape)}"
    if tuple(matrix.shape) != (width, width):
        raise ValueError(f"{expected}. Pass one row and column for each parameter.")
    if not torch.allclose(matrix, matrix.mT):
        raise ValueError(f"{expected}, not symmetric. Pass (P + P.T) / 2.")
    return matrix


def _checked_covariance(covariance: Values) -> Tensor:
    """A symmetric matrix (P, P); one number counts as (1, 1)."""
    matrix = float64(covariance, "covariance")
    if matrix.numel() == 1:
        matrix = matrix.reshape(1, 1)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Expected a covariance (P, P), got {tuple(matrix.shape)}.")
    spread = matrix.diagonal().abs().sqrt()
    if bool(((matrix - matrix.mT).abs() > 1e-6 * spread * spread[:, None]).any()):
        raise ValueError("Expected a symmetric covariance. Pass (C + C.T) / 2.")
    if bool((matrix.diagonal() < 0).any()):
        raise ValueError("Expected variances >= 0 on the covariance's diagonal, got negative ones.")
    return (matrix + matrix.mT) / 2


def _check_semidefinite(eigenvalues: Tensor) -> None:
    """Refuse, or warn about, negative eigenvalues (ascending) of a correlation matrix."""
    smallest = float(eigenvalues[0])
    largest = float(eigenvalues[-1].abs())
    rounding = 10 * len(eigenvalues) * torch.finfo(torch.float64).eps * largest
    if smallest >= -rounding:
        return
    symptom = (
        "Expected a positive semi-definite covariance, got one whose smallest eigenvalue (as a "
        f"correlation matrix) is {smallest:.3g}."
    )
    if smallest < -1e-8 * largest:
        raise ValueError(f"{symptom} The fit did not end at a minimum.")
    notify(
        f"{symptom} It is treated as zero, so predictions along its direction get no error bar. "
        "Pass the covariance in full precision, or the Jacobian to from_jacobian."
    )


def _parameters(parameters: Values | None, width: int) -> Tensor | None:
    """The fitted values (P,), checked."""
    return None if parameters is None else column(parameters, "parameters", width)
