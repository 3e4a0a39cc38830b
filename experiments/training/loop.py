"""The ordinary training loop of one larger network: any module, any number of inputs, any loss.

`fitted` trains on tensors of rows. `descended` is its core, which takes any pass over the training
data and any validation loss as functions: networks of atoms use it with batches of structures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from experiments.frame.progress import steps
from experiments.training.plateau import SMALLEST_GAIN
from experiments.training.protocol import Protocol, device

Rows = tuple[Tensor, ...]
"""The network's inputs and, last, the target; all with the same number of rows."""

Loss = Callable[[nn.Module, Sequence[Tensor], Tensor], Tensor]
"""loss(net, inputs, target): the mean over the rows."""

CHUNK = 8192
"""Rows of a validation batch."""


@dataclass(frozen=True)
class Fitted:
    """A network at the end of its training.

    Attributes:
        net: The network with the weights of the smallest validation loss, in evaluation mode, on
            the CPU.
        epoch: The epoch of those weights, counted from one.
        loss: That smallest loss.
    """

    net: nn.Module
    epoch: int
    loss: float


def squared_error(net: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """The mean of (f(x) - y)^2."""
    return nn.functional.mse_loss(net(*inputs), target)


def fitted(
    net: nn.Module,
    train: Rows,
    valid: Rows,
    protocol: Protocol,
    seed: int,
    *,
    loss: Loss = squared_error,
    what: str = "the net",
) -> Fitted:
    """Train a network in place by AdamW, and keep the weights of the smallest validation loss.

    Args:
        net: The network with its first weights. It has its own architecture and activation: of the
            protocol, `hidden`, `activation` and `last_bias` are not read here.
        train: Inputs and target of the training rows.
        valid: Inputs and target of the rows that cut the rate and choose the weights.
        protocol: Epochs, batch, rate and its cuts, decay.
        seed: Seed of the order of the batches, and of a network that draws random numbers itself.
        loss: The loss that is minimised on the training rows and followed on the validation rows.
        what: The word for the network in the progress.

    Raises:
        FloatingPointError: No epoch has a finite validation loss.
    """
    where = device()
    train = tuple(column.to(where) for column in train)
    valid = tuple(column.to(where) for column in valid)
    net.to(where)

    def one_epoch(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        one_pass(net, train, optimiser, protocol.batch, order, loss)

    def valid_loss() -> float:
        return mean_loss(net, valid, loss)

    return descended(net, protocol, seed, one_epoch, valid_loss, what=what)


def descended(
    net: nn.Module,
    protocol: Protocol,
    seed: int,
    one_epoch: Callable[[torch.optim.Optimizer, torch.Generator], None],
    valid_loss: Callable[[], float],
    *,
    what: str = "the net",
) -> Fitted:
    """Train by AdamW, cut the rate on plateaus, and keep the best weights.

    Args:
        net: The network on the device of the training, changed in place.
        protocol: Epochs, rate and its cuts, decay.
        seed: Seed of the order of the batches, and of a network that draws random numbers itself.
        one_epoch: Goes once through the training data; takes the optimiser and the generator of
            the order.
        valid_loss: Returns the validation loss of the network as it is.
        what: The word for the network in the progress.

    Raises:
        FloatingPointError: No epoch has a finite validation loss.
    """
    where = next(net.parameters()).device
    optimiser = adamw(net, protocol)
    schedule = ReduceLROnPlateau(
        optimiser,
        factor=protocol.cut,
        patience=protocol.patience,
        threshold=SMALLEST_GAIN,
        min_lr=protocol.smallest,
    )
    order = torch.Generator().manual_seed(seed)
    smallest_loss = float("inf")
    best_epoch = 0
    best_weights = copy.deepcopy(net.state_dict())
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        for epoch in steps(range(1, protocol.epochs + 1), f"epochs of {what}"):
            one_epoch(optimiser, order)
            loss = valid_loss()
            schedule.step(loss)
            if loss < smallest_loss:
                smallest_loss = loss
                best_epoch = epoch
                best_weights = copy.deepcopy(net.state_dict())
    if best_epoch == 0:
        raise FloatingPointError(
            f"Expected a finite validation loss at some epoch of {what}, got none of "
            f"{protocol.epochs}. Use a smaller rate, or look at the rows."
        )
    net.load_state_dict(best_weights)
    return Fitted(net.eval().cpu(), best_epoch, smallest_loss)


def adamw(net: nn.Module, protocol: Protocol) -> torch.optim.AdamW:
    """The optimiser, in one kernel for all weights."""
    return torch.optim.AdamW(
        net.parameters(), lr=protocol.rate, weight_decay=protocol.decay, fused=True
    )


def one_pass(
    net: nn.Module,
    rows: Rows,
    optimiser: torch.optim.Optimizer,
    batch: int,
    order: torch.Generator,
    loss: Loss = squared_error,
) -> None:
    """Train for one epoch, in place: every row once, in a random order.

    Args:
        net: The network.
        rows: Inputs and target.
        optimiser: The optimiser of its weights.
        batch: Rows a step.
        order: The generator of the order.
        loss: The loss that is minimised.
    """
    net.train()
    for *inputs, target in batches(shuffled(rows, order), batch):
        optimiser.zero_grad()
        loss(net, inputs, target).backward()
        optimiser.step()


@torch.no_grad()
def mean_loss(net: nn.Module, rows: Rows, loss: Loss = squared_error) -> float:
    """The loss of all rows, in evaluation mode."""
    net.eval()
    sums = [len(target) * loss(net, inputs, target) for *inputs, target in batches(rows, CHUNK)]
    return float(torch.stack(sums).sum()) / len(rows[-1])


def shuffled(rows: Rows, order: torch.Generator) -> Rows:
    """All rows in a random order, the same for inputs and target."""
    places = torch.randperm(len(rows[-1]), generator=order).to(rows[-1].device)
    return tuple(column[places] for column in rows)


def batches(rows: Rows, size: int) -> Iterator[Rows]:
    """Consecutive slices of the rows; the last may be smaller."""
    return zip(*(column.split(size) for column in rows), strict=True)
