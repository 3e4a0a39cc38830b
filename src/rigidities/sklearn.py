r"""Error bars for regressors of scikit-learn, in its own manner.

    reg = RigidityRegressor(Ridge()).fit(X, y)
    mean, std = reg.predict(X_new, return_std=True)
    low, high = reg.predict_interval(X_new, 0.9)

A fitted regressor is read as rows made by the host (its transformers, its kernel) and a small torch
module whose last map is linear and which must reproduce `predict`; `LastLayerRigidity` does the
rest. Needs the extra `sklearn`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from numbers import Real
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import fits
from .closed_forms import SubsetOfRegressors
from .last_layer.rigidity import LastLayerRigidity
from .losses import Huber, LossLike
from .notices import extra, missing, notify, require_level
from .prediction.prediction import Prediction
from .trees import SQUARED, SUPPORTED, Forest, is_forest

try:
    import numpy as np
    from scipy.special import stdtrit
    from sklearn import compose, frozen, get_config, pipeline
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone, is_regressor
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge, RidgeCV
    from sklearn.metrics.pairwise import pairwise_kernels
    from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, train_test_split
    from sklearn.neural_network import MLPRegressor
    from sklearn.utils import _safe_indexing, get_tags, validation
    from sklearn.utils.validation import _num_samples
except ModuleNotFoundError as error:
    missing(error, extra("sklearn"), "sklearn", "scipy")

Array = np.ndarray[Any, Any]
EXACT = (BayesianRidge, KernelRidge, LinearRegression, Ridge, RidgeCV)
"""Linear in all that was trained: left-out training rows are as good as rows held out."""
UNPENALISED = 1e3  # height of an intercept's column: a ridge on it counts a millionth
TINY = 1e-12  # a ridge beside the mean square of a column, where the base has none
_FLAT = "Its loss has no curvature, so it is no least-squares fit. Use KernelRidge or Ridge."
REFUSED = {
    "GaussianProcessRegressor": "It has error bars of its own: predict(X, return_std=True).",
    **dict.fromkeys(("SVR", "NuSVR", "LinearSVR", "QuantileRegressor"), _FLAT),
    "NeighborsBase": "It has no trained weights. Use KernelRidge, or Nystroem with Ridge.",
    "_PLS": "Its directions are found from the targets. Use PCA with Ridge.",
}
ROUNDING = float(np.finfo(np.float32).eps)  # of a host in single precision, of one operation
CHANGED = "The base has changed since fit: error bars around other predictions. Call fit again."


class RigidityRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""A regressor with calibrated error bars around any supported one.

    The mean is the base's own prediction. Under a `TransformedTargetRegressor` the distribution is
    that of the transformed target: quantiles go through the inverse, and the standard deviation is
    that of the distribution they make within four of them (under exp heavy tails have none).

    Args:
        estimator: linear models, `MLPRegressor`, `KernelRidge`, tree ensembles, skorch's nets, as
            they are or in `Pipeline`, `TransformedTargetRegressor`, `GridSearchCV`.
        prefit: whether it is trained already; a `FrozenEstimator` is.
        valid: share of the rows given to `fit` that only calibrate. "auto" is none for the criteria
            "loo" and "textbook", and under "auto" for bases that are linear in all that was trained
            (least squares, ridge, kernel ridge), whose training rows count as if left out; else a
            fifth; under `prefit` half, the other half standing for the training rows. None under
            `prefit` (as of "loo" and "textbook"): these are the training rows.
        criterion: as in `calibrate`; "textbook" is the standard error of linear regression, with
            residuals over n less the effective number of parameters and Student's intervals.
        noise: as in `calibrate`.
        distribution: as in `calibrate`.
        ridge: by default the base's own penalty where that is known; in units of the columns that
            a linear base is given, of a net's or trees' features as in `calibrate`.
        random_state: of the split.

    Attributes:
        estimator_: the fitted base.
        uq_: the `LastLayerRigidity` (a `FitRigidity` for "textbook"), on what `rows` gives.
        report_: of the calibration; None for "textbook".
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
        self.estimator, self.prefit, self.valid = estimator, prefit, valid
        self.criterion, self.noise, self.distribution = criterion, noise, distribution
        self.ridge, self.random_state = ridge, random_state

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, train: tuple[Any, ...] | None = None
    ) -> RigidityRegressor:
        """Train the base, unless it is, and calibrate its error bars.

        With `train`, (X, y) or (X, y, sample_weight) that a trained base has learnt from, X and y
        are rows that it has not seen, and all of them calibrate.
        """
        layers = _require_supported(self.estimator)
        fixed = self.prefit or isinstance(self.estimator, frozen.FrozenEstimator)
        learnt = fixed or any(isinstance(one, frozen.FrozenEstimator) for one in layers)
        if fixed:
            validation.check_is_fitted(self.estimator)
        data = _Data.of(X, y, sample_weight)
        given = None if train is None else _Data.given(train, data, learnt)
        base, known, held = self._trained(data, given, fixed, learnt)
        chain = _Chain.of(base, known, self.ridge)
        chain.require_same(known if held is None else held, seen=held is None)
        if self.criterion == "textbook":
            chain = replace(chain, readout=_Readout(dense, nn.Identity()))
            uq, report = self._textbook(chain, known, held), None
        else:
            uq, report = self._calibrated(chain, known, held, learnt and given is None)
        validation.validate_data(self, X, reset=True, skip_check_array=True)
        self.estimator_, self.uq_, self.report_, self._chain = base, uq, report, chain
        return self

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The base's predictions; with standard deviations or a covariance of new observations.

        That is (N, N), or (N, N, K): of predictions, with the noise on its diagonal.
        """
        validation.check_is_fitted(self)
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not for both at once.")
        if not return_std and not return_cov:
            return self.estimator_.predict(X)
        mean, p = self._predicted(X)
        if return_std:
            return mean, self._chain.targets.std(p.std, self._quantile(p)).reshape(np.shape(mean))
        return mean, self._covariance(X, p, np.ndim(mean) == 1)

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """Central intervals that hold new observations with probability `level`: (low, high)."""
        require_level(level, "An interval's")
        ends = self.predict_quantiles(X, [(1 - level) / 2, (1 + level) / 2])
        return ends[..., 0], ends[..., 1]

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> Array:
        """Quantiles of a new observation, (N, levels), or (N, K, levels) for several targets."""
        if np.ndim(levels) != 1:
            raise ValueError(f"Expected a list of levels, as [0.05, 0.95], got {levels!r}.")
        for level in levels:
            require_level(level, "A quantile's")
        mean, p = self._predicted(X)
        found = [self._chain.targets.quantile(self._quantile(p), float(one)) for one in levels]
        return np.stack([one.reshape(np.shape(mean)) for one in found], -1)

    def prediction(self, X: Any) -> Prediction:
        """Mean, epistemic variance, noise and distribution; in the units of a transformed
        target."""
        exact = isinstance(self.uq_, fits.FitRigidity)
        options = {"noise": self.uq_.noise} if exact else {"progress": False}  # of weight one
        found: Prediction = self.uq_.predict(self.rows(X), **options)
        return found

    def rows(self, X: Any) -> Tensor:
        """What `uq_` takes for these inputs: `reg.uq_.ensemble(64)(reg.rows(X))`."""
        validation.check_is_fitted(self)
        validation.validate_data(self, X, reset=False, skip_check_array=True)
        return self._chain.rows(X)

    def __sklearn_tags__(self) -> Any:
        return replace(get_tags(self.estimator), array_api_support=False)

    def _predicted(self, X: Any) -> tuple[Any, Prediction]:
        """The base's mean and the distribution around it, which must agree."""
        validation.check_is_fitted(self)
        mean = self.estimator_.predict(X)
        try:
            p = self.prediction(X)
        except IndexError as error:  # a leaf that was none
            raise ValueError(CHANGED) from error
        if self._chain.difference(mean, p.mean):
            raise ValueError(CHANGED)
        return mean, p

    def _quantile(self, p: Prediction) -> Callable[[float], Tensor]:
        """Of the distribution: Student's around a textbook fit."""
        df = getattr(self.uq_, "degrees_of_freedom", None)
        return p.quantile if df is None else lambda q: p.mean + float(stdtrit(df, q)) * p.std

    def _trained(self, data: _Data, given: _Data | None, fixed: bool, learnt: bool) -> Any:
        """The base, rows that it was trained on, and rows held out; `fixed` it stays as it is."""
        base, known = self.estimator, None
        while True:
            share = self._share(base, learnt, known)
            known, held = data.split(share, self.random_state) if given is None else (given, data)
            base = base if fixed else _trained(clone(self.estimator), known)
            if held is not None or self._share(base, learnt, known) is None:
                return base, known, held  # else only the fit has told what it is

    def _share(self, base: Any, learnt: bool, known: _Data | None) -> float | None:
        """Of rows that only calibrate; `known` has trained the base."""
        share: Any = self.valid
        if isinstance(share, str) and share == "auto":
            alone = self.criterion in ("loo", "textbook")
            if self.criterion == "auto" and not learnt and _is_exact(base):
                alone = known is None or not known.reproduced(base)
            return None if alone else 0.5 if learnt else 0.2
        if share is None or (isinstance(share, Real) and 0 < float(share) < 1):
            return None if share is None else float(share)
        raise ValueError(f"valid must be 'auto', None or a share between 0 and 1, got {share!r}.")

    def _textbook(self, chain: _Chain, known: _Data, held: _Data | None) -> Any:
        if any(one is not None for one in (held, self.noise, self.distribution, self.ridge)):
            what = "criterion='textbook' has Student's distribution and the base's own penalty"
            raise ValueError(
                f"{what}: leave valid, train, noise, distribution and ridge as they are."
            )
        target = chain.targets.towards(known.y)
        return fits.linear(chain.model, chain.rows(known.X), target, sample_weight=known.weight)

    def _calibrated(self, chain: _Chain, known: _Data, held: _Data | None, unseen: bool) -> Any:
        """Error bars and their report; `unseen` rows are no residuals of training."""
        rows, own = known.tensors(chain), chain.readout.ridge
        options: dict[str, Any] = {"loss": chain.readout.loss, "progress": False}
        options |= {"method": "gram" if own is None else "qr"}  # a small ridge needs all digits
        options |= {} if known.weight is None else {"sample_weight": itemgetter("weight")}
        apart = held is not None and (unseen or known.reproduced(chain.base))
        options |= {"sample": 0} if apart else {}
        uq = LastLayerRigidity(_Weighted(chain.readout.module)).fit(rows, **options)
        wanted = {name: getattr(self, name) for name in ("criterion", "noise", "distribution")}
        wanted |= {"ridge": self.ridge if own is None else own}
        wanted |= {"optimism": not _is_exact(chain.base), "progress": False}
        wanted |= {"train": rows} if self.criterion == "loo" else {}
        report = uq.calibrate(None if held is None else held.tensors(chain), **wanted)
        if held is not None and report.useless and (report.gain <= 0 or not report.varies):
            notify(report.useless)
        return uq, report

    def _covariance(self, X: Any, p: Prediction, single: bool) -> Array:
        slope, rows = self._chain.targets.slope, self.rows(X)
        if slope is None:
            what = "return_cov needs a target map that is affine, as a scaler's is"
            raise ValueError(f"{what}. Use return_std or predict_quantiles.")
        joint, noise = self.uq_.covariance(rows), array(p.noise)
        found = array(joint).reshape(2 * noise.shape).diagonal(axis1=1, axis2=3) * np.square(slope)
        found[np.diag_indices(len(noise))] += noise * np.square(slope)
        return np.asarray(found[..., 0] if single else found)


