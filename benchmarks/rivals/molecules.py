"""Small organic molecules with energies: QM9 where its file is found, else G2.

QM9 is `qm9.npz` in the folder that RIGIDITIES_DATA names, or in `shared/data` beside the project.
G2 has some hundred molecules only, so that training, validation and test data hold rattled copies
of the same ones, with the same energies: variances can be compared on it, but the calibrated scale
then means nothing.

The module is imported in the environment that holds metatrain, which brings NumPy and ASE.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "RIGIDITIES_DATA"
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
SPECIES = (1, 6, 7, 8, 9)
HARTREE = 27.211386  # eV
KCAL_PER_MOL = 0.0433641  # eV
RATTLE = 0.05  # angstrom


@dataclass(frozen=True)
class Molecule:
    """One geometry and its energy.

    Attributes:
        numbers: Atomic numbers, (n,).
        positions: In angstrom, (n, 3).
        energy: In eV.
    """

    numbers: Any
    positions: Any
    energy: float


def molecules(count: int) -> tuple[str, list[Molecule]]:
    """The name of the set, and so many of its molecules in a seeded order."""
    random = np.random.default_rng(0)
    folders = [BESIDE]
    if os.environ.get(VARIABLE):
        folders.insert(0, Path(os.environ[VARIABLE]))
    for folder in folders:
        if (folder / "qm9.npz").is_file():
            return "QM9", _qm9(folder / "qm9.npz", count, random)
    return "G2", _g2(count, random)


def _qm9(path: Path, count: int, random: np.random.Generator) -> list[Molecule]:
    """Atomisation energies at 0 K."""
    with np.load(path) as stored:
        sizes = stored["n_atoms"]
        numbers = stored["Z"]
        positions = stored["R"]
        total_energies = stored["U0"]
        free_atom_energies = stored["atomref_U0"]  # by atomic number
    ends = np.cumsum(sizes, dtype=np.int64)
    chosen = []
    for i in random.choice(len(sizes), count, replace=False):
        atoms = slice(ends[i] - int(sizes[i]), ends[i])
        energy = HARTREE * float(total_energies[i] - free_atom_energies[numbers[atoms]].sum())
        chosen.append(Molecule(numbers[atoms], positions[atoms].astype(float), energy))
    return chosen


def _g2(count: int, random: np.random.Generator) -> list[Molecule]:
    """Enthalpies of formation; each copy of a molecule is rattled anew."""
    from ase.build import molecule
    from ase.data.g2 import data

    geometries = {}
    for name in data:
        atoms = molecule(name)
        if len(atoms) > 1 and set(atoms.numbers) <= set(SPECIES):
            geometries[name] = atoms
    names = list(geometries)
    chosen = []
    for i in range(count):
        name = names[i % len(names)]
        atoms = geometries[name]
        energy = KCAL_PER_MOL * float(data[name]["enthalpy"])
        rattled = atoms.positions + RATTLE * random.standard_normal(atoms.positions.shape)
        chosen.append(Molecule(atoms.numbers, rattled, energy))
    return chosen
