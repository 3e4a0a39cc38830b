"""Noise: the part of the variance that more data would not remove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Noise(Protocol):
    """The part of the variance that more data would not remove."""

    @property
    def name(self) -> str:
        """What files call it."""

    def variance(self, features: Tensor) -> Tensor:
        """Of each target, broadcast against (M, K), for features (M, ...)."""


@dataclass(frozen=True)
class ConstantNoise:
    """The same noise variance everywhere, one entry per target; zeros for none."""

    level: Tensor
    name: str = "constant"

    def variance(self, features: Tensor) -> Tensor:
        """(K,), whatever the features."""
        return self.level
