r"""The guard: it keeps error bars honest for unfamiliar inputs, where a head has learnt nothing.

A head (`prediction.head`) gives a row's distribution. The guard acts where q exceeds $q_{ref}$;
90 % of the training rows lie below. There it widens the distribution and lets its shape fade to
that of a usual row. `head.FoldedGuard` evaluates the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Guard", "guard_from"]

RISE = 2.0 / math.log(10)
r"""Factor of $\log(q / q_{ref})$ in the rise r, which is two at ten times the reference."""
NOVELTY_RISE = 3.0
"""How much faster than with q the rise is with novelty: it is 1.8 at twice the alarm. Distances of
usual rows differ less than their q."""
POWER = 2
r"""Power of the rise. Familiarity $e^{-r^2}$ is 0.7 at twice the reference, 1/3 at 3.3 times it."""


@dataclass(frozen=True)
class Guard:
    r"""Widens error bars towards those of a forecaster who knows only the targets' spread.

    Residuals inside the domain do not tell how large errors are outside. The error of an ignorant
    forecaster does. This forecaster predicts the targets' mean c for every row: where y is
    independent of a prediction f, $E (y - f)^2 = v + (f - c)^2 = M$ with the targets' variance v.
    The second moment $\sigma^2$ of the head's distribution becomes

    $$\sigma^2 \leftarrow \sigma^2 (1 + M / \sigma^2)^{1 - e^{-r^2}}, \quad
        r = 2 \max(0, \log_{10}(q / q_{ref})) .$$

    That has no corner: it leaves familiar rows alone and ends at $\sigma^2 + M$. The shape of the
    distribution fades to that of a usual row with $e^{-2 r^2}$, before it is widened.

    For sums over atoms all of this is about intensive rows (`head.Forecast`): the forecaster knows
    the atoms, and a structure is not unfamiliar just because it is larger.

    Where inputs have a novelty n (`fit(novelty=True)`), the guard listens to it too. It sets in at
    the alarm $n_{ref}$, which about one usual row in a hundred exceeds: the larger of $q / q_{ref}$
    and $(n / n_{ref})^3$ decides.

    Attributes:
        reference: $q_{ref}$ of each target, (K,).
        variance: v, (K,).
        distances: Squared distances in the L watched layers in whose units novelty is, (L,); None
            where no layer is watched.
        alarm: $n_{ref}$, (); given where `distances` is.
    """

    reference: Tensor
    variance: Tensor
    distances: Tensor | None = None
    alarm: Tensor | None = None

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
    try:
        return Guard(**tensors)
    except TypeError as error:
        raise ValueError(
            f"The guard of this file has other tensors than a guard has here ({error}): the file "
            "or state dict is damaged or from another version. Calibrate again."
        ) from error
