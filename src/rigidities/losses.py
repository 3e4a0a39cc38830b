r"""Curvature of the loss at the prediction: the weight of a row in the Gram.

The paper's pseudo-Hessian (Sec. 3.4) weights each row by $\partial^2 \ell / \partial \tilde y^2$. A
loss here is any object with `curvature(prediction, target, batch)`. `loss_for` makes one from a
name, a plain callable or a `torch.nn` loss with `reduction="none"`. A loss may also have sample
weights (`own_weights`), and a `ValuedLoss` has a value that can be differentiated.

| name | loss | curvature |
| --- | --- | --- |
| `"mse"` | half the squared error | 1 |
| `"huber"` | `Huber(delta=1)` | 1 inside delta, 0 outside |
| `"log-cosh"` | log cosh(r) | 1 - tanh(r)^2 |
| `"poisson"` | exp(y) - t y, y the log rate | exp(y) |
| `GaussianNLL(variance)` | r^2 / (2 variance) | 1 / variance |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .models.derivatives import pulled, recorded, slopes
from .notices import notify

__all__ = [
    "MSE",
    "GaussianNLL",
    "Huber",
    "LogCosh",
    "Loss",
    "LossLike",
    "PerSampleLoss",
    "PoissonNLL",
    "ValuedLoss",
    "loss_for",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@runtime_checkable
class Loss(Protocol):
    """What a fit needs from a loss.

    Attributes:
        needs_target: Whether the curvature depends on the target.
    """

    needs_target: bool

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor | None:
        """Second derivative with respect to the prediction.

        Args:
            prediction: (N, K).
            target: (N, K); None if there is no target and none is needed.
            batch: The batch as the user gave it.

        Returns:
            (N, K) or (N, 1); None for all ones.
        """


@runtime_checkable
class ValuedLoss(Loss, Protocol):
    """A loss that can be differentiated as a whole, as the exact Hessian needs it."""

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        """The loss of each sample, (N,) or (N, K), up to a constant."""


LossLike = str | Loss | Callable[[Tensor, Tensor], Tensor]
"""A name, a loss, or callable(prediction, target) -> one loss per sample."""


# Files store the fields of the losses below by name.


NOT_DIFFERENTIABLE = "The loss does not depend on the prediction through torch operations."
"""Why a loss cannot be used."""


@dataclass(frozen=True)
class MSE:
    """Half the squared error: curvature 1, so that $G = F^T F$ as in the paper."""

    needs_target = False

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        """$r^2 / 2$."""
        return (prediction - target).square() / 2

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> None:
        """All ones."""
        return


@dataclass(frozen=True)
class Huber:
    """Half the squared error inside delta, linear outside: rows in the tails have no curvature.

    Attributes:
        delta: Size of the residual beyond which the loss is linear.
    """

    delta: float = 1.0
    needs_target = True

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        r"""$r^2/2$ inside, $\delta(|r| - \delta/2)$ outside."""
        size = (prediction - target).abs()
        outside = self.delta * (size - self.delta / 2)
        return torch.where(size <= self.delta, size.square() / 2, outside)

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor:
        r"""1 where $|r| \le \delta$, else 0."""
        assert target is not None
        residual = (prediction - target).to(torch.float64)
        inside = (residual.abs() <= self.delta).to(torch.float64)
        # A comparison with NaN is False, so that a sum makes NaN of a NaN residual again.
        return inside + 0 * residual


@dataclass(frozen=True)
class LogCosh:
    """log cosh(r): half the squared error near zero, linear far away."""

    needs_target = True

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        """log cosh(r), without overflow."""
        residual = prediction - target
        return residual + nn.functional.softplus(-2 * residual) - math.log(2)

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor:
        r"""$1 - \tanh^2 r$, as $\cosh^{-2} r$, which does not cancel."""
        assert target is not None
        residual = (prediction - target).to(torch.float64)
        # An infinite residual must give NaN, and must not pass for one far in the tail.
        return residual.cosh().pow(-2) + 0 * residual


@dataclass(frozen=True)
class PoissonNLL:
    """Poisson NLL of a model that predicts the log rate, or the rate with `log=False`.

    Attributes:
        log: Whether the model predicts the logarithm of the rate.
    """

    log: bool = True
    needs_target = True

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        r"""$e^y - t y$, or $y - t \log y$."""
        if self.log:
            return prediction.exp() - target * prediction
        return prediction - torch.xlogy(target, prediction)

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor:
        """exp(y), or $t / y^2$."""
        assert target is not None
        prediction = prediction.to(torch.float64)
        if self.log:
            return prediction.exp()
        return target / prediction.square()


@dataclass(frozen=True)
class GaussianNLL:
    """$r^2 / 2v$ with a given variance v.

    Args:
        variance: A number, a tensor with one entry per target, or a callable(batch) -> one variance
            per sample or per output.
    """

    variance: float | Tensor | Callable[[Any], Tensor]
    needs_target = False

    def __post_init__(self) -> None:
        # Tensors have no single truth value when two losses are compared.
        if isinstance(self.variance, Tensor):
            object.__setattr__(self, "variance", self.variance.tolist())

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        """$r^2 / 2v$; the variances of a callable enter by `weight` instead."""
        square = (prediction - target).square() / 2
        if callable(self.variance):
            return square
        return square * _precision(self.variance, prediction).to(square)

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor | None:
        """1 / v; the variances of a callable enter by `weight` instead."""
        if callable(self.variance):
            return None
        precision = _precision(self.variance, prediction).to(prediction.device)
        return precision.expand(prediction.shape)

    @property
    def weight(self) -> Callable[[Any], Tensor] | None:
        """The sample weights 1 / v where v comes with the batch."""
        variance = self.variance
        if not callable(variance):
            return None
        return lambda batch: _precision(variance(batch))


def _precision(variance: float | Tensor, prediction: Tensor | None = None) -> Tensor:
    """1 / v, one number or one per target of the predictions (N, K), which are checked."""
    variance = torch.as_tensor(variance, dtype=torch.float64)
    if prediction is not None and variance.numel() not in {1, prediction.shape[-1]}:
        raise ValueError(
            f"GaussianNLL has {variance.numel()} variances for {prediction.shape[-1]} targets. "
            "Pass one number, one variance per target, or callable(batch) for one per sample."
        )
    if not bool((variance > 0).all()):
        raise ValueError("GaussianNLL needs variances above zero.")
    return 1 / variance


@dataclass(unsafe_hash=True)
class PerSampleLoss:
    """Any twice differentiable loss per sample.

    Attributes:
        function: callable(prediction, target) -> (N,) or (N, K).
    """

    function: Callable[[Tensor, Tensor], Tensor]
    needs_target = True
    _checked = False

    def value(self, prediction: Tensor, target: Tensor, batch: Any) -> Tensor:
        """What the callable returns."""
        return self.function(prediction, target)

    def curvature(self, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor:
        """Diagonal of the second derivative by automatic differentiation, (N, K).

        It warns where the loss couples the targets of a sample.
        """
        assert target is not None
        diagonal = prediction.new_zeros(prediction.shape, dtype=torch.float64)
        columns = diagonal.view(len(prediction), -1)
        coupled = False
        for k, row in enumerate(self._hessian_rows(prediction, target)):
            columns[:, k] = row[:, k]
            if not coupled:
                off_diagonal = row.abs().sum(1) - row[:, k].abs()
                coupled = bool((off_diagonal > 1e-9).any())
        if coupled:
            notify(
                "The loss couples the targets of a sample. Only the diagonal of its curvature is "
                "used."
            )
        return diagonal

    def coupled_curvature(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The full matrix of second derivatives of each sample's loss, (N, K, K)."""
        return torch.stack(list(self._hessian_rows(prediction, target)), dim=1)

    def _hessian_rows(self, prediction: Tensor, target: Tensor) -> Iterator[Tensor]:
        """Row k of every sample's Hessian, (N, K), one backward pass each."""
        t = target.to(torch.float64) if target.is_floating_point() else target

        def checked_values(predictions: Tensor) -> Tensor:
            values = self.function(predictions, t)
            self._check(values, predictions, t)
            return values

        y, values = recorded(checked_values, prediction.to(torch.float64))
        (slope,) = pulled(
            values,
            y,
            torch.ones_like(values)[None],
            graph=True,
            unconnected=NOT_DIFFERENTIABLE,
        )
        for column in slope.reshape(len(y), -1).unbind(1):
            (row,) = pulled(column, y, torch.ones_like(column)[None])
            yield row.reshape(len(y), -1)

    def _check(self, values: Tensor, prediction: Tensor, target: Tensor) -> None:
        """Refuse a function that does not give the loss of each sample alone."""
        rows = len(prediction)
        if values.ndim == 0 or values.shape[0] != rows:
            raise ValueError(
                f"The loss must return one value per sample, shape ({rows},) or "
                f"{tuple(prediction.shape)}, got {tuple(values.shape)}. A mean or sum over the "
                "batch loses the curvature of each sample. Pass reduction='none', or drop the "
                ".mean()."
            )
        # Only the first batch is tried: the first sample must have the same loss by itself.
        if not self._checked and rows > 1:
            alone = self.function(prediction[:1].detach(), target[:1]).detach()
            in_batch = values[:1].detach()
            if not torch.allclose(alone, in_batch, rtol=1e-4, equal_nan=True):
                raise ValueError(
                    "The loss of a sample depends on the rest of its batch (for one sample alone "
                    f"it is {float(alone.sum()):.6g}, in the batch {float(in_batch.sum()):.6g}). "
                    "Return the plain loss of each sample, not divided by the batch size."
                )
        self._checked = True


