"""Training of a net of atoms: batches of structures, loss sum r^2 / n."""

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
    """What the net says of a batch, (N,)."""
    found: Tensor = net(**{name: value for name, value in batch.items() if name != "y"})
    return found


def squared_error(net: nn.Module, batch: Batch) -> Tensor:
    """The mean of r^2 / n over the structures of a batch."""
    return ((energies(net, batch) - batch["y"]).square() * loss_weight(batch)).mean()


def fitted(
    net: nn.Module,
    train: Environments,
    valid: Environments,
    seed: int,
    protocol: Protocol = PROTOCOL,
    *,
    what: str = "the net",
) -> Fitted:
    """Train a net in place; the weights of the smallest validation loss are kept.

    Args:
        net: with its first weights.
        train: structures to train on.
        valid: those that cut the rate and choose the weights.
        seed: of the order of the batches.
        protocol: epochs, batch, rate and its cuts, decay.
        what: is trained, for the progress.
    """
    where = device()
    train, valid = train.to(where), valid.to(where)
    net.to(where)

    def one_pass(optimiser: torch.optim.Optimizer, order: torch.Generator) -> None:
        net.train()
        for batch in train.batches(protocol.batch, order):
            optimiser.zero_grad()
            squared_error(net, batch).backward()
            optimiser.step()

    return descended(net, protocol, seed, one_pass, lambda: mean_loss(net, valid), what=what)


@torch.no_grad()
def mean_loss(net: nn.Module, data: Environments) -> float:
    """The loss of all structures, in evaluation mode."""
    net.eval()
    parts = [len(batch["y"]) * squared_error(net, batch) for batch in data.batches(CHUNK)]
    return float(torch.stack(parts).sum()) / len(data)
