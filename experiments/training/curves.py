"""Curves of few parameters: a cubic, two Gaussians with a prior, and how they are fitted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.data.cosine import NOISE

START = torch.tensor([0.5, 0.5, -0.5, 0.5, math.log(0.25), math.log(0.25)], dtype=torch.float64)
"""Two bumps side by side: prefactors, means and logarithms of the variances."""

PRIOR_PRECISION = NOISE**2
"""Precision of the Gaussians' parameters about their start: the variance of the noise over a prior
variance of one."""


def cubic(coefficients: Tensor, x: Tensor) -> Tensor:
    """A polynomial of degree three: (4,), (N, 1) -> (N,)."""
    return x.pow(torch.arange(4)) @ coefficients


def gaussians(parameters: Tensor, x: Tensor) -> Tensor:
    """A linear combination of two Gaussians: (6,), (N, 1) -> (N,)."""
    prefactor, mean, log_variance = parameters.reshape(3, 2)
    return (prefactor * torch.exp(-(x - mean).square() / (2 * log_variance.exp()))).sum(1)


def prior(parameters: Tensor) -> Tensor:
    """The regulariser of the Gaussians: without it seven points hardly determine six numbers."""
    return PRIOR_PRECISION / 2 * (parameters - START).square().sum()


def minimised(loss: Callable[[Tensor], Tensor], start: Tensor, **options: Any) -> Tensor:
    """The parameters of the smallest loss, by L-BFGS.

    Args:
        loss: A function of the parameters.
        start: The first parameters.
        options: Options of `torch.optim.LBFGS`.
    """
    parameters = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], line_search_fn="strong_wolfe", **options)

    def step() -> Tensor:
        optimiser.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimiser.step(step)
    return parameters.detach()
