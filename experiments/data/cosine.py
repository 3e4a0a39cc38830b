r"""Noisy points of $y = \cos^2 x$ (paper, Sec. 4.1 and "Simple fits")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 0.01
"""The standard deviation of the noise."""

INPUTS = (-0.8, -0.75, 0.0, 0.05, 0.07, 0.7, 0.73)
"""Inputs of the seven training points."""

CALIBRATION = 20
"""The number of calibration points."""

CALIBRATION_REACH = 1.2
"""The largest input of a calibration point; the smallest is its negative."""

TEST = 400
"""The number of test points."""

TEST_REACH = 1.5
"""The largest input of a test point; the smallest is its negative."""


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
        """Some of the points, given by a mask or indices."""
        return Points(self.x[rows], self.y[rows])


@dataclass(frozen=True)
class Sample:
    """One draw of all points.

    Attributes:
        train: Seven points to fit.
        calibration: Points to calibrate on.
        test: Points to score.
    """

    train: Points
    calibration: Points
    test: Points

    @classmethod
    def draw(cls, seed: int) -> Sample:
        """The points of a seed."""
        generator = torch.Generator().manual_seed(seed)
        train_inputs = torch.tensor(INPUTS, dtype=torch.float64)[:, None]
        return cls(
            train=noisy(train_inputs, generator),
            calibration=noisy(evenly(CALIBRATION, CALIBRATION_REACH), generator),
            test=noisy(evenly(TEST, TEST_REACH), generator),
        )


def truth(x: Tensor) -> Tensor:
    """The function without noise."""
    return x.cos().square()


def noisy(x: Tensor, generator: torch.Generator) -> Points:
    """Noisy observations at some inputs, (N, 1)."""
    noise = NOISE * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return Points(x, truth(x) + noise)


def evenly(count: int, reach: float) -> Tensor:
    """Inputs from minus to plus reach, (count, 1)."""
    return torch.linspace(-reach, reach, count, dtype=torch.float64)[:, None]
