"""A fitted model as rows and a small torch module that is linear in its last trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge, RidgeCV
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.neural_network import MLPRegressor
from torch import Tensor, nn

from ..losses import Huber, LossLike
from ..notices import notify
from ..theory.closed_forms import SubsetOfRegressors
from ..trees import SQUARED, SUPPORTED, Forest, is_forest
from .data import as_tensor

EXACT = (BayesianRidge, KernelRidge, LinearRegression, Ridge, RidgeCV)
"""Models that are linear in everything that was trained. For these, a training row that a formula
leaves out is as good as a row that was held out."""

_INTERCEPT_HEIGHT = 1e3
"""Value of an intercept's column where the ridge is not known yet."""

_INTERCEPT_PENALTY = 1e-8
"""Share of an intercept's precision that a known ridge may take, by the height of its column.

A much smaller share would cost digits of the other columns, since the column would be larger.
"""

_TINY_RIDGE = 1e-12
"""The ridge of a base that has none, relative to the mean square of a column."""


class EstimatorReadout(NamedTuple):
    """A fitted model as the library reads it.

    Attributes:
        rows: Function from the model's inputs to the module's.
        module: Predicts the transformed target, (N, K), and is linear in its last weights.
        loss: The loss that the model was trained with.
        ridge: The penalty of these weights if it is known, in units of the module's rows.
    """

    rows: Callable[[Any], Tensor]
    module: nn.Module
    loss: LossLike = "mse"
    ridge: Any = None


class IgnoringWeight(nn.Sequential):
    """A module for batches that contain the weights of rows, which only the fit uses."""

    def forward(self, input: Tensor, weight: Tensor | None = None) -> Any:
        """The module's output, whatever the weight."""
        return self[0](input)


def readout_of(model: Any, X: Any, weight: Any, ridge: Any) -> EstimatorReadout:
    """How the library reads a model.

    Args:
        model: The last regressor of a chain, fitted.
        X: Its training inputs, after all transformers.
        weight: Weights of the training rows, or None.
        ridge: The user's ridge, or "search"; None takes the model's own penalty.
    """
    if is_forest(model):
        forest = Forest(model, X)
        return EstimatorReadout(rows=forest.rows, module=forest.module)
    if isinstance(model, MLPRegressor):
        return _perceptron_readout(model)
    if isinstance(model, KernelRidge):
        return _kernel_readout(model, ridge)
    if hasattr(model, "module_") and hasattr(model, "criterion_"):
        return _skorch_readout(model)
    if hasattr(model, "coef_") and hasattr(model, "intercept_"):
        return _linear_readout(model, X, weight, ridge)
    raise TypeError(
        f"Cannot read {type(model).__name__}: it has no linear weights from a least-squares fit. "
        "Supported are linear models, MLPRegressor, KernelRidge, skorch's networks, "
        f"{SUPPORTED}."
    )


def _skorch_readout(model: Any) -> EstimatorReadout:
    """A network of skorch, which brings its own torch module."""
    scalar_like_weights = next(model.module_.parameters()).detach().new_zeros(())
    rows = partial(as_tensor, like=scalar_like_weights)
    return EstimatorReadout(rows=rows, module=model.module_, loss=_training_loss(model))


def _perceptron_readout(model: Any) -> EstimatorReadout:
    """The network of an `MLPRegressor`, layer by layer in torch."""
    activations = {
        "identity": nn.Identity,
        "logistic": nn.Sigmoid,
        "tanh": nn.Tanh,
        "relu": nn.ReLU,
    }
    layers: list[nn.Module] = []
    for coefficients, intercept in zip(model.coefs_, model.intercepts_, strict=True):
        layers.append(_linear_layer(as_tensor(coefficients).mT, as_tensor(intercept)))
        layers.append(activations[model.activation]())
    # The output has no activation.
    module = nn.Sequential(*layers[:-1])
    return EstimatorReadout(rows=as_tensor, module=module, loss=_training_loss(model))


