"""Which structures a model can handle, and the part of their energy that it does not learn.

`check_structure` refuses structures for which no model can give a sensible answer. A baseline is
what was subtracted from the energies before training, by structure or by element.
"""

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

CLOSEST = 0.1
"""Two atoms closer than this, in Å, are said to lie on top of each other."""

Baseline = Callable[[Atoms], float] | Mapping[Any, float]
"""callable(atoms) -> eV, or {element: eV} by symbol or atomic number."""


def check_structure(atoms: Atoms, species: set[int] | None) -> None:
    """Refuse a structure for which no model can give a sensible answer.

    Args:
        atoms: The structure.
        species: Atomic numbers that the model knows; None for all.

    Raises:
        ValueError: There are no atoms, a position is not finite, an element is unknown, or two
            atoms (or an atom and an image in a flat cell) lie on top of each other.
    """
    if len(atoms) == 0:
        raise ValueError("The structure has no atoms. Pass one with at least one atom.")
    without_position = np.flatnonzero(~np.isfinite(atoms.positions).all(1))
    if len(without_position):
        first = without_position[0]
        raise ValueError(
            f"The position of atom {first} ({atoms.symbols[first]}) is not finite. Use a shorter "
            "time step, or check the forces before this step."
        )
    if species is not None:
        unknown = sorted(set(atoms.numbers.tolist()) - species)
        if unknown:
            raise ValueError(
                f"The model was not trained on {_symbols(unknown)}: species= contains "
                f"{_symbols(sorted(species))}. Label structures with these elements and train "
                "again."
            )
    pair = _own_image(atoms) or closest_pair(atoms, CLOSEST)
    if pair is not None:
        i, j, distance = pair
        other = "its own image" if i == j else f"{j} ({atoms.symbols[j]})"
        raise ValueError(
            f"Atoms lie on top of each other: {i} ({atoms.symbols[i]}) and {other} are "
            f"{distance:.3g} Å apart, expected at least {CLOSEST}. Check the positions, the cell "
            "and their unit."
        )


def closest_pair(atoms: Atoms, within: float) -> tuple[int, int, float] | None:
    """The two atoms nearest to each other, including periodic images.

    It uses a tree of the atoms in the cell and the images next to its faces, since ASE's neighbour
    lists look at every pair where there is no cell.

    Args:
        atoms: The structure. Its cell must not be much flatter than `within`: the number of images
            grows as it gets flatter.
        within: The largest distance to look for, in Å.

    Returns:
        Their numbers, i <= j, and their distance in Å; None where no two are that close.
    """
    cell, periodic = periodic_cell(atoms)
    fractions = np.linalg.solve(cell.T, atoms.positions.T).T  # positions in units of the cell
    fractions[:, periodic] %= 1
    # `within` as a fraction of the distance between opposite faces.
    margin = np.where(periodic, within * np.linalg.norm(np.linalg.inv(cell), axis=0), np.inf)
    reach = [math.ceil(width) if width < np.inf else 0 for width in margin]
    images = []
    image_owners = []
    for shift in itertools.product(*(range(-most, most + 1) for most in reach)):
        shifted = fractions + shift
        near = ((shifted >= -margin) & (shifted <= 1 + margin)).all(1)
        images.append(shifted[near] @ cell)
        image_owners.append(np.flatnonzero(near))
    points = np.concatenate(images)
    owners = np.concatenate(image_owners)
    pairs = cKDTree(points).query_pairs(within, output_type="ndarray")
    if not len(pairs):
        return None
    distances = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1)
    nearest = int(distances.argmin())
    i, j = sorted(owners[pairs[nearest]].tolist())
    return i, j, float(distances[nearest])


def periodic_cell(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """The cell, (3, 3), and which of its directions are periodic, (3,).

    Directions that are not periodic have unit vectors.
    """
    periodic = atoms.pbc & atoms.cell.any(1)
    return complete_cell(np.where(periodic[:, None], atoms.cell.array, 0.0)), periodic


def _own_image(atoms: Atoms) -> tuple[int, int, float] | None:
    """The first atom, its nearest image and their distance, where a vector of the cell is short.

    Returns:
        The atom's number twice, as in `closest_pair`; None where no vector is short.

    Raises:
        ValueError: Vectors are long enough, but the cell is flat: they nearly lie in a plane.
    """
    cell, periodic = periodic_cell(atoms)
    lengths = np.where(periodic, np.linalg.norm(cell, axis=1), np.inf)
    if lengths.min() < CLOSEST:
        return 0, 0, float(lengths.min())
    # The distance between opposite faces is the volume over the area of a face.
    areas = np.linalg.norm(np.cross(np.roll(cell, -1, 0), np.roll(cell, -2, 0)), axis=1)
    if (abs(np.linalg.det(cell)) <= CLOSEST * areas)[periodic].any():
        raise ValueError(
            f"The cell is flat: opposite faces are less than {CLOSEST} Å apart, for vectors "
            f"{atoms.cell.array.round(3).tolist()}. Check the cell and its unit."
        )
    return None


def no_baseline(atoms: Atoms) -> float:
    """The baseline that is zero for every structure."""
    return 0.0


def checked_baseline(baseline: Baseline) -> Baseline:
    """A baseline with atomic numbers as keys; a function is returned unchanged."""
    if not isinstance(baseline, Mapping):
        return baseline
    return {atomic_number(element): float(energy) for element, energy in baseline.items()}


def baseline_energy(baseline: Baseline, atoms: Atoms) -> float:
    """The baseline of a structure in eV.

    Raises:
        ValueError: The baseline lacks an element, or is not finite.
    """
    if isinstance(baseline, Mapping):
        numbers = atoms.numbers.tolist()
        missing = sorted(set(numbers) - set(baseline))
        if missing:
            raise ValueError(f"baseline= has no energy for {_symbols(missing)}. Add it, in eV.")
        energy = math.fsum(baseline[number] for number in numbers)
    else:
        energy = float(baseline(atoms))
    if not math.isfinite(energy):
        raise ValueError(f"The baseline of {atoms.symbols} is {energy}. Check baseline=.")
    return energy


def atomic_number(element: Any) -> int:
    """The atomic number of an element, which is given by its symbol or number.

    Raises:
        ValueError: There is no such element.

    Examples:
        >>> atomic_number("Cu"), atomic_number(29)
        (29, 29)
    """
    number = atomic_numbers.get(element) if isinstance(element, str) else int(element)
    if number is None or not 0 <= number < len(chemical_symbols):
        raise ValueError(f"Expected a chemical symbol or atomic number, got {element!r}.")
    return number


def _symbols(numbers: Iterable[int]) -> str:
    """The symbols of some elements, for messages."""
    return ", ".join(chemical_symbols[number] for number in numbers)
