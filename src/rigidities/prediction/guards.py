r"""What keeps error bars honest beyond the training rows, whatever a head says there.

A guard sets in where q exceeds $q_{ref}$, below which nine tenths of the training rows lie. It
changes the squared scale $s^2$ of the law, and divides the law's tilt by $\max(1, q / q_{ref})$.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    r"""From the fitted law to that of a forecaster who knows nothing but the targets' spread.

    Residuals inside the domain say nothing about errors outside. What does is the error of an
    ignorant forecaster, who always says the targets' mean c: where y is independent of a
    prediction f, $E (y - f)^2 = v + (f - c)^2$ with the targets' variance v. So

    $$s^2 \leftarrow s^2 \max(1, M / s^2)^{t^{3/2}}, \quad M = \tau (v + (f - c)^2), \quad
        t = \min(1, \max(0, \log_{10}(q / q_{ref}))) .$$

    The factor $\tau$ gives the law's 90 % interval the width of a Gaussian's of that variance.
    Bars never shrink. For sums over atoms the forecaster knows the atoms: c is what the readout's
    bias columns explain of the targets, $c + w \cdot \text{features}$.

    Attributes:
        reference: $q_{ref}$, (K,).
        variance: v, (K,).
        factor: $\tau$, (K,).
        centre: c, (K,).
        by_feature: w, (K, D); (K, 0) where c is the same for all rows.
    """

    reference: Tensor
    variance: Tensor
    factor: Tensor
    centre: Tensor
    by_feature: Tensor

    def beyond(self, q: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K)."""
        return _beyond(self.reference, q)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor) -> Tensor:
        """The squared scale of rows (M, K) whose predictions lie that far from c, (M, K)."""
        level = self.factor.to(q) * (self.variance.to(q) + distance.square())
        share = (self.beyond(q).log() / math.log(SPAN)).clamp(max=1) ** POWER
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

    def beyond(self, q: Tensor) -> Tensor:
        r"""$\max(1, q / q_{ref})$ of rows (M, 1 or K)."""
        return _beyond(self.reference, q)

    def widened(self, squared_scale: Tensor, q: Tensor, distance: Tensor) -> Tensor:
        """The squared scale of rows (M, K); what they predict does not matter."""
        growth = self.beyond(q) ** GROWTH - 1
        return squared_scale + (self.scale2 * self.reference).to(q) * growth

    def to(self, device: torch.device) -> RigidityGuard:
        """The same on another device."""
        return RigidityGuard(**{name: part.to(device) for name, part in vars(self).items()})

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return dict(vars(self))


Guard = IgnoranceGuard | RigidityGuard


def guard_from(tensors: dict[str, Tensor]) -> Guard | None:
    """The guard whose `tensors` these are; None of none."""
    if not tensors:
        return None
    if "scale2" in tensors:
        return RigidityGuard(**tensors)
    return IgnoranceGuard(**tensors)


def stacked(guards: list[Guard]) -> Guard:
    """The guards of single targets, which follow one rule, as one of all of them."""
    first = guards[0]
    parts = {}
    for name in vars(first):
        # Masked rows may leave one target without weights of the features, and others with some.
        each = [vars(guard)[name] for guard in guards]
        width = max(part.numel() for part in each)
        parts[name] = torch.stack([pad(p, (0, width - len(p))) if p.ndim else p for p in each])
    return type(first)(**parts)


def _beyond(reference: Tensor, q: Tensor) -> Tensor:
    return (q / reference.to(q)).clamp(min=1)