@dataclass(frozen=True)
class _StandardisedColumns:
    """Rows of a linear model: its columns that count, standardised, then the intercept's if any.

    Attributes:
        is_used: Which columns count, (P,).
        centre: Of the columns that count, (D,).
        spread: What they are divided by, (D,).
        height: Value of the intercept's column; None without an intercept.
    """

    is_used: Tensor
    centre: Tensor
    spread: Tensor
    height: float | None

    def __call__(self, X: Any) -> Tensor:
        """(N, D), or (N, D + 1) with an intercept."""
        rows = (as_tensor(X)[:, self.is_used] - self.centre) / self.spread
        if self.height is None:
            return rows
        intercept_column = rows.new_full((len(rows), 1), self.height)
        return torch.cat([rows, intercept_column], 1)


def _linear_readout(model: Any, X: Any, weight: Any, ridge: Any) -> EstimatorReadout:
    """Any model with `coef_`, in columns that are centred where it has an intercept."""
    coefficients = as_tensor(np.atleast_2d(model.coef_))  # (K, P)
    design = as_tensor(X)  # (N, P)
    has_intercept = bool(getattr(model, "fit_intercept", True))

    # A coefficient that the training has set to zero (Lasso) brings no variance.
    every_column_counts = isinstance(model, EXACT) and not getattr(model, "positive", False)
    if every_column_counts or not coefficients.any():
        is_used = torch.ones(coefficients.shape[1], dtype=torch.bool)
    else:
        is_used = (coefficients != 0).any(0)
    coefficients = coefficients[:, is_used]
    design = design[:, is_used]

    # Weighted mean and standard deviation of each column, (D,).
    row_weights = design.new_ones(len(design)) if weight is None else as_tensor(weight).reshape(-1)
    shares = (row_weights / row_weights.sum())[:, None]  # (N, 1)
    if has_intercept:
        centre = (shares * design).sum(0)
    else:
        centre = design.new_zeros(design.shape[1])
    spread = (shares * (design - centre).square()).sum(0).sqrt()
    spread = torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)  # constant columns

    total_weight = float(row_weights.sum())
    if ridge is None:
        ridge = own_ridge(model)
    if isinstance(ridge, Real):
        asked = float(ridge)
        if asked:
            # A ridge belongs to the columns as they are: divided by one number, its ratios stay.
            spread = torch.full_like(spread, float(spread.max()))
            ridge = asked / float(spread[0]) ** 2
        else:
            ridge = _TINY_RIDGE * total_weight
        weighted_rows = row_weights.sqrt()[:, None] * (design - centre) / spread
        least = _least_ridge(weighted_rows, total_weight)
        if asked and ridge < least:
            used = least * float(spread[0]) ** 2
            notify(
                f"The penalty {asked:g} is lost in the rounding of these columns, whose units or "
                f"directions differ by many orders of magnitude, and error bars use {used:.2g}. "
                "Standardise the columns (StandardScaler), or drop those that depend on others."
            )
        ridge = max(ridge, least)

    height = None
    if has_intercept:
        height = _INTERCEPT_HEIGHT
        if isinstance(ridge, Real):
            height = max(1.0, (float(ridge) / (_INTERCEPT_PENALTY * total_weight)) ** 0.5)

    slopes = coefficients * spread  # by standardised columns
    if height is not None:
        intercept = as_tensor(model.intercept_).reshape(-1).expand(len(coefficients))
        at_centre = intercept + coefficients @ centre  # (K,)
        slopes = torch.cat([slopes, at_centre[:, None] / height], 1)
    return EstimatorReadout(
        rows=_StandardisedColumns(is_used, centre, spread, height),
        module=_linear_layer(slopes),
        loss=_training_loss(model),
        ridge=ridge,
    )


def _least_ridge(rows: Tensor, total_weight: float) -> float:
    """The ridge that weighted rows (N, D) need in float64; 0 if they need none.

    See `Posterior.with_ridge`, which refuses a smaller one.
    """
    eigenvalues = torch.linalg.eigvalsh(rows.mT @ rows)
    columns = rows.shape[1] + 1
    # An intercept has a column of mean square one.
    largest = max(float(eigenvalues[-1]), total_weight)
    floor = torch.finfo(torch.float64).eps * max(columns, 1000) * largest
    return 2 * floor if float(eigenvalues[0]) <= 2 * floor else 0.0


