r"""How derivatives of the prediction entered the training loss, and what they add to the Gram.

A model trained on values and derivatives (energies and forces) minimises
$\sum_i \ell(y_i) + \frac{\beta}{2} \sum_k (\partial y / \partial x_k - t_k)^2$. Each derivative is
linear in the readout's weights with features $g_k = \partial f / \partial x_k$, and adds
$\beta\, g_k g_k^\top$ to the Gram.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import InputName, Slot
from ...notices import notify
from ...posterior.posterior import Posterior
from ...posterior.quadratic import QuadraticForm
from ..readout.tap import AnyTap
from .feature_derivatives import derivative_rows, output_derivatives
from .feature_map import FeatureMap
from .gradient import Differentiator

GradientWeight = float | Callable[[Any], Tensor]
GradientTarget = str | Callable[[Any], Tensor]

GradientRows = tuple[Tensor, Tensor, Tensor | None]
"""Features (R, D), or (R, K, D) where they differ between targets, weights (R, 1), and residuals
(R, K), where the derivatives' targets are known."""


@dataclass(frozen=True)
class GradientLoss:
    r"""Half the squared error of derivatives, in the training loss beside the values'.

    Attributes:
        wrt: the input to differentiate by.
        weight: $\beta$: a number, or callable(batch) -> one weight per row of that input. The
            sample weights of the values do not apply here.
        target: of the derivatives $\partial y / \partial x$ (forces with their sign changed): key
            or attribute of the batch, or callable(batch); None where it is not known. A key is
            taken out of a batch that is passed to the model as keywords; what a callable reads
            stays in, so that the model's forward (or `forward=`) must take it.
    """

    wrt: InputName
    weight: GradientWeight = 1.0
    target: GradientTarget | None = None

    def __post_init__(self) -> None:
        if callable(self.weight):
            return
        try:
            weight = float(self.weight)
        except (TypeError, ValueError):
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ValueError(
                f"gradient_weight must be a positive number or callable(batch), got {self.weight}."
            )
        object.__setattr__(self, "weight", weight)

    @property
    def apart(self) -> str | None:
        """The key of a batch that holds the derivatives' target and is no input of the model."""
        return self.target if isinstance(self.target, str) else None

    def map(self, tap: AnyTap, batch: Batch) -> FeatureMap:
        """Output and features of a batch as functions of the input."""
        return FeatureMap.of(tap, batch, Slot.find(batch, self.wrt, tap))

    def rows(self, tap: AnyTap, batch: Batch) -> Iterator[GradientRows]:
        """What the derivatives of one batch add to the Gram, one chunk after the other."""
        point = self.map(tap, batch)
        residuals = self._residuals(point, batch)
        weights = self._weights(batch, point)
        per_row = point.rows * point.point[0].numel()
        for features, places in derivative_rows(point):
            errors = None if residuals is None else residuals[places]
            yield features, weights[places // per_row, None], errors

    def known_target(self, batch: Batch) -> Tensor | None:
        """The derivatives' target of a batch, where one was named; it must be there."""
        if self.target is None:
            return None
        found: Any
        if callable(self.target):
            found = self.target(batch.raw)
        elif isinstance(batch.raw, Mapping):
            found = batch.raw.get(self.target)
        else:
            found = getattr(batch.raw, self.target, None)
        if found is None:
            raise ValueError(
                f"there is no target of the derivatives: gradient_target={self.target!r} gives "
                f"nothing for a batch of type {type(batch.raw).__name__}. Name a key or attribute "
                "that the batches have, or pass callable(batch)."
            )
        return torch.as_tensor(found, dtype=torch.float64)

    def _residuals(self, point: FeatureMap, batch: Batch) -> Tensor | None:
        target = self.known_target(batch)
        if target is None:
            return None
        mean = output_derivatives(point)
        target = checked_target(target, point).to(torch.float64)
        return point.by_places(target.reshape(mean.shape) - mean)

    def _weights(self, batch: Batch, point: FeatureMap) -> Tensor:
        rows, like = len(point.point), point.reading.features
        if not callable(self.weight):
            return like.new_full((rows,), self.weight, dtype=torch.float64)
        given = torch.as_tensor(self.weight(batch.raw), dtype=torch.float64).to(like.device)
        if given.numel() != rows:
            raise ValueError(
                f"gradient_weight returned {tuple(given.shape)} for an input with {rows} rows: "
                "expected one weight per row."
            )
        return given.reshape(rows)


def gradient_loss(
    gradients: InputName, weight: GradientWeight | None, target: GradientTarget | None
) -> GradientLoss | None:
    """The loss that a user's options describe, or None."""
    if gradients is not None:
        return GradientLoss(gradients, 1.0 if weight is None else weight, target)
    for name, value in (("gradient_weight", weight), ("gradient_target", target)):
        if value is not None:
            raise ValueError(f"{name}= needs gradients=, the input to differentiate by.")
    return None


def calibration_loss(
    fitted: GradientLoss | None, gradients: InputName, target: GradientTarget | None
) -> GradientLoss:
    """What to calibrate derivatives on: as in the fit, except for what is given."""
    if target is None:
        raise ValueError("gradients= needs gradient_target=, the derivatives to calibrate on.")
    known = None if fitted is None else fitted.wrt
    return GradientLoss(known if gradients is None else gradients, 1.0, target)


def checked_target(target: Tensor, point: FeatureMap) -> Tensor:
    """A target of derivatives, if it is finite and shaped like the derivatives."""
    outputs = point.reading.output.shape[1:].numel()
    rows, numbers = len(point.point), point.point[0].numel()
    expected = point.shaped(target.new_zeros(rows, outputs, numbers)).shape
    if target.squeeze().shape != torch.Size(n for n in expected if n != 1):
        raise ValueError(
            f"the derivatives' target has the shape {tuple(target.shape)}, expected "
            f"{tuple(expected)}."
        )
    if not bool(torch.isfinite(target).all()):
        raise ValueError("the derivatives' target holds NaN or infinity. Clean the data.")
    return target.to(point.point.device)


def gradient_sums(
    tap: AnyTap,
    batches: Iterable[Batch],
    posterior: Posterior,
    dtype: torch.dtype,
    loss: GradientLoss,
) -> Tensor:
    r"""Of the derivatives $r^2 / q$ by target, how many there are, and how many have no q: (3, K).

    The posterior has the chosen ridge and one scale per target; `dtype` is the model's.
    """
    one, form = torch.ones_like(posterior.scale), QuadraticForm.of(posterior, dtype)
    differentiator = Differentiator(posterior, form, one, members=0)
    sums = torch.zeros(3, len(one), dtype=torch.float64)
    for batch in batches:
        target = loss.known_target(batch)
        assert target is not None
        point = loss.map(tap, batch)
        found = differentiator(point)
        error = checked_target(target, point).reshape(found.mean.shape) - found.mean
        q = found.variance.to(torch.float64)
        known = q > 0
        ratio = torch.where(known, error.to(torch.float64).square() / q, 0.0)
        for total, new in zip(sums, (ratio, known.to(q), (~known).to(q)), strict=True):
            total += point.per_target(new).cpu()
    return sums


def gradient_scale(sums: Iterable[Tensor]) -> Tensor:
    r"""$\alpha_g$ of each target: $\alpha_g^2 = \mathrm{mean}\, r^2 / q$ over the derivatives."""
    total, count, left_out = torch.stack(list(sums)).sum(0)
    if not bool((count > 0).all()):
        raise ValueError(
            "No derivative of the features by that input is different from zero: there is "
            "nothing to calibrate. Name another input."
        )
    if some := int(left_out.sum()):
        notify(
            f"{some} derivatives do not depend on the readout's weights and were left out of the "
            "calibration."
        )
    return torch.sqrt(total / count)
