"""The ordinary loop for one larger net: any module, any number of inputs, any loss."""

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
"""The net's inputs and, last, the target; all with the same number of rows."""

Loss = Callable[[nn.Module, Sequence[Tensor], Tensor], Tensor]
"""loss(net, inputs, target): the mean over the rows."""

CHUNK = 8192
"""Rows of a validation batch."""


@dataclass(frozen=True)
class Fitted:
    """A net at the end of its training.

    Attributes:
        net: with the weights of the smallest validation loss, in evaluation mode, on the CPU.
        epoch: of those weights, counted from one.
        loss: that smallest loss.
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
    """Train a net in place by AdamW; the weights of the smallest validation loss are kept.

    Args:
        net: with its first weights. Architecture and activation are its own: of the protocol,
            `hidden`, `activation` and `last_bias` are not read here.
        train: inputs and target.
        valid: the same for the rows that cut the rate and choose the weights.
        protocol: epochs, batch, rate and its cuts, decay.
        seed: of the order of the batches, and of a net that draws random numbers itself.
        loss: minimised on the training rows, followed on the validation rows.
        what: is trained, for the progress.
    """
    where = device()
    train, valid = (tuple(part.to(where) for part in rows) for rows in (train, valid))
    net.to(where)
    return descended(
        net,
        protocol,
        seed,
        lambda optimiser, order: one_pass(net, train, optimiser, protocol.batch, order, loss),
        lambda: mean_loss(net, valid, loss),
        what=what,
    )


def descended(
    net: nn.Module,
    protocol: Protocol,
    seed: int,
    one_epoch: Callable[[torch.optim.Optimizer, torch.Generator], None],
    valid_loss: Callable[[], float],
    *,
    what: str = "the net",
) -> Fitted:
    """Epoch after epoch by AdamW, the rate cut on plateaus, the best weights kept.

    Args:
        net: on the device of the training, changed in place.
        protocol: epochs, rate and its cuts, decay.
        seed: of the order of the batches, and of a net that draws random numbers itself.
        one_epoch: goes once through the training data; takes the optimiser and the generator of
            the order.
        valid_loss: of the net as it is.
        what: is trained, for the progress.
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
    smallest, best, weights = float("inf"), 0, copy.deepcopy(net.state_dict())
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        for epoch in steps(range(1, protocol.epochs + 1), f"epochs of {what}"):
            one_epoch(optimiser, order)
            now = valid_loss()
            schedule.step(now)
            if now < smallest:
                smallest, best, weights = now, epoch, copy.deepcopy(net.state_dict())
    if not best:
        raise FloatingPointError(
            f"Expected a finite validation loss at some epoch of {what}, got none of "
            f"{protocol.epochs}. Use a smaller rate, or look at the rows."
        )
    net.load_state_dict(weights)
    return Fitted(net.eval().cpu(), best, smallest)


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
    """One epoch, in place: every row once, in a random order."""
    net.train()
    for *inputs, target in batches(shuffled(rows, order), batch):
        optimiser.zero_grad()
        loss(net, inputs, target).backward()
        optimiser.step()


@torch.no_grad()
def mean_loss(net: nn.Module, rows: Rows, loss: Loss = squared_error) -> float:
    """The loss of all rows, in evaluation mode."""
    net.eval()
    parts = [len(target) * loss(net, x, target) for *x, target in batches(rows, CHUNK)]
    return float(torch.stack(parts).sum()) / len(rows[-1])


def shuffled(rows: Rows, order: torch.Generator) -> Rows:
    """All rows in a random order, the same for inputs and target."""
    places = torch.randperm(len(rows[-1]), generator=order).to(rows[-1].device)
    return tuple(part[places] for part in rows)


def batches(rows: Rows, size: int) -> Iterator[Rows]:
    """Consecutive slices; the last may be smaller."""
    return zip(*(part.split(size) for part in rows), strict=True)
