r"""Error bars for regressors of scikit-learn, in its own manner.

    reg = RigidityRegressor(Ridge()).fit(X, y)
    mean, std = reg.predict(X_new, return_std=True)
    low, high = reg.predict_interval(X_new, 0.9)

The way of the data:

1. `_fit_base` trains the regressor (the *base*) and decides which rows calibrate.
2. `_Chain.of` takes the fitted base apart: transformers of the inputs, maps of the target, and the
   last model. `_readout` reads that model as rows that scikit-learn makes (its transformers, its
   kernel, its leaves) and a small torch module whose last map is linear in trained weights.
3. The module must reproduce the base's `predict`; otherwise the base is refused.
4. `LastLayerRigidity` (for the textbook criterion `fits.linear`) gives a distribution of the
   transformed target, which `_TargetMap` carries back to the user's units.

Needs the extra `sklearn`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import fits
from .calibration.report import CalibrationReport
from .closed_forms import SubsetOfRegressors
from .last_layer.rigidity import LastLayerRigidity
from .losses import Huber, LossLike
from .notices import extra, missing, notify, require_level
from .prediction.prediction import Prediction
from .trees import SQUARED, SUPPORTED, Forest, is_forest

try:
    import numpy as np
    from scipy.special import stdtrit
    from sklearn import get_config
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone, is_regressor
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.frozen import FrozenEstimator
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge, RidgeCV
    from sklearn.metrics.pairwise import pairwise_kernels
    from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, train_test_split
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import Pipeline
    from sklearn.utils import _safe_indexing, get_tags
    from sklearn.utils.validation import (
        _num_samples,
        check_array,
        check_consistent_length,
        check_is_fitted,
        validate_data,
    )
except ModuleNotFoundError as error:
    missing(error, extra("sklearn"), "sklearn", "scipy")

__all__ = ["RigidityRegressor"]


def __dir__() -> list[str]:
    return sorted(__all__)


Array = np.ndarray[Any, Any]

_EXACT = (BayesianRidge, KernelRidge, LinearRegression, Ridge, RidgeCV)
"""Models that are linear in all that was trained: a training row that is left out by formula is as
good as a row that was held out."""

_INTERCEPT_HEIGHT = 1e3
"""Value of an intercept's column. A ridge weighs on that column by a millionth, that is, not."""

_TINY_RIDGE = 1e-12
"""A ridge relative to the mean square of a column, where the base has none."""

_SINGLE_EPSILON = float(np.finfo(np.float32).eps)
"""Relative rounding of one operation in single precision."""

