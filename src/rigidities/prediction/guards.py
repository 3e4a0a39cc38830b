r"""The guard: it keeps error bars honest for unfamiliar inputs, where a head has learnt nothing.

A head (`prediction.head`) gives the squared scale $s^2$ of the distribution and its tilt. The guard
acts where q exceeds $q_{ref}$; 90 % of the training rows lie below. There it widens $s^2$ and
divides the tilt by $\max(1, q / q_{ref})$. The methods here are the plain formulas; `HeadForm`
evaluates the same ones in a folded form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ["POWER", "SPAN", "Guard", "guard_from", "stacked", "unfamiliarity"]

SPAN = 10.0
"""$q / q_{ref}$ from which on a prediction counts as that of an ignorant forecaster."""
POWER = 1.5
r"""Power of the ramp in $\log q$ that leads there."""


@dataclass(frozen=True)
class Guard:
    r"""Widens error bars towards those of a forecaster who knows only the targets' spread.

    Residuals inside the domain do not tell how large errors are outside. The error of an ignorant
    forecaster does. This forecaster predicts the targets' mean c for every row: where y is
    independent of a prediction f, $E (y - f)^2 = v + (f - c)^2$ with the targets' variance v. So

    $$s^2 \leftarrow s^2 \max(1, M / s^2)^{t^{3/2}}, \quad M = \tau (v + (f - c)^2), \quad
        t = \min(1, \max(0, \log_{10}(q / q_{ref}))) .$$

    The factor $\tau$ makes the distribution's 90 % interval as wide as that of a Gaussian of that
    variance. Bars never shrink.

    For sums over atoms the forecaster knows the atoms, and predicts the part of the targets that
    the readout's bias columns explain, $c + w \cdot \text{features}$ instead of c. A structure is
    not unfamiliar just because it is larger. As q grows with the square of the number of atoms, it
    is divided by the square of the extent, which is the number of atoms relative to a usual one.

    Attributes:
        reference: $q_{ref}$ of each target, (K,).
        variance: v, (K,).
        factor: $\tau$, (K,).
        centre: c, (K,).
        by_feature: w, (K, D); None where the forecast is the same for all rows.
        extent_weight: Weights of the features that give the extent, (K, D); None where the extent
            is one. It is given where `by_feature` is.
    """

    reference: Tensor
    variance: Tensor
    factor: Tensor
    centre: Tensor
    by_feature: Tensor | None = None
    extent_weight: Tensor | None = None

    def beyond(self, q: Tensor, extent: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K), q over the squared extent."""
        return (unfamiliarity(q, extent) / self.reference.to(q)).clamp(min=1)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor, extent: Tensor) -> Tensor:
        """The squared scale beyond the training rows.

        Args:
            squared_scale: What the head says, (M, K).
            q: Unscaled variances, (M, 1 or K).
            distance: Prediction minus forecast, (M, K).
            extent: Extent of the rows, (M, 1 or K).
        """
        level = self.factor.to(q) * (self.variance.to(q) + distance.square())
        share = (self.beyond(q, extent).log() / math.log(SPAN)).clamp(max=1) ** POWER
        return squared_scale * (level / squared_scale).clamp(min=1) ** share

    def to(self, device: torch.device) -> Guard:
        """The same guard on another device."""
        return Guard(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are given, by name, for files."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def guard_from(tensors: dict[str, Tensor]) -> Guard | None:
    """The guard whose `tensors` these are, or None where there are none.

    Raises:
        ValueError: The names are not those of a guard's fields.
    """
    if not tensors:
        return None
    names = [guard_field.name for guard_field in fields(Guard)]
    of_all_guards = names[:4]
    if set(tensors) not in (set(of_all_guards), set(names)):
        raise ValueError(
            f"A guard has {', '.join(of_all_guards)}, and for sums over atoms "
            f"{' and '.join(names[4:])}, got {', '.join(sorted(tensors))}: the file or state dict "
            "is damaged or from another version. Calibrate again."
        )
    return Guard(**tensors)


def stacked(guards: Sequence[Guard]) -> Guard:
    """The guards of K single targets, whose fields lack the axis of targets, as one guard."""
    return Guard(
        reference=torch.stack([guard.reference for guard in guards]),
        variance=torch.stack([guard.variance for guard in guards]),
        factor=torch.stack([guard.factor for guard in guards]),
        centre=torch.stack([guard.centre for guard in guards]),
        by_feature=_stacked_weights([guard.by_feature for guard in guards]),
        extent_weight=_stacked_weights([guard.extent_weight for guard in guards]),
    )


def unfamiliarity(q: Tensor, extent: Tensor) -> Tensor:
    """q over the squared extent.

    Where a readout sums over nothing, extent and q are both zero, and q is returned.
    """
    return q / torch.where(extent == 0, 1.0, extent.square())


def _stacked_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    """Weights of features, one row per target, (K, D); None where no target has any.

    Masked rows may leave one target without weights while others have some; zeros stand for them.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    zeros = torch.zeros_like(given[0])
    return torch.stack([zeros if weight is None else weight for weight in weights])