class _Data(NamedTuple):
    """Rows as the host takes them; `tensors` as the library does."""

    X: Any
    y: Any
    weight: Any = None

    @classmethod
    def of(cls, X: Any, y: Any, weight: Any = None) -> _Data:
        if y is None:
            raise ValueError("RigidityRegressor requires y to be passed, but the target y is None.")
        validation.check_array(y, ensure_2d=False, input_name="y", ensure_min_samples=0)
        validation.check_consistent_length(X, y, weight)
        if _num_samples(y) == 1:
            raise ValueError("Error bars cannot be calibrated on 1 sample: give several rows.")
        return cls(X, y, weight)

    @classmethod
    def given(cls, train: Any, new: _Data, learnt: bool) -> _Data:
        """The rows that a trained base has learnt from, beside others."""
        if not learnt:
            raise ValueError("train= is for a base that is trained already: prefit=True.")
        if not isinstance(train, (tuple, list)) or len(train) not in (2, 3):
            raise ValueError("Expected train=(X, y) or train=(X, y, sample_weight).")
        known = cls.of(*train)
        if (known.weight is None) != (new.weight is None):
            raise ValueError("Give weights of both the rows and train=, or of neither.")
        return known

    def split(self, share: float | None, seed: Any) -> tuple[_Data, _Data | None]:
        if share is None:
            return self, None
        parts = [part for part in self if part is not None]
        cut = train_test_split(*parts, test_size=share, random_state=seed)
        return _Data(*cut[::2]), _Data(*cut[1::2])

    def reproduced(self, base: Any) -> bool:
        """Whether its predictions leave nothing of the targets."""
        own = np.asarray(base.predict(self.X), float)
        return np.allclose(own, np.asarray(self.y, float).reshape(own.shape), 1e-9, 1e-12)

    def tensors(self, chain: _Chain) -> dict[str, Tensor]:
        rows, target = chain.rows(self.X), dense(chain.targets.towards(self.y))
        weight = {} if self.weight is None else {"weight": dense(self.weight).reshape(-1)}
        return {"input": rows, "y": target.to(rows.device), **weight}


