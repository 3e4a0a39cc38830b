r"""Noisy points of $y = \cos^2 x$ (paper, Sec. 4.1 and "Simple fits")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 0.01
INPUTS = (-0.8, -0.75, 0.0, 0.05, 0.07, 0.7, 0.73)
CALIBRATION, CALIBRATION_REACH = 20, 1.2
TEST, TEST_REACH = 400, 1.5


@dataclass(frozen=True)
class Points:
    """Inputs (N, 1) and targets (N, 1), float64."""

    x: Tensor
    y: Tensor

    @property
    def inside(self) -> Tensor:
        """Which rows lie between the outermost of the seven points, (N,)."""
        return (self.x[:, 0] >= min(INPUTS)) & (self.x[:, 0] <= max(INPUTS))

    def part(self, rows: Tensor) -> Points:
        """Some of the rows."""
        return Points(self.x[rows], self.y[rows])


@dataclass(frozen=True)
class Sample:
    """One draw of everything: seven points to fit, some to calibrate on, some to score."""

    train: Points
    calibration: Points
    test: Points

    @classmethod
    def draw(cls, seed: int) -> Sample:
        """The points of a seed."""
        generator = torch.Generator().manual_seed(seed)
        seven = torch.tensor(INPUTS, dtype=torch.float64)[:, None]
        return cls(
            noisy(seven, generator),
            noisy(evenly(CALIBRATION, CALIBRATION_REACH), generator),
            noisy(evenly(TEST, TEST_REACH), generator),
        )


def truth(x: Tensor) -> Tensor:
    """The function without noise."""
    return x.cos().square()


def noisy(x: Tensor, generator: torch.Generator) -> Points:
    """Observations at some inputs."""
    return Points(x, truth(x) + NOISE * torch.randn(x.shape, generator=generator, dtype=x.dtype))


def evenly(count: int, reach: float) -> Tensor:
    """Inputs from minus to plus reach, (count, 1)."""
    return torch.linspace(-reach, reach, count, dtype=torch.float64)[:, None]
