r"""What keeps error bars honest beyond the training rows, whatever a head says there.

A guard sets in where q exceeds $q_{ref}$, below which nine tenths of the training rows lie. It
changes the squared scale $s^2$ of the distribution, and divides the distribution's tilt by $\max(1,
q / q_{ref})$.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

SPAN = 10.0
"""$q / q_{ref}$ from which on a prediction counts as one of an ignorant forecaster."""
POWER = 1.5
"""Of the ramp that leads there."""
GROWTH = 0.8
"""Power of q by which the variance of a `RigidityGuard` grows beyond its reference."""


@dataclass(frozen=True)
class IgnoranceGuard:
    r"""From the fitted distribution to that of a forecaster who knows nothing but the targets'
    spread.

    Residuals inside the domain say nothing about errors outside. What does is the error of an
    ignorant forecaster, who says the targets' mean c of every row: where y is independent of a
    prediction f, $E (y - f)^2 = v + (f - c)^2$ with the targets' variance v. So

    $$s^2 \leftarrow s^2 \max(1, M / s^2)^{t^{3/2}}, \quad M = \tau (v + (f - c)^2), \quad
        t = \min(1, \max(0, \log_{10}(q / q_{ref}))) .$$

    The factor $\tau$ gives the distribution's 90 % interval the width of a Gaussian's of that
    variance. Bars never shrink. For sums over atoms the forecaster knows the atoms and says what
    the readout's bias columns explain of the targets, $c + w \cdot \text{features}$ instead of c. A
    larger structure is no unfamiliar one: q, which grows with the square of the number of atoms, is
    divided by that of the extent, the number of atoms beside a usual one.

    Attributes:
        reference: $q_{ref}$, (K,).
        variance: v, (K,).
        factor: $\tau$, (K,).
        centre: c, (K,).
        by_feature: w, (K, D); (K, 0) where c is the same for all rows.
        extent_weight: weights of the features that give the extent, (K, D); (K, 0) where it is one.
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
        """The squared scale of rows (M, K) whose predictions lie that far from c, (M, K)."""
        level = self.factor.to(q) * (self.variance.to(q) + distance.square())
        share = (self.beyond(q, extent).log() / math.log(SPAN)).clamp(max=1) ** POWER
        return squared_scale * (level / squared_scale).clamp(min=1) ** share

    def to(self, device: torch.device) -> IgnoranceGuard:
        """The same on another device."""
        return IgnoranceGuard(**{name: part.to(device) for name, part in vars(self).items()})

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


@dataclass(frozen=True)
class RigidityGuard:
    r"""Bars that grow with q alone, `calibrate(guard="q")`.

    The squared scale gains $\alpha_g^2 q_{ref} [(q/q_{ref})^{0.8} - 1]_+$.

    Attributes:
        reference: $q_{ref}$, (K,).
        scale2: $\alpha_g^2$, (K,).
    """

    reference: Tensor
    scale2: Tensor

    def beyond(self, q: Tensor, extent: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K), whatever their extent."""
        return (q / self.reference.to(q)).clamp(min=1)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor, extent: Tensor) -> Tensor:
        """The squared scale of rows (M, K); what they predict does not matter."""
        growth = self.beyond(q, extent) ** GROWTH - 1
        return squared_scale + (self.scale2 * self.reference).to(q) * growth

    def to(self, device: torch.device) -> RigidityGuard:
        """The same on another device."""
        return RigidityGuard(**{name: part.to(device) for name, part in vars(self).items()})

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


Guard = IgnoranceGuard | RigidityGuard


def guard_from(tensors: dict[str, Tensor]) -> Guard | None:
    """The guard whose `tensors` these are; None of none.

    Raises:
        ValueError: they are not those of a guard.
    """
    if not tensors:
        return None
    kind = RigidityGuard if "scale2" in tensors else IgnoranceGuard
    expected = [one.name for one in fields(kind)]
    if set(tensors) != set(expected):
        raise ValueError(
            f"A guard of this kind has {', '.join(expected)}, got {', '.join(sorted(tensors))}: "
            "the file or state dict is damaged or of another version. Calibrate again."
        )
    return kind(**tensors)


def stacked(guards: Sequence[Guard]) -> Guard:
    """The guards of single targets, which follow one rule, as one of all of them."""
    reference = torch.stack([guard.reference for guard in guards])
    by_q = [guard for guard in guards if isinstance(guard, RigidityGuard)]
    if by_q:
        return RigidityGuard(reference, torch.stack([guard.scale2 for guard in by_q]))
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
    """q over the squared extent; q itself where there is nothing to sum, and q is zero."""
    return q / torch.where(extent == 0, 1.0, extent.square())


def _padded(weights: list[Tensor]) -> Tensor:
    """One row a target. Masked rows may leave one target without weights, and others with some."""
    width = max(map(len, weights))
    return torch.stack([pad(each, (0, width - len(each))) for each in weights])