@dataclass(frozen=True)
class _TargetMap:
    """What `TransformedTargetRegressor`s do `towards` the last target (N, K), and `back`."""

    transformers: list[Any]
    slope: Any = 1.0  # (K,) of the way back where that is affine; otherwise None
    rising: bool = True
    ends: tuple[Any, Any] = (-np.inf, np.inf)  # of the last target: between them it is monotone

    @classmethod
    def of(cls, transformers: list[Any], y: Any) -> _TargetMap:
        free = cls(transformers)
        t = np.sort(free.towards(y), 0)
        values, columns = free.back(t), range(t.shape[1])
        own = [free.back(np.where(np.equal(columns, k), t, t[:1]))[:, k] for k in columns]
        rising, falling = (bool((sign * np.diff(values, axis=0) >= 0).all()) for sign in (1, -1))
        if not (rising or falling) or not np.allclose(np.stack(own, 1), values):
            what = "must map each target by itself and rise or fall throughout"
            raise ValueError(f"The inverse of the target's transformer {what}, to carry quantiles.")
        low, high = t[:1], np.where(t[-1:] > t[:1], t[-1:], t[:1] + 1)
        slope = (free.back(high) - free.back(low)) / (high - low)
        straight = np.allclose(free.back(low) + (t - low) * slope, values, rtol=1e-9, atol=1e-9)
        if straight:
            return cls(transformers, slope[0], bool((slope >= 0).all()))
        free = replace(free, slope=None, rising=rising)
        return replace(free, ends=(free._end(low, low - high), free._end(high, high - low)))

    def _end(self, start: Array, step: Array) -> Array:
        """How far beyond the targets, (1, K), in steps of their range, the way back is monotone."""
        path = start + step * np.append(0, np.logspace(-6, 6, 9601))[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the place where NaN begin
            values = self.back(path) * (np.sign(step) if self.rising else -np.sign(step))
            onwards = np.diff(values, axis=0) >= -1e-13 * np.abs(values[1:])
        last = np.logical_and.accumulate(onwards & np.isfinite(values[1:])).sum(0)
        return np.asarray(path[last, np.arange(path.shape[1])])

    def towards(self, y: Any) -> Array:
        values = np.asarray(y, dtype=np.float64)
        for one in self.transformers:
            values = np.asarray(one.transform(values.reshape(len(values), -1)), dtype=np.float64)
        return values.reshape(len(values), -1)

    def back(self, values: Array) -> Array:
        with np.errstate(all="ignore"):  # far ones may be infinite, or have no inverse
            for one in reversed(self.transformers):
                values = np.asarray(one.inverse_transform(values)).reshape(len(values), -1)
        return values

    def quantile(self, of: Callable[[float], Tensor], level: float) -> Array:
        """Of the distribution carried back; a falling map turns it over."""
        return self.back(np.clip(array(of(level if self.rising else 1 - level)), *self.ends))

    def std(self, own: Tensor, of: Callable[[float], Tensor]) -> Array:
        r"""Of the distribution carried back, over $|z| \le 4$ of a normal z with the same
        quantiles."""
        if self.slope is not None:
            return np.asarray(array(own) * np.abs(self.slope))
        z = torch.linspace(-4, 4, 65, dtype=torch.float64)
        levels = torch.special.ndtr(z).tolist()
        values = np.stack([self.quantile(of, level) for level in levels])
        share = torch.softmax(-z.square() / 2, 0).numpy()[:, None, None]
        return np.asarray(np.sqrt((share * np.square(values - (share * values).sum(0))).sum(0)))


@dataclass(frozen=True)
class _Chain:
    """A fitted regressor taken apart; `rows` are what the library reads of it."""

    base: Any
    transformers: list[Any]
    targets: _TargetMap
    model: Any
    readout: _Readout
    centre: Array  # of the training targets, (K,)
    spread: Array  # their largest distance from it, (K,)

    @classmethod
    def of(cls, base: Any, known: _Data, ridge: Any) -> _Chain:
        layers = _layers(base)
        maps = [one.transformer_ for one in layers if hasattr(one, "transformer_")]
        targets = _TargetMap.of(maps, known.y) if maps else _TargetMap([])
        steps = [pipe[:-1] for pipe in _pipes(layers) if len(pipe) > 1]
        readout = _readout(layers[-1], _transformed(steps, known.X), known.weight, ridge)
        y = np.asarray(known.y, dtype=np.float64).reshape(_num_samples(known.y), -1)
        centre = y.mean(0)
        spread = np.abs(y - centre).max(0)
        return cls(base, steps, targets, layers[-1], readout, centre, spread)

    def rows(self, X: Any) -> Tensor:
        return self.readout.rows(_transformed(self.transformers, X))

    def difference(self, own: Any, mean: Tensor) -> float:
        """Of the host's predictions from means of the last target; zero where it is rounding.

        That is a small part of how far predictions and targets lie from the targets' mean, not of
        the mean itself, and beside it the last digits of the host's precision.
        """
        found, own = self.targets.back(array(mean)), np.asarray(own).reshape(mean.shape[0], -1)
        share, digits = (1e-3, 64 * ROUNDING) if own.dtype == np.float32 else (1e-5, 1e-12)
        own = own.astype(np.float64)
        away = np.nanmax(np.abs(own - self.centre), axis=0, initial=0)  # (K,)
        allowed = share * np.maximum(away, self.spread)
        allowed = allowed + digits * np.nanmax(np.abs(own), axis=0, initial=0)
        apart = np.where(np.isnan(found) & np.isnan(own), 0.0, np.abs(found - own))
        return 0.0 if (apart <= allowed).all() else float(apart.max())

    def require_same(self, data: _Data, *, seen: bool) -> None:
        """Refuse a module that does not predict what the host does, of rows in another order."""
        own, X = np.asarray(self.base.predict(data.X)), data.X
        if self.transformers:
            order = np.random.default_rng(0).permutation(len(own))
            X, own = _safe_indexing(X, order), own[order]
        if seen and data.reproduced(self.base):
            what = "The base reproduces its training rows: error bars of almost zero mean nothing"
            notify(f"{what}. Hold rows out with valid=0.2, or give it a penalty.")
        module = copy.deepcopy(self.readout.module).eval()  # the host may have left it in training
        if error := self.difference(own, module(self.rows(X))):
            raise ValueError(
                f"{type(self.model).__name__} is no linear model of single rows here: as one, its "
                f"predictions differ by up to {error:.3g}. With a link function use "
                "TransformedTargetRegressor instead, with a singular kernel a larger alpha; "
                "transformers must neither move nor mix rows."
            )


def _transformed(steps: list[Any], X: Any) -> Any:
    found = reduce(lambda rows, step: step.transform(rows), steps, X)
    if (made := _num_samples(found)) != (rows := _num_samples(X)):
        what = f"The pipeline's transformers give {made} rows for {rows}: error bars need one each"
        raise ValueError(f"{what}. Drop rows before fit, not in a transformer.")
    return found


class _Readout(NamedTuple):
    """Rows made by the host, a module linear in its last weights, and the penalty of these."""

    rows: Callable[[Any], Tensor]
    module: nn.Module
    loss: LossLike = "mse"
    ridge: float | None = None


class _Weighted(nn.Sequential):
    """A module that lets a row's weight pass by, which the fit asks for."""

    def forward(self, input: Tensor, weight: Tensor | None = None) -> Any:
        return self[0](input)


def dense(X: Any, like: Tensor | None = None) -> Tensor:
    """Rows of any host as a tensor: float64, or like another."""
    values = X.toarray() if hasattr(X, "toarray") else X
    found = torch.as_tensor(np.array(values, dtype=np.float64))
    return found if like is None else found.to(like)


def array(tensor: Tensor) -> Array:
    """(N, K) from (N,) or (N, K), on any device."""
    return np.asarray(tensor.detach().cpu().double().reshape(len(tensor), -1))


def _readout(model: Any, X: Any, weight: Any, ridge: Any) -> _Readout:
    """How the library reads a model that was trained on these inputs."""
    if is_forest(model):
        forest = Forest(model, X)
        return _Readout(forest.rows, forest.module)
    if isinstance(model, MLPRegressor):
        return _perceptron(model)
    if isinstance(model, KernelRidge):
        return _kernel_ridge(model, ridge)
    if hasattr(model, "module_") and hasattr(model, "criterion_"):  # skorch's
        like = next(model.module_.parameters()).detach().new_zeros(())
        return _Readout(partial(dense, like=like), model.module_, _loss(model))
    if hasattr(model, "coef_") and hasattr(model, "intercept_"):
        return _linear(model, X, weight, ridge)
    raise TypeError(
        f"Cannot read {type(model).__name__}: it has no linear weights that least squares have "
        f"found. Known are linear models, MLPRegressor, KernelRidge, skorch's nets, {SUPPORTED}."
    )


def _linear(model: Any, X: Any, weight: Any, ridge: Any) -> _Readout:
    """Any model with `coef_`: its columns that are not zero, centred where it has an intercept."""
    slopes, ridge = dense(np.atleast_2d(model.coef_)), _own_ridge(model) if ridge is None else ridge
    exact = isinstance(model, EXACT) and not getattr(model, "positive", False)
    kept = (slopes != 0).any(0) | exact | (not slopes.any())
    slopes, design = slopes[:, kept], dense(X)[:, kept]
    share = design.new_ones(len(design)) if weight is None else dense(weight).reshape(-1)
    share = (share / share.sum())[:, None]
    intercept = float(getattr(model, "fit_intercept", True))
    centre = (share * design).sum(0) * intercept
    spread = (share * (design - centre).square()).sum(0).sqrt()
    spread = torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)
    if isinstance(ridge, Real) and ridge:  # of these columns as they are
        spread = torch.full_like(spread, float(spread.max()))
        ridge = float(ridge) / float(spread[0]) ** 2
    elif isinstance(ridge, Real):
        ridge = TINY * float(len(design) if weight is None else dense(weight).sum())
    start = dense(model.intercept_).reshape(-1).expand(len(slopes)) + slopes @ centre
    ones = start[:, None] / UNPENALISED if intercept else start.new_zeros(len(start), 0)
    module = _layer(torch.cat([slopes * spread, ones], 1))
    rows = partial(_columns, kept=kept, centre=centre, spread=spread, ones=ones.shape[1])
    return _Readout(rows, module, _loss(model), ridge)


