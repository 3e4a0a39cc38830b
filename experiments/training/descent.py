"""Stochastic descent of a stack: epochs, batches, the best weights by validation loss."""

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
"""x (B, N, d) and y (B, N, K), of each net."""


@dataclass(frozen=True)
class Trained:
    """Nets at the end of their training.

    Attributes:
        best: with the weights of the smallest validation loss; the last where there was none.
        last: with the weights of the last epoch.
        epoch: of the best, (B,), counted from one.
    """

    best: Stack
    last: Stack
    epoch: Tensor


def trained(
    train: Rows, valid: Rows | None, protocol: Protocol, seeds: Sequence[int], what: str = "nets"
) -> Trained:
    """B nets on the mean squared error, each on its own rows.

    Args:
        train: (B, n, d) and (B, n, K), standardised.
        valid: the same for the rows that choose the rate and the weights.
        protocol: of the training.
        seeds: of each net's first weights and batches.
        what: is trained, for the progress.
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
    """Train a stack in place, by any objective; the arguments are those of `trained`.

    Args:
        stack: the first weights.
        train: rows.
        valid: rows, or None: no rate is then cut and the last weights are the best.
        protocol: of the training.
        seeds: of the order of each net's batches, whatever its companions. `trained` draws its
            first weights from the same ones.
        objective: writes the gradients.
        loss: on the validation rows, (B,).
        what: is trained, for the progress.
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
            optimiser.rate.fill_(
                protocol.rate * (1 + math.cos(math.pi * epoch / protocol.epochs)) / 2
            )
        for x, y in _batches(train, protocol.batch, generators):
            objective(stack, x, y)
            optimiser.step(stack.gradient)
        if plateau is not None and valid is not None:
            plateau.update(loss(stack, *valid))
    _require_finite(stack)
    if plateau is None:
        return Trained(stack, stack, torch.full((len(stack),), protocol.epochs))
    best = Stack(plateau.weights, stack.sizes, stack.activation, stack.last_bias)
    return Trained(best, stack, plateau.epoch.cpu())


def _require_finite(stack: Stack) -> None:
    """Refuse nets that came to nothing, before their numbers enter a table."""
    lost = (~stack.flat.isfinite().all(1)).nonzero().flatten().tolist()
    if lost:
        raise FloatingPointError(
            f"Expected finite weights after the training, got others in nets {lost} of "
            f"{len(stack)}. Use a smaller rate, or look at their rows."
        )


def _batches(rows: Rows, size: int, generators: Sequence[torch.Generator]) -> list[Rows]:
    """The rows of every net in an order of its own, cut into batches."""
    x, y = rows
    order = torch.stack([torch.randperm(x.shape[1], generator=g) for g in generators])
    order = order.to(x.device)[..., None]
    x, y = (t.gather(1, order.expand(-1, -1, t.shape[2])) for t in (x, y))
    return list(zip(x.split(size, 1), y.split(size, 1), strict=True))
