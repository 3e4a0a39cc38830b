"""The nets of every round and method, trained at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.training.adam import Adam
from experiments.training.objectives import squared_error
from experiments.training.stack import Stack


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


def trained(
    x: Tensor, y: Tensor, how: Training, generator: torch.Generator, *, copies: int = 1
) -> Stack:
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
    seeds = torch.randint(2**31, (sets // copies,), generator=generator).tolist() * copies
    stack = Stack.drawn(seeds, (inputs, *how.hidden, 1), "silu")
    optimiser = Adam(stack.flat, how.rate, how.decay)
    which = torch.arange(sets)[:, None]
    for step in range(how.steps):
        optimiser.rate.fill_(how.rate * (1 + math.cos(math.pi * step / how.steps)) / 2)
        pick = torch.randint(rows, (sets // copies, how.batch), generator=generator)
        pick = pick.repeat(copies, 1)
        squared_error(stack, x[which, pick], y[which, pick, None])
        optimiser.step(stack.gradient)
    return stack