def _columns(X: Any, kept: Tensor, centre: Tensor, spread: Tensor, ones: int) -> Tensor:
    """Rows of a linear model: columns that count, then the intercept's if any."""
    rows = (dense(X)[:, kept] - centre) / spread
    return torch.cat([rows, rows.new_full((len(rows), ones), UNPENALISED)], 1)


def _own_ridge(model: Any) -> float | None:
    r"""$\varsigma^2$ of a ridge fit, zero of plain least squares; None of others, or of several."""
    found = np.unique(getattr(model, "alpha_", getattr(model, "alpha", 0.0)))
    if isinstance(model, BayesianRidge) and hasattr(model, "lambda_"):
        found = np.array([model.lambda_ / model.alpha_])
    return float(found[0]) if isinstance(model, EXACT) and len(found) == 1 else None


def _loss(model: Any) -> LossLike:
    """That a model was trained with, by what it says of it."""
    skorch = getattr(model, "criterion_", None)
    skorch = skorch if isinstance(skorch, nn.Module) else None  # LassoLarsIC has an array
    if skorch:
        name = type(skorch).__name__
    else:
        name = model.get_params(deep=False).get("loss") or "squared_error"
    delta = getattr(skorch, "delta", getattr(model, "epsilon", None))
    if delta and (name in ("huber", "HuberLoss") or hasattr(model, "outliers_")):
        return Huber(delta * getattr(model, "scale_", 1.0))  # HuberRegressor has both
    if name not in SQUARED:
        known = "squared error, or Huber's of a linear model or net; positive targets as logarithms"
        what = f"Cannot read {type(model).__name__} with the loss {name!r}"
        raise ValueError(f"{what}. Use the {known}.")
    return "mse"


