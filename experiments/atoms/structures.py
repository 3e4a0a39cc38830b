"""Molecules and clusters, many in one object: their atoms stand one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ase import Atoms

TOO_CLOSE = 0.1
"""The smallest distance of two nuclei in angstrom."""

EXTRA = 'pip install "rigidities[chemistry]"'


class StructureError(ValueError):
    """There is no descriptor for some atoms; the message says which and why."""


@dataclass(frozen=True)
class Structures:
    """N structures of A atoms in all, without a cell.

    Attributes:
        numbers: Atomic numbers, (A,).
        positions: Positions in angstrom, (A, 3) float64.
        counts: Numbers of atoms of each structure, (N,), none of them zero.
    """

    numbers: Tensor
    positions: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        atoms = int(self.counts.sum())
        if self.numbers.shape != (atoms,) or self.positions.shape != (atoms, 3):
            raise StructureError(
                f"Expected numbers ({atoms},) and positions ({atoms}, 3) for counts that sum to "
                f"{atoms}, got {tuple(self.numbers.shape)} and {tuple(self.positions.shape)}."
            )
        empty_structures = self.counts < 1
        if bool(empty_structures.any()):
            empty = int(empty_structures.nonzero()[0])
            raise StructureError(
                f"Structure {empty} has no atoms: there is no energy to predict. Leave it out."
            )
        finite = torch.isfinite(self.positions).all(1)
        if not bool(finite.all()):
            atom = int((~finite).nonzero()[0])
            raise StructureError(
                f"Structure {int(self.owners[atom])} has a position that is no finite number: "
                f"{self.positions[atom].tolist()}. Mend it or leave the structure out."
            )

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """Where structures begin and end, (N + 1,): n has the atoms ends[n] to ends[n + 1] - 1."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @cached_property
    def owners(self) -> Tensor:
        """The structure of each atom, (A,)."""
        return torch.arange(len(self), device=self.counts.device).repeat_interleave(self.counts)

    def atoms_of(self, rows: Tensor) -> Tensor:
        """Indices of the atoms of some structures, one structure after another."""
        return spans(self.ends[:-1][rows], self.counts[rows])

    def picked(self, rows: Tensor) -> Structures:
        """Some structures, in the order of their indices."""
        atoms = self.atoms_of(rows)
        return Structures(self.numbers[atoms], self.positions[atoms], self.counts[rows])

    def composition(self, species: Sequence[int]) -> Tensor:
        """Numbers of atoms of each species in each structure, (N, S) float64."""
        places = indices(self.numbers, species)
        counts = torch.zeros(len(self), len(species), dtype=torch.float64, device=places.device)
        unit = torch.ones(1, dtype=torch.float64, device=places.device)
        return counts.index_put_((self.owners, places), unit, accumulate=True)

    def digest(self) -> str:
        """The SHA-256 of all numbers: other structures have another."""
        total = hashlib.sha256()
        for tensor in (self.numbers.long(), self.positions.double(), self.counts.long()):
            total.update(tensor.cpu().numpy().tobytes())
        return total.hexdigest()

    def as_ase(self) -> list[Atoms]:
        """The structures as objects of ASE, which featomic reads too."""
        try:
            from ase import Atoms
        except ImportError as error:
            raise ImportError(f"Structures of ASE need the package ase: {EXTRA}") from error
        counts = self.counts.tolist()
        numbers = self.numbers.cpu().split(counts)
        positions = self.positions.cpu().split(counts)
        return [Atoms(z.numpy(), r.numpy()) for z, r in zip(numbers, positions, strict=True)]

    @classmethod
    def from_ase(cls, frames: Sequence[Atoms]) -> Structures:
        """The structures of objects of ASE.

        Raises:
            StructureError: A structure is empty or periodic.
        """
        for place, frame in enumerate(frames):
            if frame.pbc.any():
                raise StructureError(
                    f"Structure {place} is periodic, and cells are not read here. Give a molecule "
                    "or a cluster (atoms.pbc = False)."
                )
        # The empty tensors give the result its type where there are no frames.
        numbers = [torch.zeros(0, dtype=torch.long)]
        positions = [torch.zeros(0, 3, dtype=torch.float64)]
        for frame in frames:
            numbers.append(torch.as_tensor(frame.numbers, dtype=torch.long))
            positions.append(torch.as_tensor(frame.positions, dtype=torch.float64))
        counts = torch.tensor([len(frame) for frame in frames], dtype=torch.long)
        return cls(torch.cat(numbers), torch.cat(positions), counts)


