r"""Guards: they keep error bars honest for unfamiliar inputs, where a head has learnt nothing.

A head (`prediction.head`) gives the squared scale $s^2$ of the distribution and its tilt. A guard
acts where q exceeds $q_{ref}$; 90 % of the training rows lie below. There it widens $s^2$ by its
own rule and divides the tilt by $\max(1, q / q_{ref})$. There are two rules: `IgnoranceGuard`, the
default, and `RigidityGuard`. The methods here are the plain formulas; `HeadForm` evaluates the same
ones in a folded form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "GROWTH",
    "POWER",
    "SPAN",
    "Guard",
    "IgnoranceGuard",
    "RigidityGuard",
    "guard_from",
    "stacked",
    "unfamiliarity",
]

SPAN = 10.0
"""$q / q_{ref}$ from which on a prediction counts as that of an ignorant forecaster."""
POWER = 1.5
r"""Power of the ramp in $\log q$ that leads there."""
GROWTH = 0.8
"""Power of q by which the variance of a `RigidityGuard` grows beyond its reference."""


@dataclass(frozen=True)
class IgnoranceGuard:
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
        by_feature: w, (K, D); (K, 0) where c is the same for all rows.
        extent_weight: Weights of the features that give the extent, (K, D); (K, 0) where the
            extent is one.
    """

    reference: Tensor
    variance: Tensor
    factor: Tensor
    centre: Tensor
    by_feature: Tensor
    extent_weight: Tensor

    def beyond(self, q: Tensor, extent: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K), q over the squared extent."""
        return (unfamiliarity(q, extent) / self.reference.to(q)).clamp(min=1)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor, extent: Tensor) -> Tensor:
        """The squared scale beyond the training rows.

        Args:
            squared_scale: What the head says, (M, K).
            q: Unscaled variances, (M, 1 or K).
            distance: Prediction minus c, (M, K).
            extent: Extent of the rows, (M, 1 or K).
        """
        level = self.factor.to(q) * (self.variance.to(q) + distance.square())
        share = (self.beyond(q, extent).log() / math.log(SPAN)).clamp(max=1) ** POWER
        return squared_scale * (level / squared_scale).clamp(min=1) ** share

    def to(self, device: torch.device) -> IgnoranceGuard:
        """The same guard on another device."""
        return IgnoranceGuard(
            reference=self.reference.to(device),
            variance=self.variance.to(device),
            factor=self.factor.to(device),
            centre=self.centre.to(device),
            by_feature=self.by_feature.to(device),
            extent_weight=self.extent_weight.to(device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for files."""
        return dict(vars(self))


@dataclass(frozen=True)
class RigidityGuard:
    r"""Widens error bars by a power of q alone, `calibrate(guard="q")`.

    The squared scale gains $\alpha_g^2 q_{ref} [(q/q_{ref})^{0.8} - 1]_+$.

    Attributes:
        reference: $q_{ref}$ of each target, (K,).
        scale2: $\alpha_g^2$, (K,).
    """

    reference: Tensor
    scale2: Tensor

    def beyond(self, q: Tensor, extent: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K), whatever their extent."""
        return (q / self.reference.to(q)).clamp(min=1)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor, extent: Tensor) -> Tensor:
        """The squared scale beyond the training rows, whatever the rows predict.

        Args:
            squared_scale: What the head says, (M, K).
            q: Unscaled variances, (M, 1 or K).
            distance: Not used.
            extent: Not used.
        """
        growth = self.beyond(q, extent) ** GROWTH - 1
        return squared_scale + (self.scale2 * self.reference).to(q) * growth

    def to(self, device: torch.device) -> RigidityGuard:
        """The same guard on another device."""
        return RigidityGuard(self.reference.to(device), self.scale2.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for files."""
        return dict(vars(self))


Guard = IgnoranceGuard | RigidityGuard


def guard_from(tensors: dict[str, Tensor]) -> Guard | None:
    """The guard whose `tensors` these are, or None where there are none.

    Raises:
        ValueError: The names are not those of a guard's fields.
    """
    if not tensors:
        return None
    kind = RigidityGuard if "scale2" in tensors else IgnoranceGuard
    expected = [guard_field.name for guard_field in fields(kind)]
    if set(tensors) != set(expected):
        raise ValueError(
            f"A guard of this kind has {', '.join(expected)}, got {', '.join(sorted(tensors))}: "
            "the file or state dict is damaged or from another version. Calibrate again."
        )
    return kind(**tensors)


def stacked(guards: Sequence[Guard]) -> Guard:
    """The guards of K single targets, which all follow the same rule, as one guard."""
    reference = torch.stack([guard.reference for guard in guards])
    by_rigidity = [guard for guard in guards if isinstance(guard, RigidityGuard)]
    if by_rigidity:
        return RigidityGuard(reference, torch.stack([guard.scale2 for guard in by_rigidity]))
    ignorant = [guard for guard in guards if isinstance(guard, IgnoranceGuard)]
    return IgnoranceGuard(
        reference=reference,
        variance=torch.stack([guard.variance for guard in ignorant]),
        factor=torch.stack([guard.factor for guard in ignorant]),
        centre=torch.stack([guard.centre for guard in ignorant]),
        by_feature=_padded([guard.by_feature for guard in ignorant]),
        extent_weight=_padded([guard.extent_weight for guard in ignorant]),
    )


def unfamiliarity(q: Tensor, extent: Tensor) -> Tensor:
    """q over the squared extent.

    Where a readout sums over nothing, extent and q are both zero, and q is returned.
    """
    return q / torch.where(extent == 0, 1.0, extent.square())


def _padded(weights: list[Tensor]) -> Tensor:
    """Weights of features, one row per target.

    Masked rows may leave one target without weights while others have some; zeros fill it.
    """
    width = max(len(weight) for weight in weights)
    return torch.stack([pad(weight, (0, width - len(weight))) for weight in weights])
