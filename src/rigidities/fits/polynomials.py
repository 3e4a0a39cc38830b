r"""Polynomials by NumPy: `numpy.polyfit` and the series of `numpy.polynomial`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .arrays import Values, column, float64
from .fit_rigidity import FitRigidity
from .sources import from_jacobian


def polyfit(
    coefficients: Any,
    x: Values,
    y: Values,
    *,
    w: Values | None = None,
    scale: float | None = None,
) -> FitRigidity:
    r"""Error bars of `polyfit(numpy.polyfit(x, y, degree), x, y)`.

    `parameter_covariance` equals that of `numpy.polyfit(..., cov=True)`, with `scale=1.0` that of
    `cov="unscaled"`.

    Args:
        coefficients: as NumPy returned them, the highest power first; or a fitted series of
            `numpy.polynomial` (`Polynomial`, `Chebyshev`, ...), with its domain and window and its
            own order of coefficients.
        x: (N,) the fit's inputs.
        y: (N,) its targets.
        w: (N,) NumPy's weights, applied to the residuals: $1/\sigma_i$, not $1/\sigma_i^2$.
        scale: the residual standard deviation in units of 1/w, where known.

    Examples:
        >>> fit = polyfit([1.0, 0.0], x=[-1.0, 0.0, 1.0], y=[-0.9, -0.2, 1.1])
        >>> fit.predict([0.0]).std.item() ** 2  # 0.06 / 3
        0.02...
    """
    parameters, basis = _series(coefficients)
    inputs = float64(x, "x").reshape(-1)
    rows = basis(inputs)
    residuals = column(y, "y", len(inputs)) - rows @ parameters
    weights = None if w is None else column(w, "w", len(inputs)).square()
    fit = from_jacobian(rows, residuals, weights=weights, scale=scale, parameters=parameters)

    def model(x: Any) -> tuple[Tensor, Tensor]:
        rows = basis(float64(x, "x").reshape(-1))
        return rows @ parameters, rows

    return replace(fit, model=model)


def _series(coefficients: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Coefficients, and the basis functions x (N,) -> (N, P) that they multiply."""
    if not hasattr(coefficients, "basis"):
        values = float64(coefficients, "coefficients").reshape(-1)
        powers = torch.arange(len(values) - 1, -1, -1)
        return values, lambda x: x[:, None] ** powers
    series, coef = coefficients, float64(coefficients.coef, "coefficients", 1)

    def basis(x: Tensor) -> Tensor:
        functions = [series.basis(i, series.domain, series.window) for i in range(len(coef))]
        return torch.stack([torch.as_tensor(function(x.numpy())) for function in functions], 1)

    return coef, basis
