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

    def batches(self, size: int, order: torch.Generator | None = None) -> Iterator[Batch]:
        """All structures, as they stand or in a random order; the last batch may be smaller."""
        rows = torch.randperm(len(self), generator=order) if order else torch.arange(len(self))
        return map(self.batch, rows.split(size))

    def picked(self, rows: Tensor) -> Environments:
        """Some structures, in the order given."""
        atoms = spans((self.counts.cumsum(0) - self.counts)[rows], self.counts[rows])
        x, y = self.x[atoms.to(self.x.device)], self.y[rows.to(self.y.device)]
        return Environments(x, self.species[atoms], self.counts[rows], y, self.kinds)

    def to(self, device: torch.device) -> Environments:
        """With descriptors and energies on a device."""
        x, y = self.x.to(device), self.y.to(device)
        return Environments(x, self.species, self.counts, y, self.kinds)


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
