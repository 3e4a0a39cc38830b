"""Many small nets trained at once, as one stack of batched matrix products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Training:
    """How every net is trained, from scratch.

    Attributes:
        hidden: widths of the hidden layers.
        steps: of Adam, on random batches, with a cosine schedule to zero.
        batch: rows a step.
        rate: the first learning rate.
        decay: decoupled weight decay.
    """

    hidden: tuple[int, ...] = (64, 64)
    steps: int = 1000
    batch: int = 64
    rate: float = 1e-2
    decay: float = 0.1


class BatchedLinear(torch.autograd.Function):
    """x W + b for a stack of layers.

    Torch's own backward pass multiplies by a transposed view of W, which on some processors is
    twenty times slower than by a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        back = slope @ weight.mT.contiguous() if ctx.needs_input_grad[0] else None
        return back, x.mT.contiguous() @ slope, slope.sum(1, keepdim=True)


class Nets:
    """B nets with SiLU layers and one output, their weights stacked along the first dimension."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        self.weights = weights  # (B, in, out)
        self.biases = biases  # (B, 1, out)

    @classmethod
    def drawn(cls, nets: int, sizes: tuple[int, ...], generator: torch.Generator) -> Nets:
        """Torch's default initialisation: uniform within one over the root of the fan-in."""

        def uniform(*shape: int, bound: float) -> Tensor:
            return (2 * torch.rand(*shape, generator=generator) - 1) * bound

        weights, biases = [], []
        for rows, columns in pairwise(sizes):
            bound = 1 / math.sqrt(rows)
            weights.append(uniform(nets, rows, columns, bound=bound))
            biases.append(uniform(nets, 1, columns, bound=bound))
        return cls(weights, biases)

    def repeated(self, copies: int) -> Nets:
        """The whole stack several times over."""
        weights, biases = (
            [p.repeat(copies, 1, 1) for p in part] for part in (self.weights, self.biases)
        )
        return Nets(weights, biases)

    def one(self, place: int) -> Nets:
        """The net at one place, a stack of one."""
        weights, biases = (
            [p[place : place + 1] for p in part] for part in (self.weights, self.biases)
        )
        return Nets(weights, biases)

    def hidden(self, x: Tensor) -> Tensor:
        """The last hidden layer: (B, N, d) -> (B, N, H)."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.nn.functional.silu(BatchedLinear.apply(x, weight, bias))
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N)."""
        return BatchedLinear.apply(self.hidden(x), self.weights[-1], self.biases[-1])[..., 0]

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer and a column of ones, without gradients: (B, N, H + 1)."""
        with torch.no_grad():
            hidden = self.hidden(x)
        return torch.cat([hidden, torch.ones_like(hidden[..., :1])], dim=-1)


def trained(
    x: Tensor, y: Tensor, how: Training, generator: torch.Generator, *, copies: int = 1
) -> Nets:
    """One net for each of B training sets.

    Args:
        x: (B, n, d), standardised.
        y: (B, n).
        how: the training.
        generator: of the first weights and of the batches.
        copies: the first B / copies sets have first weights and batches of their own, which the
            others repeat in order: what differs between copies is their rows.
    """
    sets, rows, inputs = x.shape
    nets = Nets.drawn(sets // copies, (inputs, *how.hidden, 1), generator).repeated(copies)
    parameters = [p.requires_grad_(True) for p in (*nets.weights, *nets.biases)]
    optimizer = torch.optim.AdamW(parameters, lr=how.rate, weight_decay=how.decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.steps)
    which = torch.arange(sets)[:, None]
    for _ in range(how.steps):
        pick = torch.randint(rows, (sets // copies, how.batch), generator=generator)
        pick = pick.repeat(copies, 1)
        # A sum over the nets, so that each has the gradient of its own mean squared error.
        loss = (nets(x[which, pick]) - y[which, pick]).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    for p in parameters:
        p.requires_grad_(False)
    return nets
