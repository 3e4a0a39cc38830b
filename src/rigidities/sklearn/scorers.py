"""Scorers of error bars, for `cross_val_score`, `cross_validate` and searches.

scikit-learn's rule for scorers is "greater is better". A score that is better when lower therefore
changes its sign, as scikit-learn's own `neg_mean_squared_error` does:

| scorer | returns |
| --- | --- |
| `nll_scorer` | minus the negative log-likelihood, in nats per row |
| `crps_scorer` | minus the continuous ranked probability score, in units of the target |
| `interval_score_scorer(0.9)` | minus the interval score of 90 % intervals, in the same units |
| `coverage_scorer(0.9)` | minus the distance of the coverage of 90 % intervals from 0.9 |
| `coverage_scorer(0.9, share=True)` | the coverage itself, for reports |

All of them accept a fitted `RigidityRegressor`, and a `Pipeline` or search that ends in one. Other
regressors whose `predict` accepts `return_std=True` are scored as Gaussian. With several targets, a
score is the mean over the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec

import numpy as np
import torch
from sklearn import get_config
from sklearn.compose import TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.metadata_routing import MetadataRequest

from ..notices import require_level
from ..prediction.prediction import Prediction
from .data import Array, as_columns, as_tensor, true_values
from .regressor import RigidityRegressor

P = ParamSpec("P")

Bars = Any
"""A `RigidityRegressor`, or a `GaussianBars`, which has the same methods."""


@dataclass(frozen=True, repr=False)
class BarScorer:
    """A callable(estimator, X, y) -> score of the estimator's error bars; greater is better.

    Attributes:
        name: How the scorer is written in Python.
        row_scores: Function from bars, X and y to one number for each true value.
        final_score: Function from the mean of these numbers to the score.
        weight_request: What scikit-learn's metadata routing was told about `sample_weight`.
    """

    name: str
    row_scores: Callable[[Bars, Any, Any], Array]
    final_score: Callable[[float], float]
    weight_request: bool | str | None = None

    def __call__(self, estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The score of a fitted estimator.

        Args:
            estimator: A fitted regressor with error bars.
            X: Inputs, (N, P), in any form that the estimator accepts.
            y: True values, shaped like the predictions.
            sample_weight: Weights of the rows, (N,).

        Returns:
            The score. Greater is better.

        Raises:
            TypeError: The estimator has no error bars.
        """
        bars, inputs = self._bars_and_inputs(estimator, X)
        scores = np.asarray(self.row_scores(bars, inputs, y), dtype=np.float64)
        scores = scores.reshape(len(scores), -1).mean(1)  # over targets: (N,)
        return self.final_score(float(np.average(scores, weights=sample_weight)))

    def __repr__(self) -> str:
        if self.weight_request is None:
            return self.name
        return f"{self.name}.set_score_request(sample_weight={self.weight_request!r})"

    def set_score_request(self, *, sample_weight: bool | str | None) -> BarScorer:
        """A scorer like this one that asks scikit-learn's metadata routing for weights.

        Args:
            sample_weight: True to ask for the weights, False to ignore them, None to refuse them,
                or the name under which they are passed.

        Returns:
            A new scorer. This one stays as it is.

        Raises:
            RuntimeError: Metadata routing is not enabled.
        """
        if not get_config()["enable_metadata_routing"]:
            raise RuntimeError(
                "set_score_request is for metadata routing, which is not enabled. Call "
                "sklearn.set_config(enable_metadata_routing=True) first."
            )
        return replace(self, weight_request=sample_weight)

    def get_metadata_routing(self) -> Any:
        """What this scorer asks of scikit-learn's metadata routing."""
        request = MetadataRequest(owner=self)
        request.score.add_request(param="sample_weight", alias=self.weight_request)
        return request

    def _accept_sample_weight(self) -> bool:
        """The answer to searches of scikit-learn that have weights but no metadata routing."""
        return True

    def _bars_and_inputs(self, estimator: Any, X: Any) -> tuple[Bars, Any]:
        """The regressor with error bars inside an estimator, and the inputs that reach it."""
        if isinstance(estimator, RigidityRegressor):
            return estimator, X
        if isinstance(estimator, Pipeline):
            inputs = estimator[:-1].transform(X) if len(estimator) > 1 else X
            return self._bars_and_inputs(estimator[-1], inputs)
        if isinstance(estimator, FrozenEstimator):
            return self._bars_and_inputs(estimator.estimator, X)
        if hasattr(estimator, "best_estimator_"):  # a fitted search
            return self._bars_and_inputs(estimator.best_estimator_, X)
        kind = type(estimator).__name__
        if isinstance(estimator, TransformedTargetRegressor):
            raise TypeError(
                f"{self.name} cannot score a {kind}, which returns no error bars. Put it inside: "
                f"RigidityRegressor({kind}(...))."
            )
        if "return_std" not in signature(getattr(estimator, "predict", _no_predict)).parameters:
            raise TypeError(
                f"{self.name} needs a regressor with error bars, but {kind} has none. Wrap it: "
                f"RigidityRegressor({kind}(...)). Regressors whose predict accepts return_std=True "
                "have bars, too."
            )
        return GaussianBars(estimator), X


def _no_predict(X: Any) -> None:
    """Stands for the method that an estimator does not have."""


