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
"""Angstrom: no two nuclei are nearer."""

EXTRA = 'pip install "rigidities[chemistry]"'


class StructureError(ValueError):
    """Atoms for which there is no descriptor; the message says which and why."""


@dataclass(frozen=True)
class Structures:
    """N structures of A atoms in all, without a cell.

    Attributes:
        numbers: (A,) atomic numbers.
        positions: (A, 3) float64, in angstrom.
        counts: (N,) atoms of each structure, none of them zero.
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
        if bool((self.counts < 1).any()):
            empty = int((self.counts < 1).nonzero()[0])
            raise StructureError(
                f"Structure {empty} has no atoms: there is no energy to predict. Leave it out."
            )
        if not bool(torch.isfinite(self.positions).all()):
            atom = int((~torch.isfinite(self.positions).all(1)).nonzero()[0])
            raise StructureError(
                f"Structure {int(self.owners[atom])} has a position that is no finite number: "
                f"{self.positions[atom].tolist()}. Mend it or leave the structure out."
            )

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """(N + 1,): the atoms of structure n are ends[n] to ends[n + 1]."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @cached_property
    def owners(self) -> Tensor:
        """(A,) the structure of each atom."""
        return torch.arange(len(self), device=self.counts.device).repeat_interleave(self.counts)

    def atoms_of(self, rows: Tensor) -> Tensor:
        """Places of the atoms of some structures, one structure after another."""
        return spans(self.ends[:-1][rows], self.counts[rows])

    def picked(self, rows: Tensor) -> Structures:
        """Some structures, in the order given."""
        atoms = self.atoms_of(rows)
        return Structures(self.numbers[atoms], self.positions[atoms], self.counts[rows])

    def composition(self, species: Sequence[int]) -> Tensor:
        """(N, S) float64: how many atoms of each species a structure has."""
        places = indices(self.numbers, species)
        table = torch.zeros(len(self), len(species), dtype=torch.float64, device=places.device)
        one = torch.ones(1, dtype=torch.float64, device=places.device)
        return table.index_put_((self.owners, places), one, accumulate=True)

    def digest(self) -> str:
        """The sha256 of all numbers: other structures have another."""
        parts = (self.numbers.long(), self.positions.double(), self.counts.long())
        return hashlib.sha256(b"".join(p.cpu().numpy().tobytes() for p in parts)).hexdigest()

    def as_ase(self) -> list[Atoms]:
        """For ASE, and for featomic, which reads its format."""
        try:
            from ase import Atoms
        except ImportError as error:
            raise ImportError(f"Structures of ASE need the package ase: {EXTRA}") from error
        parts = (x.cpu().split(self.counts.tolist()) for x in (self.numbers, self.positions))
        return [Atoms(n.numpy(), r.numpy()) for n, r in zip(*parts, strict=True)]

    @classmethod
    def from_ase(cls, frames: Sequence[Atoms]) -> Structures:
        """Of ASE's structures.

        Raises:
            StructureError: an empty structure, or a periodic one.
        """
        for place, frame in enumerate(frames):
            if frame.pbc.any():
                raise StructureError(
                    f"Structure {place} is periodic, and cells are not read here. Give a molecule "
                    "or a cluster (atoms.pbc = False)."
                )
        counts = torch.tensor([len(frame) for frame in frames], dtype=torch.long)
        numbers = [torch.as_tensor(frame.numbers, dtype=torch.long) for frame in frames]
        positions = [torch.as_tensor(frame.positions, dtype=torch.float64) for frame in frames]
        empty = torch.zeros(0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.float64)
        return cls(torch.cat([empty[0], *numbers]), torch.cat([empty[1], *positions]), counts)


def check_known(structures: Structures, species: Sequence[int]) -> None:
    """Refuse an element that the model does not know.

    Raises:
        StructureError: with the structure, the atom and its element.
    """
    known = torch.tensor(list(species), device=structures.numbers.device)
    unknown = (~torch.isin(structures.numbers, known)).nonzero()[:, 0]
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

    Raises:
        StructureError: with the pair and its distance.
    """
    if not len(structures):
        return
    counts, width = structures.counts, int(structures.counts.max())
    padded = structures.positions.new_full((len(structures), width, 3), float("inf"))
    column = spans(torch.zeros_like(counts), counts)
    padded[structures.owners, column] = structures.positions
    for first in range(width):
        away = (padded[:, first + 1 :] - padded[:, first, None]).norm(dim=-1)
        near = (away < least).nonzero()
        if len(near):
            row, other = near[0].tolist()
            raise StructureError(
                f"Atoms {first} and {first + 1 + other} of structure {row} are "
                f"{away[row, other]:.3g} angstrom apart: expected at least {least}. Mend the "
                "positions (are they in angstrom?) or leave the structure out."
            )


def spans(starts: Tensor, counts: Tensor) -> Tensor:
    """The numbers start, start + 1, ... of each span, one span after another.

    >>> spans(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = counts.cumsum(0) - counts
    inside = torch.arange(int(counts.sum()), device=counts.device) - before.repeat_interleave(
        counts
    )
    return inside + starts.repeat_interleave(counts)


def indices(numbers: Tensor, species: Sequence[int]) -> Tensor:
    """The place of each atom's species in the list.

    Raises:
        StructureError: an element that is not in the list.
    """
    places = torch.full((max([118, *species]) + 1,), -1, device=numbers.device)
    places[list(species)] = torch.arange(len(species), device=numbers.device)
    known = (numbers > 0) & (numbers < len(places))
    found = torch.where(known, places[numbers.long().clamp(0, len(places) - 1)], -1)
    if bool((found < 0).any()):
        atom = int((found < 0).nonzero()[0])
        raise StructureError(
            f"Atom {atom} has the atomic number {int(numbers[atom])}, but the model knows "
            f"{', '.join(map(str, species))} only: it was never trained on that element. Leave the "
            "structure out, or train on structures that contain it."
        )
    return found
