"""QM9: small molecules of H, C, N, O and F, and the energies that density-functional theory gives.

130,831 molecules of 3 to 29 atoms (the 3,054 whose geometry is in doubt left out) in
``qm9.npz``. Where that file is nowhere it is made, once, from the package ``qm9pack`` of the
set's first author, which carries the numbers as text.

Ramakrishnan, Dral, Rupp, von Lilienfeld: Quantum chemistry structures and properties of 134 kilo
molecules. Scientific Data 1, 140022 (2014).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.atoms.structures import Structures
from experiments.data import files
from experiments.data.splits import Split

ELECTRONVOLT = 27.211386245988  # per hartree
KILOCALORIE = 23.060547830619 * ELECTRONVOLT
"""Kilocalories per mole in a hartree."""

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
"""Atomic numbers, in the order of the published stoichiometries."""

FREE_ATOM = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730}
"""Internal energy of the free atoms at 0 K, in hartree, as published with the set."""

TRAIN = VALID = 10_000

NAMES = ("qm9.npz",)
"""Of the files that may hold the set."""

FIELDS = ("id", "n_atoms", "Z", "R", "U0", "atomref_U0")

PACKAGE = "qm9pack"
PARTS = ("qm9_part1.csv", "qm9_part2.csv", "qm9_part3.csv")
COLUMNS = ("Index", "N_atoms", "Stoichiometry", "Elements", "XYZ_Ang", "InternalEnergy_0K_au")
AGAIN = f"Install the package again: pip install --force-reinstall --no-deps {PACKAGE}"

Fetch = Callable[[], str | Path]
"""Gives the folder with the tables of `PARTS`."""

Molecule = tuple[int, list[int], list[float], float]
"""Number in the set, atomic numbers, coordinates of all atoms in a row, internal energy."""


@dataclass(frozen=True)
class Totals:
    """What is known of the whole set.

    Attributes:
        molecules: how many.
        atoms: of each of `ELEMENTS`.
        energy: mean of the internal energies, in hartree.
        square: mean square of the coordinates, in square angstrom.
    """

    molecules: int
    atoms: tuple[int, ...]
    energy: float
    square: float

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Totals:
        """The totals of the fields of our file."""
        atoms = np.bincount(arrays["Z"], minlength=10)[list(ELEMENTS.values())]
        square = np.square(arrays["R"], dtype=np.float64).mean()
        energy = float(arrays["U0"].mean())
        return cls(len(arrays["id"]), tuple(atoms.tolist()), energy, float(square))


PUBLISHED = Totals(
    130_831, (1_208_486, 831_925, 132_498, 183_265, 3_036), -410.8194482642111, 2.9708090700604375
)


@dataclass(frozen=True)
class Molecules:
    """N molecules and their energies.

    Attributes:
        ids: (N,) numbers in the original set, from 1 to 133,885.
        structures: elements and positions, in angstrom.
        energy: (N,) float64, internal energy at 0 K (U0) in kcal/mol.
        atom_energy: (10,) float64, the same of a free atom, by atomic number; 0 for those that no
            molecule has. ``atom_energy[structures.numbers]`` is that of every atom.
    """

    ids: Tensor
    structures: Structures
    energy: Tensor
    atom_energy: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def picked(self, rows: np.ndarray | Tensor) -> Molecules:
        """Some molecules, in the order given: places from 0, as a `Split` has them."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        return Molecules(
            self.ids[rows], self.structures.picked(rows), self.energy[rows], self.atom_energy
        )


def random(count: int, k: int, seed: int, *, train: int = TRAIN, valid: int = VALID) -> Split:
    """The k-th random split of a seed; what is neither training nor validation is the test.

    Args:
        count: molecules in all.
        k: which split.
        seed: of all splits.
        train: molecules to train on.
        valid: molecules to validate with.

    Raises:
        ValueError: a part would be empty.
    """
    if min(train, valid) < 1 or count <= train + valid:
        raise ValueError(
            f"Expected molecules in every part, got {train} for training, {valid} for validation "
            f"and {count - train - valid} of {count} left to test. Pass smaller train and valid "
            "(1 or more), or more molecules."
        )
    order = np.random.default_rng([seed, k]).permutation(count)
    return Split(order[:train], order[train : train + valid], order[train + valid :])


# --- the file ------------------------------------------------------------------------------------


def missing(folder: str | Path | None = None) -> str | None:
    """What is missing and how to get it, or None where the set can be read."""
    if files.find(NAMES, folder) or (folder is None and package()):
        return None
    again = "and run this again" if folder is None else "and give no folder"
    remedy = f"pip install {PACKAGE} (the set is inside, about 100 MB) {again}."
    return files.absence(NAMES, folder, remedy)


def read(
    folder: str | Path | None = None, *, check: bool = True, fetch: Fetch | None = None
) -> Molecules:
    """The set; where the file is nowhere, it is first made in the cache from the package.

    The package is not asked where a folder is given. It is with `files.OFFLINE` set, for what is
    installed needs no network.

    Args:
        folder: that holds the file, the only place to look in; default `files.places`.
        check: that the file is the published one, or the one that was made.
        fetch: instead of `package`.

    Raises:
        FileNotFoundError: with the remedy.
        ValueError: a file that is damaged or of another format.
    """
    path = path_of(folder, fetch)
    stored = files.fields(path, FIELDS, check=check)
    refuse(stored, path)
    numbers, positions, counts = (torch.from_numpy(stored[name]) for name in ("Z", "R", "n_atoms"))
    return Molecules(
        ids=torch.from_numpy(stored["id"]).long(),
        structures=Structures(numbers.long(), positions.double(), counts.long()),
        energy=torch.from_numpy(stored["U0"]).double() * KILOCALORIE,
        atom_energy=torch.from_numpy(stored["atomref_U0"]).double() * KILOCALORIE,
    )