_NO_CURVATURE = (
    "Its loss has no curvature, so it is no least-squares fit. Use KernelRidge or Ridge."
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
"""Classes of scikit-learn that have no error bars of this kind: the reason, and what to use."""

_CHANGED = "The base has changed since fit: error bars around other predictions. Call fit again."


class RigidityRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""A regressor with calibrated error bars around any supported one.

    The mean is the base's own prediction. Under a `TransformedTargetRegressor` the distribution is
    that of the transformed target. Its quantiles go through the inverse map. The standard deviation
    is that of the distribution which these quantiles make within four standard deviations (under
    exp, heavy tails have none).

    Args:
        estimator: The base: a linear model, `MLPRegressor`, `KernelRidge`, a tree ensemble or a
            network of skorch, alone or in `Pipeline`, `TransformedTargetRegressor`,
            `GridSearchCV`.
        prefit: Whether the base is trained already. A `FrozenEstimator` always is.
        valid: Share of the rows given to `fit` that only calibrate. "auto" holds no row out for the
            criteria "loo" and "textbook", nor under the criterion "auto" for bases that are linear
            in all that was trained (least squares, ridge, kernel ridge), whose training rows count
            as if left out. Otherwise it holds out a fifth; under `prefit` half, and the other half
            stands for the training rows. None under `prefit` says that these are the training
            rows, as the criteria "loo" and "textbook" do.
        criterion: As in `LastLayerRigidity.calibrate`. "textbook" is the standard error of linear
            regression, with residuals over n less the effective number of parameters and Student's
            intervals.
        noise: As in `LastLayerRigidity.calibrate`.
        distribution: As in `LastLayerRigidity.calibrate`.
        ridge: By default the base's own penalty where that is known. It is in units of the columns
            that a linear base is given; for features of a network or of trees it is in the units
            of `LastLayerRigidity.calibrate`.
        random_state: Seed of the split.

    Attributes:
        estimator_: The fitted base.
        uq_: The `LastLayerRigidity` (for "textbook" a `FitRigidity`), which takes what `rows`
            gives.
        report_: The report of the calibration; None for "textbook".
    """

    def __init__(
        self,
        estimator: Any,
        *,
        prefit: bool = False,
        valid: float | str | None = "auto",
        criterion: str = "auto",
        noise: Any = None,
        distribution: Any = None,
        ridge: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.prefit = prefit
        self.valid = valid
        self.criterion = criterion
        self.noise = noise
        self.distribution = distribution
        self.ridge = ridge
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, train: tuple[Any, ...] | None = None
    ) -> RigidityRegressor:
        """Train the base, unless it is trained already, and calibrate its error bars.

        Args:
            X: Inputs, (N, P), as the base takes them.
            y: Targets, (N,) or (N, K).
            sample_weight: Weights of the rows, (N,).
            train: The data that a trained base has learnt from, (X, y) or (X, y, sample_weight).
                With it, `X` and `y` are rows that the base has not seen, and all of them calibrate.

        Returns:
            This regressor, fitted.

        Raises:
            TypeError: The base is of a kind that has no such error bars.
            ValueError: The data cannot be used, or the base is no linear model of single rows.
        """
        layers = _require_supported(self.estimator)
        is_prefit = self.prefit or isinstance(self.estimator, FrozenEstimator)
        if is_prefit:
            check_is_fitted(self.estimator)
        # A frozen regressor inside a pipeline was trained on other rows than these, too.
        was_trained = is_prefit or any(isinstance(layer, FrozenEstimator) for layer in layers)

        data = _Data.of(X, y, sample_weight)
        if train is None:
            training_data = None
        else:
            training_data = _Data.of_training(train, data, was_trained)
        fitted = self._fit_base(data, training_data, is_prefit, was_trained)

        chain = _Chain.of(fitted.base, fitted.training, self.ridge)
        if fitted.heldout is None:
            chain.warn_of_reproduced_rows(fitted.training)
            chain.require_same_predictions(fitted.training)
        else:
            chain.require_same_predictions(fitted.heldout)

        uq: LastLayerRigidity | fits.FitRigidity
        report: CalibrationReport | None
        if self.criterion == "textbook":
            # `fits.linear` takes the columns as the model is given them.
            plain_columns = _Readout(rows=_as_tensor, module=nn.Identity())
            chain = replace(chain, readout=plain_columns)
            uq = self._textbook(chain, fitted)
            report = None
        else:
            # Without train=, rows stand for training rows that the base may never have seen.
            rows_are_unseen = was_trained and training_data is None
            uq, report = self._calibrated(chain, fitted, rows_are_unseen)

        # Attributes change only now, so that a refused fit leaves the last one as it was.
        validate_data(self, X, reset=True, skip_check_array=True)
        self.estimator_ = fitted.base
        self.uq_ = uq
        self.report_ = report
        self._chain = chain
        return self

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The base's predictions, on request with error bars of new observations.

        Args:
            X: Inputs, (N, P), as the base takes them.
            return_std: Whether to return standard deviations too, shaped like the predictions.
            return_cov: Whether to return a covariance too, (N, N), or (N, N, K) for several
                targets: that of the predictions, with the noise on its diagonal.

        Returns:
            The predictions, or a tuple of predictions and standard deviations or covariance.

        Raises:
            ValueError: Both were asked for, the base has changed since `fit`, or the target's map
                is not affine and has no covariance.
        """
        check_is_fitted(self)
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not for both at once.")
        if not return_std and not return_cov:
            return self.estimator_.predict(X)

        mean, prediction = self._mean_and_prediction(X)
        if return_cov:
            return mean, self._covariance(X, prediction, single_target=np.ndim(mean) == 1)
        std = self._chain.targets.std(prediction.std, self._quantile_function(prediction))
        return mean, std.reshape(np.shape(mean))

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """Central intervals that cover new observations with probability `level`.

        Args:
            X: Inputs, (N, P), as the base takes them.
            level: Probability between 0 and 1.

        Returns:
            The lower and the upper ends, each shaped like the predictions.
        """
        require_level(level, "An interval's")
        ends = self.predict_quantiles(X, [(1 - level) / 2, (1 + level) / 2])
        return ends[..., 0], ends[..., 1]

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> Array:
        """Quantiles of a new observation.

        Args:
            X: Inputs, (N, P), as the base takes them.
            levels: Probabilities between 0 and 1.

        Returns:
            (N, levels), or (N, K, levels) for several targets.
        """
        if np.ndim(levels) != 1:
            raise ValueError(f"Expected a list of levels, as [0.05, 0.95], got {levels!r}.")
        for level in levels:
            require_level(level, "A quantile's")

        mean, prediction = self._mean_and_prediction(X)
        quantile_function = self._quantile_function(prediction)
        quantiles = []
        for level in levels:
            quantile = self._chain.targets.quantile(quantile_function, float(level))
            quantiles.append(quantile.reshape(np.shape(mean)))
        return np.stack(quantiles, -1)

    def prediction(self, X: Any) -> Prediction:
        """Mean, epistemic variance, noise and distribution, in units of a transformed target.

        Args:
            X: Inputs, (N, P), as the base takes them.

        Returns:
            The `Prediction` of `uq_`.
        """
        rows = self.rows(X)
        uq: Any = self.uq_
        prediction: Prediction
        if isinstance(uq, fits.FitRigidity):
            noise: Any = uq.noise  # the variance of an observation of weight one
            prediction = uq.predict(rows, noise=noise)
        else:
            prediction = uq.predict(rows, progress=False)
        return prediction

    def rows(self, X: Any) -> Tensor:
        """What `uq_` takes for these inputs: `reg.uq_.ensemble(64)(reg.rows(X))`.

        Args:
            X: Inputs, (N, P), as the base takes them.

        Returns:
            One row of numbers for each row of X; its columns depend on the kind of the base.
        """
        check_is_fitted(self)
        validate_data(self, X, reset=False, skip_check_array=True)
        return self._chain.rows(X)

    def __sklearn_tags__(self) -> Any:
        return replace(get_tags(self.estimator), array_api_support=False)

    def _fit_base(
        self, data: _Data, training_data: _Data | None, is_prefit: bool, was_trained: bool
    ) -> _FittedBase:
        """The fitted base with the rows that trained it and those that only calibrate.

        Args:
            data: The rows that `fit` was given.
            training_data: The rows of `train=`; with them all of `data` calibrates.
            is_prefit: Whether the base stays as it is.
            was_trained: Whether the base, or a regressor in it, was trained on other rows before.
        """
        share = self._heldout_share(self.estimator, was_trained)
        if training_data is not None:
            base = self._trained_base(training_data, is_prefit)
            return _FittedBase(base, training_data, heldout=data)

        training, heldout = data.split(share, self.random_state)
        base = self._trained_base(training, is_prefit)
        if heldout is None:
            # Only the fit shows what a search has chosen, or that the base reproduces its rows:
            # then rows must be held out after all, and the base is trained again without them.
            share = self._heldout_share(base, was_trained, training)
            if share is not None:
                training, heldout = data.split(share, self.random_state)
                base = self._trained_base(training, is_prefit)
        return _FittedBase(base, training, heldout)

    def _trained_base(self, training: _Data, is_prefit: bool) -> Any:
        """The user's own base where it is trained already, otherwise a trained clone."""
        if is_prefit:
            return self.estimator
        return _trained(clone(self.estimator), training)

    def _heldout_share(
        self, base: Any, was_trained: bool, training: _Data | None = None
    ) -> float | None:
        """Share of the rows that only calibrate, or None; `training` has trained the base."""
        share = self._checked_valid()
        if share != "auto":
            return share
        if self.criterion in ("loo", "textbook"):
            return None
        if was_trained:
            return 0.5
        if self.criterion == "auto" and _is_exact(base):
            # Left-out training rows need no others, unless their residuals are all zero.
            has_residuals = training is None or not training.is_reproduced_by(base)
            if has_residuals:
                return None
        return 0.2

    def _checked_valid(self) -> float | Literal["auto"] | None:
        """The parameter `valid`; a ValueError where it is no share."""
        valid: Any = self.valid
        if valid is None:
            return None
        if isinstance(valid, str) and valid == "auto":
            return "auto"
        if isinstance(valid, Real) and 0 < float(valid) < 1:
            return float(valid)
        raise ValueError(f"valid must be 'auto', None or a share between 0 and 1, got {valid!r}.")

    def _textbook(self, chain: _Chain, fitted: _FittedBase) -> fits.FitRigidity:
        """Student's error bars of a linear fit."""
        options = (fitted.heldout, self.noise, self.distribution, self.ridge)
        if any(option is not None for option in options):
            raise ValueError(
                "criterion='textbook' has Student's distribution and the base's own penalty: "
                "leave valid, train, noise, distribution and ridge as they are."
            )
        training = fitted.training
        target = chain.targets.transformed(training.y)
        rows = chain.rows(training.X)
        return fits.linear(chain.model, rows, target, sample_weight=training.weight)

    def _calibrated(
        self, chain: _Chain, fitted: _FittedBase, rows_are_unseen: bool
    ) -> tuple[LastLayerRigidity, CalibrationReport]:
        """Calibrated error bars and their report.

        Args:
            chain: The fitted base taken apart.
            fitted: The base and its rows.
            rows_are_unseen: Whether the base may never have seen the rows that stand for its
                training rows. Their residuals are then no residuals of training.
        """
        readout = chain.readout
        training_rows = fitted.training.tensors(chain)
        heldout_rows = None if fitted.heldout is None else fitted.heldout.tensors(chain)

        uq = LastLayerRigidity(_IgnoringWeight(readout.module))
        # A small ridge needs all digits of the Gram, which a QR decomposition keeps.
        method = "gram" if readout.ridge is None else "qr"
        weight_of = None if fitted.training.weight is None else itemgetter("weight")
        # Training residuals that mean nothing must not be kept for the calibration.
        forget_residuals = fitted.heldout is not None and (
            rows_are_unseen or fitted.training.is_reproduced_by(chain.base)
        )
        if forget_residuals:
            uq.fit(
                training_rows,
                loss=readout.loss,
                sample_weight=weight_of,
                sample=0,
                method=method,
                progress=False,
            )
        else:
            uq.fit(
                training_rows,
                loss=readout.loss,
                sample_weight=weight_of,
                method=method,
                progress=False,
            )

        report = uq.calibrate(
            heldout_rows,
            train=training_rows if self.criterion == "loo" else None,
            criterion=self.criterion,
            ridge=self.ridge if readout.ridge is None else readout.ridge,
            noise=self.noise,
            distribution=self.distribution,
            optimism=not _is_exact(chain.base),
            progress=False,
        )
        beats_constant_bar = report.gain > 0 and report.varies
        if fitted.heldout is not None and report.useless and not beats_constant_bar:
            notify(report.useless)
        return uq, report

    def _mean_and_prediction(self, X: Any) -> tuple[Any, Prediction]:
        """The base's predictions and the distribution around them, which must agree."""
        check_is_fitted(self)
        mean = self.estimator_.predict(X)
        try:
            prediction = self.prediction(X)
        except IndexError as error:  # a tree grown since fit has leaves that were none
            raise ValueError(_CHANGED) from error
        if self._chain.largest_difference(mean, prediction.mean):
            raise ValueError(_CHANGED)
        return mean, prediction

    def _quantile_function(self, prediction: Prediction) -> Callable[[float], Tensor]:
        """Level -> quantile of the transformed target; Student's around a textbook fit."""
        if not isinstance(self.uq_, fits.FitRigidity):
            return prediction.quantile
        degrees_of_freedom = self.uq_.degrees_of_freedom

        def students_quantile(level: float) -> Tensor:
            return prediction.mean + float(stdtrit(degrees_of_freedom, level)) * prediction.std

        return students_quantile

    def _covariance(self, X: Any, prediction: Prediction, *, single_target: bool) -> Array:
        """Covariance of new observations in the user's units, (N, N) or (N, N, K)."""
        slope = self._chain.targets.slope
        if slope is None:
            raise ValueError(
                "return_cov needs a target map that is affine, as a scaler's is. Use return_std or "
                "predict_quantiles."
            )
        rows = self.rows(X)
        noise = _as_columns(prediction.noise)  # (N, K)
        joint = _as_columns(self.uq_.covariance(rows))
        # Of the joint covariance (N, K, N, K) only the blocks of one target with itself: (N, N, K).
        joint = joint.reshape(2 * noise.shape)
        covariance = joint.diagonal(axis1=1, axis2=3) * np.square(slope)
        covariance[np.diag_indices(len(noise))] += noise * np.square(slope)
        if single_target:
            covariance = covariance[..., 0]
        return np.asarray(covariance)


class _Data(NamedTuple):
    """Inputs, targets and weights of rows, as scikit-learn takes them."""

    X: Any
    y: Any
    weight: Any = None

    @classmethod
    def of(cls, X: Any, y: Any, weight: Any = None) -> _Data:
        """The data, after scikit-learn's checks of the targets and the lengths."""
        if y is None:
            raise ValueError("RigidityRegressor requires y to be passed, but the target y is None.")
        check_array(y, ensure_2d=False, input_name="y", ensure_min_samples=0)
        check_consistent_length(X, y, weight)
        if _num_samples(y) == 1:
            raise ValueError("Error bars cannot be calibrated on 1 sample: give several rows.")
        return cls(X, y, weight)

    @classmethod
    def of_training(cls, train: Any, new_data: _Data, was_trained: bool) -> _Data:
        """The checked argument `train=`: rows that a trained base has learnt from."""
        if not was_trained:
            raise ValueError("train= is for a base that is trained already: prefit=True.")
        if not isinstance(train, (tuple, list)) or len(train) not in (2, 3):
            raise ValueError("Expected train=(X, y) or train=(X, y, sample_weight).")
        training = cls.of(*train)
        if (training.weight is None) != (new_data.weight is None):
            raise ValueError("Give weights of both the rows and train=, or of neither.")
        return training

    def split(self, share: float | None, seed: Any) -> tuple[_Data, _Data | None]:
        """Rows that train and a share that is held out; all and None without a share."""
        if share is None:
            return self, None
        columns = [column for column in self if column is not None]
        # train_test_split gives two halves of each column in turn: X, X', y, y', ...
        halves = train_test_split(*columns, test_size=share, random_state=seed)
        return _Data(*halves[::2]), _Data(*halves[1::2])

    def is_reproduced_by(self, base: Any) -> bool:
        """Whether the base's predictions leave no residuals."""
        predictions = np.asarray(base.predict(self.X), float)
        targets = np.asarray(self.y, float).reshape(predictions.shape)
        return np.allclose(predictions, targets, rtol=1e-9, atol=1e-12)

    def tensors(self, chain: _Chain) -> dict[str, Tensor]:
        """The rows as a batch of `LastLayerRigidity`, with transformed targets."""
        rows = chain.rows(self.X)
        target = _as_tensor(chain.targets.transformed(self.y))
        batch = {"input": rows, "y": target.to(rows.device)}
        if self.weight is not None:
            batch["weight"] = _as_tensor(self.weight).reshape(-1)
        return batch


class _FittedBase(NamedTuple):
    """A trained regressor, the rows that trained it, and the rows that were held out, if any."""

    base: Any
    training: _Data
    heldout: _Data | None


@dataclass(frozen=True)
class _TargetMap:
    """What `TransformedTargetRegressor`s do to the targets, and the way back.

    The model learns the *transformed* target, (N, K), whose distribution this map carries back to
    the user's units.

    Attributes:
        transformers: Fitted transformers of the targets, the outermost first.
        slope: Of the way back where that is affine, (K,) or 1; otherwise None.
        rising: Whether the way back rises; otherwise it falls.
        ends: Lowest and highest transformed target, (1, K), between which the way back is monotone.
    """

    transformers: list[Any]
    slope: Any = 1.0
    rising: bool = True
    ends: tuple[Any, Any] = (-np.inf, np.inf)

    @classmethod
    def of(cls, transformers: list[Any], y: Any) -> _TargetMap:
        """The map with its properties, which are found from the training targets.

        Raises:
            ValueError: The way back mixes targets, or neither rises nor falls throughout.
        """
        if not transformers:
            return cls([])
        plain_map = cls(transformers)
        sorted_targets = np.sort(plain_map.transformed(y), 0)  # (N, K)
        values = plain_map.back(sorted_targets)
        steps = np.diff(values, axis=0)
        rising = bool((steps >= 0).all())
        falling = bool((steps <= 0).all())
        if not (rising or falling) or not plain_map._maps_targets_apart(sorted_targets, values):
            raise ValueError(
                "The inverse of the target's transformer must map each target by itself and rise "
                "or fall throughout, to carry quantiles."
            )

        low = sorted_targets[:1]
        # A constant target has no range: then the slope is taken over a step of one.
        high = np.where(sorted_targets[-1:] > low, sorted_targets[-1:], low + 1)
        slope = (plain_map.back(high) - plain_map.back(low)) / (high - low)  # (1, K)
        straight_line = plain_map.back(low) + (sorted_targets - low) * slope
        if np.allclose(straight_line, values, rtol=1e-9, atol=1e-9):
            return cls(transformers, slope=slope[0], rising=bool((slope >= 0).all()))

        curved_map = cls(transformers, slope=None, rising=rising)
        lowest = curved_map._monotone_end(low, low - high)
        highest = curved_map._monotone_end(high, high - low)
        return replace(curved_map, ends=(lowest, highest))

    def _maps_targets_apart(self, sorted_targets: Array, values: Array) -> bool:
        """Whether the way back of each target is the same when all others stay at their lowest."""
        alone = []
        for k in range(sorted_targets.shape[1]):
            only_one_varies = np.repeat(sorted_targets[:1], len(sorted_targets), axis=0)
            only_one_varies[:, k] = sorted_targets[:, k]
            alone.append(self.back(only_one_varies)[:, k])
        return np.allclose(np.stack(alone, 1), values)

    def _monotone_end(self, start: Array, step: Array) -> Array:
        """How far from `start` in the direction of `step`, (1, K), the way back stays monotone.

        Args:
            start: The lowest or the highest transformed training target, (1, K).
            step: Their range, with the sign of the direction, (1, K).
        """
        # From a millionth of the range to a million ranges beyond the training targets.
        distances = np.append(0, np.logspace(-6, 6, 9601))[:, None]
        path = start + step * distances  # (9602, K)
        sign = np.sign(step) if self.rising else -np.sign(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the place where NaN begin
            values = self.back(path) * sign
            goes_on = np.diff(values, axis=0) >= -1e-13 * np.abs(values[1:])
        goes_on &= np.isfinite(values[1:])
        steps_in_a_row = np.logical_and.accumulate(goes_on).sum(0)  # (K,)
        return np.asarray(path[steps_in_a_row, np.arange(path.shape[1])])

    def transformed(self, y: Any) -> Array:
        """Targets as the model learns them, (N, K)."""
        values = np.asarray(y, dtype=np.float64)
        for transformer in self.transformers:
            columns = values.reshape(len(values), -1)
            values = np.asarray(transformer.transform(columns), dtype=np.float64)
        return values.reshape(len(values), -1)

    def back(self, values: Array) -> Array:
        """Transformed targets, (N, K), in the user's units."""
        with np.errstate(all="ignore"):  # far values may be infinite, or have no inverse
            for transformer in reversed(self.transformers):
                inverse = transformer.inverse_transform(values)
                values = np.asarray(inverse).reshape(len(values), -1)
        return values

    def quantile(self, quantile_function: Callable[[float], Tensor], level: float) -> Array:
        """A quantile in the user's units, (N, K), from those of the transformed target."""
        # A falling map turns the distribution over.
        transformed_level = level if self.rising else 1 - level
        quantile = _as_columns(quantile_function(transformed_level))
        return self.back(np.clip(quantile, *self.ends))

    def std(self, transformed_std: Tensor, quantile_function: Callable[[float], Tensor]) -> Array:
        r"""Standard deviation in the user's units, (N, K).

        Where the map is not affine, the distribution is that of the mapped quantiles with the
        weights of a normal z, over $|z| \le 4$.
        """
        if self.slope is not None:
            return np.asarray(_as_columns(transformed_std) * np.abs(self.slope))
        z = torch.linspace(-4, 4, 65, dtype=torch.float64)
        levels = torch.special.ndtr(z).tolist()
        values = np.stack([self.quantile(quantile_function, level) for level in levels])
        weights = torch.softmax(-z.square() / 2, 0).numpy()[:, None, None]
        mean = (weights * values).sum(0)
        return np.asarray(np.sqrt((weights * np.square(values - mean)).sum(0)))


@dataclass(frozen=True)
class _Chain:
    """A fitted regressor taken apart.

    Attributes:
        base: The whole regressor.
        transformers: Transformers of the inputs, the outermost pipeline's first.
        targets: The map of the targets.
        model: The last regressor, which is read as `readout`.
        readout: Rows and torch module of that model.
        target_centre: Mean of the training targets, (K,).
        target_spread: Their largest distance from it, (K,).
    """

    base: Any
    transformers: list[Any]
    targets: _TargetMap
    model: Any
    readout: _Readout
    target_centre: Array
    target_spread: Array

    @classmethod
    def of(cls, base: Any, training: _Data, ridge: Any) -> _Chain:
        """Take a base apart that was trained on these rows."""
        layers = _layers(base)
        model = layers[-1]
        target_transformers = [
            layer.transformer_ for layer in layers if hasattr(layer, "transformer_")
        ]
        input_transformers = [pipe[:-1] for pipe in _pipelines(layers) if len(pipe) > 1]
        inputs = _transformed_inputs(input_transformers, training.X)
        y = np.asarray(training.y, dtype=np.float64).reshape(_num_samples(training.y), -1)
        centre = y.mean(0)
        return cls(
            base=base,
            transformers=input_transformers,
            targets=_TargetMap.of(target_transformers, training.y),
            model=model,
            readout=_readout(model, inputs, training.weight, ridge),
            target_centre=centre,
            target_spread=np.abs(y - centre).max(0),
        )

    def rows(self, X: Any) -> Tensor:
        """What the torch module takes for these inputs of the base."""
        return self.readout.rows(_transformed_inputs(self.transformers, X))

    def largest_difference(self, predictions: Any, transformed_mean: Tensor) -> float:
        """Largest difference of the base's predictions from the torch means; 0 if it is rounding.

        Rounding is a small share of how far predictions and targets lie from the targets' mean (not
        of the mean itself, which may be large), plus the last digits of the base's precision.

        Args:
            predictions: Of the base, (N,) or (N, K).
            transformed_mean: Of the torch module, in units of the transformed target, (N, K).
        """
        mean = self.targets.back(_as_columns(transformed_mean))
        predictions = np.asarray(predictions).reshape(transformed_mean.shape[0], -1)
        if predictions.dtype == np.float32:
            share_of_spread = 1e-3
            digits = 64 * _SINGLE_EPSILON
        else:
            share_of_spread = 1e-5
            digits = 1e-12

        predictions = predictions.astype(np.float64)
        from_centre = np.nanmax(np.abs(predictions - self.target_centre), axis=0, initial=0)  # (K,)
        size = np.nanmax(np.abs(predictions), axis=0, initial=0)  # (K,)
        allowed = share_of_spread * np.maximum(from_centre, self.target_spread)
        allowed = allowed + digits * size
        both_undefined = np.isnan(mean) & np.isnan(predictions)
        differences = np.where(both_undefined, 0.0, np.abs(mean - predictions))
        if (differences <= allowed).all():
            return 0.0
        return float(differences.max())

    def warn_of_reproduced_rows(self, training: _Data) -> None:
        """Warn where the training rows, which are to calibrate, have no residuals."""
        if training.is_reproduced_by(self.base):
            notify(
                "The base reproduces its training rows: error bars of almost zero mean nothing. "
                "Hold rows out with valid=0.2, or give it a penalty."
            )

    def require_same_predictions(self, data: _Data) -> None:
        """Refuse a base whose torch module predicts something else."""
        X = data.X
        predictions = np.asarray(self.base.predict(X))
        if self.transformers:
            # In another order, transformers that move or mix rows give other predictions.
            order = np.random.default_rng(0).permutation(len(predictions))
            X = _safe_indexing(X, order)
            predictions = predictions[order]
        # A copy, since the host may have left its module in training mode.
        module = copy.deepcopy(self.readout.module).eval()
        difference = self.largest_difference(predictions, module(self.rows(X)))
        if difference:
            raise ValueError(
                f"{type(self.model).__name__} is no linear model of single rows here: as one, its "
                f"predictions differ by up to {difference:.3g}. With a link function use "
                "TransformedTargetRegressor instead, with a singular kernel a larger alpha; "
                "transformers must neither move nor mix rows."
            )


def _transformed_inputs(transformers: list[Any], X: Any) -> Any:
    """Inputs after all transformers; refused where these drop or add rows."""
    inputs = X
    for transformer in transformers:
        inputs = transformer.transform(inputs)
    rows_before = _num_samples(X)
    rows_after = _num_samples(inputs)
    if rows_after != rows_before:
        raise ValueError(
            f"The pipeline's transformers give {rows_after} rows for {rows_before}: error bars "
            "need one each. Drop rows before fit, not in a transformer."
        )
    return inputs


class _Readout(NamedTuple):
    """A fitted model as the library reads it.

    Attributes:
        rows: Inputs of the model -> what the module takes.
        module: Predicts the transformed target, (N, K), and is linear in its last weights.
        loss: The loss that the model was trained with.
        ridge: The penalty of these weights where it is known, in units of the module's rows.
    """

    rows: Callable[[Any], Tensor]
    module: nn.Module
    loss: LossLike = "mse"
    ridge: Any = None


class _IgnoringWeight(nn.Sequential):
    """A module for batches that carry the rows' weights, which only the fit asks for."""

    def forward(self, input: Tensor, weight: Tensor | None = None) -> Any:
        """The module's output; the weight of a row changes nothing."""
        return self[0](input)


def _as_tensor(X: Any, like: Tensor | None = None) -> Tensor:
    """An array, frame or sparse matrix as a new tensor: in float64 on the CPU, or like another."""
    values = X.toarray() if hasattr(X, "toarray") else X
    tensor = torch.as_tensor(np.array(values, dtype=np.float64))
    return tensor if like is None else tensor.to(like)


def _as_columns(tensor: Tensor) -> Array:
    """A tensor (N,) or (N, K) on any device as an array (N, K) in float64."""
    return np.asarray(tensor.detach().cpu().double().reshape(len(tensor), -1))


def _readout(model: Any, X: Any, weight: Any, ridge: Any) -> _Readout:
    """How the library reads a model.

    Args:
        model: The last regressor of a chain, fitted.
        X: Its training inputs, after all transformers.
        weight: Weights of the training rows, or None.
        ridge: The user's ridge, or "search"; None takes the model's own penalty.
    """
    if is_forest(model):
        forest = Forest(model, X)
        return _Readout(rows=forest.rows, module=forest.module)
    if isinstance(model, MLPRegressor):
        return _perceptron_readout(model)
    if isinstance(model, KernelRidge):
        return _kernel_readout(model, ridge)
    if hasattr(model, "module_") and hasattr(model, "criterion_"):
        return _skorch_readout(model)
    if hasattr(model, "coef_") and hasattr(model, "intercept_"):
        return _linear_readout(model, X, weight, ridge)
    raise TypeError(
        f"Cannot read {type(model).__name__}: it has no linear weights that least squares have "
        "found. Known are linear models, MLPRegressor, KernelRidge, skorch's networks, "
        f"{SUPPORTED}."
    )


def _skorch_readout(model: Any) -> _Readout:
    """A network of skorch, which brings its own torch module."""
    scalar_like_weights = next(model.module_.parameters()).detach().new_zeros(())
    rows = partial(_as_tensor, like=scalar_like_weights)
    return _Readout(rows=rows, module=model.module_, loss=_training_loss(model))


def _perceptron_readout(model: Any) -> _Readout:
    """The network of an `MLPRegressor`, layer by layer in torch."""
    activations = {
        "identity": nn.Identity,
        "logistic": nn.Sigmoid,
        "tanh": nn.Tanh,
        "relu": nn.ReLU,
    }
    layers: list[nn.Module] = []
    for coefficients, intercept in zip(model.coefs_, model.intercepts_, strict=True):
        layers.append(_linear_layer(_as_tensor(coefficients).mT, _as_tensor(intercept)))
        layers.append(activations[model.activation]())
    # The output has no activation.
    module = nn.Sequential(*layers[:-1])
    return _Readout(rows=_as_tensor, module=module, loss=_training_loss(model))


@dataclass(frozen=True)
class _StandardisedColumns:
    """Rows of a linear model: its columns that count, standardised, then the intercept's if any.

    Attributes:
        is_used: Which columns count, (P,).
        centre: Of the columns that count, (D,).
        spread: What they are divided by, (D,).
        has_intercept: Whether there is a column of an intercept.
    """

    is_used: Tensor
    centre: Tensor
    spread: Tensor
    has_intercept: bool

    def __call__(self, X: Any) -> Tensor:
        """(N, D), or (N, D + 1) with an intercept."""
        rows = (_as_tensor(X)[:, self.is_used] - self.centre) / self.spread
        if not self.has_intercept:
            return rows
        intercept_column = rows.new_full((len(rows), 1), _INTERCEPT_HEIGHT)
        return torch.cat([rows, intercept_column], 1)


def _linear_readout(model: Any, X: Any, weight: Any, ridge: Any) -> _Readout:
    """Any model with `coef_`, in columns that are centred where it has an intercept."""
    coefficients = _as_tensor(np.atleast_2d(model.coef_))  # (K, P)
    design = _as_tensor(X)  # (N, P)
    has_intercept = bool(getattr(model, "fit_intercept", True))

    # A coefficient that the training has set to zero (Lasso) brings no variance.
    every_column_counts = isinstance(model, _EXACT) and not getattr(model, "positive", False)
    if every_column_counts or not coefficients.any():
        is_used = torch.ones(coefficients.shape[1], dtype=torch.bool)
    else:
        is_used = (coefficients != 0).any(0)
    coefficients = coefficients[:, is_used]
    design = design[:, is_used]

    # Weighted mean and standard deviation of each column, (D,).
    row_weights = design.new_ones(len(design)) if weight is None else _as_tensor(weight).reshape(-1)
    shares = (row_weights / row_weights.sum())[:, None]  # (N, 1)
    if has_intercept:
        centre = (shares * design).sum(0)
    else:
        centre = design.new_zeros(design.shape[1])
    spread = (shares * (design - centre).square()).sum(0).sqrt()
    spread = torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)  # constant columns

    if ridge is None:
        ridge = _own_ridge(model)
    if isinstance(ridge, Real) and ridge:
        # A ridge belongs to the columns as they are: divided by one number, its ratios stay.
        spread = torch.full_like(spread, float(spread.max()))
        ridge = float(ridge) / float(spread[0]) ** 2
    elif isinstance(ridge, Real):
        ridge = _TINY_RIDGE * float(len(design) if weight is None else _as_tensor(weight).sum())

    slopes = coefficients * spread  # by standardised columns
    if has_intercept:
        intercept = _as_tensor(model.intercept_).reshape(-1).expand(len(coefficients))
        at_centre = intercept + coefficients @ centre  # (K,)
        slopes = torch.cat([slopes, at_centre[:, None] / _INTERCEPT_HEIGHT], 1)
    return _Readout(
        rows=_StandardisedColumns(is_used, centre, spread, has_intercept),
        module=_linear_layer(slopes),
        loss=_training_loss(model),
        ridge=ridge,
    )


def _own_ridge(model: Any) -> float | None:
    r"""$\varsigma^2$ of a ridge fit, zero of plain least squares; None of others, or of several."""
    if not isinstance(model, _EXACT):
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
            "Huber's of a linear model or network; positive targets as logarithms."
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
        points = _as_tensor(X)
        unexplained = self.regressors.unexplained(points)[:, None].sqrt()
        return torch.cat([self.regressors.features(points) @ self.rotation, unexplained], 1)


def _kernel_readout(model: Any, ridge: Any) -> _Readout:
    """Kernel ridge regression as a Gaussian process, with its own penalty."""
    if model.kernel == "precomputed":
        raise ValueError("kernel='precomputed' hides the rows. Give KernelRidge the kernel itself.")
    training_points = _as_tensor(model.X_fit_)
    regressors = SubsetOfRegressors(partial(_kernel, model), training_points, noise=1.0)
    # Calibration standardises features, and would learn those of single rows: rotated, none is.
    draws = np.random.default_rng(0).normal(size=(regressors.rank, regressors.rank))
    rotation = _as_tensor(np.linalg.qr(draws)[0])

    dual = _as_tensor(model.dual_coef_).reshape(len(training_points), -1).mT  # (K, N)
    slopes = dual @ regressors.features(training_points) @ rotation  # (K, D)
    zero_slope = slopes.new_zeros(len(slopes), 1)  # of the unexplained variance
    if ridge is None:
        ridge = _own_ridge(model) or None
    return _Readout(
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


def _layers(estimator: Any) -> list[Any]:
    """A regressor and all that it contains, fitted where they are, the outermost first."""
    inner = _inner_regressor(estimator)
    if inner is None:
        return [estimator]
    return [estimator, *_layers(inner)]


def _inner_regressor(estimator: Any) -> Any:
    """The regressor inside a pipeline, a search or another wrapper, fitted if it is; or None."""
    if isinstance(estimator, Pipeline):
        return estimator.steps[-1][1]
    if isinstance(estimator, TransformedTargetRegressor):
        if hasattr(estimator, "regressor_"):
            return estimator.regressor_
        return LinearRegression() if estimator.regressor is None else estimator.regressor
    if isinstance(estimator, (FrozenEstimator, GridSearchCV, RandomizedSearchCV)):
        return getattr(estimator, "best_estimator_", estimator.estimator)
    return None


def _pipelines(layers: list[Any]) -> list[Any]:
    """The pipelines among the layers of a base."""
    return [layer for layer in layers if isinstance(layer, Pipeline)]


def _require_supported(estimator: Any) -> list[Any]:
    """The layers of a base; refused before training if it can have no error bars of this kind."""
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise TypeError(f"Expected a regressor, as Ridge(), got {estimator!r}.")
    if not is_regressor(estimator):
        raise TypeError(f"Expected a regressor, got {type(estimator).__name__}.")
    layers = _layers(estimator)
    model_class = type(layers[-1])
    for ancestor in model_class.__mro__:
        if ancestor.__name__ in _REFUSALS:
            reason = _REFUSALS[ancestor.__name__]
            raise TypeError(f"RigidityRegressor cannot take {model_class.__name__}. {reason}")
    if not all(getattr(layer, "refit", True) for layer in layers):
        raise ValueError("A search with refit=False keeps no regressor. Use refit=True.")
    return layers


def _is_exact(estimator: Any) -> bool:
    """Whether all that is trained on targets is linear, with one penalty."""
    layers = _layers(estimator)
    model = layers[-1]
    if getattr(model, "positive", False) or _own_ridge(model) is None:
        return False
    for pipe in _pipelines(layers):
        for parameter in pipe[:-1].get_params().values():
            is_estimator = hasattr(parameter, "__sklearn_tags__")
            if is_estimator and get_tags(parameter).target_tags.required:
                return False  # a transformer that sees the targets, as TargetEncoder
    return True


def _trained(base: Any, training: _Data) -> Any:
    """The base after its own fit, with the weights under the name by which it takes them."""
    if training.weight is None:
        return base.fit(training.X, training.y)
    # Through pipelines, weights are called ridge__sample_weight, unless scikit-learn routes them.
    names = []
    if not get_config()["enable_metadata_routing"]:
        names = [pipe.steps[-1][0] for pipe in _pipelines(_layers(base))]
    weight_name = "__".join([*names, "sample_weight"])
    return base.fit(training.X, training.y, **{weight_name: training.weight})
