"""Polynomials by `numpy.polyfit` and `numpy.polynomial`, with the data that they were fitted to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .arrays import Values, as_tensor, column, float64
from .fit_rigidity import FitRigidity, LinearModel
from .normal_equations import misfit
from .sources import from_jacobian

__all__ = ["polyfit"]


def polyfit(
    coefficients: Any, x: Values, y: Values, *, w: Values | None = None, scale: float | None = None
) -> FitRigidity:
    r"""Error bars of `polyfit(numpy.polyfit(x, y, degree), x, y)`.

    `parameter_covariance` equals that of `numpy.polyfit(..., cov=True)`, or with `scale=1.0` that
    of `cov="unscaled"`. Data that do not satisfy the fit's normal equations are refused.

    Args:
        coefficients: The coefficients as `numpy.polyfit` returned them, the highest power first;
            or a fitted series of `numpy.polynomial` (`Polynomial`, `Chebyshev`, ...), whose domain,
            window and order of coefficients are used.
        x: (N,) the fit's inputs.
        y: (N,) its targets.
        w: (N,) NumPy's weights, applied to the residuals: $1/\sigma_i$, not $1/\sigma_i^2$.
        scale: The residual standard deviation in units of 1/w, if known.

    Raises:
        ValueError: The coefficients are not the fit of these data.

    Examples:
        >>> fit = polyfit([1.0, 0.0], x=[-1.0, 0.0, 1.0], y=[-0.9, -0.2, 1.1])
        >>> fit.predict([0.0]).std.item() ** 2  # 0.06 / 3
        0.02...
    """
    is_series = hasattr(coefficients, "basis")
    if is_series:
        parameters, basis = _series(coefficients)
    else:
        parameters, basis = _powers(coefficients)

    def rows_at(x: Any) -> Tensor:
        """The design matrix (M, P) at new inputs."""
        return basis(column(x, "x", as_tensor(x).numel()))

    rows = rows_at(x)
    target = column(y, "y", len(rows))
    residuals = target - rows @ parameters
    weights = None if w is None else column(w, "w", len(rows)).square()
    fit = from_jacobian(rows, residuals, weights=weights, scale=scale, parameters=parameters)

    defect = misfit(fit, rows, target, weights)
    if defect is not None:
        remedy = (
            "Pass x, y and w exactly as they were given to numpy's fit, with all its coefficients."
        )
        reversed_fit = replace(fit, parameters=parameters.flip(0))
        if not is_series and misfit(reversed_fit, rows, target, weights) is None:
            remedy = (
                "In reverse order they are: numpy.polynomial puts the lowest power first, but "
                "here the highest power comes first, as in numpy.polyfit. Pass "
                "coefficients[::-1], or the series itself, Polynomial.fit(x, y, degree)."
            )
        raise ValueError(f"{defect} {remedy}")
    return replace(fit, model=LinearModel(rows_at, parameters))


def _powers(coefficients: Values) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Coefficients (P,) and the powers x (N,) -> (N, P) that they multiply, the highest first."""
    values = float64(coefficients, "coefficients").reshape(-1)
    powers = torch.arange(len(values) - 1, -1, -1)
    return values, lambda x: x[:, None] ** powers


def _series(series: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Coefficients (P,) and the basis functions x (N,) -> (N, P) of a series of NumPy."""
    values = float64(series.coef, "coefficients", 1)

    def basis(x: Tensor) -> Tensor:
        """The basis functions of the series at x, (N, P)."""
        columns = []
        for degree in range(len(values)):
            basis_function = series.basis(degree, series.domain, series.window)
            columns.append(torch.as_tensor(basis_function(x.numpy())))
        return torch.stack(columns, 1)

    return values, basis
