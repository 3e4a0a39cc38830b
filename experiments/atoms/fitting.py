"""Training of a network of atoms: batches of structures, loss sum r^2 / n.

Here r is the error of a structure's energy and n its number of atoms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.atoms.batches import Batch, Environments, loss_weight
from experiments.atoms.bpnn import HIDDEN
from experiments.training.loop import Fitted, descended
from experiments.training.protocol import Protocol, device

PROTOCOL = Protocol(
    hidden=HIDDEN, activation="silu", last_bias=False, epochs=300, batch=32, decay=1e-2
)
"""Rate, decay, batch and epochs as published; the rate is cut as in the paper's other fits."""

CHUNK = 512
"""Structures of a validation batch."""


def energies(net: nn.Module, batch: Batch) -> Tensor:
    """The network's energies of the structures of a batch, (N,)."""
    inputs = {name: value for name, value in batch.items() if name != "y"}
    predicted: Tensor = net(**inputs)
    return predicted


def squared_error(net: nn.Module, batch: Batch) -> Tensor:
    """The mean of r^2 / n over the structures of a batch."""
    error = energies(net, batch) - batch["y"]
    return (error.square() * loss_weight(batch)).mean()


def fitted(
    net: nn.Module,
    train: Environments,
    valid: Environments,
    seed: int,
    protocol: Protocol = PROTOCOL,
    *,
    what: str = "the net",
) -> Fitted:
    """Train a network in place, and keep the weights of the smallest validation loss.

    Args:
        net: The network with its first weights.
        train: Structures to train on.
        valid: Structures that cut the rate and choose the weights.
        seed: Seed of the order of the batches.
        protocol: Epochs, batch, rate and its cuts, decay.
        what: The word for the network in the progress.
    """
    where = device()
    train = train.to(where)
    valid = valid.to(where)
    net.to(where)

    def one_pass(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        net.train()
        for batch in train.batches(protocol.batch, order):
            optimiser.zero_grad()
            squared_error(net, batch).backward()
            optimiser.step()

    def valid_loss() -> float:
        return mean_loss(net, valid)

    return descended(net, protocol, seed, one_pass, valid_loss, what=what)


@torch.no_grad()
def mean_loss(net: nn.Module, data: Environments) -> float:
    """The loss of all structures, in evaluation mode."""
    net.eval()
    sums = [len(batch["y"]) * squared_error(net, batch) for batch in data.batches(CHUNK)]
    return float(torch.stack(sums).sum()) / len(data)