def _perceptron(model: Any) -> _Readout:
    """The net of an `MLPRegressor` in torch."""
    kinds = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
    layers: list[nn.Module] = []
    for slopes, start in zip(model.coefs_, model.intercepts_, strict=True):
        layers += [_layer(dense(slopes).mT, dense(start)), kinds[model.activation]()]
    return _Readout(dense, nn.Sequential(*layers[:-1]), _loss(model))


def _kernel_ridge(model: Any, ridge: Any) -> _Readout:
    """Kernel ridge regression as a Gaussian process, with its own penalty."""
    if model.kernel == "precomputed":
        raise ValueError("kernel='precomputed' hides the rows. Give KernelRidge the kernel itself.")
    inducing = dense(model.X_fit_)
    regressors = SubsetOfRegressors(partial(_kernel, model), inducing, noise=1.0)
    draws = np.random.default_rng(0).normal(size=(regressors.rank, regressors.rank))
    turn = dense(np.linalg.qr(draws)[0])  # calibration would learn features of single rows
    slopes = dense(model.dual_coef_).reshape(len(inducing), -1).mT
    slopes = slopes @ regressors.features(inducing) @ turn
    module = _layer(torch.cat([slopes, slopes.new_zeros(len(slopes), 1)], 1))
    ridge = (_own_ridge(model) or None) if ridge is None else ridge
    return _Readout(partial(_kernel_rows, regressors, turn), module, ridge=ridge)


