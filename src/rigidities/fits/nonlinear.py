r"""Nonlinear least squares by SciPy: `curve_fit` and `least_squares`.

The variance of a prediction is $g^\top C g$ with $g = \partial f(x) / \partial w$ at the fitted
parameters and $C = s^2 (J^\top J)^{-1}$ their covariance: the Gauss-Newton rigidity. C comes from
what SciPy returned, or from the data. g comes from the user's Jacobian, or from central differences
of f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..prediction.derived import differences
from .arrays import Values, as_tensor, column, float64
from .fit_rigidity import FitRigidity, Model
from .sources import from_covariance, from_jacobian, residual_variance, shared_sigma, with_fixed

__all__ = ["curve_fit", "least_squares"]

Function = Callable[[Any], Any]
"""Parameters (P,) as a NumPy array -> predictions (M,)."""


def curve_fit(
    f: Callable[..., Any],
    popt: Values,
    pcov: Values | None = None,
    *,
    x: Any = None,
    y: Values | None = None,
    sigma: Values | None = None,
    absolute_sigma: bool = False,
    scale: float | None = None,
    jac: Callable[..., Any] | None = None,
) -> FitRigidity:
    r"""Error bars of `scipy.optimize.curve_fit`: pass f and what SciPy returned.

    Args:
        f: The function f(x, *parameters) -> (M,) that you passed to SciPy. As there, a list of
            numbers reaches it as an array.
        popt: (P,) the fitted parameters.
        pcov: (P, P) their covariance as SciPy returned it, which accounts for `sigma` and
            `absolute_sigma`.
        x: The fit's inputs. They are required if pcov is missing. With pcov, x and y serve to
            estimate the residual variance (`predict(noise=True)`) and the degrees of freedom
            (`interval`).
        y: (N,) the fit's targets.
        sigma: The standard deviations of the observations, (N,) or one number, as you passed them
            to SciPy.
        absolute_sigma: As you passed it to SciPy.
        scale: The residual standard deviation in units of sigma, if known; 1.0 means that sigma is
            absolute.
        jac: The function jac(x, *parameters) -> (M, P); None for central differences of f.

    Raises:
        ValueError: SciPy could not estimate the covariance (it is infinite), or neither pcov nor
            data were passed.
    """
    parameters = float64(popt, "popt").reshape(-1)
    if pcov is None and (x is None or y is None):
        raise ValueError("Expected pcov, or x and y of the fit, got neither. Pass one of them.")
    if absolute_sigma and scale not in (None, 1.0):
        raise ValueError(f"An absolute sigma has scale 1, got {scale}. Pass one of the two.")
    covariance = None
    spread = torch.zeros_like(parameters)  # unknown
    if pcov is not None:
        covariance = _finite_covariance(pcov, len(parameters))
        spread = covariance.diagonal().sqrt()
    derivative = None if jac is None else lambda w, x: jac(x, *w)
    model = _model(lambda w, x: f(x, *w), parameters, spread, derivative)
    if absolute_sigma:
        scale = 1.0

    common_sigma: float | None
    if sigma is not None:
        common_sigma = shared_sigma(_weights(sigma, as_tensor(sigma).numel()).sqrt())
    elif scale == 1.0:
        common_sigma = None  # an absolute sigma that was not given
    else:
        common_sigma = 1.0

    degrees_of_freedom = math.inf
    if x is not None and y is not None:
        mean, rows = model(x)
        weights = _weights(sigma, len(mean))
        residuals = column(y, "y", len(mean)) - mean
        fit = from_jacobian(rows, residuals, weights=weights, scale=scale, parameters=parameters)
        scale = fit.scale
        degrees_of_freedom = fit.degrees_of_freedom
    if covariance is not None:  # SciPy's covariance takes precedence
        fit = from_covariance(
            covariance,
            parameters=parameters,
            scale=scale,
            degrees_of_freedom=degrees_of_freedom,
        )
    return replace(fit, model=model, sigma=common_sigma)


def least_squares(
    result: Any,
    f: Callable[[Any, Any], Any] | None = None,
    *,
    scale: float | None = None,
    jac: Callable[[Any, Any], Any] | None = None,
) -> FitRigidity:
    r"""Error bars of `scipy.optimize.least_squares`.

    SciPy scales its Jacobian so that $J^\top J$ approximates the Hessian, also for a robust loss.
    The covariance is $2\,\mathrm{cost} / (n - p)\, (J^\top J)^{-1}$, equal to the `pcov` of
    `curve_fit(loss=...)`. For the squared loss the factor $2\,\mathrm{cost} / (n - p)$ is the
    residual variance, which `predict(noise=True)` adds. (If each residual was divided by its sigma,
    pass `noise=fit.noise * sigma_new**2`.) For a robust loss (`soft_l1`, `cauchy`, ...) it is not,
    and the noise is unknown (None) unless `scale` is given. Parameters at a bound (`active_mask`)
    stay fixed and are not counted: `FitRigidity.fixed` lists them, and there is a warning.

    Args:
        result: The object that SciPy returned.
        f: The function f(parameters, x) -> (M,), for `predict`. A list of numbers as x reaches it
            as an array.
        scale: The residual standard deviation, if known: 1.0 if the residuals were already divided
            by it. Its square also replaces the factor above in the covariance.
        jac: The function jac(parameters, x) -> (M, P); None for central differences of f.

    Raises:
        TypeError: The result is not SciPy's, or its Jacobian has no entries.
        ValueError: All parameters are at a bound, the Jacobian is singular, or no degrees of
            freedom are left.
    """
    jacobian = _dense_jacobian(result)
    parameters = float64(result.x, "result.x", 1)
    n, width = jacobian.shape
    active_mask = getattr(result, "active_mask", None)
    if active_mask is None:
        active_mask = [0] * width
    free = [i for i in range(width) if not active_mask[i]]
    fixed = tuple(i for i in range(width) if active_mask[i])
    if not free:
        raise ValueError(
            "All parameters are at a bound, so no prediction can vary. Widen the bounds."
        )

    noise: float | None
    if scale is not None:
        degrees_of_freedom = math.inf
        factor = scale**2
        noise = factor
    else:
        degrees_of_freedom = float(n - len(free))
        factor = residual_variance(2 * float(result.cost), degrees_of_freedom)
        noise = None if _has_robust_loss(result) else factor
    fit = with_fixed(from_jacobian(jacobian[:, free], scale=scale), fixed)
    fit = replace(fit, scale=math.sqrt(factor))  # zero if all residuals are zero
    return replace(
        fit,
        parameters=parameters,
        noise=noise,
        sigma=None if scale == 1.0 else 1.0,
        degrees_of_freedom=degrees_of_freedom,
        model=None if f is None else _model(f, parameters, fit.parameter_std, jac),
    )


def _has_robust_loss(result: Any) -> bool:
    """Whether the cost differs from half the sum of squares."""
    residuals = getattr(result, "fun", None)
    if residuals is None:
        return False
    squares = float(float64(residuals, "result.fun").square().sum())
    return not math.isclose(2 * float(result.cost), squares, rel_tol=1e-6)


def _model(
    f: Callable[[Any, Any], Any],
    parameters: Tensor,
    spread: Tensor,
    jac: Callable[[Any, Any], Any] | None,
) -> Model:
    """The model: x -> predictions of f and their derivatives, at the fitted parameters.

    Args:
        f: f(parameters, x) -> (M,).
        parameters: (P,).
        spread: (P,) a scale for each parameter, for the steps of differences; zero if unknown.
        jac: jac(parameters, x) -> (M, P); None for differences.
    """

    def model(x: Any) -> tuple[Tensor, Tensor]:
        """Predictions (M,) and their derivatives (M, P)."""
        x = _array_of_list(x)
        mean = _evaluated(lambda w: f(w, x), parameters)
        if jac is None:
            return mean, _central_differences(lambda w: f(w, x), parameters, spread)
        rows = float64(jac(parameters.numpy().copy(), x), "jac", 2)
        if tuple(rows.shape) != (len(mean), len(parameters)):
            raise ValueError(
                f"Expected jac to return ({len(mean)}, {len(parameters)}), got {tuple(rows.shape)}."
            )
        return mean, rows

    return model


def _array_of_list(x: Any) -> Any:
    """A list of numbers, or of lists of numbers, as an array; anything else as it is."""
    import numpy as np

    entry = x
    while isinstance(entry, list) and entry:
        entry = entry[0]
    if isinstance(x, list) and isinstance(entry, Real):
        return np.asarray(x, dtype=float)
    return x


def _evaluated(function: Function, parameters: Tensor) -> Tensor:
    """The function's predictions (M,) in float64; a scalar is one prediction."""
    values = float64(function(parameters.numpy().copy()), "the model's predictions")
    if values.squeeze().ndim > 1:
        raise ValueError(
            f"Expected the model to return one prediction per row, (M,), got {tuple(values.shape)}."
        )
    return values.reshape(-1)


