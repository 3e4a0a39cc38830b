"""Many small nets trained at once, with their weights stacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from experiments.progress import steps

WIDTH = 50
BATCH, RATE, DECAY = 100, 3e-3, 1e-4


def trained(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> list[nn.Sequential]:
    """One inputs-50-1 ReLU net per leading entry of x (nets, rows, inputs) and y (nets, rows, 1).

    Adam with a cosine schedule on half the squared error; every net sees its own rows in its own
    order from its own start.
    """
    nets, rows, inputs = x.shape
    generator = torch.Generator().manual_seed(seed)
    weights = started(nets, inputs, generator)
    optimiser = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in steps(range(epochs), f"epochs of {nets} nets"):
        order = torch.rand(nets, rows, generator=generator).argsort(1)
        for part in order.split(BATCH, dim=1):
            batch_x, batch_y = (
                t.gather(1, part[..., None].expand(-1, -1, t.shape[2])) for t in (x, y)
            )
            optimiser.zero_grad()
            loss = (outputs(weights, batch_x) - batch_y).square().mean((1, 2)).sum() / 2
            loss.backward()
            optimiser.step()
        schedule.step()
    return apart(weights)


def started(nets: int, inputs: int, generator: torch.Generator) -> list[Tensor]:
    """Weights and biases drawn uniformly within one over the root of the layer's inputs."""
    shapes = [(inputs, WIDTH), (1, WIDTH), (WIDTH, 1), (1, 1)]
    bounds = [1 / math.sqrt(inputs)] * 2 + [1 / math.sqrt(WIDTH)] * 2
    return [
        (bound * (2 * torch.rand(nets, *shape, generator=generator) - 1)).requires_grad_()
        for shape, bound in zip(shapes, bounds, strict=True)
    ]


def outputs(weights: list[Tensor], x: Tensor) -> Tensor:
    """Of all nets, (nets, rows, 1)."""
    first, first_bias, last, last_bias = weights
    hidden = torch.baddbmm(first_bias, x, first).relu()
    return torch.baddbmm(last_bias, hidden, last)


def apart(weights: list[Tensor]) -> list[nn.Sequential]:
    """Each net as a module of its own."""
    nets = []
    for first, first_bias, last, last_bias in zip(*(w.detach() for w in weights), strict=True):
        net = nn.Sequential(nn.Linear(len(first), WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        values = (first.T, first_bias[0], last.T, last_bias[0])
        for parameter, value in zip(net.parameters(), values, strict=True):
            parameter.data.copy_(value)
        nets.append(net.eval())
    return nets
