"""Batches of structures, as the network takes them: atoms one species after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.atoms.structures import spans

Batch = dict[str, Tensor]
"""The network's inputs by name, and "y" where the energies are known."""


@dataclass(frozen=True)
class Environments:
    """Descriptors of the atoms of N structures, with the structures' energies.

    Attributes:
        x: Descriptors, (A, D).
        species: The species of the atoms, counted from zero, (A,), on the CPU.
        counts: Numbers of atoms of each structure, (N,), on the CPU.
        y: Energies less the baseline, (N,).
        kinds: The number of species.
    """

    x: Tensor
    species: Tensor
    counts: Tensor
    y: Tensor
    kinds: int

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, rows: Tensor) -> Batch:
        """A batch of some structures. The CPU computes the indices, so that a GPU never waits."""
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
        """Batches of all structures; the last may be smaller.

        Args:
            size: Structures of a batch.
            order: The generator of a random order; without it they keep their order.
        """
        return Batches(self, size, order)

    def picked(self, rows: Tensor) -> Environments:
        """Some structures, in the order of their indices."""
        starts = self.counts.cumsum(0) - self.counts
        atoms = spans(starts[rows], self.counts[rows])
        return Environments(
            x=self.x[atoms.to(self.x.device)],
            species=self.species[atoms],
            counts=self.counts[rows],
            y=self.y[rows.to(self.y.device)],
            kinds=self.kinds,
        )

    def to(self, device: torch.device) -> Environments:
        """The same with descriptors and energies on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


@dataclass(frozen=True)
class Batches:
    """Batches of all structures, made anew in each iteration.

    Attributes:
        data: The structures.
        size: Structures of a batch; the last may be smaller.
        order: The generator of a random order, another in each iteration; without it the
            structures keep their order.
    """

    data: Environments
    size: int
    order: torch.Generator | None = None

    def __len__(self) -> int:
        return -(-len(self.data) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.data)
        if self.order is None:
            rows = torch.arange(count)
        else:
            rows = torch.randperm(count, generator=self.order)
        if count == 0:  # `split` would give one empty batch
            return
        for batch_rows in rows.split(self.size):
            yield self.data.batch(batch_rows)


def arranged(
    counts: Tensor, species: Tensor, rows: Tensor, kinds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The atoms of some structures, one species after another.

    Args:
        counts: Numbers of atoms of all structures, (N,).
        species: The species of all atoms, (A,).
        rows: Indices of the structures that are wanted.
        kinds: The number of species.

    Returns:
        The indices of their atoms among all; for each of these the place of its structure in
        `rows`; and the numbers of atoms of each species, (S,).
    """
    starts = counts.cumsum(0) - counts
    atoms = spans(starts[rows], counts[rows])
    owners = torch.arange(len(rows)).repeat_interleave(counts[rows])
    atom_species = species[atoms]
    order = atom_species.argsort(stable=True)
    return atoms[order], owners[order], atom_species.bincount(minlength=kinds)


def loss_weight(batch: Batch) -> Tensor:
    """1 / n: the weight of a structure of n atoms in the loss sum r^2 / n."""
    return 1 / batch["counts"].double()