@dataclass(frozen=True)
class GaussianBars:
    """Gaussian error bars of a regressor whose `predict` accepts `return_std=True`."""

    estimator: Any

    def log_prob(self, X: Any, y: Any) -> Array:
        """Logarithm of the predicted density at true values."""
        prediction = self._prediction(X)
        return as_columns(prediction.log_prob(_true_values(y, prediction)))

    def crps(self, X: Any, y: Any) -> Array:
        """Continuous ranked probability score of true values."""
        prediction = self._prediction(X)
        return as_columns(prediction.crps(_true_values(y, prediction)))

    def predict_interval(self, X: Any, level: float) -> tuple[Array, Array]:
        """Central intervals of that level."""
        low, high = self._prediction(X).interval(level)
        return as_columns(low), as_columns(high)

    def _prediction(self, X: Any) -> Prediction:
        """The predicted distributions, (N, K)."""
        mean, std = self.estimator.predict(X, return_std=True)
        mean = as_tensor(mean).reshape(len(mean), -1)
        std = as_tensor(std).reshape(mean.shape)
        if not bool((std > 0).all()):
            raise ValueError(
                f"{type(self.estimator).__name__} predicts error bars that are not above zero, "
                "which cannot be scored."
            )
        nothing = torch.zeros_like(mean)
        return Prediction(mean=mean, epistemic=nothing, noise=std.square(), rigidity=nothing)


def _true_values(y: Any, prediction: Prediction) -> torch.Tensor:
    """True values in the shape of a prediction, (N, K)."""
    return as_tensor(true_values(y, tuple(prediction.mean.shape)))


def _log_density(bars: Bars, X: Any, y: Any) -> Array:
    """Logarithm of the density at each true value."""
    return np.asarray(bars.log_prob(X, y))


def _crps(bars: Bars, X: Any, y: Any) -> Array:
    """CRPS of each true value."""
    return np.asarray(bars.crps(X, y))


def _ends(bars: Bars, X: Any, y: Any, level: float) -> tuple[Array, Array, Array]:
    """Lower ends, upper ends and true values, all in one shape."""
    low, high = bars.predict_interval(X, level)
    return low, high, true_values(y, np.shape(low))


def _is_covered(bars: Bars, X: Any, y: Any, *, level: float) -> Array:
    """Whether each true value lies in its interval, as 0 or 1."""
    low, high, targets = _ends(bars, X, y, level)
    return ((low <= targets) & (targets <= high)).astype(np.float64)


def _interval_scores(bars: Bars, X: Any, y: Any, *, level: float) -> Array:
    """Interval score of each true value: the width, and a penalty if the value lies outside."""
    low, high, targets = _ends(bars, X, y, level)
    outside = np.maximum(low - targets, 0) + np.maximum(targets - high, 0)
    return np.asarray(high - low + 2 / (1 - level) * outside)


def _unchanged(score: float) -> float:
    """A mean that is better when greater."""
    return score


def _negated(score: float) -> float:
    """Minus a mean that is better when lower."""
    return -score


def _minus_distance(coverage: float, *, level: float) -> float:
    """Minus the distance of a coverage from its level."""
    return -abs(coverage - level)


nll_scorer = BarScorer("nll_scorer", _log_density, _unchanged)
"""Minus the negative log-likelihood (NLL) of the true values, in nats per row."""

crps_scorer = BarScorer("crps_scorer", _crps, _negated)
"""Minus the continuous ranked probability score (CRPS), in units of the target."""


def _to_be_called(make: Callable[P, BarScorer]) -> Callable[P, BarScorer]:
    """A function that makes a scorer, and says so where scikit-learn takes it for a scorer itself.

    scikit-learn scores with NaN then, and warns with the error's text.
    """

    @wraps(make)
    def checked(*args: P.args, **options: P.kwargs) -> BarScorer:
        if len(args) > 1:  # the estimator, X and y
            name = make.__name__
            raise TypeError(f"{name} makes a scorer. Call it: scoring={name}(0.9).")
        return make(*args, **options)

    return checked


@_to_be_called
def interval_score_scorer(level: float = 0.9) -> BarScorer:
    """A scorer of intervals: minus the mean interval score, in units of the target.

    The interval score is the width, plus 2 / (1 - level) times the distance of a true value that
    lies outside. It is best for intervals that are as narrow as their coverage permits.

    Args:
        level: Probability of the intervals, which are those of `predict_interval`.

    Returns:
        A scorer. Greater is better.

    Examples:
        >>> interval_score_scorer(0.8)
        interval_score_scorer(0.8)
    """
    require_level(level, "An interval's")
    row_scores = partial(_interval_scores, level=level)
    return BarScorer(f"interval_score_scorer({level:g})", row_scores, _negated)


@_to_be_called
def coverage_scorer(level: float = 0.9, *, share: bool = False) -> BarScorer:
    """A scorer of the coverage of intervals: minus its distance from the level.

    The score is at most 0, for intervals that cover exactly the nominal share. Coverage alone does
    not choose a good model, because intervals of one constant width can have the right coverage,
    too. Choose by `crps_scorer`, `nll_scorer` or `interval_score_scorer`, and report the coverage.

    Args:
        level: Probability of the intervals, which are those of `predict_interval`.
        share: Whether to return the coverage itself, the share of true values inside their
            intervals. It is for reports. A search would choose the widest intervals by it.

    Returns:
        A scorer. Greater is better, unless `share` is True.

    Examples:
        >>> coverage_scorer(0.9), coverage_scorer(0.9, share=True)
        (coverage_scorer(0.9), coverage_scorer(0.9, share=True))
    """
    require_level(level, "An interval's")
    row_scores = partial(_is_covered, level=level)
    if share:
        return BarScorer(f"coverage_scorer({level:g}, share=True)", row_scores, _unchanged)
    final_score = partial(_minus_distance, level=level)
    return BarScorer(f"coverage_scorer({level:g})", row_scores, final_score)
