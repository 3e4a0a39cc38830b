"""Predictions with error bars by each method, batch by batch, as a user would make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.studies.cost.nets import moments

Predicted = tuple[Tensor, Tensor]
"""Mean and variance, (N, 1)."""


@torch.inference_mode()
def plain(net: nn.Module, x: Tensor, block: int) -> Tensor:
    """No error bars."""
    return torch.cat([net(part) for part in x.split(block)])


@torch.inference_mode()
def dropout(net: nn.Module, x: Tensor, block: int, passes: int) -> Predicted:
    """Moments over passes with different units left out; the observation's noise comes on top."""
    net.train()
    return _joined([_moments_of([net(part) for _ in range(passes)]) for part in x.split(block)])


@torch.inference_mode()
def ensemble(nets: Sequence[nn.Module], x: Tensor, block: int) -> Predicted:
    """Moments of the mixture of the members' Gaussians."""
    blocks = []
    for part in x.split(block):
        means, variances = zip(*(moments(net(part)) for net in nets), strict=True)
        mean, spread = _moments_of(means)
        blocks.append((mean, spread + torch.stack(variances).mean(0)))
    return _joined(blocks)


def _moments_of(values: Sequence[Tensor]) -> Predicted:
    stacked = torch.stack(tuple(values))
    return stacked.mean(0), stacked.var(0, correction=0)


def _joined(blocks: Sequence[Predicted]) -> Predicted:
    mean, variance = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return mean, variance
