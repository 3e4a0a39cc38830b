r"""Noisy rows of random smooth functions, with a gap between the training rows.

A function is a sum of cosines with random frequencies, phases and amplitudes: nearly a draw from a
Gaussian process of unit variance with a squared-exponential kernel of length `LENGTH` (Rahimi and
Recht, "Random features for large-scale kernel machines", 2007). Nobody can tell from the rows on
both sides what such a function does in a gap three lengths wide. The rows on the left have little
noise, those on the right four times as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = 0.7
"""The length scale of the functions."""

COSINES = 200
"""The number of cosines in the sum."""

LEFT, GAP, RIGHT = (-3.0, -1.0), (-1.0, 1.0), (1.0, 3.0)
"""The ranges of the inputs: training rows on the left, none in the gap, training rows again."""

BEYOND = 1.0
"""How far test inputs reach beyond the outermost training rows."""

NOISE_LEFT, NOISE_RIGHT = 0.05, 0.2
"""The standard deviation of the noise for negative and for positive inputs."""

TRAINING, VALIDATION, TEST = 400, 200, 1000
"""The numbers of rows; there are as many test rows in each region."""

Rows = tuple[Tensor, Tensor]
"""Inputs (N, 1) and targets (N, 1), float64."""


@dataclass(frozen=True)
class Function:
    """A random smooth function.

    Attributes:
        frequencies: (cosines,).
        phases: (cosines,).
        amplitudes: (cosines,).
    """

    frequencies: Tensor
    phases: Tensor
    amplitudes: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator) -> Function:
        """A function, as drawn by a generator."""
        options = {"generator": generator, "dtype": torch.float64}
        return cls(
            frequencies=torch.randn(COSINES, **options) / LENGTH,
            phases=2 * math.pi * torch.rand(COSINES, **options),
            amplitudes=torch.randn(COSINES, **options) * math.sqrt(2 / COSINES),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The values at some inputs, (N, 1) -> (N, 1)."""
        waves = torch.cos(x * self.frequencies + self.phases)  # (N, cosines)
        return (waves * self.amplitudes).sum(1, keepdim=True)


@dataclass(frozen=True)
class Sample:
    """One draw of a function and of all rows.

    Attributes:
        function: The function without noise.
        train: Rows on both sides of the gap, to train on.
        valid: Rows on both sides of the gap, to calibrate on.
        test: Rows to score, by region: "inside" (both sides), "gap" and "beyond" (past both ends).
    """

    function: Function
    train: Rows
    valid: Rows
    test: dict[str, Rows]

    @classmethod
    def draw(cls, seed: int) -> Sample:
        """The function and the rows of a seed."""
        generator = torch.Generator().manual_seed(seed)
        function = Function.draw(generator)
        before = (LEFT[0] - BEYOND, LEFT[0])
        after = (RIGHT[1], RIGHT[1] + BEYOND)
        return cls(
            function=function,
            train=noisy(function, TRAINING, (LEFT, RIGHT), generator),
            valid=noisy(function, VALIDATION, (LEFT, RIGHT), generator),
            test={
                "inside": noisy(function, TEST, (LEFT, RIGHT), generator),
                "gap": noisy(function, TEST, (GAP,), generator),
                "beyond": noisy(function, TEST, (before, after), generator),
            },
        )


def noise_level(x: Tensor) -> Tensor:
    """The standard deviation of the noise at some inputs."""
    return torch.where(x < 0, NOISE_LEFT, NOISE_RIGHT).to(x.dtype)


def noisy(
    function: Function,
    count: int,
    ranges: tuple[tuple[float, float], ...],
    generator: torch.Generator,
) -> Rows:
    """Rows with inputs spread evenly at random over some ranges, the same number in each.

    Args:
        function: The function without noise.
        count: The number of rows.
        ranges: Least and largest input of each range.
        generator: What draws.
    """
    inputs = []
    for low, high in ranges:
        shape = (count // len(ranges), 1)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        inputs.append(low + (high - low) * uniform)
    x = torch.cat(inputs)
    standard_normal = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x, function(x) + noise_level(x) * standard_normal