def _central_differences(function: Function, parameters: Tensor, spread: Tensor) -> Tensor:
    r"""Derivatives (M, P) of function(parameters) (M,).

    The step is $h = \epsilon^{1/7}$ times the parameter's scale, where $\epsilon$ is the precision
    *of the function's output* (a JAX function returns float32 by default). Truncation and rounding
    are then both near $\epsilon^{6/7}$, 4e-14 in float64 and 1e-6 in float32.

    Args:
        function: Parameters as a NumPy array -> predictions (M,).
        parameters: (P,).
        spread: (P,) a scale for each parameter, such as its standard error; zero if unknown.
    """
    values = as_tensor(function(parameters.numpy().copy()))
    dtype = values.dtype if values.is_floating_point() else torch.float64
    steps = _steps(parameters, spread, torch.finfo(dtype).eps)
    changes, _ = differences(lambda d: _evaluated(function, parameters + d), steps.diag())
    return changes.mT / steps


def _steps(parameters: Tensor, spread: Tensor, epsilon: float) -> Tensor:
    """Steps h near epsilon^(1/7) min(|p|, spread), powers of two so that p + h - p is h."""
    size = parameters.abs()
    scale = torch.where((size > 0) & (spread > 0), torch.minimum(size, spread), size + spread)
    scale = torch.where(scale > 0, scale, 1.0)
    step = torch.maximum(epsilon ** (1 / 7) * scale, epsilon ** (2 / 3) * size)
    return 2 ** step.log2().round()


