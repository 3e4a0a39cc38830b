"""The loss and the constrained prediction as functions of one float64 vector, with derivatives.

`ConstrainedProblem.of` reads what the user hands in and checks it. Its methods map a vector to the
loss and to the prediction at x. An `Expansion` is the problem at one vector, with first and second
derivatives. Vectors are the parameters in the problem's `units`, which the solver chooses so that
curvatures are near one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...any_regressor.curvature.exact_hessian import Penalty, Regulariser
from ...any_regressor.derivatives.parameters import Subset
from ...any_regressor.derivatives.regressor import Function, Regressor
from ...data.samples import doubled
from ...losses import LossLike, ValuedLoss, own_weights, require_valued
from ...metrics.alignment import as_tensor
from ...models.directional import Differentiated
from ...posterior.posterior import check_ridge


@dataclass(frozen=True, eq=False)
class Expansion:
    """Loss and prediction at one point with their derivatives, each computed on first use.

    Attributes:
        problem: The loss and the prediction as functions of a vector.
        vector: The point, (P,).
    """

    problem: ConstrainedProblem
    vector: Tensor

    @property
    def loss(self) -> float:
        """The summed loss."""
        return float(self._loss.value)

    @property
    def gradient(self) -> Tensor:
        """Gradient of the loss, (P,)."""
        return self._loss.gradient

    @cached_property
    def hessian(self) -> Tensor:
        """Hessian of the loss, (P, P)."""
        return self._loss.hessian()

    @property
    def prediction(self) -> float:
        """The prediction at x."""
        return float(self._prediction.value)

    @property
    def prediction_gradient(self) -> Tensor:
        """Gradient of the prediction, (P,)."""
        return self._prediction.gradient

    @cached_property
    def prediction_hessian(self) -> Tensor:
        """Hessian of the prediction, (P, P)."""
        return self._prediction.hessian()

    @cached_property
    def gradient_scale(self) -> float:
        """Length of the losses' derivative with respect to predictions: a natural scale."""
        with torch.no_grad():
            outputs = self.problem.outputs(self.vector)
        return float(Differentiated.of(self.problem.losses, outputs).gradient.norm())

    @cached_property
    def _loss(self) -> Differentiated:
        """The summed loss with its derivatives."""
        return Differentiated.of(self.problem.total, self.vector)

    @cached_property
    def _prediction(self) -> Differentiated:
        """The prediction at x with its derivatives."""
        return Differentiated.of(self.problem.prediction, self.vector)


@dataclass(frozen=True)
class ConstrainedProblem:
    """Minimise the summed loss, with or without the prediction at x held fixed.

    Attributes:
        regressor: The model, in float64.
        loss: The loss of one sample.
        inputs: Training inputs.
        target: Training targets, (N, K).
        x: The input x, as a batch of one.
        output_index: Which of the K predictions at x.
        regulariser: A function callable(params) -> number that is added to the loss, or None.
        ridge: Half the ridge times |w - w0|^2 is added too, with the user's parameters w0.
        weight: Weights of the samples, (N, 1), or None.
        units: The vectors here are the parameters divided by these, (P,).
    """

    regressor: Regressor
    loss: ValuedLoss
    inputs: tuple[Tensor, ...]
    target: Tensor
    x: tuple[Tensor, ...]
    output_index: int
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
        """Check the arguments of `constrained_rigidity` and turn them into float64 tensors.

        Raises:
            ValueError: Shapes do not fit, or values are not finite.
        """
        check_ridge(ridge)
        regressor = Regressor.of(f, params, subset=subset).double()
        inputs = _inputs(X)
        query = _query(x, inputs)
        with torch.no_grad():
            outputs = regressor.outputs(regressor.flat, *inputs)
            prediction = regressor.outputs(regressor.flat, *query)
        if not bool(prediction.isfinite().all()):
            raise ValueError("The prediction at x is NaN or infinite. Check x.")
        if regulariser is not None:
            Penalty(regressor, regulariser)  # raises unless it returns one number
        weight = _weight(sample_weight, len(outputs))
        return cls(
            regressor=regressor,
            loss=require_valued(loss),
            inputs=inputs,
            target=_target(y, outputs, weight),
            x=query,
            output_index=_output_index(output, outputs.shape[1]),
            regulariser=regulariser,
            ridge=float(ridge),
            weight=weight,
            units=torch.ones_like(regressor.flat),
        )

    @property
    def start(self) -> Tensor:
        """The user's parameters, in these units, (P,)."""
        return self.regressor.flat / self.units

    def outputs(self, vector: Tensor) -> Tensor:
        """Predictions of the training data, (N, K)."""
        return self.regressor.outputs(self.units * vector, *self.inputs)

    def losses(self, outputs: Tensor) -> Tensor:
        """The weighted losses of the samples, summed."""
        batch = (*self.inputs, self.target)
        values = self.loss.value(outputs, self.target, batch).reshape(len(outputs), -1)
        loss_weight = own_weights(self.loss, batch)
        if loss_weight is not None:
            values = values * loss_weight
        if self.weight is not None:
            values = values * self.weight
        return values.sum()

    def total(self, vector: Tensor) -> Tensor:
        """The summed loss, the regulariser and the ridge."""
        total = self.losses(self.outputs(vector))
        flat = self.units * vector
        if self.regulariser is not None:
            total = total + self.regulariser(self.regressor.parameters.restore(flat))
        if self.ridge:
            total = total + 0.5 * self.ridge * (flat - self.regressor.flat).square().sum()
        return total

    def prediction(self, vector: Tensor) -> Tensor:
        """The prediction at x, a scalar."""
        return self.regressor.outputs(self.units * vector, *self.x)[0, self.output_index]


