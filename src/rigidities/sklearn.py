r"""Error bars for regressors of scikit-learn, in its own manner.

    reg = RigidityRegressor(Ridge()).fit(X, y)
    mean, std = reg.predict(X_new, return_std=True)
    low, high = reg.predict_interval(X_new, 0.9)

A fitted regressor is read as rows made by the host (its transformers, its kernel) and a small torch
module whose last map is linear; `LastLayerRigidity` does the rest, and the module must reproduce
`predict` of the host. `BASES` lists what can be read. Needs `pip install "rigidities[sklearn]"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .fits import FitRigidity
from .fits import linear as linear_fit
from .last_layer.rigidity import LastLayerRigidity
from .losses import Huber, LossLike
from .notices import notify, require_level
from .prediction.prediction import Prediction

try:
    import numpy as np
    from sklearn import get_config
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone, is_regressor
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.frozen import FrozenEstimator
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import BayesianRidge, LinearRegression, Ridge, RidgeCV
    from sklearn.metrics.pairwise import pairwise_kernels
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import Pipeline
    from sklearn.utils import _safe_indexing, get_tags
    from sklearn.utils.validation import (
        _num_samples,
        check_array,
        check_consistent_length,
        check_is_fitted,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    raise ModuleNotFoundError(
        'rigidities.sklearn needs scikit-learn: pip install "rigidities[sklearn]".', name="sklearn"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    Array = NDArray[np.float64]

EXACT = (LinearRegression, Ridge, RidgeCV, BayesianRidge, KernelRidge)
"""Linear in all that was trained: left-out training rows are as good as rows held out."""
TEXTBOOK = "textbook"
HELD, APART = 0.2, 0.5
"""Share of rows that calibrate: of those given to train on, of those given with a trained base."""
UNPENALISED = 1e3
"""Height of an intercept's column beside the others: a ridge on it counts a millionth."""
KEPT = 1e-13
"""Share of the largest eigenvalue below which those of a kernel are rounding."""
LOOKED_AT = 256
REFUSED = {
    "GaussianProcessRegressor": "It has error bars of its own: predict(X, return_std=True).",
    "SVR": "Its loss has no curvature, so it is no least-squares fit. Use KernelRidge.",
    "NuSVR": "Its loss has no curvature, so it is no least-squares fit. Use KernelRidge.",
    "LinearSVR": "Its loss has no curvature, so it is no least-squares fit. Use Ridge.",
    "QuantileRegressor": "Its loss has no curvature; its predictions are quantiles already.",
    "KNeighborsRegressor": "It has no trained weights. Use KernelRidge, or Nystroem with Ridge.",
    "RadiusNeighborsRegressor": "It has no trained weights. Use KernelRidge.",
}