def _finite_covariance(pcov: Values, width: int) -> Tensor:
    """The covariance (P, P); refuses the infinite one that SciPy returns when it has none."""
    import numpy as np

    if np.isinf(np.asarray(pcov)).any():
        raise ValueError(
            "SciPy could not estimate the parameters' covariance (pcov is infinite): the data do "
            "not determine all of them, or leave no degrees of freedom. Fix a parameter, add "
            "data, or pass sigma with absolute_sigma=True."
        )
    covariance = float64(pcov, "pcov")
    if tuple(covariance.shape) != (width, width):
        raise ValueError(
            f"Expected pcov of shape ({width}, {width}) for {width} parameters, got "
            f"{tuple(covariance.shape)}."
        )
    return covariance


def _weights(sigma: Values | None, rows: int) -> Tensor:
    """1 / sigma^2 of each row, (N,); ones without sigma."""
    if sigma is None:
        return torch.ones(rows, dtype=torch.float64)
    values = float64(sigma, "sigma")
    if values.ndim == 2 and min(values.shape) > 1:
        raise ValueError(
            f"Expected one sigma per observation, got {tuple(values.shape)}. Correlated noise is "
            "part of pcov: pass pcov and leave x, y and sigma out."
        )
    if values.ndim == 0:
        values = values.expand(rows)
    else:
        values = column(values, "sigma", rows)
    if not bool((values > 0).all()):
        raise ValueError(f"Expected sigma above zero, got {float(values.min()):.3g}.")
    return values.square().reciprocal()


def _dense_jacobian(result: Any) -> Tensor:
    """SciPy's Jacobian as a matrix (N, P); sparse ones are written out."""
    jacobian = getattr(result, "jac", None)
    if jacobian is None or not hasattr(result, "cost"):
        raise TypeError(
            "Expected the result of scipy.optimize.least_squares (with jac, cost and x), got "
            f"{type(result).__name__} without them. For other fits use from_jacobian or "
            "from_covariance."
        )
    if hasattr(jacobian, "toarray"):
        jacobian = jacobian.toarray()
    if hasattr(jacobian, "rmatvec"):
        raise TypeError(
            "Expected a Jacobian with entries, got a LinearOperator. Pass its matrix to "
            "from_jacobian: jac @ numpy.eye(jac.shape[1])."
        )
    return float64(jacobian, "result.jac", 2)