def path_of(folder: str | Path | None, fetch: Fetch | None) -> Path:
    """The file: found, or made in the cache."""
    if found := files.find(NAMES, folder):
        return found
    source = None if folder is not None else fetch() if fetch else package()
    if source is None:
        raise files.MissingDataError(missing(folder))
    return files.store(NAMES[0], lambda: checked(table(Path(source)), Path(source)))


def refuse(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Refuse a file whose fields do not fit together."""
    n, atoms = len(arrays["id"]), int(arrays["n_atoms"].sum())
    expected = dict(zip(FIELDS, [(n,), (n,), (atoms,), (atoms, 3), (n,), (10,)], strict=True))
    got = {name: arrays[name].shape for name in FIELDS}
    said = f"{path}. Delete it and get it again."
    if got != expected:
        raise files.FormatError(f"Expected the shapes {expected}, got {got} in {said}")
    if not np.isin(arrays["Z"], list(FREE_ATOM)).all():
        raise files.FormatError(
            f"Expected the atomic numbers {sorted(FREE_ATOM)}, got "
            f"{np.unique(arrays['Z']).tolist()} in {said}"
        )
    for name in ("R", "U0", "atomref_U0"):
        if not np.isfinite(arrays[name]).all():
            raise files.FormatError(f"Expected finite numbers in {name} of {said}")


# --- the package ---------------------------------------------------------------------------------


def package() -> Path | None:
    """The folder with the tables of the package, which is not imported; None where it is not."""
    spec = find_spec(PACKAGE)
    places = (spec and spec.submodule_search_locations) or ()
    folders = (Path(place) / "data" for place in places)
    return next((folder for folder in folders if folder.is_dir()), None)


def checked(arrays: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The fields, refused where they are not the whole set or hold a molecule twice."""
    got, ids = Totals.of(arrays), arrays["id"]
    same = (got.molecules, got.atoms) == (PUBLISHED.molecules, PUBLISHED.atoms)
    ours, theirs = (got.energy, got.square), (PUBLISHED.energy, PUBLISHED.square)
    if not same or not np.allclose(ours, theirs, rtol=1e-10, atol=0):
        raise files.FormatError(
            f"Expected {PUBLISHED} in the tables of {folder}, got {got}. {AGAIN}"
        )
    if not (np.diff(ids) > 0).all():
        raise files.FormatError(f"Expected every molecule once, in order, in {folder}. {AGAIN}")
    return arrays


def table(folder: Path) -> dict[str, np.ndarray]:
    """The fields of our file from the tables of the package."""
    ids, counts = array("i"), bytearray()
    numbers, positions, energies = bytearray(), array("f"), array("d")
    for name in PARTS:
        for index, elements, coordinates, energy in molecules(folder / name):
            ids.append(index)
            counts.append(len(elements))
            numbers.extend(elements)
            positions.extend(coordinates)
            energies.append(energy)
    free = np.zeros(10)
    free[list(FREE_ATOM)] = list(FREE_ATOM.values())
    return {
        "id": np.array(ids, np.int32),
        "n_atoms": np.frombuffer(counts, np.uint8),
        "Z": np.frombuffer(numbers, np.uint8),
        "R": np.array(positions, np.float32).reshape(-1, 3),
        "U0": np.array(energies),
        "atomref_U0": free,
    }


def molecules(path: Path) -> Iterator[Molecule]:
    """The molecules of one table, in order.

    Raises:
        FormatError: with the file, the line and the remedy.
    """
    if not path.is_file():
        raise files.FormatError(f"Expected a table {path}, and there is none. {AGAIN}")
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            chosen = itemgetter(*map(next(reader, []).index, COLUMNS))
            for cells in reader:
                yield molecule(*chosen(cells))
        except (ValueError, IndexError, csv.Error) as error:
            raise files.FormatError(
                f"Expected the columns {', '.join(COLUMNS)} and one molecule a line in {path}, got "
                f"at line {reader.line_num}: {error}. {AGAIN}"
            ) from error


def molecule(
    index: str, count: str, stoichiometry: str, elements: str, positions: str, energy: str
) -> Molecule:
    """Of the cells of one line, whose lists are written as Python writes them.

    >>> molecule("3", "2", "[1,0,0,0,1]", "['F','H']", "[[0.,0.,1.],[0.,0.,2.]]", "-100.")
    (3, [9, 1], [0.0, 0.0, 1.0, 0.0, 0.0, 2.0], -100.0)
    """
    symbols = elements[2:-2].split("','")
    held = [symbols.count(symbol) for symbol in ELEMENTS]
    published = [int(one) for one in stoichiometry[1:-1].split(",")]
    coordinates = [float(one) for one in positions[2:-2].replace("],[", ",").split(",")]
    if held != published or not sum(held) == len(symbols) == int(count):
        raise ValueError(
            f"molecule {index} of {count} atoms and the stoichiometry {stoichiometry} "
            f"({', '.join(ELEMENTS)}) has the elements {elements}"
        )
    if len(coordinates) != 3 * len(symbols):
        raise ValueError(f"molecule {index} of {count} atoms has {len(coordinates)} coordinates")
    return int(index), [ELEMENTS[one] for one in symbols], coordinates, float(energy)
