r"""Derivatives of the prediction in the training loss, and what they add to the Gram.

A model trained on values and derivatives (energies and forces) minimises
$\sum_i \ell(y_i) + \frac{\beta}{2} \sum_k (\partial y / \partial x_k - t_k)^2$. Each derivative is
linear in the readout's weights with features $g_k = \partial f / \partial x_k$, and adds
$\beta\, g_k g_k^\top$ to the Gram.

A `GradientLoss` describes that part of the loss. During a fit, `GradientLoss.rows` gives the rows
that the derivatives of each batch add to the Gram. During a calibration, `gradient_sums` compares
derivatives with their targets, and `gradient_scale` makes a scale of these sums.
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
from ...readout.readout import AnyReadout
from ...statistics.block import DerivativeRows
from .feature_derivatives import derivative_rows, output_derivatives
from .feature_map import FeatureMap
from .gradient import Differentiator

GradientWeight = float | Callable[[Any], Tensor]
"""A number, or callable(batch) -> one weight per row of the input."""

GradientTarget = str | Callable[[Any], Tensor]
"""Key or attribute of a batch, or callable(batch)."""


# A file holds the fields of this class by name.
@dataclass(frozen=True)
class GradientLoss:
    r"""Half the squared error of derivatives, which the training loss had beside that of values.

        uq.fit(train, gradient_loss=rg.GradientLoss("pos", weight=0.1, target="slope"))

    Attributes:
        wrt: The input to differentiate by: its position or its name ("pos" for forces).
        weight: $\beta$: a number, or callable(batch) -> one weight per row of that input. The
            sample weights of the values do not apply here. Weight 0 stands for derivatives that
            were not trained: they add nothing to the Gram, and `calibrate` finds their scale.
        target: The target of the derivatives $\partial y / \partial x$ (forces with their sign
            changed): key or attribute of the batch, or callable(batch). None where it is not
            known. If a batch is a mapping that is passed to the model as keywords, a key is taken
            out of it. What a callable reads stays in, so that the model's forward (or `forward=`)
            must take it.
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
            weight = math.nan  # refused below
        if not 0 <= weight < math.inf:
            raise ValueError(
                "weight of a GradientLoss must be a finite number that is not negative, or "
                f"callable(batch), got {self.weight}."
            )
        if weight == 0 and self.target is None:
            raise ValueError(
                "A GradientLoss of weight 0 only calibrates derivatives, and needs their target=."
            )
        object.__setattr__(self, "weight", weight)

    @property
    def in_training_loss(self) -> bool:
        """Whether the derivatives were trained, so that they add rows to the Gram."""
        return self.weight != 0

    @property
    def derivative_target_key(self) -> str | None:
        """The key of a batch's entry with the derivatives' target, not an input of the model."""
        return self.target if isinstance(self.target, str) else None

    def slot(self, readout: AnyReadout, batch: Batch) -> Slot:
        """Where the input stands in a batch.

        Raises:
            ValueError: There is no such input, or derivatives by it are not possible.
        """
        return Slot.find(batch, self.wrt, readout)

    def feature_map(self, readout: AnyReadout, batch: Batch) -> FeatureMap:
        """Output and features of a batch as functions of the input."""
        return FeatureMap.of(readout, batch, self.slot(readout, batch))

    def rows(self, readout: AnyReadout, batch: Batch) -> Iterator[DerivativeRows]:
        """What the derivatives of one batch add to the Gram, one chunk after the other."""
        feature_map = self.feature_map(readout, batch)
        residuals = self._residuals(feature_map, batch)
        weights = self._weights(batch, feature_map)
        rows_per_input_row = feature_map.rows_per_sample * feature_map.numbers_per_row
        for places, features in derivative_rows(feature_map):
            yield (
                features,
                weights[places // rows_per_input_row, None],
                None if residuals is None else residuals[places],
            )

    def derivative_target(self, batch: Batch) -> Tensor | None:
        """The derivatives' target of a batch in float64; None where none was named.

        Raises:
            ValueError: A target was named, and the batch does not have it.
        """
        if self.target is None:
            return None
        value: Any
        if callable(self.target):
            with torch.enable_grad():  # for functions that differentiate
                value = self.target(batch.raw)
        elif isinstance(batch.raw, Mapping):
            value = batch.raw.get(self.target)
        else:
            value = getattr(batch.raw, self.target, None)
        if value is None:
            raise ValueError(
                f"there is no target for the derivatives: target={self.target!r} finds "
                f"nothing in a batch of type {type(batch.raw).__name__}. Name a key or attribute "
                "that the batches have, or pass callable(batch)."
            )
        return torch.as_tensor(value, dtype=torch.float64)

    def _residuals(self, feature_map: FeatureMap, batch: Batch) -> Tensor | None:
        """Target minus derivative, (L I d, K) in the order of the Gram's rows."""
        target = self.derivative_target(batch)
        if target is None:
            return None
        derivatives = output_derivatives(feature_map)  # (L, O, d)
        target = checked_target(target, feature_map)
        return feature_map.rows_of(target.reshape(derivatives.shape) - derivatives)

    def _weights(self, batch: Batch, feature_map: FeatureMap) -> Tensor:
        """The weight of each row of the input, (L,) in float64."""
        input_rows = len(feature_map.x)
        features = feature_map.features
        if not callable(self.weight):
            return features.new_full((input_rows,), self.weight, dtype=torch.float64)
        with torch.enable_grad():  # for functions that differentiate
            values = self.weight(batch.raw)
        weights = torch.as_tensor(values, dtype=torch.float64).to(features.device)
        if weights.numel() != input_rows:
            raise ValueError(
                f"weight of the GradientLoss returned {tuple(weights.shape)} for an input with "
                f"{input_rows} rows: expected one weight per row."
            )
        return weights.reshape(input_rows)


def checked_gradient_loss(loss: Any) -> GradientLoss | None:
    """What a user has passed as `gradient_loss=`, which must be a `GradientLoss` or None.

    Raises:
        TypeError: It is something else.
    """
    if loss is None or isinstance(loss, GradientLoss):
        return loss
    raise TypeError(
        'gradient_loss must be a rigidities.GradientLoss, such as GradientLoss("pos", weight=0.1, '
        f'target="slope"), got {loss!r}.'
    )


def checked_target(target: Tensor, feature_map: FeatureMap) -> Tensor:
    """A target of derivatives, on the device of the input and in the shape that users see.

    Raises:
        ValueError: It is not finite, or not shaped like the derivatives.
    """
    expected = feature_map.shape
    # Dimensions of size one may be there or not.
    if target.squeeze().shape != torch.Size(size for size in expected if size != 1):
        raise ValueError(
            f"the target of the derivatives has the shape {tuple(target.shape)}, expected "
            f"{tuple(expected)}."
        )
    if not bool(torch.isfinite(target).all()):
        raise ValueError("the target of the derivatives contains NaN or infinity. Clean the data.")
    return target.to(feature_map.x.device).reshape(expected)


def gradient_sums(
    readout: AnyReadout,
    batches: Iterable[Batch],
    posterior: Posterior,
    dtype: torch.dtype,
    loss: GradientLoss,
) -> Tensor:
    r"""Sums over the derivatives of some batches that their scale is made of.

    Args:
        readout: The readout.
        batches: The data, with the derivatives' targets.
        posterior: With the chosen ridge and one scale per target.
        dtype: The model's precision.
        loss: Names the input and the targets.

    Returns:
        (3, K), for each target: the sum of $r^2 / q$, the number of derivatives in it, and the
        number of derivatives that have no q.
    """
    unit_scale = torch.ones_like(posterior.scale)
    form = QuadraticForm.of(posterior, dtype)
    differentiator = Differentiator(posterior, form, unit_scale, members=0)
    sums = torch.zeros(3, len(unit_scale), dtype=torch.float64)
    for batch in batches:
        target = loss.derivative_target(batch)
        assert target is not None
        feature_map = loss.feature_map(readout, batch)
        gradient = differentiator(feature_map)
        error = feature_map.rows_of(checked_target(target, feature_map) - gradient.mean)
        q = feature_map.rows_of(gradient.variance.to(torch.float64))
        # A derivative that does not depend on the readout's weights has q = 0.
        uncertain = q > 0
        ratio = torch.where(uncertain, error.square() / q, 0.0)
        sums += torch.stack([ratio.sum(0), uncertain.sum(0), (~uncertain).sum(0)]).cpu()
    return sums


def gradient_scale(sums: Iterable[Tensor]) -> Tensor:
    r"""$\alpha_g$ of each target: $\alpha_g^2 = \mathrm{mean}\, r^2 / q$ over the derivatives.

    Args:
        sums: What `gradient_sums` gave, for each process.

    Raises:
        ValueError: All derivatives of a target have no q.
    """
    total, count, left_out = torch.stack(list(sums)).sum(0)
    if not bool((count > 0).all()):
        raise ValueError(
            "All derivatives of the features with respect to that input are zero, so there is "
            "nothing to calibrate. Name another input."
        )
    left_out_count = int(left_out.sum())
    if left_out_count:
        notify(
            f"{left_out_count} derivatives do not depend on the readout's weights and were left "
            "out of the calibration."
        )
    return torch.sqrt(total / count)