def _kernel_rows(regressors: SubsetOfRegressors, turn: Tensor, X: Any) -> Tensor:
    """Features of a kernel, and the root of what they leave of the full process's variance."""
    points = dense(X)
    rest = regressors.unexplained(points)[:, None].sqrt()
    return torch.cat([regressors.features(points) @ turn, rest], 1)


def _kernel(model: Any, X: Tensor, Z: Tensor) -> Any:
    named = {"gamma": model.gamma, "degree": model.degree, "coef0": model.coef0}
    own = (model.kernel_params or {}) if callable(model.kernel) else named
    return pairwise_kernels(X.numpy(), Z.numpy(), model.kernel, filter_params=True, **own)


def _layer(slopes: Tensor, start: Tensor | None = None) -> nn.Linear:
    """(K, P) and (K,) as a layer."""
    layer = nn.Linear(slopes.shape[1], len(slopes), start is not None, dtype=torch.float64)
    layer.load_state_dict({"weight": slopes} | ({} if start is None else {"bias": start}))
    return layer


def _layers(estimator: Any) -> list[Any]:
    """The regressor and all that it holds, fitted where they are, the outermost first."""
    inner = None
    if isinstance(estimator, pipeline.Pipeline):
        inner = estimator.steps[-1][1]
    elif isinstance(estimator, compose.TransformedTargetRegressor):
        own = LinearRegression() if estimator.regressor is None else None
        inner = getattr(estimator, "regressor_", own or estimator.regressor)
    elif isinstance(estimator, (frozen.FrozenEstimator, GridSearchCV, RandomizedSearchCV)):
        inner = getattr(estimator, "best_estimator_", estimator.estimator)
    return [estimator] if inner is None else [estimator, *_layers(inner)]


