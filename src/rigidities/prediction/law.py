r"""What sits around the mean: the shape of the predictive law and its noise.

A prediction is $y = \mu + \sigma z$ with $\sigma^2 = \alpha^2 q + \text{noise}$ and $z$ from a
law of unit variance. Another law or another noise is another class with the same methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Law(Protocol):
    """A law of zero mean and unit variance."""

    @property
    def name(self) -> str:
        """What files call it."""

    def quantile(self, level: Tensor) -> Tensor:
        """z with probability `level` below it."""

    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws for each entry of `like`, (n, ...)."""


@dataclass(frozen=True)
class Gaussian:
    """The standard normal law."""

    name: str = "gaussian"

    def quantile(self, level: Tensor) -> Tensor:
        """Inverse of the normal distribution function."""
        z: Tensor = torch.special.ndtri(level)
        return z

    def log_density(self, z: Tensor) -> Tensor:
        r"""$-z^2/2 - \log(2\pi)/2$."""
        return -0.5 * z.square() - 0.5 * math.log(2 * math.pi)

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Normal draws."""
        device = like.device if generator is None else generator.device
        shape = (n, *like.shape)
        return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like)


def gaussian_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The central Gaussian interval that holds probability `level`: (low, high).

    Raises:
        ValueError: the level lies outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"An interval's level must lie between 0 and 1, got {level}.")
    z = Gaussian().quantile(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(std)
    return mean - z * std, mean + z * std