def require_valued(loss: LossLike) -> ValuedLoss:
    """The loss for a name or a callable, if it has a value to differentiate.

    Raises:
        TypeError: It has none.
    """
    valued = loss_for(loss)
    if not isinstance(valued, ValuedLoss):
        raise TypeError(
            "Expected a loss with value(prediction, target, batch), got "
            f"{type(valued).__name__}. Pass callable(prediction, target) -> one loss per sample."
        )
    return valued


def own_weights(loss: Loss, batch: Any) -> Tensor | None:
    """Sample weights that are part of a loss, (N, 1) or (N, K) in float64; None if it has none."""
    weight: Callable[[Any], Tensor] | None = getattr(loss, "weight", None)
    if weight is None:
        return None
    weights = weight(batch).to(torch.float64)
    return weights.reshape(len(weights), -1)


def summed_loss(
    loss: ValuedLoss, prediction: Tensor, target: Tensor, weight: Tensor | None, batch: Any
) -> Tensor:
    """The weighted losses of a batch, added up.

    Args:
        loss: The loss of one sample, which may have weights of its own.
        prediction: (N, K).
        target: (N, K); it may be anything for samples of weight zero.
        weight: Weights of the samples, (N, 1), or None.
        batch: The batch as the user gave it, which some losses read.
    """
    if weight is not None:
        # A NaN with weight zero must not spread into the sum.
        target = torch.where(weight > 0, target, 0.0)
    values = loss.value(prediction, target.to(prediction), batch).reshape(len(prediction), -1)
    for factor in (weight, own_weights(loss, batch)):
        if factor is not None:
            values = values * factor
    return values.sum()


