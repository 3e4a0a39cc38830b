"""What a base consists of: a regressor, possibly inside pipelines, searches and target maps."""

from __future__ import annotations

from typing import Any

from sklearn import get_config
from sklearn.base import is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags

from .data import Data
from .readouts import own_ridge

_NO_CURVATURE = (
    "Its loss has no curvature, so it is not a least-squares fit. Use KernelRidge or Ridge."
)
_REFUSALS = {
    "GaussianProcessRegressor": "It has error bars of its own: predict(X, return_std=True).",
    "SVR": _NO_CURVATURE,
    "NuSVR": _NO_CURVATURE,
    "LinearSVR": _NO_CURVATURE,
    "QuantileRegressor": _NO_CURVATURE,
    "NeighborsBase": "It has no trained weights. Use KernelRidge, or Nystroem with Ridge.",
    "_PLS": "Its directions are found from the targets. Use PCA with Ridge.",
}
"""Why classes of scikit-learn have no error bars of this kind, and what to use instead."""


def layers_of(estimator: Any) -> list[Any]:
    """A regressor and the regressors inside it, fitted ones if there are, the outermost first."""
    inner = _inner_regressor(estimator)
    if inner is None:
        return [estimator]
    return [estimator, *layers_of(inner)]


def _inner_regressor(estimator: Any) -> Any:
    """The regressor inside a pipeline, search or other wrapper, fitted if there is one; or None."""
    if isinstance(estimator, Pipeline):
        return estimator.steps[-1][1]
    if isinstance(estimator, TransformedTargetRegressor):
        if hasattr(estimator, "regressor_"):
            return estimator.regressor_
        return LinearRegression() if estimator.regressor is None else estimator.regressor
    if isinstance(estimator, (FrozenEstimator, GridSearchCV, RandomizedSearchCV)):
        return getattr(estimator, "best_estimator_", estimator.estimator)
    return None


def pipelines(layers: list[Any]) -> list[Any]:
    """The pipelines among the layers of a base."""
    return [layer for layer in layers if isinstance(layer, Pipeline)]


def require_supported(estimator: Any) -> list[Any]:
    """The layers of a base that can have error bars of this kind.

    Raises:
        TypeError: It cannot, or it is not a regressor. This is checked before any training.
        ValueError: A search keeps no regressor.
    """
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise TypeError(f"Expected a regressor such as Ridge(), got {estimator!r}.")
    if not is_regressor(estimator):
        raise TypeError(f"Expected a regressor, got {type(estimator).__name__}.")
    layers = layers_of(estimator)
    model_class = type(layers[-1])
    for ancestor in model_class.__mro__:
        if ancestor.__name__ in _REFUSALS:
            reason = _REFUSALS[ancestor.__name__]
            raise TypeError(f"RigidityRegressor does not support {model_class.__name__}. {reason}")
    if not all(getattr(layer, "refit", True) for layer in layers):
        raise ValueError("A search with refit=False keeps no regressor. Use refit=True.")
    return layers


def is_exact(estimator: Any) -> bool:
    """Whether everything that learns from the targets is linear, with one penalty."""
    layers = layers_of(estimator)
    model = layers[-1]
    if getattr(model, "positive", False) or own_ridge(model) is None:
        return False
    for pipe in pipelines(layers):
        for parameter in pipe[:-1].get_params().values():
            is_estimator = hasattr(parameter, "__sklearn_tags__")
            if is_estimator and get_tags(parameter).target_tags.required:
                return False  # a transformer that sees the targets, such as TargetEncoder
    return True


def trained(base: Any, training: Data) -> Any:
    """The trained base. Its `fit` gets the weights under the name that it expects."""
    if training.weight is None:
        return base.fit(training.X, training.y)
    # Through pipelines, weights are called ridge__sample_weight, unless scikit-learn routes them.
    names = []
    if not get_config()["enable_metadata_routing"]:
        names = [pipe.steps[-1][0] for pipe in pipelines(layers_of(base))]
    weight_name = "__".join([*names, "sample_weight"])
    return base.fit(training.X, training.y, **{weight_name: training.weight})
