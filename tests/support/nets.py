"""Nets that several test files share: one of named parts, and a small trained one with its data."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import rigidities as rg


class Net(nn.Module):
    """A module made of named parts and a forward function of itself and the inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def without_forward_mode(function: Callable[..., Tensor], slope: Callable[..., Tensor]) -> Any:
    """An elementwise operation written in the old style, which has no forward mode."""

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * slope(*ctx.saved_tensors)

    return Operation


class Trained(NamedTuple):
    model: nn.Module
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def data(rows: int, targets: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, targets, generator=generator)
    y = torch.sin(x[:, :1] + torch.arange(targets)) + (0.05 + 0.2 * x[:, 1:2].abs()) * noise
    return x, y


def trained(targets: int = 1, seed: int = 0, steps: int = 150) -> Trained:
    """A 4-24-24-K net after a short training on a few hundred rows: the caller's own copy."""
    return copy.deepcopy(_trained(targets, seed, steps, torch.get_default_dtype()))


@cache
def _trained(targets: int, seed: int, steps: int, _: torch.dtype) -> Trained:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, targets)
        )
    sets = [data(rows, targets, seed + i) for i, rows in enumerate((300, 200, 200))]
    x, y = sets[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return Trained(model, *sets)


def calibrated(
    uq: rg.LastLayerRigidity, valid: Any, ridge: float | None = None
) -> rg.LastLayerRigidity:
    return uq.calibrate(valid, method=rg.Paper(ridge=ridge))


def derivative_scale(uq: rg.LastLayerRigidity) -> Tensor:
    """The scale of derivatives: their own where they were calibrated, else that of the values."""
    report = uq.calibration_report
    if report is None or report.gradient_scale is None:
        return uq.scale
    return report.gradient_scale


def fitted(net: Trained, **options: Any) -> rg.LastLayerRigidity:
    return calibrated(rg.LastLayerRigidity(net.model, **options).fit(net.train), net.valid)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]
