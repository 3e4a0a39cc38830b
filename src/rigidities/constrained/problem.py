"""The loss and the constrained prediction as functions of one float64 vector, with derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..any_regressor.curvature.exact_hessian import Penalty, Regulariser
from ..any_regressor.derivatives.parameters import Subset
from ..any_regressor.derivatives.regressor import Function, Regressor
from ..data.samples import doubled
from ..losses import LossLike, ValuedLoss, own_weights, require_valued
from ..metrics.alignment import as_tensor
from ..models.directional import Differentiated
from ..posterior.posterior import check_ridge


@dataclass(frozen=True, eq=False)
class Local:
    """Loss and prediction at one point with their derivatives, each computed when asked for."""

    problem: ConstrainedProblem
    vector: Tensor

    @property
    def loss(self) -> float:
        """The summed loss."""
        return float(self._loss.value)

    @property
    def gradient(self) -> Tensor:
        """Of the loss, (P,)."""
        return self._loss.gradient

    @cached_property
    def hessian(self) -> Tensor:
        """Of the loss, (P, P)."""
        return self._loss.hessian()

    @property
    def prediction(self) -> float:
        """At x."""
        return float(self._prediction.value)

    @property
    def slope(self) -> Tensor:
        """Gradient of the prediction, (P,)."""
        return self._prediction.gradient

    @cached_property
    def bend(self) -> Tensor:
        """Hessian of the prediction, (P, P)."""
        return self._prediction.hessian()

    @cached_property
    def force(self) -> float:
        """Length of the losses' derivatives by the predictions: the natural size of a gradient."""
        problem = self.problem
        with torch.no_grad():
            outputs = problem.outputs(self.vector)
        return float(Differentiated.of(problem.losses, outputs).gradient.norm())

    @cached_property
    def _loss(self) -> Differentiated:
        return Differentiated.of(self.problem.total, self.vector)

    @cached_property
    def _prediction(self) -> Differentiated:
        return Differentiated.of(self.problem.prediction, self.vector)


@dataclass(frozen=True)
class ConstrainedProblem:
    """Minimise the summed loss, with or without the prediction at x held fixed.

    Attributes:
        regressor: in float64.
        loss: per sample.
        inputs: of the training data.
        target: (N, K).
        point: the one input x, batched.
        output: which of the K predictions at x.
        regulariser: callable(params) -> a number added to the loss, or None.
        ridge: half of it times the squared distance from the given parameters is added too.
        weight: (N, 1) of the samples, or None.
        units: (P,) the vectors here are parameters divided by it.
    """

    regressor: Regressor
    loss: ValuedLoss
    inputs: tuple[Tensor, ...]
    target: Tensor
    point: tuple[Tensor, ...]
    output: int
    regulariser: Regulariser | None
    ridge: float
    weight: Tensor | None
    units: Tensor

    @classmethod
    def of(
        cls,
        f: Function | nn.Module,
        params: Any,
        X: Any,
        y: Any,
        x: Any,
        *,
        loss: LossLike = "mse",
        regulariser: Regulariser | None = None,
        ridge: float = 0.0,
        subset: Subset | None = None,
        sample_weight: Any = None,
        output: int | None = None,
    ) -> ConstrainedProblem:
        """Read what the user handed in, in float64."""
        check_ridge(ridge)
        regressor = Regressor.of(f, params, subset=subset).double()
        inputs, point = _inputs(X), _point(x, X)
        with torch.no_grad():
            outputs = regressor.outputs(regressor.flat, *inputs)
            prediction = regressor.outputs(regressor.flat, *point)
        if not bool(prediction.isfinite().all()):
            raise ValueError("The prediction at x is NaN or infinite: look at x.")
        if regulariser is not None:
            Penalty(regressor, regulariser)  # which refuses what is not one number
        weight, valued = _weight(sample_weight, len(outputs)), require_valued(loss)
        target, chosen = _target(y, outputs, weight), _output(output, outputs.shape[1])
        terms = (regulariser, float(ridge), weight, torch.ones_like(regressor.flat))
        return cls(regressor, valued, inputs, target, point, chosen, *terms)

    @property
    def start(self) -> Tensor:
        """The given parameters."""
        return self.regressor.flat / self.units

    def outputs(self, vector: Tensor) -> Tensor:
        """Predictions of the training data, (N, K)."""
        return self.regressor.outputs(self.units * vector, *self.inputs)

    def losses(self, outputs: Tensor) -> Tensor:
        """The samples' losses, summed."""
        batch = (*self.inputs, self.target)
        values = self.loss.value(outputs, self.target, batch).reshape(len(outputs), -1)
        for weight in (own_weights(self.loss, batch), self.weight):
            values = values if weight is None else values * weight
        return values.sum()

    def total(self, vector: Tensor) -> Tensor:
        """The summed loss, the regulariser and the ridge."""
        total, flat = self.losses(self.outputs(vector)), self.units * vector
        if self.regulariser is not None:
            total = total + self.regulariser(self.regressor.parameters.restore(flat))
        if self.ridge:
            total = total + 0.5 * self.ridge * (flat - self.regressor.flat).square().sum()
        return total

    def prediction(self, vector: Tensor) -> Tensor:
        """The prediction at x, a scalar."""
        return self.regressor.outputs(self.units * vector, *self.point)[0, self.output]


