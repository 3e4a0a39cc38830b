"""Structures that a model can answer for, and the part of their energy that it does not learn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from ase.data import atomic_numbers, chemical_symbols
from ase.geometry import complete_cell
from scipy.spatial import cKDTree

from ase import Atoms

CLOSEST = 0.1  # distance in Å below which two atoms are taken to lie on top of each other
Baseline = Callable[[Atoms], float] | Mapping[Any, float]
"""eV of a structure, or of each element, by symbol or atomic number."""


def check_structure(atoms: Atoms, species: set[int] | None) -> None:
    """Refuse what no model can answer sensibly.

    Raises:
        ValueError: there are no atoms, one has no position or is of an unknown element, or two lie
            on top of each other, as do atoms and their images in a cell that is too flat.
    """
    if len(atoms) == 0:
        raise ValueError("The structure has no atoms. Give one with at least one atom.")
    if len(lost := np.flatnonzero(~np.isfinite(atoms.positions).all(1))):
        what = f"The position of atom {lost[0]} ({atoms.symbols[lost[0]]}) is not finite"
        raise ValueError(f"{what}. Take a shorter time step, or look at the forces before.")
    if species is not None and (unknown := sorted(set(atoms.numbers.tolist()) - species)):
        raise ValueError(
            f"The model was not trained on {_listed(unknown)}: species= holds "
            f"{_listed(sorted(species))}. Label structures with it and train again."
        )
    if (pair := _own_image(atoms) or closest_pair(atoms, CLOSEST)) is not None:
        i, j, distance = pair
        other = "its own image" if i == j else f"{j} ({atoms.symbols[j]})"
        raise ValueError(
            f"Atoms lie on top of each other: {i} ({atoms.symbols[i]}) and {other} are "
            f"{distance:.3g} Å apart, expected at least {CLOSEST}. Check the positions, the cell "
            "and their unit."
        )


def closest_pair(atoms: Atoms, within: float) -> tuple[int, int, float] | None:
    """The two atoms nearest to each other, i <= j, and their distance; images count.

    The cell must not be much flatter than `within`: the number of images grows as it gets flatter.

    A tree over the atoms of the cell and the images next to its faces: ASE's own neighbour lists
    take every pair into account where there is no cell. None where no two are as near.
    """
    cell, periodic = periodic_cell(atoms)
    places = np.linalg.solve(cell.T, atoms.positions.T).T
    places[:, periodic] %= 1
    margin = np.where(periodic, within * np.linalg.norm(np.linalg.inv(cell), axis=0), np.inf)
    reach = [math.ceil(width) if width < np.inf else 0 for width in margin]
    images, owners = [], []
    for shift in itertools.product(*(range(-most, most + 1) for most in reach)):
        moved = places + shift
        near = ((moved >= -margin) & (moved <= 1 + margin)).all(1)
        images.append(moved[near] @ cell)
        owners.append(np.flatnonzero(near))
    points, owner = np.concatenate(images), np.concatenate(owners)
    pairs = cKDTree(points).query_pairs(within, output_type="ndarray")
    if not len(pairs):
        return None
    distances = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1)
    nearest = int(distances.argmin())
    i, j = sorted(owner[pairs[nearest]].tolist())
    return i, j, float(distances[nearest])


def periodic_cell(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """The cell, (3, 3), with unit vectors for directions that do not repeat, and which do, (3,)."""
    periodic = atoms.pbc & atoms.cell.any(1)
    return complete_cell(np.where(periodic[:, None], atoms.cell.array, 0.0)), periodic


def _own_image(atoms: Atoms) -> tuple[int, int, float] | None:
    """The first atom, its nearest image and their distance, where a vector of the cell is short.

    Refuses a cell of which no vector is, but where two or three nearly lie in a line or plane.
    """
    cell, periodic = periodic_cell(atoms)
    lengths = np.where(periodic, np.linalg.norm(cell, axis=1), np.inf)
    if lengths.min() < CLOSEST:
        return 0, 0, float(lengths.min())
    faces = np.linalg.norm(np.cross(np.roll(cell, -1, 0), np.roll(cell, -2, 0)), axis=1)
    if (abs(np.linalg.det(cell)) <= CLOSEST * faces)[periodic].any():
        raise ValueError(
            f"The cell is flat: opposite faces are less than {CLOSEST} Å apart, for vectors "
            f"{atoms.cell.array.round(3).tolist()}. Check the cell and its unit."
        )
    return None


def no_baseline(atoms: Atoms) -> float:
    """Of every structure."""
    return 0.0


def checked_baseline(baseline: Baseline) -> Baseline:
    """A baseline by atomic number, or the function as given."""
    if not isinstance(baseline, Mapping):
        return baseline
    return {atomic_number(element): float(energy) for element, energy in baseline.items()}


def baseline_energy(baseline: Baseline, atoms: Atoms) -> float:
    """The baseline of a structure in eV; refused where it lacks an element or is not finite."""
    if isinstance(baseline, Mapping):
        numbers = atoms.numbers.tolist()
        if missing := sorted(set(numbers) - set(baseline)):
            raise ValueError(f"baseline= holds no energy of {_listed(missing)}. Add it, in eV.")
        energy = math.fsum(baseline[number] for number in numbers)
    else:
        energy = float(baseline(atoms))
    if not math.isfinite(energy):
        raise ValueError(f"The baseline of {atoms.symbols} is {energy}. Check baseline=.")
    return energy


def atomic_number(element: Any) -> int:
    """Of a chemical symbol, or of itself.

    Examples:
        >>> atomic_number("Cu"), atomic_number(29)
        (29, 29)
    """
    number = atomic_numbers.get(element) if isinstance(element, str) else int(element)
    if number is None or not 0 <= number < len(chemical_symbols):
        raise ValueError(f"Expected a chemical symbol or atomic number, got {element!r}.")
    return number


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(chemical_symbols[number] for number in numbers)