class RigidityRegressor(MetaEstimatorMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""A regressor with calibrated error bars around any supported one.

    The mean is that of the base, whatever it is; the law around it has the variance $\alpha^2 f^T
    (G + \varsigma^2 I)^{-1} f$ and a noise, both calibrated by `LastLayerRigidity.calibrate`.
    Under a `TransformedTargetRegressor` the law is that of the transformed target: quantiles go
    through the inverse, the mean is the inverse of the mean, and the standard deviation is that of
    the law they make, four standard deviations to either side (heavy tails have none under exp).

    Args:
        estimator: a regressor: linear models, `MLPRegressor`, `KernelRidge`, skorch's
            `NeuralNetRegressor`, as they are or inside of `Pipeline`,
            `TransformedTargetRegressor` and searches.
        prefit: whether it is trained already; a `FrozenEstimator` is.
        valid: share of the rows given to `fit` that only calibrate. "auto" is none for bases that
            are linear in all that was trained (least squares, ridge, kernel ridge), whose training
            rows count as if left out; a fifth for others; half under `prefit`, where the other
            half stands for the training rows unless `fit` is given those. None is no share: under
            `prefit` the rows are then those that the base was trained on.
        criterion: as in `LastLayerRigidity.calibrate`; "textbook" is the standard error of linear
            regression, residuals over n less the effective number of parameters, with Student's
            intervals (as statsmodels'), from the training rows.
        noise: as there.
        law: as there.
        ridge: as there; by default the base's own penalty where that is known.
        support: as there.
        conformal: share of the calibrating rows for `predict_interval(X, 0.9, conformal=True)`.
        random_state: of the split.

    Attributes:
        estimator_: the fitted base.
        uq_: the `LastLayerRigidity` (a `FitRigidity` for "textbook"), on what `rows` gives.
        report_: of the calibration; None for "textbook".
        n_features_in_: number of features, and
        feature_names_in_: their names, where the base knows them.

    Examples:
        >>> from sklearn.linear_model import LinearRegression
        >>> X, y = [[-1.0], [0.0], [1.0]], [-0.9, -0.2, 1.1]
        >>> reg = RigidityRegressor(LinearRegression(), criterion="textbook").fit(X, y)
        >>> mean, std = reg.predict([[0.0]], return_std=True)
        >>> round(float(std[0]) ** 2, 12)  # 0.06 (1 + 1/3)
        0.08
    """

    def __init__(
        self,
        estimator: Any,
        *,
        prefit: bool = False,
        valid: float | str | None = "auto",
        criterion: str = "auto",
        noise: Any = None,
        law: Any = None,
        ridge: float | None = None,
        support: tuple[float | None, float | None] | None = None,
        conformal: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.prefit = prefit
        self.valid = valid
        self.criterion = criterion
        self.noise = noise
        self.law = law
        self.ridge = ridge
        self.support = support
        self.conformal = conformal
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, train: tuple[Any, ...] | None = None
    ) -> Self:
        """Train the base, unless it is, and calibrate its error bars.

        Args:
            X: (N, P) inputs, in any form that the base takes.
            y: (N,) or (N, K) targets.
            sample_weight: (N,) loss weights.
            train: (X, y) or (X, y, sample_weight) that a trained base was trained on; X and y are
                then rows that it has not seen, and all of them calibrate.
        """
        fixed = self.prefit or isinstance(self.estimator, FrozenEstimator)
        _require_supported(self.estimator)
        if train is not None and not fixed:
            raise ValueError("train= is for a base that is trained already: prefit=True.")
        given = Data.of(X, y, sample_weight)
        if fixed:
            check_is_fitted(self.estimator)
        share = None if train is not None else self._share(fixed)
        known, held = given.split(share, self.random_state)
        if train is not None:
            known, held = Data.of(*train), given
        base = self.estimator if fixed else _trained(clone(self.estimator), known)
        chain = Chain.of(base, known)
        if self.criterion == TEXTBOOK:
            found: Any = self._textbook(chain, known, held)
            readout, report = None, None
        else:
            readout = chain.readout(known)
            unseen = fixed and train is None and held is not None
            found = self._fitted(chain, readout, known, unseen=unseen)
            _require_same(found, chain, readout, known if held is None else held, base)
            rows = (None if one is None else one.tensors(chain, readout) for one in (known, held))
            report = self._calibrated(found, readout, *rows)
        self.estimator_, self.uq_, self.report_ = base, found, report
        self._chain, self._readout = chain, readout
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(base, name):
                setattr(self, name, getattr(base, name))
        return self

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The base's predictions, with standard deviations or a covariance where asked for.

        Args:
            X: (N, P) inputs.
            return_std: also the standard deviation of a new observation, shaped like the mean.
            return_cov: also the joint covariance of new observations, (N, N), for several targets
                (N, N, K): that of the predictions, and the noise on its diagonal.
        """
        check_is_fitted(self)
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not for both at once.")
        mean = self.estimator_.predict(X)
        if return_std:
            return mean, self._chain.targets.std(self.prediction(X)).reshape(np.shape(mean))
        return (mean, self._covariance(X)) if return_cov else mean

    def predict_interval(
        self, X: Any, level: float = 0.9, *, conformal: bool = False
    ) -> tuple[Array, Array]:
        """The central interval that holds a new observation with probability `level`: (low, high).

        Args:
            X: (N, P) inputs.
            level: the probability.
            conformal: with the guarantee of the conformal rows, instead of under the law.
        """
        require_level(level, "An interval's")
        if not conformal:
            low, high = np.moveaxis(
                self.predict_quantiles(X, [(1 - level) / 2, (1 + level) / 2]), -1, 0
            )
            return low, high
        ends = self.prediction(X).interval(level, conformal=True)
        targets, shape = self._chain.targets, self._shape(X)
        mapped = [targets.back(_array(end)) for end in ends]
        return np.minimum(*mapped).reshape(shape), np.maximum(*mapped).reshape(shape)

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> Array:
        """Quantiles of a new observation, (N, levels), or (N, K, levels) for several targets."""
        shape, prediction = self._shape(X), self.prediction(X)
        own = self._student(X) if isinstance(self.uq_, FitRigidity) else prediction.quantile
        found = [self._chain.targets.quantile(own, level) for level in levels]
        return np.stack([one.reshape(shape) for one in found], -1)

    def prediction(self, X: Any) -> Prediction:
        """Mean, epistemic variance, noise and law; in the units of a transformed target."""
        rows = self.rows(X)
        if isinstance(self.uq_, FitRigidity):
            return self.uq_.predict(rows, noise=True)
        found: Prediction = self.uq_.predict(rows)
        return found

    def rows(self, X: Any) -> Tensor:
        """What `uq_` takes for these inputs: `reg.uq_.ensemble(64)(reg.rows(X))`."""
        check_is_fitted(self)
        inputs = self._chain.inputs(X)
        return dense(inputs) if self._readout is None else self._readout.rows(inputs)

    def __sklearn_tags__(self) -> Any:
        tags, own = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.input_tags, tags.target_tags = own.input_tags, own.target_tags
        tags.regressor_tags, tags.non_deterministic = own.regressor_tags, own.non_deterministic
        return tags

    def _share(self, fixed: bool) -> float | None:
        """Of rows that only calibrate."""
        share = self.valid
        if share == "auto":
            exact = self.criterion == "auto" and not fixed and _is_exact(self.estimator)
            needless = exact or self.criterion in ("loo", TEXTBOOK)
            return None if needless else APART if fixed else HELD
        if share is None or (isinstance(share, float) and 0 < share < 1):
            return share
        raise ValueError(f"valid must be 'auto', None or a share between 0 and 1, got {share!r}.")

    def _textbook(self, chain: Chain, known: Data, held: Data | None) -> FitRigidity:
        if held is not None or self.conformal is not None or self.noise or self.law:
            raise ValueError(
                "criterion='textbook' has its own noise and law and needs the training rows alone: "
                "leave valid, train, noise, law and conformal as they are."
            )
        rows, target = dense(chain.inputs(known.X)), chain.targets.towards(known.y)
        return linear_fit(chain.model, rows, target, sample_weight=known.weight)

    def _fitted(
        self, chain: Chain, readout: Readout, known: Data, *, unseen: bool
    ) -> LastLayerRigidity:
        """With the Gram of the training rows; left out only where the base has seen them."""
        weight = None if known.weight is None else itemgetter("weight")
        options: dict[str, Any] = {"method": "gram" if readout.ridge is None else "qr"}
        options |= {"sample": 0} if unseen else {}
        uq = LastLayerRigidity(Weighted(readout.module))
        rows = known.tensors(chain, readout)
        return uq.fit(rows, loss=readout.loss, sample_weight=weight, progress=False, **options)

    def _calibrated(self, uq: LastLayerRigidity, readout: Readout, known: Any, held: Any) -> Any:
        """The report."""
        ridge = readout.ridge if self.ridge is None else self.ridge
        options: dict[str, Any] = {"noise": self.noise, "law": self.law, "support": self.support}
        options |= {"ridge": ridge, "conformal": self.conformal, "progress": False}
        seen = known if self.criterion == "loo" else None
        return uq.calibrate(held, train=seen, criterion=self.criterion, **options)

    def _covariance(self, X: Any) -> Array:
        slope, p, rows = self._chain.targets.slope, self.prediction(X), self.rows(X)
        if slope is None:
            raise ValueError(
                "return_cov needs a target map that is affine, as a scaler's; under another the "
                "joint law is not Gaussian. Use predict_quantiles, or covariance of uq_ in the "
                "units of the transformed target."
            )
        if isinstance(self.uq_, FitRigidity):
            joint = self.uq_.covariance(self.uq_.model(rows)[1])
        else:
            joint = self.uq_.covariance(rows)
        n, k = len(rows), _array(p.noise).shape[1]
        found = _array(joint).reshape(n, k, n, k).diagonal(axis1=1, axis2=3).copy()
        found[np.arange(n), np.arange(n)] += _array(p.noise)
        found *= np.square(slope)
        return found[..., 0] if len(self._shape(X)) == 1 else found

    def _student(self, X: Any) -> Callable[[float], Tensor]:
        """Quantiles of Student's law of a textbook fit."""
        rows, fit = self.rows(X), self.uq_

        def quantile(level: float) -> Tensor:
            if level == 0.5:
                mean: Tensor = fit.predict(rows).mean
                return mean
            ends: tuple[Tensor, Tensor] = fit.interval(rows, abs(2 * level - 1), noise=True)
            return ends[int(level > 0.5)]

        return quantile

    def _shape(self, X: Any) -> tuple[int, ...]:
        """Of what the base predicts, after its own checks of the inputs."""
        check_is_fitted(self)
        return np.shape(self.estimator_.predict(X))


@dataclass(frozen=True)
class Data:
    """Rows as the host takes them."""

    X: Any
    y: Any
    weight: Any = None

    @classmethod
    def of(cls, X: Any, y: Any, weight: Any = None) -> Data:
        """Checked as far as the base does not."""
        if y is None:
            raise ValueError("RigidityRegressor requires y to be passed, but the target y is None.")
        check_array(y, ensure_2d=False, input_name="y", ensure_min_samples=0)
        check_consistent_length(X, y, weight)
        if _num_samples(y) == 1:
            raise ValueError("Error bars cannot be calibrated on 1 sample: give several rows.")
        return cls(X, y, weight)

    def split(self, share: float | None, seed: Any) -> tuple[Data, Data | None]:
        """Rows to learn from, and those that calibrate."""
        if share is None:
            return self, None
        parts = [part for part in (self.X, self.y, self.weight) if part is not None]
        cut = train_test_split(*parts, test_size=share, random_state=seed)
        return Data(*cut[::2]), Data(*cut[1::2])

    def tensors(self, chain: Chain, readout: Readout) -> dict[str, Tensor]:
        """As the library takes them."""
        rows = readout.rows(chain.inputs(self.X))
        target = torch.as_tensor(chain.targets.towards(self.y)).to(rows)
        found = {"x": rows, "y": target}
        if self.weight is None:
            return found
        weight = np.asarray(self.weight, dtype=np.float64).reshape(-1)
        return {**found, "weight": torch.as_tensor(weight, device=rows.device)}


@dataclass(frozen=True)
class TargetMap:
    """What `TransformedTargetRegressor`s do to a target, the outermost first.

    Attributes:
        transformers: fitted.
        slope: (K,) of the way back, where that is affine; otherwise None.
    """

    transformers: tuple[Any, ...] = ()
    slope: Array | None = None

    @classmethod
    def of(cls, transformers: tuple[Any, ...], y: Any) -> TargetMap:
        """Checked on these targets: each must have a monotone map of its own."""
        free = cls(transformers)
        t = np.sort(free.towards(y), 0)
        values, low, high = free.back(t), t[:1], t[-1:]
        for k in range(t.shape[1] if t.shape[1] > 1 else 0):
            moved = t.copy()
            moved[:, k] = low[:, k]
            same = np.isclose(free.back(moved), values).all(0)
            if not np.delete(same, k).all():
                raise ValueError(
                    "The target's transformer mixes targets: their quantiles cannot be carried "
                    "back. Use one that maps each target by itself."
                )
        steps = np.diff(values, axis=0)
        if not ((steps >= 0).all(0) | (steps <= 0).all(0)).all():
            raise ValueError(
                "The inverse of the target's transformer neither rises nor falls throughout: "
                "quantiles cannot be carried through it."
            )
        high = np.where(high > low, high, low + 1)
        start, end = free.back(low), free.back(high)
        slope = (end - start) / (high - low)
        straight = np.allclose(start + (t - low) * slope, values, rtol=1e-9, atol=1e-9)
        return cls(transformers, slope[0] if straight else None)

    def towards(self, y: Any) -> Array:
        """(N, K) as the innermost regressor was given them."""
        values: Array = np.asarray(y, dtype=np.float64)
        values = values.reshape(len(values), -1)
        for one in self.transformers:
            values = np.asarray(one.transform(values), dtype=np.float64).reshape(len(values), -1)
        return values

    def back(self, values: Array) -> Array:
        """(N, K) in the user's units."""
        with np.errstate(over="ignore"):  # a far quantile may be infinite
            for one in reversed(self.transformers):
                values = np.asarray(one.inverse_transform(values)).reshape(len(values), -1)
        return values

    def quantile(self, of: Callable[[float], Tensor], level: float) -> Array:
        """Of the law carried back; a falling map turns it over."""
        value = self.back(_array(of(level)))
        if not self.transformers:
            return value
        other = self.back(_array(of(1 - level)))
        return np.minimum(value, other) if level < 0.5 else np.maximum(value, other)

    def std(self, p: Prediction) -> Array:
        r"""Of the law carried back, over $|z| \le 4$ of a normal z with the same quantiles."""
        if not self.transformers:
            return _array(p.std)
        if self.slope is not None:
            return _array(p.std) * np.abs(self.slope)
        z = torch.linspace(-4, 4, 65, dtype=torch.float64)
        share = torch.exp(-z.square() / 2)
        share = (share / share.sum()).numpy()[:, None, None]
        levels = torch.special.ndtr(z).tolist()
        values = np.stack([self.back(_array(p.quantile(level))) for level in levels])
        mean = (share * values).sum(0)
        found: Array = np.sqrt((share * np.square(values - mean)).sum(0))
        return found


@dataclass(frozen=True)
class Chain:
    """A fitted regressor taken apart: transformers, maps of the target, the last regressor."""

    transformers: tuple[Any, ...]
    targets: TargetMap
    model: Any

    @classmethod
    def of(cls, base: Any, known: Data) -> Chain:
        """Checked on the rows: transformers must take rows one by one."""
        layers = _layers(base)
        maps = tuple(one.transformer_ for one in layers if _is_target_map(one))
        pipes = [one for one in layers if isinstance(one, Pipeline)]
        steps = tuple(pipe[:-1] for pipe in pipes if len(pipe) > 1)
        targets = TargetMap.of(maps, known.y) if maps else TargetMap()
        return cls(steps, targets, layers[-1])

    def inputs(self, X: Any) -> Any:
        """What the last regressor takes, one row each."""
        found = reduce(lambda rows, step: step.transform(rows), self.transformers, X)
        rows, made = _num_samples(X), _num_samples(found)
        if made != rows:
            raise ValueError(
                f"The pipeline's transformers give {made} rows for {rows}: error bars need one for "
                "each. Drop rows before fit, not in a transformer."
            )
        return found

    def readout(self, known: Data) -> Readout:
        """How the library reads the last regressor."""
        model, inputs = self.model, self.inputs(known.X)
        for recognised, read in BASES:
            if recognised(model):
                found = read(model, inputs, known.weight)
                self._require_rows_apart(found, known)
                return found
        raise TypeError(
            f"Cannot read {type(model).__name__}: it has no linear weights that a least-squares "
            "fit has found. Known: linear models (coef_), MLPRegressor, KernelRidge, skorch's "
            "NeuralNetRegressor."
        )

    def _require_rows_apart(self, readout: Readout, known: Data) -> None:
        """Refuse transformers that change the order of rows, or mix them."""
        if not self.transformers:
            return
        few = np.arange(min(LOOKED_AT, _num_samples(known.X)))
        parts = (_safe_indexing(known.X, order) for order in (few, few[::-1]))
        ahead, back = (readout.rows(self.inputs(part)) for part in parts)
        if not torch.allclose(ahead.flip(0), back, rtol=1e-4, atol=1e-6):
            raise ValueError(
                "The pipeline's transformers change the order of rows, or a row's values depend on "
                "the rows beside it: error bars would belong to others. Map each row by itself."
            )


@dataclass(frozen=True)
class Readout:
    """A fitted regressor as rows made by the host and a module.

    Attributes:
        module: rows (N, P) -> predictions (N, K), linear in its last weights.
        rows: what the regressor takes -> what the module takes.
        loss: that it was trained with.
        ridge: its own penalty, in the units of the module's last rows; None where unknown.
    """

    module: nn.Module
    rows: Callable[[Any], Tensor]
    loss: LossLike = "mse"
    ridge: float | None = None


class Weighted(nn.Module):
    """A module that lets a row's weight pass by, which the fit asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Any:
        """The module's own."""
        return self.module(x)


@dataclass(frozen=True)
class Columns:
    """Rows of a linear model: columns that count, centred and scaled, then the intercept's."""

    kept: Any
    centre: Tensor
    spread: Tensor
    height: float = 0.0

    def __call__(self, X: Any) -> Tensor:
        rows = (dense(X)[:, self.kept] - self.centre) / self.spread
        one = rows.new_full((len(rows), 1), self.height)
        return torch.cat([rows, one], 1) if self.height else rows


@dataclass(frozen=True)
class KernelRows:
    r"""Rows of a kernel: $\mu^{-1/2} U^T k(x)$, and the root of what they leave of $k(x, x)$.

    The last one is zero at the training rows: the variance is the full Gaussian process's.
    """

    model: Any
    basis: Tensor

    def __call__(self, X: Any) -> Tensor:
        rows = self.kernel(X, self.model.X_fit_) @ self.basis
        own = [float(self.kernel(x, x)) for x in np.split(dense(X).numpy(), len(rows))]
        rest = torch.tensor(own, dtype=torch.float64) - rows.square().sum(1)
        return torch.cat([rows, rest.clamp(min=0).sqrt()[:, None]], 1)

    def kernel(self, X: Any, Z: Any) -> Tensor:
        """(n, m), by the host."""
        return _kernel(self.model, X, Z)


def _kernel(model: Any, X: Any, Z: Any) -> Tensor:
    if callable(model.kernel):
        options = model.kernel_params or {}
    else:
        options = {"gamma": model.gamma, "degree": model.degree, "coef0": model.coef0}
    return dense(pairwise_kernels(X, Z, metric=model.kernel, filter_params=True, **options))


def dense(X: Any) -> Tensor:
    """Rows of any host as a float64 tensor."""
    values = X.toarray() if hasattr(X, "toarray") else X
    return torch.as_tensor(np.array(values, dtype=np.float64))


def _array(tensor: Tensor) -> Array:
    """(N, K) from (N,) or (N, K), on any device."""
    values: Array = tensor.detach().cpu().double().numpy()
    return values.reshape(len(values), -1) if values.ndim < 3 else values


def _linear(model: Any, X: Any, weight: Any) -> Readout:
    """Any model with `coef_`: its columns that are not zero, centred where it has an intercept."""
    coefficients = dense(model.coef_)
    coefficients = coefficients.reshape(1, -1) if coefficients.ndim == 1 else coefficients
    free = isinstance(model, EXACT) and not getattr(model, "positive", False)
    kept = torch.ones(coefficients.shape[1], dtype=torch.bool)
    if not free and bool(coefficients.any()):
        kept = (coefficients != 0).any(0)
    design, ridge = dense(X)[:, kept], _own_ridge(model)
    intercept = getattr(model, "fit_intercept", True)
    centre, spread = _moments(design, weight)
    centre = centre if intercept else torch.zeros_like(centre)
    height = UNPENALISED * float(spread.max()) if intercept and ridge is not None else 0.0
    spread = torch.ones_like(spread) if ridge is not None else spread
    slopes = coefficients[:, kept]
    start = dense(model.intercept_).reshape(-1).expand(len(slopes)) + slopes @ centre
    slopes = slopes * spread
    if height:
        slopes, intercept = torch.cat([slopes, start[:, None] / height], 1), False
    module = _layer(slopes, start if intercept else None)
    return Readout(module, Columns(kept, centre, spread, height), _loss(model), ridge)


def _moments(design: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of columns; 1 for those that are constant."""
    shares = design.new_ones(len(design)) if weight is None else dense(weight).reshape(-1)
    shares = (shares / shares.sum())[:, None]
    centre = (shares * design).sum(0)
    spread = (shares * (design - centre).square()).sum(0).sqrt()
    return centre, torch.where(spread > 1e-12 * centre.abs(), spread, 1.0)


def _own_ridge(model: Any) -> float | None:
    r"""$\varsigma^2$ of a ridge fit; None where there is none, or several."""
    if isinstance(model, BayesianRidge):
        return float(model.lambda_ / model.alpha_)
    if not isinstance(model, (Ridge, RidgeCV, KernelRidge)):
        return None
    found = np.unique(getattr(model, "alpha_", getattr(model, "alpha", 0.0)))
    return float(found[0]) if len(found) == 1 and found[0] > 0 else None


def _loss(model: Any) -> LossLike:
    """The loss of a linear model, by what it says of it."""
    name = getattr(model, "loss", "squared_error")
    if hasattr(model, "outliers_"):  # HuberRegressor
        return Huber(model.epsilon * model.scale_)
    if name == "huber":
        return Huber(model.epsilon)
    if name != "squared_error":
        raise ValueError(
            f"The loss {name!r} of {type(model).__name__} has no curvature that error bars could "
            "follow. Train it with 'squared_error' or 'huber'."
        )
    return "mse"


def _perceptron(model: Any, X: Any, weight: Any) -> Readout:
    """The net of an `MLPRegressor` in torch."""
    if model.out_activation_ != "identity":
        raise ValueError(
            f"Expected an MLPRegressor with loss='squared_error', got {model.loss!r}. For positive "
            "targets use TransformedTargetRegressor(func=np.log, inverse_func=np.exp)."
        )
    kinds = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
    layers: list[nn.Module] = []
    for slopes, start in zip(model.coefs_, model.intercepts_, strict=True):
        layers += [_layer(dense(slopes).mT, dense(start)), kinds[model.activation]()]
    return Readout(nn.Sequential(*layers[:-1]), dense)


def _kernel_ridge(model: Any, X: Any, weight: Any) -> Readout:
    """Kernel ridge regression as a Gaussian process: `KernelRows`, and its own penalty."""
    if model.kernel == "precomputed":
        raise ValueError("kernel='precomputed' hides the rows. Give KernelRidge the kernel itself.")
    values, vectors = torch.linalg.eigh(_kernel(model, model.X_fit_, model.X_fit_))
    large = values > KEPT * values[-1]
    roots, vectors = values[large].sqrt(), vectors[:, large]
    dual = dense(model.dual_coef_).reshape(len(vectors), -1)
    slopes = (roots[:, None] * (vectors.mT @ dual)).mT
    slopes = torch.cat([slopes, slopes.new_zeros(len(slopes), 1)], 1)
    return Readout(_layer(slopes), KernelRows(model, vectors / roots), ridge=_own_ridge(model))


@dataclass(frozen=True)
class ModuleRows:
    """Rows as a torch module takes them."""

    module: nn.Module

    def __call__(self, X: Any) -> Tensor:
        return dense(X).to(next(self.module.parameters()))


def _skorch(model: Any, X: Any, weight: Any) -> Readout:
    """The trained module of skorch's `NeuralNetRegressor`."""
    loss = model.criterion_
    if not isinstance(loss, (nn.MSELoss, nn.HuberLoss)):
        raise ValueError(
            f"Expected skorch's criterion MSELoss or HuberLoss, got {type(loss).__name__}. Use "
            "rigidities.LastLayerRigidity(net.module_).fit(..., loss=...)."
        )
    kind: LossLike = Huber(loss.delta) if isinstance(loss, nn.HuberLoss) else "mse"
    return Readout(model.module_, ModuleRows(model.module_), kind)


def _layer(slopes: Tensor, start: Tensor | None = None) -> nn.Linear:
    """(K, P) and (K,) as a layer."""
    layer = nn.Linear(slopes.shape[1], len(slopes), start is not None, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(slopes)
        if start is not None:
            layer.bias.copy_(start)
    return layer


Read = Callable[[Any, Any, Any], Readout]
BASES: list[tuple[Callable[[Any], bool], Read]] = [
    (lambda model: isinstance(model, MLPRegressor), _perceptron),
    (lambda model: isinstance(model, KernelRidge), _kernel_ridge),
    (lambda model: hasattr(model, "module_") and hasattr(model, "criterion_"), _skorch),
    (lambda model: hasattr(model, "coef_") and hasattr(model, "intercept_"), _linear),
]
"""Which fitted regressors can be read, and how: (model, its training inputs, weights)."""


def _is_target_map(layer: Any) -> bool:
    return isinstance(layer, TransformedTargetRegressor)


def _inside(layer: Any) -> Any:
    """The regressor that another one holds, fitted where it is; None for the last."""
    if isinstance(layer, Pipeline):
        return layer.steps[-1][1]
    if _is_target_map(layer):
        own = layer.regressor if layer.regressor is not None else LinearRegression()
        return getattr(layer, "regressor_", own)
    if isinstance(layer, FrozenEstimator):
        return layer.estimator
    search = hasattr(layer, "refit") and hasattr(layer, "estimator")
    return getattr(layer, "best_estimator_", layer.estimator) if search else None


def _layers(estimator: Any) -> list[Any]:
    """The regressor and all that it holds, the outermost first."""
    found = [estimator]
    while (inner := _inside(found[-1])) is not None:
        found.append(inner)
    return found


def _require_supported(estimator: Any) -> None:
    """Refuse what is known to have no error bars of this kind, before it is trained."""
    if not is_regressor(estimator):
        raise TypeError(f"Expected a regressor, got {type(estimator).__name__}.")
    last = type(_layers(estimator)[-1])
    for kind in last.__mro__:
        if kind.__name__ in REFUSED:
            raise TypeError(f"RigidityRegressor cannot take {last.__name__}. {REFUSED[kind.__name__]}")


def _is_exact(estimator: Any) -> bool:
    """Whether all that was trained on targets is linear."""
    layers = _layers(estimator)
    steps = [step for one in layers if isinstance(one, Pipeline) for _, step in one.steps[:-1]]
    blind = not any(
        get_tags(step).target_tags.required for step in steps if hasattr(step, "transform")
    )
    return blind and isinstance(layers[-1], EXACT)


def _trained(base: Any, known: Data) -> Any:
    """The base after its own fit, with the weights by the name that it takes them."""
    if known.weight is None:
        return base.fit(known.X, known.y)
    name = "sample_weight"
    if not get_config()["enable_metadata_routing"]:
        pipes = [one for one in _layers(base) if isinstance(one, Pipeline)]
        name = "__".join([*(pipe.steps[-1][0] for pipe in pipes), name])
    return base.fit(known.X, known.y, **{name: known.weight})


def _require_same(
    uq: LastLayerRigidity, chain: Chain, readout: Readout, data: Data, base: Any
) -> None:
    """Refuse a module that does not predict what the host does."""
    own = np.asarray(base.predict(data.X))
    mean = uq.predict(readout.rows(chain.inputs(data.X)), progress=False).mean
    found = chain.targets.back(_array(mean))
    error = np.abs(found - own.reshape(found.shape)).max()
    if not error <= (1e-3 if own.dtype == np.float32 else 1e-5) * np.abs(own).max():
        raise ValueError(
            f"{type(chain.model).__name__} is not read well: the linear form of it gives "
            f"predictions that differ by up to {error:.3g} from its own. It may have a link "
            "function; transform the target instead, with TransformedTargetRegressor."
        )
