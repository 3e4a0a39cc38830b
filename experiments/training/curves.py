"""Curves of few parameters: a cubic, two Gaussians with a prior, and how they are fitted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.data.cosine import NOISE

# Two bumps side by side: prefactors, means and logarithms of the variances.
START = torch.tensor([0.5, 0.5, -0.5, 0.5, *[math.log(0.25)] * 2], dtype=torch.float64)
PRIOR_PRECISION = NOISE**2
"""Of the Gaussians' parameters about their start: the noise's variance over a prior one of one."""


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
    """The parameters of the smallest loss, by L-BFGS with these options of torch's."""
    parameters = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], line_search_fn="strong_wolfe", **options)

    def step() -> Tensor:
        optimiser.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimiser.step(step)
    return parameters.detach()
