"""Worlds with a known distribution, and models of fixed random features with a readout in closed
form."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

F64 = torch.float64
Draw = Callable[[Tensor, torch.Generator], Tensor]


class Sets(NamedTuple):
    """A model and data; x (n, 3), y (n, K)."""

    model: nn.Sequential
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def normal_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Ten times as wide at one end as at the other."""
    level = torch.exp(1.15 * x[:, :1].clamp(-1, 1))
    return 0.2 * level * torch.randn(len(x), 1, generator=generator, dtype=F64)


def skewed_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Exponential, to one side on the left and to the other on the right; of mean zero."""
    drawn = -torch.rand(len(x), 1, generator=generator, dtype=F64).log() - 1
    return 0.4 * torch.where(x[:, :1] > 0, drawn, -drawn)


def heavy_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Student-t with three degrees of freedom."""
    z = torch.randn(4, len(x), 1, generator=generator, dtype=F64)
    return 0.2 * (1 + 0.5 * x[:, :1].clamp(-1, 1)) * z[0] / (z[1:].square().mean(0)).sqrt()


def signal(x: Tensor, targets: int = 1) -> Tensor:
    return torch.sin(2 * x[:, :1] + torch.arange(targets)) + 0.5 * x[:, 1:2] * x[:, 2:3]


def draw(rows: int, noise: Draw, seed: int, targets: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(rows, 3, generator=generator, dtype=F64) - 1
    added = torch.cat([noise(x, generator) for _ in range(targets)], 1)
    return x, signal(x, targets) + added


def random_feature_net(x: Tensor, y: Tensor, width: int, seed: int = 0) -> nn.Sequential:
    """tanh features of fixed weights, and the readout of ridge regression; float64."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, y.shape[1])).double()
    with torch.no_grad():
        for part in model[0].parameters():
            part.copy_(1.5 * torch.randn(part.shape, generator=generator, dtype=F64))
        one = torch.ones(len(x), 1, dtype=F64)
        f = torch.cat([model[1](model[0](x)), one], 1)
        w = torch.linalg.solve(f.T @ f + 0.1 * torch.eye(width + 1), f.T @ y)
        model[2].weight.copy_(w[:-1].T)
        model[2].bias.copy_(w[-1])
    return model


def sets(
    noise: Draw = normal_noise,
    rows: tuple[int, int, int] = (240, 120, 100),
    targets: int = 1,
    width: int = 10,
    seed: int = 0,
) -> Sets:
    parts = [draw(n, noise, seed + i, targets) for i, n in enumerate(rows)]
    return Sets(random_feature_net(*parts[0], width=width), *parts)