NAMED: dict[str, Loss] = {
    "mse": MSE(),
    "huber": Huber(),
    "log-cosh": LogCosh(),
    "poisson": PoissonNLL(),
}
"""Losses by name. Files store these names, but not functions."""


def loss_for(loss: LossLike) -> Loss:
    """The loss object for a name or a per-sample callable.

    Args:
        loss: A name from the table of this module, a loss object, or a callable(prediction, target)
            -> one loss per sample.

    Raises:
        ValueError: There is no loss of that name.
        TypeError: It is neither a name nor a callable.

    Examples:
        >>> loss_for("huber").curvature(torch.tensor([[0.0], [3.0]]), torch.zeros(2, 1), None)
        tensor([[1.],
                [0.]], dtype=torch.float64)
    """
    if isinstance(loss, str):
        if loss not in NAMED:
            raise ValueError(
                f"Unknown loss {loss!r}. Known: {', '.join(sorted(NAMED))}, GaussianNLL(variance), "
                "or callable(prediction, target) -> one loss per sample."
            )
        return NAMED[loss]
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, nn.PoissonNLLLoss) and loss.log_input and loss.reduction == "none":
        return PoissonNLL()  # the same derivatives, and a file can hold it
    if callable(loss):
        return PerSampleLoss(loss)
    raise TypeError(f"loss must be a name or a callable, got {type(loss).__name__}.")


