r"""Linear fits, $\tilde y = x^\top w$ (+ intercept), by statsmodels, scikit-learn and NumPy.

The parameters come from the fitted object. The covariance comes from the same object (statsmodels,
`BayesianRidge`), or from the training data (`from_jacobian`). These data must be those of the fit:
parameters that are not the minimum for them are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .arrays import Values, as_tensor, column, float64
from .fit_rigidity import FitRigidity, LinearModel
from .sources import from_covariance, from_jacobian, shared_sigma, weight_roots, with_fixed

__all__ = ["linear", "polyfit"]


def linear(
    results: Any,
    X: Values | None = None,
    y: Values | None = None,
    *,
    sample_weight: Values | None = None,
) -> FitRigidity:
    r"""Error bars of a linear fit, recognised by its class and attributes.

    - statsmodels OLS, WLS, GLS results: the covariance is the one that the results report, even if
      it is a robust one. `predict(x).std` equals `get_prediction(x).se_mean`. With
      `noise=fit.noise / weight` it equals `se_obs` for new weights; `noise=True` uses the weight
      that all rows share. x has the columns of the design matrix, including the constant. Models
      whose mean is not a linear function (Poisson, Logit, Probit) are refused.
    - scikit-learn `LinearRegression`, `Ridge`, `RidgeCV` with their training data: the variance is
      $\sigma^2 x^\top (X^\top X + \alpha I)^{-1} x$. The intercept is a column that is not
      penalised, and $\sigma^2$ comes from the residuals over n minus the effective number of
      parameters. With $\alpha > 0$ it is the Bayesian variance (prior variance
      $\sigma^2 / \alpha$), which includes the bias of the penalised fit. Data that do not satisfy
      the fit's normal equations $X^\top W r = \alpha w$ are refused. With `positive=True`,
      coefficients at zero stay fixed, with a warning: `FitRigidity.fixed` lists them.
    - scikit-learn `BayesianRidge`: the covariance is that of its own posterior.
      `predict(x, noise=True).std` equals its `predict(x, return_std=True)`, which treats the
      intercept as known.

    Args:
        results: The fitted object.
        X: (N, P) inputs that a scikit-learn `LinearRegression` or `Ridge` was fitted on.
        y: (N,) targets that it was fitted on.
        sample_weight: (N,) weights, if it was fitted with any.

    Raises:
        TypeError: The object is not a linear least-squares fit.
        ValueError: It is not fitted, or the data are missing or not those of the fit.
    """
    class_names = {kind.__name__ for kind in type(results).__mro__}
    if hasattr(results, "cov_params") and hasattr(getattr(results, "model", None), "exog"):
        return _from_statsmodels(results)
    if "BayesianRidge" in class_names:
        _check_fitted(results)
        return _from_bayesian_ridge(results)
    if class_names & {"LinearRegression", "Ridge", "RidgeCV"}:
        _check_fitted(results)
        return _from_sklearn(results, X, y, sample_weight)
    raise TypeError(
        "Expected statsmodels results of OLS, WLS or GLS, or a fitted scikit-learn "
        f"LinearRegression, Ridge, RidgeCV or BayesianRidge, got {type(results).__name__}. For "
        "other fits use from_jacobian or from_covariance."
    )


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
    parameters, basis = _series(coefficients)

    def rows_at(x: Any) -> Tensor:
        """The design matrix (M, P) at new inputs."""
        return basis(column(x, "x", as_tensor(x).numel()))

    model = LinearModel(rows_at, parameters)
    mean, rows = model(x)
    residuals = column(y, "y", len(mean)) - mean
    weights = None if w is None else column(w, "w", len(mean)).square()
    fit = from_jacobian(rows, residuals, weights=weights, scale=scale, parameters=parameters)
    no_penalties = torch.zeros_like(parameters)
    remedy = "Pass x, y and w exactly as they were given to numpy's fit, with all its coefficients."
    if not hasattr(coefficients, "basis"):
        reversed_parameters = parameters.flip(0)
        reversed_fit = replace(fit, parameters=reversed_parameters)
        reversed_residuals = residuals + mean - rows @ reversed_parameters
        defect = _defect(reversed_fit, rows, reversed_residuals, weights, no_penalties)
        if defect is None:
            remedy = (
                "In reverse order they are: numpy.polynomial puts the lowest power first, but "
                "here the highest power comes first, as in numpy.polyfit. Pass "
                "coefficients[::-1], or the series itself, Polynomial.fit(x, y, degree)."
            )
    _check_minimum(fit, rows, residuals, weights, no_penalties, remedy)
    return replace(fit, model=model)


def _from_statsmodels(results: Any) -> FitRigidity:
    """The fit of OLS, WLS and GLS results, with the covariance that they report."""
    parameters = float64(results.params, "params", 1)
    design = float64(results.model.exog, "exog", 2)
    _check_linear(results, design, parameters)
    fit = from_covariance(
        results.cov_params(),
        parameters=parameters,
        scale=math.sqrt(float(results.scale)),
        degrees_of_freedom=float(results.df_resid) if results.use_t else math.inf,
    )
    model = LinearModel(_Design(len(parameters)), parameters)
    return replace(fit, model=model, sigma=_statsmodels_sigma(results.model))


def _statsmodels_sigma(model: Any) -> float | None:
    """The sigma that all observations share, in units of the residual scale, or None."""
    sigma = getattr(model, "sigma", None)  # only GLS has it, as a covariance; others have weights
    if sigma is None:
        weights = float64(getattr(model, "weights", 1.0), "sigma")
        return shared_sigma(weights**0.5)
    variances = float64(sigma, "sigma")
    if variances.ndim == 2:
        variances = variances.diagonal()
    return shared_sigma(variances**-0.5)


def _check_linear(results: Any, design: Tensor, parameters: Tensor) -> None:
    """Refuse statsmodels results whose mean is not linear, or whose scale is not a variance.

    The `fittedvalues` of Poisson, Logit and Probit are on the scale of the link, where they are
    linear, so `predict` is compared too.
    """
    name = type(results.model).__name__
    if "QuantReg" in {kind.__name__ for kind in type(results.model).__mro__}:
        raise TypeError(
            f"Expected a least-squares fit, got {name}, whose scale is not a residual variance. "
            "For bars without noise, pass its cov_params() to from_covariance."
        )
    is_linear = len(parameters) == design.shape[1]
    for values in (results.fittedvalues, results.predict()):
        mean = float64(values, "the fitted values")
        is_linear = is_linear and mean.ndim == 1
        is_linear = is_linear and torch.allclose(design @ parameters, mean, rtol=1e-6, atol=1e-9)
    if not is_linear:
        raise TypeError(
            f"Expected a linear fit (OLS, WLS, GLS), got {name}, whose mean is not its design "
            "matrix times its parameters: the bars would be on the scale of the link, with a "
            "noise of 1. Use its own get_prediction(x), or PredictionRigidity(f, params, "
            "loss=...) where f is the mean that it predicts."
        )


def _from_sklearn(
    model: Any, X: Values | None, y: Values | None, sample_weight: Values | None
) -> FitRigidity:
    """The fit of a `LinearRegression`, `Ridge` or `RidgeCV`, with its training data."""
    if X is None or y is None:
        raise ValueError(
            f"{type(model).__name__} keeps no covariance. Pass the X and y that it was fitted on."
        )
    design = float64(X, "X", 2)
    parameters = float64(model.coef_, "coef_").squeeze()
    if parameters.ndim > 1:
        raise ValueError(
            f"Expected a fit of one target, got coef_ {tuple(parameters.shape)}. Fit each target "
            "separately; they share the design matrix."
        )
    parameters = parameters.reshape(-1)
    width = len(parameters)
    penalties = torch.full_like(parameters, _alpha(model))
    if model.fit_intercept:
        intercept = float64(model.intercept_, "intercept_").reshape(1)
        parameters = torch.cat([parameters, intercept])
        penalties = torch.cat([penalties, torch.zeros(1, dtype=torch.float64)])
    fitted_model = LinearModel(_Design(width, bool(model.fit_intercept)), parameters)
    mean, rows = fitted_model(design)
    fixed: tuple[int, ...] = ()
    if getattr(model, "positive", False):
        fixed = tuple((parameters[:width] == 0).nonzero().flatten().tolist())
    free = [i for i in range(len(parameters)) if i not in fixed]
    if not free:
        raise ValueError("All coefficients are fixed at zero, so no prediction can vary.")
    residuals = column(y, "y", len(mean)) - mean
    penalty = penalties[free].diag() if bool(penalties.any()) else None
    fit = from_jacobian(rows[:, free], residuals, weights=sample_weight, penalty=penalty)
    fit = replace(fit, parameters=parameters[free])
    remedy = (
        "Pass X, y and sample_weight exactly as they were given to fit(), or fit with a smaller "
        "tol."
    )
    _check_minimum(fit, rows[:, free], residuals, sample_weight, penalties[free], remedy)
    return replace(with_fixed(fit, fixed), parameters=parameters, model=fitted_model)


def _check_minimum(
    fit: FitRigidity,
    rows: Tensor,
    residuals: Tensor,
    weights: Values | None,
    penalties: Tensor,
    remedy: str,
) -> None:
    """Refuse data for which the parameters are not the minimum.

    Args:
        fit: The fit, with its parameters.
        rows: The design matrix (N, P).
        residuals: (N,).
        weights: Weights of the rows, (N,), or None.
        penalties: The diagonal of the penalty, (P,).
        remedy: The last sentence of the error message.
    """
    defect = _defect(fit, rows, residuals, weights, penalties)
    if defect is not None:
        raise ValueError(
            "The parameters do not fit these data: a new fit would lower the sum of squares "
            f"{defect.squares:.3g} by {defect.lowered:.3g}. {remedy}"
        )


@dataclass(frozen=True)
class _Defect:
    """A sum of squares, and by how much a new fit would lower it."""

    squares: float
    lowered: float


def _defect(
    fit: FitRigidity, rows: Tensor, residuals: Tensor, weights: Values | None, penalties: Tensor
) -> _Defect | None:
    r"""How far the parameters are from the minimum; None where they are at it.

    A new fit would lower $\sum w r^2$ by $d^\top H^{-1} d$ with $d = X^\top W r - \alpha w$. The
    normal equations say that d vanishes, up to rounding or the tolerance of an iterative solver.
    The arguments are those of `_check_minimum`.
    """
    assert fit.parameters is not None
    weight = weight_roots(weights, len(rows)).square()
    normal_equations = rows.mT @ (weight * residuals) - penalties * fit.parameters
    lowered = float((normal_equations @ fit.root).square().sum())
    squares = float((weight * residuals.square()).sum())
    # For exact data the squares are zero: rounding, even of float32, is compared with the signal.
    signal = float((weight * (rows.abs() @ fit.parameters.abs()).square()).sum())
    if lowered <= 1e-4 * squares + 1e-12 * signal:
        return None
    return _Defect(squares, lowered)


def _from_bayesian_ridge(model: Any) -> FitRigidity:
    """The fit of a `BayesianRidge`, with its own posterior."""
    parameters = float64(model.coef_, "coef_", 1)
    scale = 1 / math.sqrt(float(model.alpha_))
    fit = from_covariance(model.sigma_, parameters=parameters, scale=scale)
    centred_model = _CentredModel(
        design=_Design(len(parameters)),
        parameters=parameters,
        offset=float64(model.X_offset_, "X_offset_"),
        intercept=float(model.intercept_),
    )
    return replace(fit, model=centred_model)


@dataclass(frozen=True)
class _Design:
    """x -> rows of a design matrix (M, width), checked; with a column of ones if `intercept`."""

    width: int
    intercept: bool = False

    def __call__(self, x: Any) -> Tensor:
        rows = float64(x, "x", 2)
        if rows.shape[1] != self.width:
            raise ValueError(f"Expected x with {self.width} columns, got {tuple(rows.shape)}.")
        if not self.intercept:
            return rows
        return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


@dataclass(frozen=True)
class _CentredModel:
    """A linear model with a known intercept: derivatives are relative to the training mean."""

    design: _Design
    parameters: Tensor
    offset: Tensor
    intercept: float

    def __call__(self, x: Any) -> tuple[Tensor, Tensor]:
        rows = self.design(x)
        return rows @ self.parameters + self.intercept, rows - self.offset


def _series(coefficients: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Coefficients, and the basis functions x (N,) -> (N, P) that they multiply."""
    if not hasattr(coefficients, "basis"):
        values = float64(coefficients, "coefficients").reshape(-1)
        powers = torch.arange(len(values) - 1, -1, -1)
        return values, lambda x: x[:, None] ** powers
    series = coefficients
    values = float64(series.coef, "coefficients", 1)

    def basis(x: Tensor) -> Tensor:
        """The basis functions of the series at x, (N, P)."""
        columns = []
        for degree in range(len(values)):
            basis_function = series.basis(degree, series.domain, series.window)
            columns.append(torch.as_tensor(basis_function(x.numpy())))
        return torch.stack(columns, 1)

    return values, basis


def _alpha(model: Any) -> float:
    """The penalty of a ridge fit, zero for plain least squares."""
    alpha = float64(getattr(model, "alpha_", getattr(model, "alpha", 0.0)), "alpha")
    if alpha.numel() > 1:
        raise ValueError(
            f"Expected one alpha, got {tuple(alpha.shape)}. Fit each target separately."
        )
    return float(alpha)


def _check_fitted(model: Any) -> None:
    """Refuse a scikit-learn model without coefficients."""
    if not hasattr(model, "coef_"):
        raise ValueError(f"This {type(model).__name__} is not fitted. Call its fit(X, y) first.")
