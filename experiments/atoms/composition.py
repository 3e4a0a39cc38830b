r"""The linear baseline: an energy for each element, $E_0(A) = \sum_{i \in A} e_{s_i}$."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.atoms.structures import Structures


@dataclass(frozen=True)
class Composition:
    """Energies of elements.

    Attributes:
        species: Atomic numbers.
        energies: Their energies, (S,) float64.
    """

    species: tuple[int, ...]
    energies: Tensor

    def __call__(self, structures: Structures) -> Tensor:
        """The baselines of structures, (N,)."""
        return structures.composition(self.species) @ self.energies


def fitted(structures: Structures, energy: Tensor, species: Sequence[int]) -> Composition:
    """Energies of elements by least squares.

    Where an element never occurs there are several solutions; the shortest is taken.

    Args:
        structures: N structures.
        energy: Their energies, (N,).
        species: Atomic numbers of the elements.
    """
    table = structures.composition(species)
    solution = torch.linalg.lstsq(table, energy.double()[:, None], driver="gelsd").solution
    return Composition(tuple(species), solution[:, 0])