def _pipes(layers: list[Any]) -> list[Any]:
    return [one for one in layers if isinstance(one, pipeline.Pipeline)]


def _require_supported(estimator: Any) -> list[Any]:
    """Its layers; refuse what is known to have no error bars of this kind, before it is trained."""
    if isinstance(estimator, type) or not hasattr(estimator, "fit"):
        raise TypeError(f"Expected a regressor, as Ridge(), got {estimator!r}.")
    if not is_regressor(estimator):
        raise TypeError(f"Expected a regressor, got {type(estimator).__name__}.")
    layers = _layers(estimator)
    last = type(layers[-1])
    for why in [REFUSED[kind.__name__] for kind in last.__mro__ if kind.__name__ in REFUSED]:
        raise TypeError(f"RigidityRegressor cannot take {last.__name__}. {why}")
    if not all(getattr(one, "refit", True) for one in layers):
        raise ValueError("A search with refit=False keeps no regressor. Use refit=True.")
    return layers


def _is_exact(estimator: Any) -> bool:
    """Whether all that is trained on targets is linear, with one penalty."""
    layers = _layers(estimator)
    parts = [one for pipe in _pipes(layers) for one in pipe[:-1].get_params().values()]
    tags = [get_tags(one) for one in parts if hasattr(one, "__sklearn_tags__")]
    blind = not any(tag.target_tags.required for tag in tags)
    free = not getattr(layers[-1], "positive", False)
    return blind and free and _own_ridge(layers[-1]) is not None


def _trained(base: Any, known: _Data) -> Any:
    """The base after its own fit, with the weights by the name that it takes them."""
    if known.weight is None:
        return base.fit(known.X, known.y)
    plain = get_config()["enable_metadata_routing"]
    names = [] if plain else [pipe.steps[-1][0] for pipe in _pipes(_layers(base))]
    return base.fit(known.X, known.y, **{"__".join([*names, "sample_weight"]): known.weight})
