"""Batches of structures, as the net takes them: atoms one species after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.atoms.structures import spans

Batch = dict[str, Tensor]
"""The net's inputs by name, and "y" where the energies are known."""


@dataclass(frozen=True)
class Environments:
    """Descriptors of the atoms of N structures, with the structures' energies.

    Attributes:
        x: (A, D).
        species: (A,) on the CPU, counted from zero.
        counts: (N,) on the CPU.
        y: (N,) energies less the baseline.
        kinds: how many species there are.
    """

    x: Tensor
    species: Tensor
    counts: Tensor
    y: Tensor
    kinds: int

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, rows: Tensor) -> Batch:
        """Some structures. Places are found on the CPU, so that a GPU never waits."""
        counts = self.counts[rows]
        atoms, owners, sizes = arranged(self.counts, self.species, rows, self.kinds)
        where = self.x.device
        return {
            "x": self.x[atoms.to(where, non_blocking=True)],
            "sizes": sizes,
            "owners": owners.to(where, non_blocking=True),
            "counts": counts.to(where, non_blocking=True),
            "y": self.y[rows.to(where, non_blocking=True)],
        }

    def batches(self, size: int, order: torch.Generator | None = None) -> Batches:
        """All structures, as they stand or in a random order; the last batch may be smaller."""
        return Batches(self, size, order)

    def picked(self, rows: Tensor) -> Environments:
        """Some structures, in the order given."""
        atoms = spans((self.counts.cumsum(0) - self.counts)[rows], self.counts[rows])
        x, y = self.x[atoms.to(self.x.device)], self.y[rows.to(self.y.device)]
        return Environments(x, self.species[atoms], self.counts[rows], y, self.kinds)

    def to(self, device: torch.device) -> Environments:
        """With descriptors and energies on a device."""
        x, y = self.x.to(device), self.y.to(device)
        return Environments(x, self.species, self.counts, y, self.kinds)


@dataclass(frozen=True)
class Batches:
    """Batches of all structures, made one after another, as often as they are asked for.

    Attributes:
        data: the structures.
        size: of a batch; the last may be smaller.
        order: of the structures, a new one each time; as they stand without it.
    """

    data: Environments
    size: int
    order: torch.Generator | None = None

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        rows = torch.randperm(count, generator=self.order) if self.order else torch.arange(count)
        return map(self.data.batch, rows.split(self.size) if count else ())


def arranged(
    counts: Tensor, species: Tensor, rows: Tensor, kinds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The atoms of some structures, one species after another.

    Args:
        counts: (N,) atoms of each of all structures.
        species: (A,) of their atoms.
        rows: the structures wanted.
        kinds: number of species.

    Returns:
        Places of the atoms among all; the place of each one's structure in `rows`; atoms of each
        species, (S,).
    """
    few = counts[rows]
    atoms = spans((counts.cumsum(0) - counts)[rows], few)
    owners = torch.arange(len(rows)).repeat_interleave(few)
    order = species[atoms].argsort(stable=True)
    return atoms[order], owners[order], species[atoms].bincount(minlength=kinds)


def loss_weight(batch: Batch) -> Tensor:
    """1 / n: what a structure of n atoms counts in the loss sum r^2 / n."""
    return 1 / batch["counts"].double()
