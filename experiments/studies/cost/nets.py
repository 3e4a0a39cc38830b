"""The nets whose cost is measured, and the losses that the methods train them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from experiments.training.protocol import Protocol
from experiments.training.stack import ACTIVATIONS

DROPPED = 0.05
"""Probability of dropout; the cost does not depend on it."""

SMALLEST = 1e-6
"""Variance of an ensemble's member."""

STEP = 0.01
"""Adversarial step, in standard deviations of an input: about a hundredth of the range."""


@dataclass(frozen=True)
class Workload:
    """A net, its training and its data.

    Attributes:
        inputs: columns.
        train: training rows.
        valid: validation rows, which calibrate.
        test: rows to predict.
        block: rows of a batch of predictions.
        protocol: of the training.
    """

    inputs: int
    train: int
    valid: int
    test: int
    block: int
    protocol: Protocol

    def smaller(self, rows: int) -> Workload:
        """The same with at most so many rows of each kind."""
        train, valid, test = (min(rows, count) for count in (self.train, self.valid, self.test))
        return replace(self, train=train, valid=valid, test=test)

    def data(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Standard normal inputs and a smooth function of them with noise."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.inputs, generator=generator)
        noise = torch.randn(rows, 1, generator=generator)
        return x, torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * noise

    def net(self, seed: int, *, outputs: int = 1, dropout: bool = False) -> nn.Sequential:
        """With dropout, it comes before every layer of weights, the first too."""
        sizes = (self.inputs, *self.protocol.hidden, outputs)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for before, after in pairwise(sizes):
                layers += [nn.Dropout(DROPPED)] * dropout
                layers += [nn.Linear(before, after), ACTIVATIONS[self.protocol.activation].module()]
        return nn.Sequential(*layers[:-1])


def gaussian(net: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The mean negative log-likelihood of a net with a mean and a variance."""
    mean, variance = moments(net(*inputs))
    return 0.5 * (variance.log() + (target - mean).square() / variance).mean()


def adversarial(net: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The same for the rows and for rows moved a little to where they fit worse."""
    (x,) = (part.detach().requires_grad_() for part in inputs)
    loss = gaussian(net, (x,), target)
    # The graph is kept: the weights' gradient of the first term goes through it again.
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    return (loss + gaussian(net, (x.detach() + STEP * slope.sign(),), target)) / 2


def moments(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance from two outputs, each (N, 1)."""
    return output[:, :1], nn.functional.softplus(output[:, 1:]) + SMALLEST