def counts_in_own_units(loss: Loss) -> bool:
    """Whether a target counts in its own unit, where one weight vector serves several targets.

    That holds for squared errors and their robust forms, which networks minimise on standardised
    targets. A likelihood (`PoissonNLL`, `GaussianNLL`) or a user's loss says by its curvature how
    much each target counts.
    """
    return isinstance(loss, MSE | Huber | LogCosh)


def loss_name(loss: Loss) -> str:
    """What a summary calls a loss."""
    if isinstance(loss, PerSampleLoss):
        return "a function"
    return type(loss).__name__


def function_name(loss: Loss) -> str:
    """The name of a loss; for a callable its own name, where it has one."""
    if not isinstance(loss, PerSampleLoss):
        return type(loss).__name__
    name: str = getattr(loss.function, "__name__", type(loss.function).__name__)
    return "a function without a name" if name == "<lambda>" else name


NO_ERROR_BARS = (
    "There are no error bars for the loss of this fit ({}): it is not smallest where the output "
    "equals the target, so that target minus output is not an error. Outputs may be a "
    "classifier's logits (or the margins of pairs), or the loss may transform the targets. For a "
    "classifier see docs/classifiers.md: its posterior, rigidities and ensembles can be used, and "
    "other methods calibrate probabilities. If the loss transforms the targets, transform them "
    'before the fit instead. If the model predicts log rates of counts, fit with loss="poisson".'
)
"""What is said where `is_least_at_target` is False, with the name of the loss."""


def is_least_at_target(loss: Loss, target: Tensor) -> bool:
    r"""Whether a loss is smallest where the prediction is the target.

    Only then is target minus prediction the error of a prediction. It is not for a classifier,
    whose predictions are logits and whose targets are labels.

    Only callables are tried; other losses say by themselves what they are. (`PoissonNLL` of a log
    rate is smallest at the logarithm of the target. Its intervals follow from the shape of the
    distribution, which the calibration learns.) The slope of the loss in the prediction is taken a
    little below and a little above the target, where it must not be positive and not be negative.
    A little is half of the targets' standard deviation: a smoothed loss may be smallest near the
    target, and a few rows may be an exception.

    Args:
        loss: The loss.
        target: Targets of some rows, (M, K).

    Returns:
        False where most of the slopes show that the loss is smallest elsewhere. True also where
        slopes cannot be computed.
    """
    if not isinstance(loss, PerSampleLoss):
        return True
    known = target.to(torch.float64)
    wrong = 0
    judged = 0
    for k in range(min(target.shape[1], _TARGETS_TRIED)):
        # One target at a time, because a loss may couple them.
        step = torch.zeros_like(known)
        step[:, k] = _small_step(known[:, k])
        try:
            below = _slope(loss, known - step, target)[:, k]
            above = _slope(loss, known + step, target)[:, k]
        except Exception:  # a user's function may refuse such predictions in any way
            return True
        is_known = below.isfinite() & above.isfinite()
        wrong += int((is_known & ((below > 0) | (above < 0))).sum())
        judged += int(is_known.sum())
    return 2 * wrong <= judged


_TARGETS_TRIED = 8
"""How many targets are tried: a loss that is for labels is so for all of them."""


def _small_step(target: Tensor) -> Tensor:
    """Half of the standard deviation of targets (M,), or a small number where all are equal."""
    finite = target[target.isfinite()]
    if not len(finite):
        return target.new_zeros(())
    half_spread = finite.std(correction=0) / 2
    smallest = 1e-3 * finite.abs().max().clamp(min=1.0)
    return torch.maximum(half_spread, smallest)


def _slope(loss: PerSampleLoss, prediction: Tensor, target: Tensor) -> Tensor:
    """First derivative of the loss with respect to the prediction, (M, K)."""
    if target.is_floating_point():
        target = target.to(torch.float64)
    return slopes(lambda point: loss.function(point, target), prediction)