def check_known(structures: Structures, species: Sequence[int]) -> None:
    """Refuse an element that the model does not know.

    Raises:
        StructureError: There is one; the message has the structure, the atom and its element.
    """
    model_species = torch.tensor(list(species), device=structures.numbers.device)
    unknown = (~torch.isin(structures.numbers, model_species)).nonzero()[:, 0]
    if len(unknown):
        atom = int(unknown[0])
        row = int(structures.owners[atom])
        raise StructureError(
            f"Atom {atom - int(structures.ends[row])} of structure {row} has the atomic number "
            f"{int(structures.numbers[atom])}, but the model knows {', '.join(map(str, species))} "
            "only: it was never trained on that element. Leave the structure out, or train on "
            "structures that contain it."
        )


def check_apart(structures: Structures, least: float = TOO_CLOSE) -> None:
    """Refuse atoms on top of each other.

    Args:
        structures: The structures.
        least: The smallest distance that is allowed, in angstrom.

    Raises:
        StructureError: Two atoms are nearer; the message has the pair and its distance.
    """
    if not len(structures):
        return
    counts = structures.counts
    largest = int(counts.max())
    # One row a structure, (N, largest, 3); absent atoms are infinitely far away.
    padded = structures.positions.new_full((len(structures), largest, 3), float("inf"))
    column = spans(torch.zeros_like(counts), counts)
    padded[structures.owners, column] = structures.positions
    for first in range(largest):
        distances = (padded[:, first + 1 :] - padded[:, first, None]).norm(dim=-1)
        near = (distances < least).nonzero()
        if len(near):
            row, other = near[0].tolist()
            raise StructureError(
                f"Atoms {first} and {first + 1 + other} of structure {row} are "
                f"{distances[row, other]:.3g} angstrom apart: expected at least {least}. Mend the "
                "positions (are they in angstrom?) or leave the structure out."
            )


def spans(starts: Tensor, counts: Tensor) -> Tensor:
    """The numbers start, start + 1, ... of each span, one span after another.

    >>> spans(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = counts.cumsum(0) - counts
    places = torch.arange(int(counts.sum()), device=counts.device)
    places_in_span = places - before.repeat_interleave(counts)
    return places_in_span + starts.repeat_interleave(counts)


def indices(numbers: Tensor, species: Sequence[int]) -> Tensor:
    """The place of each atom's element in a list of elements, (A,).

    Args:
        numbers: Atomic numbers of the atoms, (A,).
        species: Atomic numbers of the elements.

    Raises:
        StructureError: An element is not in the list.
    """
    # A table by atomic number, -1 for elements that are not in the list.
    place_of = torch.full((max([118, *species]) + 1,), -1, device=numbers.device)
    place_of[list(species)] = torch.arange(len(species), device=numbers.device)
    in_table = (numbers > 0) & (numbers < len(place_of))
    places = torch.where(in_table, place_of[numbers.long().clamp(0, len(place_of) - 1)], -1)
    unknown = places < 0
    if bool(unknown.any()):
        atom = int(unknown.nonzero()[0])
        raise StructureError(
            f"Atom {atom} has the atomic number {int(numbers[atom])}, but the model knows "
            f"{', '.join(map(str, species))} only: it was never trained on that element. Leave the "
            "structure out, or train on structures that contain it."
        )
    return places