def own_ridge(model: Any) -> float | None:
    r"""$\varsigma^2$ of a ridge fit; 0 for plain least squares; None if unknown or several."""
    if not isinstance(model, EXACT):
        return None
    if isinstance(model, BayesianRidge) and hasattr(model, "lambda_"):
        # Precision of the weights over that of the noise.
        return float(model.lambda_ / model.alpha_)
    penalties = np.unique(getattr(model, "alpha_", getattr(model, "alpha", 0.0)))
    if len(penalties) != 1:
        return None
    return float(penalties[0])


def _training_loss(model: Any) -> LossLike:
    """The loss that a model was trained with: squared, or Huber's.

    Raises:
        ValueError: It is another one.
    """
    criterion = getattr(model, "criterion_", None)
    if isinstance(criterion, nn.Module):  # skorch's; LassoLarsIC has an array of that name
        name = type(criterion).__name__
        delta = getattr(criterion, "delta", None)
    else:
        name = model.get_params(deep=False).get("loss") or "squared_error"
        delta = getattr(model, "epsilon", None)

    is_huber_regressor = hasattr(model, "outliers_")
    if delta and (name in ("huber", "HuberLoss") or is_huber_regressor):
        # HuberRegressor learns the scale of its residuals, too.
        return Huber(delta * getattr(model, "scale_", 1.0))
    if name not in SQUARED:
        raise ValueError(
            f"Cannot read {type(model).__name__} with the loss {name!r}. Use the squared error, or "
            "Huber's loss for a linear model or network. For positive targets, train on their "
            "logarithms."
        )
    return "mse"


@dataclass(frozen=True)
class _KernelRows:
    """Rows of a kernel: its features, then the root of the variance that they leave.

    Attributes:
        regressors: Features of the kernel at the training points.
        rotation: Random and orthogonal, (D, D).
    """

    regressors: SubsetOfRegressors
    rotation: Tensor

    def __call__(self, X: Any) -> Tensor:
        """(N, D + 1)."""
        points = as_tensor(X)
        unexplained = self.regressors.unexplained(points)[:, None].sqrt()
        return torch.cat([self.regressors.features(points) @ self.rotation, unexplained], 1)


def _kernel_readout(model: Any, ridge: Any) -> EstimatorReadout:
    """Kernel ridge regression as a Gaussian process, with its own penalty."""
    if model.kernel == "precomputed":
        raise ValueError(
            "kernel='precomputed' does not show the inputs. Pass the kernel itself to KernelRidge."
        )
    training_points = as_tensor(model.X_fit_)
    regressors = SubsetOfRegressors(partial(_kernel, model), training_points, noise=1.0)
    # Calibration standardises features, and would learn those of single rows: rotated, none is.
    draws = np.random.default_rng(0).normal(size=(regressors.rank, regressors.rank))
    rotation = as_tensor(np.linalg.qr(draws)[0])

    dual = as_tensor(model.dual_coef_).reshape(len(training_points), -1).mT  # (K, N)
    slopes = dual @ regressors.features(training_points) @ rotation  # (K, D)
    zero_slope = slopes.new_zeros(len(slopes), 1)  # of the unexplained variance
    if ridge is None:
        ridge = own_ridge(model) or None
    return EstimatorReadout(
        rows=_KernelRows(regressors, rotation),
        module=_linear_layer(torch.cat([slopes, zero_slope], 1)),
        ridge=ridge,
    )


def _kernel(model: Any, X: Tensor, Z: Tensor) -> Any:
    """The kernel of a `KernelRidge` between two sets of points."""
    if callable(model.kernel):
        parameters = model.kernel_params or {}
    else:
        parameters = {"gamma": model.gamma, "degree": model.degree, "coef0": model.coef0}
    return pairwise_kernels(X.numpy(), Z.numpy(), model.kernel, filter_params=True, **parameters)


def _linear_layer(slopes: Tensor, intercept: Tensor | None = None) -> nn.Linear:
    """A layer with these weights, (K, P), and biases, (K,)."""
    outputs, inputs = slopes.shape
    layer = nn.Linear(inputs, outputs, bias=intercept is not None, dtype=torch.float64)
    weights = {"weight": slopes}
    if intercept is not None:
        weights["bias"] = intercept
    layer.load_state_dict(weights)
    return layer
