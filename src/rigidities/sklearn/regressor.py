"""The meta-estimator: a regressor of scikit-learn, and calibrated error bars around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from .. import fits
from ..calibration.methods import Full, Method, Paper, method_for
from ..calibration.report import CalibrationReport
from ..last_layer.rigidity import LastLayerRigidity
from ..notices import notify, require_level
from ..prediction.distribution import StudentT
from ..prediction.prediction import Prediction
from ..statistics.statistics import KEPT_BY_DEFAULT
from .chain import Chain
from .data import Array, Data, as_columns, as_tensor, true_values
from .layers import is_exact, require_supported, trained
from .readouts import EstimatorReadout, IgnoringWeight
from .textbook import textbook_fit

_CHANGED = "The base has changed since fit, so its error bars are no longer valid. Call fit again."


class _FittedBase(NamedTuple):
    """A trained regressor and its rows.

    Attributes:
        base: The regressor.
        training: The rows that trained it.
        heldout: The rows that were held out to calibrate the bars, if any.
        conformal: The rows that were held out for the guarantee of intervals, if any.
    """

    base: Any
    training: Data
    heldout: Data | None
    conformal: Data | None


class RigidityRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""A regressor with calibrated error bars around any supported one.

        reg = RigidityRegressor(Ridge()).fit(X, y)
        mean, std = reg.predict(X_new, return_std=True)
        low, high = reg.predict_interval(X_new, 0.9)

    The mean is the base's own prediction. Under a `TransformedTargetRegressor` the bars come from
    the distribution of the transformed target, whose quantiles go through the inverse map. The
    standard deviation then ignores the tails beyond four standard deviations of a normal
    distribution, because the exponential of a heavy-tailed value has no standard deviation.

    Args:
        estimator: The base: a linear model, `MLPRegressor`, `KernelRidge`, a tree ensemble or a
            network of skorch. It may be inside a `Pipeline`, `TransformedTargetRegressor`,
            `GridSearchCV` or `RandomizedSearchCV`.
        prefit: Whether the base is trained already. A `FrozenEstimator` always is.
        valid: Share of the rows given to `fit` that only calibrate the bars. "auto" holds no row
            out if training rows can calibrate: for `Paper(criterion="loo")` and "textbook", and
            with `Full` for bases that are linear in everything that was trained (least squares,
            ridge, kernel ridge). Otherwise it holds out a fifth. Under `prefit` it holds
            out half, and the other half stands for the training rows. None holds no row out; under
            `prefit` it declares that the rows given to `fit` are the training rows.
        conformal: Share (float) or number (int) of the rows given to `fit` that are kept apart for
            intervals with a guarantee. They neither train the base nor calibrate the bars. They
            are set apart first, so that `valid` is then a share of the other rows. None (default)
            keeps no rows apart, and gives no guarantee. 90 % intervals need at least 9 such rows,
            and a few hundred for a coverage close to 90 % in every draw.
        method: As in `LastLayerRigidity.calibrate`: "full", "paper", or an object `Full(...)` or
            `Paper(...)`. Its `ridge` is by default the base's own penalty if that is known. For a
            linear base it is in units of the base's input columns. For features of a network or of
            trees it is in the units of `LastLayerRigidity.calibrate`. "textbook" gives the standard
            errors of linear regression, with the residual variance over n minus the effective
            number of parameters, and Student's intervals.
        random_state: Seed of the splits.

    Attributes:
        estimator_: The fitted base.
        uq_: The `LastLayerRigidity` (for "textbook" a `FitRigidity`). Its inputs are what `rows`
            returns.
        report_: The report of the calibration; None for "textbook".
    """

    def __init__(
        self,
        estimator: Any,
        *,
        prefit: bool = False,
        valid: float | str | None = "auto",
        conformal: float | int | None = None,
        method: Literal["full", "paper", "textbook"] | Method = "full",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.prefit = prefit
        self.valid = valid
        self.conformal = conformal
        self.method = method
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, train: tuple[Any, ...] | None = None
    ) -> RigidityRegressor:
        """Train the base, unless it is trained already, and calibrate its error bars.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.
            y: Targets, (N,) or (N, K).
            sample_weight: Weights of the rows, (N,).
            train: The data that a trained base has learnt from, (X, y) or (X, y, sample_weight).
                With it, `X` and `y` are rows that the base has not seen, and all of them calibrate
                the bars.

        Returns:
            This regressor, fitted.

        Raises:
            TypeError: The base is of a kind that has no such error bars.
            ValueError: The data or options cannot be used, or the base cannot be read as a linear
                model of single rows. An earlier fit stays as it was.
        """
        layers = require_supported(self.estimator)
        method = None if self.method == "textbook" else _calibration_method(self.method)
        is_prefit = self.prefit or isinstance(self.estimator, FrozenEstimator)
        if is_prefit:
            check_is_fitted(self.estimator)
        # A frozen regressor inside a pipeline was trained on other rows than these, too.
        was_trained = is_prefit or any(isinstance(layer, FrozenEstimator) for layer in layers)

        data = Data.of(X, y, sample_weight)
        if train is None:
            training_data = None
        else:
            training_data = Data.of_training(train, data, was_trained)
        fitted = self._fit_base(data, training_data, is_prefit, was_trained)

        chain = Chain.of(fitted.base, fitted.training, None if method is None else method.ridge)
        if fitted.heldout is None:
            chain.warn_of_reproduced_rows(fitted.training)
            chain.require_same_predictions(fitted.training)
        else:
            chain.require_same_predictions(fitted.heldout)

        uq: LastLayerRigidity | fits.FitRigidity
        report: CalibrationReport | None
        if method is None:
            # Textbooks use the model's own columns.
            plain_columns = EstimatorReadout(rows=as_tensor, module=nn.Identity())
            chain = replace(chain, readout=plain_columns)
            uq = self._textbook(chain, fitted)
            report = None
        else:
            # Without train=, the base may never have seen the rows that stand for training rows.
            rows_are_unseen = was_trained and training_data is None
            # Rows that were held out here cannot have chosen a checkpoint of the base.
            early_stopped = None if was_trained else False
            uq, report = self._calibrated(chain, fitted, method, rows_are_unseen, early_stopped)

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
            X: Inputs, (N, P), in any form that the base accepts.
            return_std: Whether to return standard deviations too, shaped like the predictions.
            return_cov: Whether to return a covariance too, (N, N), or (N, N, K) for several
                targets. It is the covariance of the predictions, with the noise on its diagonal.

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

    def predict_interval(
        self, X: Any, level: float = 0.9, *, conformal: bool | None = None
    ) -> tuple[Array, Array]:
        """Intervals that cover new observations with probability `level`.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.
            level: Probability between 0 and 1.
            conformal: Which intervals to return. None (default) returns intervals with a guarantee
                if rows were kept apart for it, `RigidityRegressor(..., conformal=0.2)`, and
                otherwise the central intervals of the predicted distribution. True insists on the
                guarantee. False asks for the distribution's intervals in any case.

        Returns:
            The lower and the upper ends, each shaped like the predictions.

        Raises:
            ValueError: The level lies outside (0, 1), the base has changed since `fit`, or there is
                no guarantee and `conformal` is True.
        """
        require_level(level, "An interval's")
        check_is_fitted(self)
        has_guarantee = self._has_guarantee()
        if conformal and not has_guarantee:
            raise ValueError(
                "There is no guarantee, because fit kept no rows apart for it. Fit with "
                "RigidityRegressor(..., conformal=0.2), or call predict_interval with "
                "conformal=None."
            )
        if conformal is False or not has_guarantee:
            ends = self.predict_quantiles(X, [(1 - level) / 2, (1 + level) / 2])
            return ends[..., 0], ends[..., 1]

        mean, prediction = self._mean_and_prediction(X)
        # A monotone map carries the guarantee of the transformed target over to the user's units.
        low, high = self._chain.targets.interval(*prediction.interval(level))
        return low.reshape(np.shape(mean)), high.reshape(np.shape(mean))

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> Array:
        """Quantiles of a new observation, by the predicted distribution.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.
            levels: Probabilities between 0 and 1.

        Returns:
            (N, levels), or (N, K, levels) for several targets.
        """
        if np.ndim(levels) != 1:
            raise ValueError(f"Expected a list of levels such as [0.05, 0.95], got {levels!r}.")
        for level in levels:
            require_level(level, "A quantile's")

        mean, prediction = self._mean_and_prediction(X)
        quantile_function = self._quantile_function(prediction)
        quantiles = []
        for level in levels:
            quantile = self._chain.targets.quantile(quantile_function, float(level))
            quantiles.append(quantile.reshape(np.shape(mean)))
        return np.stack(quantiles, -1)

    def log_prob(self, X: Any, y: Any) -> Array:
        """Logarithm of the predicted density at true values, in the units of `y`.

        Minus its mean is the negative log-likelihood (NLL).

        Args:
            X: Inputs, (N, P), in any form that the base accepts.
            y: True values, shaped like the predictions.

        Returns:
            One number for each true value, shaped like the predictions.
        """
        mean, prediction = self._mean_and_prediction(X)
        y = true_values(y, np.shape(mean))
        log_density = self._chain.targets.log_prob(self._with_students(prediction), y)
        return log_density.reshape(np.shape(mean))

    def crps(self, X: Any, y: Any) -> Array:
        """Continuous ranked probability score of true values, in the units of `y`.

        If the target's map is not affine, tails beyond four standard deviations of a normal
        distribution are left out, as in `predict(X, return_std=True)`.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.
            y: True values, shaped like the predictions.

        Returns:
            One number for each true value, shaped like the predictions. Lower is better.
        """
        mean, prediction = self._mean_and_prediction(X)
        y = true_values(y, np.shape(mean))
        score = self._chain.targets.crps(self._with_students(prediction), y)
        return score.reshape(np.shape(mean))

    def prediction(self, X: Any) -> Prediction:
        """Mean, epistemic variance, noise and distribution, in units of a transformed target.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.

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
            prediction = uq.predict(rows)
        return prediction

    def rows(self, X: Any) -> Tensor:
        """The input of `uq_` for these inputs: `reg.uq_.ensemble(64)(reg.rows(X))`.

        Args:
            X: Inputs, (N, P), in any form that the base accepts.

        Returns:
            One row of numbers for each row of X. The columns depend on the kind of the base.
        """
        check_is_fitted(self)
        validate_data(self, X, reset=False, skip_check_array=True)
        return self._chain.rows(X)

    def __sklearn_tags__(self) -> Any:
        return replace(get_tags(self.estimator), array_api_support=False)

    def _fit_base(
        self, data: Data, training_data: Data | None, is_prefit: bool, was_trained: bool
    ) -> _FittedBase:
        """The fitted base, the rows that trained it, and the rows that were held out.

        Args:
            data: The rows that `fit` was given.
            training_data: The rows of `train=`. With them none of `data` trains.
            is_prefit: Whether the base stays as it is.
            was_trained: Whether the base, or a regressor in it, was trained on other rows before.
        """
        share = self._heldout_share(self.estimator, was_trained)
        rows_trained_the_base = was_trained and training_data is None and share is None
        if self.conformal is not None and rows_trained_the_base:
            raise ValueError(
                "conformal needs rows that did not train the base. With valid=None or "
                'Paper(criterion="loo"), the rows given to fit are those that trained it, so they '
                "give no guarantee. Fit on held-out rows, and pass the training rows as "
                "fit(..., train=(X, y))."
            )
        data, conformal = data.split(self._checked_conformal(data), self.random_state)
        if training_data is not None:
            base = self._trained_base(training_data, is_prefit)
            return _FittedBase(base, training_data, heldout=data, conformal=conformal)

        training, heldout = data.split(share, self.random_state)
        base = self._trained_base(training, is_prefit)
        if heldout is None:
            # Only the fit shows what a search has chosen, or that the base reproduces its rows.
            # Then rows must be held out after all, and the base is trained again without them.
            share = self._heldout_share(base, was_trained, training)
            if share is not None:
                training, heldout = data.split(share, self.random_state)
                base = self._trained_base(training, is_prefit)
        return _FittedBase(base, training, heldout, conformal)

    def _trained_base(self, training: Data, is_prefit: bool) -> Any:
        """The user's own base if it is trained already, otherwise a trained clone."""
        if is_prefit:
            return self.estimator
        return trained(clone(self.estimator), training)

    def _heldout_share(
        self, base: Any, was_trained: bool, training: Data | None = None
    ) -> float | None:
        """Share of the rows that only calibrate, or None.

        Args:
            base: The base, trained or not.
            was_trained: As in `_fit_base`.
            training: The rows that have trained the base, if it was trained here.
        """
        share = self._checked_valid()
        if share != "auto":
            return share
        by_left_out_rows = isinstance(self.method, Paper) and self.method.criterion == "loo"
        if by_left_out_rows or self.method == "textbook":
            return None
        if was_trained:
            return 0.5
        if (isinstance(self.method, Full) or self.method == "full") and is_exact(base):
            # Left-out training rows need no others, unless their residuals are all zero.
            has_residuals = training is None or not training.is_reproduced_by(base)
            if has_residuals:
                return None
        return 0.2

    def _checked_valid(self) -> float | Literal["auto"] | None:
        """The parameter `valid`; a ValueError if it is not a share."""
        valid: Any = self.valid
        if valid is None:
            return None
        if isinstance(valid, str) and valid == "auto":
            return "auto"
        if isinstance(valid, Real) and 0 < float(valid) < 1:
            return float(valid)
        raise ValueError(f"valid must be 'auto', None or a share between 0 and 1, got {valid!r}.")

    def _checked_conformal(self, data: Data) -> float | int | None:
        """The parameter `conformal`; a ValueError if it is not a share or number of these rows."""
        conformal: Any = self.conformal
        if conformal is None:
            return None
        if self.method == "textbook":
            raise ValueError(
                "method='textbook' always returns Student's intervals and sets no rows apart. "
                "Leave conformal=None, or use method='full'."
            )
        is_number = isinstance(conformal, (int, np.integer)) and not isinstance(conformal, bool)
        if is_number and 0 < conformal < data.row_count - 1:
            return int(conformal)
        if isinstance(conformal, Real) and 0 < float(conformal) < 1:
            return float(conformal)
        raise ValueError(
            "conformal must be None, a share of the rows between 0 and 1 (0.2), or a number of "
            f"rows that leaves at least two of the {data.row_count} rows, got {conformal!r}."
        )

    def _textbook(self, chain: Chain, fitted: _FittedBase) -> fits.FitRigidity:
        """Student's error bars of a linear fit."""
        if fitted.heldout is not None:
            raise ValueError(
                "method='textbook' is for the rows that trained the base. Leave valid and train at "
                "their defaults."
            )
        training = fitted.training
        target = chain.targets.transformed(training.y)
        rows = chain.rows(training.X)
        return textbook_fit(chain.model, rows, target, training.weight)

    def _calibrated(
        self,
        chain: Chain,
        fitted: _FittedBase,
        method: Method,
        rows_are_unseen: bool,
        early_stopped: bool | None,
    ) -> tuple[LastLayerRigidity, CalibrationReport]:
        """Calibrated error bars and their report.

        Args:
            chain: The fitted base taken apart.
            fitted: The base and its rows.
            method: What is asked of the calibration.
            rows_are_unseen: Whether the base may never have seen the rows that stand for its
                training rows. Their residuals are then not those of training rows.
            early_stopped: As in `LastLayerRigidity.calibrate`.
        """
        readout = chain.readout
        training_rows = chain.tensors(fitted.training)
        heldout_rows = None if fitted.heldout is None else chain.tensors(fitted.heldout)
        conformal_rows = None if fitted.conformal is None else chain.tensors(fitted.conformal)

        uq = LastLayerRigidity(IgnoringWeight(readout.module), progress=False)
        weight_of = None if fitted.training.weight is None else itemgetter("weight")
        # Training residuals that mean nothing must not be kept for the calibration.
        forget_residuals = fitted.heldout is not None and (
            rows_are_unseen or fitted.training.is_reproduced_by(chain.base)
        )
        uq.fit(
            training_rows,
            loss=readout.loss,
            sample_weight=weight_of,
            keep_rows=0 if forget_residuals else KEPT_BY_DEFAULT,
        )
        if readout.ridge is not None:
            method = replace(method, ridge=readout.ridge)
        train = None
        if isinstance(method, Full):
            # Left-out rows of a base that is linear in all that was trained are as good as new.
            method = replace(method, optimism=method.optimism and not is_exact(chain.base))
        elif method.criterion == "loo":
            train = training_rows
        uq.calibrate(heldout_rows, method=method, train=train, early_stopped=early_stopped)
        if conformal_rows is not None:
            uq.conformalize(conformal_rows)
        report = uq.calibration_report
        assert report is not None
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
        except IndexError as error:  # trees that were trained again have unknown leaves
            raise ValueError(_CHANGED) from error
        if self._chain.largest_difference(mean, prediction.mean):
            raise ValueError(_CHANGED)
        return mean, prediction

    def _has_guarantee(self) -> bool:
        """Whether rows were kept apart for intervals with a guarantee."""
        uq = self.uq_
        return isinstance(uq, LastLayerRigidity) and uq.calibration.conformal is not None

    def _with_students(self, prediction: Prediction) -> Prediction:
        """The prediction; around a textbook fit with Student's distribution, as its quantiles."""
        if not isinstance(self.uq_, fits.FitRigidity):
            return prediction
        degrees_of_freedom = self.uq_.degrees_of_freedom
        if degrees_of_freedom <= 2:
            raise ValueError(
                "Scores of a textbook fit need more than two rows beyond its coefficients, because "
                "Student's distribution has no variance otherwise; here there are "
                f"{degrees_of_freedom:g}. Fit with more rows."
            )
        students = StudentT(degrees_of_freedom)
        # The bar of a textbook is the unit of Student's distribution, whose variance is larger.
        noise = prediction.variance * students.second - prediction.epistemic
        return replace(prediction, noise=noise, distribution=students)

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
                "return_cov needs an affine map of the target, such as a scaler's. Use return_std "
                "or predict_quantiles."
            )
        rows = self.rows(X)
        noise = as_columns(prediction.noise)  # (N, K)
        joint = as_columns(self.uq_.covariance(rows))
        # The joint covariance is (N, K, N, K). Only blocks of one target with itself are kept.
        joint = joint.reshape(2 * noise.shape)
        covariance = joint.diagonal(axis1=1, axis2=3) * np.square(slope)
        covariance[np.diag_indices(len(noise))] += noise * np.square(slope)
        if single_target:
            covariance = covariance[..., 0]
        return np.asarray(covariance)


def _calibration_method(method: Any) -> Method:
    """The method of a calibration that was asked for.

    Raises:
        ValueError: There is no such method.
    """
    try:
        return method_for(method)
    except ValueError as error:
        raise ValueError(f"{error} For a linear base there is also 'textbook'.") from error
