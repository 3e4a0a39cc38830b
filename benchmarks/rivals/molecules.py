"""Small organic molecules with energies: QM9 where its file is found, else G2.

QM9 is `qm9.npz` in the folder that RIGIDITIES_DATA names, or in `shared/data` beside the project.
G2 has some hundred molecules only, so that training, validation and test data hold rattled copies
of the same ones, with the same energies: variances can be compared on it, but the calibrated scale
then means nothing.

Read by the environment that holds metatrain, which brings NumPy and ASE.
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
    """Atomic `numbers` (n,), `positions` (n, 3) in angstrom, `energy` in eV."""

    numbers: Any
    positions: Any
    energy: float


def molecules(count: int) -> tuple[str, list[Molecule]]:
    """So many molecules in a seeded order, and the name of the set."""
    random = np.random.default_rng(0)
    named = os.environ.get(VARIABLE)
    for folder in ([Path(named)] if named else []) + [BESIDE]:
        if (folder / "qm9.npz").is_file():
            return "QM9", _qm9(folder / "qm9.npz", count, random)
    return "G2", _g2(count, random)


def _qm9(path: Path, count: int, random: np.random.Generator) -> list[Molecule]:
    """Atomisation energies at 0 K."""
    with np.load(path) as stored:
        sizes, numbers, positions = (stored[name] for name in ("n_atoms", "Z", "R"))
        totals, atoms = stored["U0"], stored["atomref_U0"]
    ends = np.cumsum(sizes, dtype=np.int64)
    found = []
    for i in random.choice(len(sizes), count, replace=False):
        own = slice(ends[i] - int(sizes[i]), ends[i])
        energy = HARTREE * float(totals[i] - atoms[numbers[own]].sum())
        found.append(Molecule(numbers[own], positions[own].astype(float), energy))
    return found


def _g2(count: int, random: np.random.Generator) -> list[Molecule]:
    """Enthalpies of formation; each copy of a molecule is rattled anew."""
    from ase.build import molecule
    from ase.data.g2 import data

    known = {name: molecule(name) for name in data}
    names = [name for name, atoms in known.items() if set(atoms.numbers) <= set(SPECIES)]
    names = [name for name in names if len(known[name]) > 1]
    found = []
    for i in range(count):
        name = names[i % len(names)]
        atoms, energy = known[name], KCAL_PER_MOL * float(data[name]["enthalpy"])
        moved = atoms.positions + RATTLE * random.standard_normal(atoms.positions.shape)
        found.append(Molecule(atoms.numbers, moved, energy))
    return found
