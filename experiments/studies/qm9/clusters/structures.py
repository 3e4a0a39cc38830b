"""Clusters of copper and gold, with energies and forces of the effective-medium theory.

A cluster is a fragment of an icosahedral or a face-centred cubic lattice: the n sites nearest to a
random point. Its atoms are copper or gold by chance; their distance follows the composition, with a
random strain; then every atom is displaced at random. A cluster with two atoms nearer than `LEAST`
is drawn again: the theory's forces between them are so large that one such cluster would decide
every mean. Clusters are independent of each other, so that test clusters are no neighbours of
training clusters on a trajectory.

Reference: K. Jacobsen, P. Stoltze, J. Norskov, "A semi-empirical effective medium theory for metals
and alloys" (1996); `ase.calculators.emt` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.atoms.structures import EXTRA, Structures

SPECIES = (29, 79)
"""Copper, gold."""

DISTANCES = torch.tensor([2.48, 2.80], dtype=torch.float64)
"""Of neighbours in a small cluster of either, in angstrom: 3 % less than in the metal."""

STRAIN = 0.03
"""Largest relative change of all distances of a cluster."""

LEAST = 2.0
"""Angstrom: no two atoms are nearer, in any family."""

LATTICE = 3
"""Cells, or shells, of a lattice on either side."""


@dataclass(frozen=True)
class Family:
    """What clusters are drawn; every cluster has its own size, composition and amplitude.

    Attributes:
        sizes: Fewest and most atoms.
        gold: Smallest and largest share of gold.
        amplitudes: Smallest and largest standard deviation of the displacements, in angstrom.
    """

    sizes: tuple[int, int] = (8, 14)
    gold: tuple[float, float] = (0.0, 0.5)
    amplitudes: tuple[float, float] = (0.05, 0.15)


FAMILIES = {
    "like": Family(),
    "distorted": replace(Family(), amplitudes=(0.2, 0.25)),
    "larger": replace(Family(), sizes=(18, 20)),
    "gold": replace(Family(), gold=(0.75, 1.0)),
}
"""Those of the training, and three that the training never sees."""


@dataclass(frozen=True)
class Labelled:
    """N clusters of A atoms in all.

    Attributes:
        structures: Elements and positions.
        energy: Energies in eV, (N,).
        forces: Forces in eV per angstrom, (A, 3).
    """

    structures: Structures
    energy: Tensor
    forces: Tensor


def clusters(family: Family, number: int, seed: int) -> Labelled:
    """Draw clusters and label them."""
    return labelled(drawn(family, number, seed))


def drawn(family: Family, number: int, seed: int) -> Structures:
    """Clusters of a family; the first ones do not depend on how many are drawn."""
    random = torch.Generator().manual_seed(seed)
    lattices = (fcc(), icosahedral())
    numbers_of_clusters = []
    positions_of_clusters = []
    for _ in range(number):
        numbers, positions = _cluster(family, lattices, random)
        numbers_of_clusters.append(numbers)
        positions_of_clusters.append(positions)
    counts = torch.tensor([len(numbers) for numbers in numbers_of_clusters])
    return Structures(torch.cat(numbers_of_clusters), torch.cat(positions_of_clusters), counts)


def labelled(structures: Structures) -> Labelled:
    """Energies and forces of the effective-medium theory.

    Raises:
        ImportError: ASE is not installed; the message names the extra.
    """
    try:
        from ase.calculators.emt import EMT
    except ImportError as error:
        raise ImportError(f"Labels of clusters need the package ase: {EXTRA}") from error
    energies = []
    forces = []
    for atoms in structures.as_ase():
        atoms.calc = EMT()
        energies.append(float(atoms.get_potential_energy()))
        forces.append(torch.as_tensor(atoms.get_forces()))
    return Labelled(structures, torch.tensor(energies, dtype=torch.float64), torch.cat(forces))


def fcc() -> Tensor:
    """Sites of the face-centred cubic lattice about one of them, neighbours at the distance 1."""
    steps = torch.arange(-LATTICE, LATTICE + 1, dtype=torch.float64)
    sites = torch.cartesian_prod(steps, steps, steps)
    return sites[sites.sum(1) % 2 == 0] / 2**0.5


def icosahedral() -> Tensor:
    """The icosahedron of three shells and its centre, shells at the distance 1."""
    from ase.cluster import Icosahedron

    sites = torch.as_tensor(Icosahedron("Cu", LATTICE + 1).positions, dtype=torch.float64)
    sites = sites - sites.mean(0)
    return sites / sites.norm(dim=1).sort().values[1]


def _cluster(
    family: Family, lattices: tuple[Tensor, Tensor], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One cluster of either lattice, without two atoms on top of each other."""
    while True:
        lattice = lattices[_random_integer(0, 1, random)]
        numbers, positions = _fragment(family, lattice, random)
        if float(torch.pdist(positions).min()) >= LEAST:
            return numbers, positions


def _fragment(family: Family, sites: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Atomic numbers and positions of a fragment of a lattice, strained and displaced."""
    size = _random_integer(*family.sizes, random)
    gold_atoms = round(size * _random_number(*family.gold, random))
    centre = torch.rand(3, generator=random, dtype=torch.float64) - 0.5
    nearest = (sites - centre).square().sum(1).argsort(stable=True)[:size]
    kinds = (torch.randperm(size, generator=random) < gold_atoms).long()
    strain = _random_number(-STRAIN, STRAIN, random)
    distance = float(DISTANCES[kinds].mean()) * (1 + strain)
    displacements = torch.randn(size, 3, generator=random, dtype=torch.float64)
    amplitude = _random_number(*family.amplitudes, random)
    positions = distance * sites[nearest] + amplitude * displacements
    return torch.tensor(SPECIES)[kinds], positions


def _random_integer(low: int, high: int, random: torch.Generator) -> int:
    """A whole number between both bounds, which are included."""
    return int(torch.randint(low, high + 1, (), generator=random))


def _random_number(low: float, high: float, random: torch.Generator) -> float:
    """A number between both bounds."""
    return low + (high - low) * float(torch.rand((), generator=random, dtype=torch.float64))
