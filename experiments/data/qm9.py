"""QM9: small molecules of H, C, N, O and F, and the energies that density-functional theory gives.

``qm9.npz`` holds 130,831 molecules of 3 to 29 atoms; the 3,054 whose geometry is in doubt are left
out. Where that file is nowhere it is made, once, from the package ``qm9pack`` of the set's first
author, which carries the numbers as text.

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

ELECTRONVOLT = 27.211386245988
"""Electronvolts in a hartree."""

KILOCALORIE = 23.060547830619 * ELECTRONVOLT
"""Kilocalories per mole in a hartree."""

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
"""Atomic numbers, in the order of the published stoichiometries."""

FREE_ATOM = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730}
"""Internal energy of the free atoms at 0 K, in hartree, as published with the set."""

TRAIN = 10_000
"""Training molecules of a split."""

VALID = 10_000
"""Validation molecules of a split."""

NAMES = ("qm9.npz",)
"""Names of the files that may hold the set."""

FIELDS = ("id", "n_atoms", "Z", "R", "U0", "atomref_U0")
"""Arrays of the file."""

PACKAGE = "qm9pack"
PARTS = ("qm9_part1.csv", "qm9_part2.csv", "qm9_part3.csv")
"""Tables of the package."""

COLUMNS = ("Index", "N_atoms", "Stoichiometry", "Elements", "XYZ_Ang", "InternalEnergy_0K_au")
"""Columns of the tables that are read."""

AGAIN = f"Install the package again: pip install --force-reinstall --no-deps {PACKAGE}"

Fetch = Callable[[], str | Path]
"""Returns the folder with the tables of `PARTS`."""

Molecule = tuple[int, list[int], list[float], float]
"""Number in the set, atomic numbers, coordinates of all atoms in a row, internal energy."""


@dataclass(frozen=True)
class Totals:
    """Numbers by which the whole set is recognised.

    Attributes:
        molecules: The number of molecules.
        atoms: The number of atoms of each of `ELEMENTS`.
        energy: The mean of the internal energies in hartree.
        square: The mean square of the coordinates in square angstrom.
    """

    molecules: int
    atoms: tuple[int, ...]
    energy: float
    square: float

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Totals:
        """The totals of the arrays of our file."""
        atoms = np.bincount(arrays["Z"], minlength=10)[list(ELEMENTS.values())]
        square = np.square(arrays["R"], dtype=np.float64).mean()
        return cls(
            molecules=len(arrays["id"]),
            atoms=tuple(atoms.tolist()),
            energy=float(arrays["U0"].mean()),
            square=float(square),
        )


PUBLISHED = Totals(
    molecules=130_831,
    atoms=(1_208_486, 831_925, 132_498, 183_265, 3_036),
    energy=-410.8194482642111,
    square=2.9708090700604375,
)


@dataclass(frozen=True)
class Molecules:
    """N molecules and their energies.

    Attributes:
        ids: Numbers in the original set, from 1 to 133,885, (N,).
        structures: Elements, and positions in angstrom.
        energy: Internal energies at 0 K (U0) in kcal/mol, (N,) float64.
        atom_energy: Internal energies of free atoms by atomic number, (10,) float64; 0 for elements
            that no molecule has. ``atom_energy[structures.numbers]`` is that of every atom.
    """

    ids: Tensor
    structures: Structures
    energy: Tensor
    atom_energy: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def picked(self, rows: np.ndarray | Tensor) -> Molecules:
        """Some molecules, in the order of their indices, as a `Split` has them."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        return Molecules(
            ids=self.ids[rows],
            structures=self.structures.picked(rows),
            energy=self.energy[rows],
            atom_energy=self.atom_energy,
        )


def random(count: int, k: int, seed: int, *, train: int = TRAIN, valid: int = VALID) -> Split:
    """The k-th random split of a seed; all other molecules are test molecules.

    Args:
        count: The number of molecules in all.
        k: The number of the split.
        seed: Seed of all splits.
        train: The number of training molecules.
        valid: The number of validation molecules.

    Raises:
        ValueError: There are no training, validation or test molecules.
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
    advice = "and run this again" if folder is None else "and give no folder"
    remedy = f"pip install {PACKAGE} (the set is inside, about 100 MB) {advice}."
    return files.absence(NAMES, folder, remedy)


def read(
    folder: str | Path | None = None, *, check: bool = True, fetch: Fetch | None = None
) -> Molecules:
    """The set; where the file is nowhere, it is first made in the cache from the package.

    The package is not used where a folder is given. It is used with `files.OFFLINE` set, since an
    installed package needs no network.

    Args:
        folder: The only folder to look in; `files.places` by default.
        check: Whether the file must be the published one, or the one that was made.
        fetch: Replaces `package`.

    Raises:
        FileNotFoundError: There is no file; the message has the remedy.
        ValueError: The file is damaged or of another format.
    """
    path = path_of(folder, fetch)
    stored = files.fields(path, FIELDS, check=check)
    refuse(stored, path)
    structures = Structures(
        numbers=torch.from_numpy(stored["Z"]).long(),
        positions=torch.from_numpy(stored["R"]).double(),
        counts=torch.from_numpy(stored["n_atoms"]).long(),
    )
    return Molecules(
        ids=torch.from_numpy(stored["id"]).long(),
        structures=structures,
        energy=torch.from_numpy(stored["U0"]).double() * KILOCALORIE,
        atom_energy=torch.from_numpy(stored["atomref_U0"]).double() * KILOCALORIE,
    )


def path_of(folder: str | Path | None, fetch: Fetch | None) -> Path:
    """The file: found, or made in the cache from the tables of the package."""
    path = files.find(NAMES, folder)
    if path is not None:
        return path
    tables = None
    if folder is None:
        tables = fetch() if fetch else package()
    if tables is None:
        raise files.MissingDataError(missing(folder))
    table_folder = Path(tables)
    return files.store(NAMES[0], lambda: checked(table(table_folder), table_folder))


def refuse(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Refuse a file whose arrays do not fit together.

    Raises:
        FormatError: A shape is another, an element is unknown, or a number is not finite.
    """
    molecules = len(arrays["id"])
    atoms = int(arrays["n_atoms"].sum())
    expected = {
        "id": (molecules,),
        "n_atoms": (molecules,),
        "Z": (atoms,),
        "R": (atoms, 3),
        "U0": (molecules,),
        "atomref_U0": (10,),
    }
    shapes = {name: arrays[name].shape for name in FIELDS}
    ending = f"{path}. Delete it and get it again."
    if shapes != expected:
        raise files.FormatError(f"Expected the shapes {expected}, got {shapes} in {ending}")
    if not np.isin(arrays["Z"], list(FREE_ATOM)).all():
        raise files.FormatError(
            f"Expected the atomic numbers {sorted(FREE_ATOM)}, got "
            f"{np.unique(arrays['Z']).tolist()} in {ending}"
        )
    for name in ("R", "U0", "atomref_U0"):
        if not np.isfinite(arrays[name]).all():
            raise files.FormatError(f"Expected finite numbers in {name} of {ending}")


