"""The network and the data that the benchmarks share: seeded, synthetic, briefly trained.

The module imports torch alone, because rivals build the same workload in environments of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Workload", "batches", "target", "train", "workload"]


@dataclass(frozen=True)
class Workload:
    """A trained regressor and the rows that it is fitted to and asked about.

    Attributes:
        model: Hidden layers and, last, a linear head.
        x: Inputs, (N, inputs).
        y: Targets, (N, targets).
        batch_size: The rows of a batch.
    """

    model: nn.Sequential
    x: Tensor
    y: Tensor
    batch_size: int

    @property
    def size(self) -> str:
        """Rows and width, as the names of rows in a table give them."""
        return f"{len(self.x):,} rows, width {self.model[-1].in_features}"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows in batches, sliced by hand: the cheapest loader there can be."""
        for start in range(0, len(self.x), self.batch_size):
            stop = start + self.batch_size
            yield self.x[start:stop], self.y[start:stop]

    def bare_pass(self) -> None:
        """The model over all batches and nothing else: the unit of every ratio."""
        with torch.inference_mode():
            for x, _ in self.batches():
                self.model(x)


def workload(
    rows: int,
    *,
    width: int,
    targets: int = 1,
    inputs: int = 90,
    batch_size: int = 1024,
    epochs: int = 2,
    seed: int = 0,
) -> Workload:
    """An ``inputs-width-width-targets`` SiLU network, fitted for a few epochs to its rows."""
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs)
    y = target(x, targets=targets, seed=seed) + 0.1 * torch.randn(rows, targets)
    model = nn.Sequential(
        nn.Linear(inputs, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, targets),
    )
    work = Workload(model, x, y, batch_size)
    train(work, epochs=epochs)
    return work


def target(x: Tensor, *, targets: int, seed: int) -> Tensor:
    """Smooth functions of eight hidden directions, shape (N, targets), of order one."""
    generator = torch.Generator().manual_seed(seed + 1)
    directions = torch.randn(x.shape[1], 8, generator=generator) / x.shape[1] ** 0.5
    mixing = torch.randn(8, targets, generator=generator) / 8**0.5
    return torch.sin(2 * x @ directions) @ mixing


def batches(rows: int, *, batch_size: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of inputs and targets that are drawn one by one: the rows never exist together."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, rows, batch_size):
        x = torch.randn(min(batch_size, rows - start), 90, generator=generator)
        yield x, target(x, targets=1, seed=0)


def train(work: Workload, *, epochs: int, rows: int = 10_000) -> None:
    """A few epochs of Adam on the first rows: enough for features that look trained."""
    optimizer = torch.optim.Adam(work.model.parameters(), lr=1e-3)
    x, y = work.x[:rows], work.y[:rows]
    work.model.train()
    for _ in range(epochs):
        for batch_x, batch_y in zip(x.split(256), y.split(256), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(work.model(batch_x), batch_y).backward()
            optimizer.step()
    optimizer.zero_grad()
    work.model.eval()
