r"""The shape of what lies around the mean: laws of zero mean and unit variance.

A prediction is $y = \mu + \sigma z$ with $\sigma^2 = \alpha^2 q + \text{noise}$ and $z$ from such a
law. Another law is another class here; `LAWS` lists the names that `calibrate(law=...)` and files
know. Its fields are its settings, plain numbers that files keep.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..notices import require_level

LOG_TWO_PI = math.log(2 * math.pi)
GOLDEN = (math.sqrt(5) - 1) / 2


class Law(ABC):
    """The base of all laws.

    Attributes:
        name: what users and files call it.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def quantile(self, level: Tensor) -> Tensor:
        """z with probability `level` below it."""

    @abstractmethod
    def log_density(self, z: Tensor) -> Tensor:
        """Logarithm of the density at z."""

    @abstractmethod
    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """n draws for each entry of `like`, (n, ...)."""

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""The best squared scale of each of J candidates, and its NLL per row.

        Found by golden sections of $\log\alpha$ about that of the root mean square; a law with a
        closed form has its own.

        Args:
            residual: (n, 1) or (n, J).
            spread: unscaled variances (n, J).
        """
        z = residual / spread.sqrt()
        centre = 0.5 * z.square().mean(0).log()
        low, high = centre - 4, centre + 4

        def value(log_scale: Tensor) -> Tensor:
            return (log_scale - self.log_density(z * (-log_scale).exp())).mean(0)

        for _ in range(60):
            a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
            left = value(a) < value(b)
            low, high = torch.where(left, low, a), torch.where(left, b, high)
        best = (low + high) / 2
        return (2 * best).exp(), value(best) + 0.5 * spread.log().mean(0)


LAWS: dict[str, type[Law]] = {}
"""By name."""

L = TypeVar("L", bound=type[Law])


def register_law(kind: L) -> L:
    """Make a law known to `calibrate` and to files, under its name; a class decorator."""
    LAWS[kind.name] = kind
    return kind


def law_named(given: str | Law | type[Law]) -> Law:
    """The law of that name or class at its default settings, or the law itself.

    Raises:
        ValueError: there is none.
    """
    if isinstance(given, Law):
        return given
    if isinstance(given, type) and issubclass(given, Law):
        return given()
    if str(given) not in LAWS:
        raise ValueError(f"Unknown law {given!r}. Known: {', '.join(LAWS)}.")
    return LAWS[given]()


@register_law
@dataclass(frozen=True)
class Gaussian(Law):
    """The standard normal law."""

    name = "gaussian"

    def quantile(self, level: Tensor) -> Tensor:
        """Inverse of the normal distribution function."""
        z: Tensor = torch.special.ndtri(level)
        return z

    def log_density(self, z: Tensor) -> Tensor:
        r"""$-z^2/2 - \log(2\pi)/2$."""
        return -0.5 * z.square() - 0.5 * LOG_TWO_PI

    def sample(self, like: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        """Normal draws."""
        device = like.device if generator is None else generator.device
        shape = (n, *like.shape)
        return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like)

    def profile(self, residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\alpha^2 = \overline{r^2/u}$, and the NLL per row.

        Examples:
            >>> scale, value = Gaussian().profile(torch.tensor([[2.0], [-2.0]]), torch.ones(2, 1))
            >>> scale.item(), round(value.item(), 4)
            (4.0, 2.1121)
        """
        scale = (residual.square() / spread).mean(0)
        return scale, 0.5 * (1 + LOG_TWO_PI + scale.log() + spread.log().mean(0))


def gaussian_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The central Gaussian interval that holds probability `level`: (low, high).

    Raises:
        ValueError: the level lies outside (0, 1).
    """
    require_level(level, "An interval's")
    z = Gaussian().quantile(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(std)
    return mean - z * std, mean + z * std
