"""Training of a stack of networks: epochs, batches, the best weights by validation loss.

Each network has its own training and validation rows, its own order of batches and its own learning
rate. It is trained as if it were alone; only the arithmetic is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.frame.progress import steps
from experiments.training.adam import Adam
from experiments.training.objectives import Objective, mean_squares, squared_error
from experiments.training.plateau import Plateau
from experiments.training.protocol import Protocol, device
from experiments.training.stack import Stack

Rows = tuple[Tensor, Tensor]
"""x (B, N, d) and y (B, N, K): the rows of each of B networks."""


@dataclass(frozen=True)
class Trained:
    """Networks at the end of their training.

    Attributes:
        best: With the weights of the smallest validation loss; without validation rows, the last.
        last: With the weights of the last epoch.
        epoch: The epoch of the best weights, (B,), counted from one.
    """

    best: Stack
    last: Stack
    epoch: Tensor


def trained(
    train: Rows, valid: Rows | None, protocol: Protocol, seeds: Sequence[int], what: str = "nets"
) -> Trained:
    """Train B networks on the mean squared error, each on its own rows.

    Args:
        train: Training rows, (B, n, d) and (B, n, K), standardised.
        valid: Validation rows, which cut the rate and choose the weights; None for neither.
        protocol: How the networks are trained.
        seeds: The seed of each network's first weights and batches.
        what: The word for the networks in the progress.
    """
    sizes = (train[0].shape[2], *protocol.hidden, train[1].shape[2])
    stack = Stack.drawn(
        seeds, sizes, protocol.activation, last_bias=protocol.last_bias, device=device()
    )
    return descended(stack, train, valid, protocol, seeds, what=what)


def descended(
    stack: Stack,
    train: Rows,
    valid: Rows | None,
    protocol: Protocol,
    seeds: Sequence[int],
    *,
    objective: Objective = squared_error,
    loss: Callable[[Stack, Tensor, Tensor], Tensor] = mean_squares,
    what: str = "nets",
) -> Trained:
    """Train a stack in place, by any objective.

    Args:
        stack: Networks with their first weights.
        train: Training rows.
        valid: Validation rows, or None: no rate is then cut and the last weights are the best.
        protocol: How the networks are trained.
        seeds: The seed of the order of each network's batches, which does not depend on its
            companions. `trained` draws the first weights from the same seeds.
        objective: Writes the gradients.
        loss: The loss of each network on validation rows, (B,).
        what: The word for the networks in the progress.

    Raises:
        FloatingPointError: The weights of a network are not finite.
    """
    where = stack.flat.device
    train = (train[0].to(where), train[1].to(where))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    optimiser = Adam(stack.flat, protocol.rate, protocol.decay)
    plateau = None
    if valid is not None:
        valid = (valid[0].to(where), valid[1].to(where))
        plateau = Plateau(stack.flat, optimiser.rate, protocol)

    for epoch in steps(range(protocol.epochs), f"epochs of {what}"):
        if protocol.cosine:
            rate = protocol.rate * (1 + math.cos(math.pi * epoch / protocol.epochs)) / 2
            optimiser.rate.fill_(rate)
        for x, y in _batches(train, protocol.batch, generators):
            objective(stack, x, y)
            optimiser.step(stack.gradient)
        if plateau is not None and valid is not None:
            plateau.update(loss(stack, valid[0], valid[1]))

    _require_finite(stack)
    if plateau is None:
        return Trained(stack, stack, torch.full((len(stack),), protocol.epochs))
    best = Stack(plateau.weights, stack.sizes, stack.activation, stack.last_bias)
    return Trained(best, stack, plateau.epoch.cpu())


def _require_finite(stack: Stack) -> None:
    """Refuse networks with weights that are not finite, before their numbers enter a table."""
    finite = stack.flat.isfinite().all(1)
    lost = (~finite).nonzero().flatten().tolist()
    if lost:
        raise FloatingPointError(
            f"Expected finite weights after the training, got others in nets {lost} of "
            f"{len(stack)}. Use a smaller rate, or look at their rows."
        )


def _batches(rows: Rows, size: int, generators: Sequence[torch.Generator]) -> list[Rows]:
    """The rows of every network in an order of its own, cut into batches."""
    x, y = rows
    orders = [torch.randperm(x.shape[1], generator=generator) for generator in generators]
    order = torch.stack(orders).to(x.device)[..., None]  # (B, N, 1)
    x = x.gather(1, order.expand(-1, -1, x.shape[2]))
    y = y.gather(1, order.expand(-1, -1, y.shape[2]))
    return list(zip(x.split(size, 1), y.split(size, 1), strict=True))