# --- the package ---------------------------------------------------------------------------------


def package() -> Path | None:
    """The folder with the tables of the package; None where it is not installed.

    The package is not imported.
    """
    spec = find_spec(PACKAGE)
    if spec is None:
        return None
    for place in spec.submodule_search_locations or ():
        folder = Path(place) / "data"
        if folder.is_dir():
            return folder
    return None


def checked(arrays: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The arrays, refused where they are not the whole set or hold a molecule twice.

    Raises:
        FormatError: They are not; the message has the remedy.
    """
    totals = Totals.of(arrays)
    same_counts = (totals.molecules == PUBLISHED.molecules) and (totals.atoms == PUBLISHED.atoms)
    same_means = np.allclose(
        [totals.energy, totals.square], [PUBLISHED.energy, PUBLISHED.square], rtol=1e-10, atol=0
    )
    if not (same_counts and same_means):
        raise files.FormatError(
            f"Expected {PUBLISHED} in the tables of {folder}, got {totals}. {AGAIN}"
        )
    if not (np.diff(arrays["id"]) > 0).all():
        raise files.FormatError(f"Expected every molecule once, in order, in {folder}. {AGAIN}")
    return arrays


def table(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of our file from the tables of the package."""
    # Compact arrays: lists of Python numbers would take gigabytes.
    ids = array("i")
    counts = bytearray()
    numbers = bytearray()
    positions = array("f")
    energies = array("d")
    for name in PARTS:
        for index, elements, coordinates, energy in molecules(folder / name):
            ids.append(index)
            counts.append(len(elements))
            numbers.extend(elements)
            positions.extend(coordinates)
            energies.append(energy)
    free_atoms = np.zeros(10)
    free_atoms[list(FREE_ATOM)] = list(FREE_ATOM.values())
    return {
        "id": np.array(ids, np.int32),
        "n_atoms": np.frombuffer(counts, np.uint8),
        "Z": np.frombuffer(numbers, np.uint8),
        "R": np.array(positions, np.float32).reshape(-1, 3),
        "U0": np.array(energies),
        "atomref_U0": free_atoms,
    }


def molecules(path: Path) -> Iterator[Molecule]:
    """The molecules of one table, in order.

    Raises:
        FormatError: The table cannot be read; the message has the file, the line and the remedy.
    """
    if not path.is_file():
        raise files.FormatError(f"Expected a table {path}, and there is none. {AGAIN}")
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, [])
            places = [header.index(column) for column in COLUMNS]
            wanted_cells = itemgetter(*places)
            for cells in reader:
                yield molecule(*wanted_cells(cells))
        except (ValueError, IndexError, csv.Error) as error:
            raise files.FormatError(
                f"Expected the columns {', '.join(COLUMNS)} and one molecule a line in {path}, got "
                f"at line {reader.line_num}: {error}. {AGAIN}"
            ) from error


def molecule(
    index: str, count: str, stoichiometry: str, elements: str, positions: str, energy: str
) -> Molecule:
    """A molecule from the cells of one line, whose lists are written as Python writes them.

    Raises:
        ValueError: The cells contradict each other.

    >>> molecule("3", "2", "[1,0,0,0,1]", "['F','H']", "[[0.,0.,1.],[0.,0.,2.]]", "-100.")
    (3, [9, 1], [0.0, 0.0, 1.0, 0.0, 0.0, 2.0], -100.0)
    """
    symbols = elements[2:-2].split("','")
    atom_counts = [symbols.count(symbol) for symbol in ELEMENTS]
    published_counts = [int(number) for number in stoichiometry[1:-1].split(",")]
    coordinates = [float(number) for number in positions[2:-2].replace("],[", ",").split(",")]
    if atom_counts != published_counts or not sum(atom_counts) == len(symbols) == int(count):
        raise ValueError(
            f"molecule {index} of {count} atoms and the stoichiometry {stoichiometry} "
            f"({', '.join(ELEMENTS)}) has the elements {elements}"
        )
    if len(coordinates) != 3 * len(symbols):
        raise ValueError(f"molecule {index} of {count} atoms has {len(coordinates)} coordinates")
    return int(index), [ELEMENTS[symbol] for symbol in symbols], coordinates, float(energy)