def _inputs(X: Any) -> tuple[Tensor, ...]:
    """One input, or a tuple of several, as float64 tensors."""
    columns = X if isinstance(X, tuple) else (X,)
    return tuple(doubled(as_tensor(column)) for column in columns)


def _query(x: Any, training_inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The one input x as a batch of one, shaped like the training inputs."""
    inputs = _inputs(x)
    if len(inputs) != len(training_inputs):
        raise ValueError(
            f"Expected x with {len(training_inputs)} inputs like X, got {len(inputs)}."
        )
    batched = []
    for value, training in zip(inputs, training_inputs, strict=True):
        if value.ndim == training.ndim - 1:
            value = value[None]
        if value.ndim != training.ndim or len(value) != 1:
            raise ValueError(
                "Expected one input x, shaped (1, ...) or as a row of X "
                f"{tuple(training.shape)}, got {tuple(value.shape)}. Call once for each input."
            )
        batched.append(value)
    return tuple(batched)


def _weight(sample_weight: Any, rows: int) -> Tensor | None:
    """Checked weights (N, 1); None without weights."""
    if sample_weight is None:
        return None
    weight = as_tensor(sample_weight).double()
    if weight.numel() != rows or len(weight) != rows:
        raise ValueError(
            f"sample_weight must have one entry per sample, {rows}, got {tuple(weight.shape)}."
        )
    if not bool((weight >= 0).all()) or not bool(weight.isfinite().all()):
        raise ValueError("sample_weight must be finite and not negative.")
    return weight.reshape(rows, 1)


def _target(y: Any, outputs: Tensor, weight: Tensor | None) -> Tensor:
    """Targets (N, K), finite; zero for samples of weight zero, where a NaN must not spread."""
    target = as_tensor(y).to(outputs)
    if target.ndim == 0 or len(target) != len(outputs) or target.numel() != outputs.numel():
        raise ValueError(
            f"Expected one target per prediction: predictions {tuple(outputs.shape)}, targets "
            f"{tuple(target.shape)}."
        )
    target = target.reshape(outputs.shape)
    if weight is not None:
        target = torch.where(weight > 0, target, 0.0)
    if not bool(target.isfinite().all()) or not bool(outputs.isfinite().all()):
        raise ValueError("Targets or predictions contain NaN or infinity. Drop these rows.")
    return target


def _output_index(output: int | None, outputs: int) -> int:
    """The index of the output to hold among `outputs` outputs; by default the only one."""
    if output is None:
        if outputs > 1:
            raise ValueError(
                f"The model has {outputs} outputs. Pass output=k to choose the output that is "
                "held at x."
            )
        return 0
    if not 0 <= output < outputs:
        raise ValueError(f"Expected output in 0..{outputs - 1}, got {output}.")
    return output