def _inputs(X: Any) -> tuple[Tensor, ...]:
    columns = X if isinstance(X, tuple) else (X,)
    return tuple(doubled(as_tensor(column)) for column in columns)


def _point(x: Any, X: Any) -> tuple[Tensor, ...]:
    """One input as a batch of one."""
    columns, rows = _inputs(x), _inputs(X)
    if len(columns) != len(rows):
        raise ValueError(f"Expected x with {len(rows)} inputs like X, got {len(columns)}.")
    pairs = zip(columns, rows, strict=True)
    batched = tuple(one[None] if one.ndim == many.ndim - 1 else one for one, many in pairs)
    for one, many in zip(batched, rows, strict=True):
        if one.ndim != many.ndim or len(one) != 1:
            what = f"Expected one input x, shaped (1, ...) or as a row of X {tuple(many.shape)}"
            raise ValueError(f"{what}, got {tuple(one.shape)}. Call once for each input.")
    return batched


def _weight(sample_weight: Any, rows: int) -> Tensor | None:
    """(N, 1), checked; None without weights."""
    if sample_weight is None:
        return None
    weight = as_tensor(sample_weight).double()
    if weight.numel() != rows or len(weight) != rows:
        what = f"sample_weight must have one entry per sample, {rows}"
        raise ValueError(f"{what}, got {tuple(weight.shape)}.")
    if not bool((weight >= 0).all()) or not bool(weight.isfinite().all()):
        raise ValueError("sample_weight must be finite and not negative.")
    return weight.reshape(rows, 1)


def _target(y: Any, outputs: Tensor, weight: Tensor | None) -> Tensor:
    """(N, K), finite; zero where a sample weighs nothing, so that a NaN there does not spread."""
    target = as_tensor(y).to(outputs)
    if target.ndim == 0 or len(target) != len(outputs) or target.numel() != outputs.numel():
        raise ValueError(
            f"Expected one target per prediction: predictions {tuple(outputs.shape)}, targets "
            f"{tuple(target.shape)}."
        )
    target = target.reshape(outputs.shape)
    target = target if weight is None else torch.where(weight > 0, target, 0.0)
    if not bool(target.isfinite().all()) or not bool(outputs.isfinite().all()):
        raise ValueError("Targets or predictions hold NaN or infinity. Drop those rows.")
    return target


def _output(output: int | None, outputs: int) -> int:
    if output is None and outputs > 1:
        raise ValueError(f"The model has {outputs} outputs. Pass output=k, which to hold at x.")
    if not 0 <= (chosen := output or 0) < outputs:
        raise ValueError(f"Expected output in 0..{outputs - 1}, got {output}.")
    return chosen
