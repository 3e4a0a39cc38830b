"""The comparison with metatrain's LLPR: what needs metatrain is left out where it is absent."""

from pathlib import Path

import numpy as np
import pytest
from ase.build import molecule
from ase.data.g2 import data as G2
from benchmarks.frame.results import Row
from benchmarks.rivals import metatrain
from benchmarks.rivals import molecules as molecules_module
from benchmarks.rivals.molecules import SPECIES, Molecule, molecules

needs_metatrain = pytest.mark.skipif(
    metatrain.interpreter() is None,
    reason="metatrain is not installed: see benchmarks/rivals/metatrain-requirements.txt",
)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return metatrain.run(quick=True)


EQUAL = ["metatrain's variances less NumPy's"]
EQUAL += [
    f"variances less {reference}, {way}"
    for reference in ("metatrain's", "NumPy's")
    for way in ("layers named", "features given")
]


@needs_metatrain
@pytest.mark.parametrize("work", EQUAL)
def test_variances_equal_those_of_metatrain_and_of_a_dense_reference(rows, work: str) -> None:
    (row,) = [row for row in rows if row.work.startswith(work)]
    assert row.figures["value"] < 1e-6


@needs_metatrain
def test_scales_equal_the_multiplier_of_metatrain(rows: list[Row]) -> None:
    found = [row.figures["value"] for row in rows if row.work.startswith("scale less")]
    assert len(found) == 2 and max(found) < 1e-6


@needs_metatrain
def test_other_weights_give_other_bars(rows: list[Row]) -> None:
    found = [row.figures["spearman"] for row in rows if row.work.startswith("bars with weights")]
    assert len(found) == 2 and all(0.5 < value < 1 for value in found)


@needs_metatrain
def test_every_time_stands_beside_the_noise_of_the_machine(rows: list[Row]) -> None:
    places = [i for i, row in enumerate(rows) if "against itself" in row.work]
    timed = [i for i, row in enumerate(rows) if row.work.startswith(("fit,", "predict,"))]
    assert len(places) == 1 and len(timed) == 4 and places[0] < min(timed)


def test_without_metatrain_the_row_says_how_to_install_it(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(metatrain.VARIABLE, raising=False)
    monkeypatch.setattr(metatrain, "ENVIRONMENT", tmp_path / ".venv-metatrain")
    monkeypatch.setattr(metatrain, "find_spec", lambda name: None)
    (row,) = metatrain.run(quick=True)
    assert (row.measured, row.reached) == ("not run", None)
    assert "metatrain-requirements.txt" in row.note and metatrain.VARIABLE in row.note


def test_the_named_interpreter_comes_first(monkeypatch) -> None:
    monkeypatch.setenv(metatrain.VARIABLE, "/somewhere/python")
    assert metatrain.interpreter() == Path("/somewhere/python")


@pytest.mark.parametrize("place", ["named", "beside"])
def test_molecules_of_a_flat_file_keep_their_atoms_and_energies(
    monkeypatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setattr(molecules_module, "BESIDE", tmp_path)
    monkeypatch.delenv("RIGIDITIES_DATA", raising=False)
    if place == "named":
        monkeypatch.setattr(molecules_module, "BESIDE", tmp_path / "nowhere")
        monkeypatch.setenv("RIGIDITIES_DATA", str(tmp_path))
    path = tmp_path / "qm9.npz"
    numbers, positions = np.array([8, 1, 1, 1, 9], "u1"), np.arange(15.0).reshape(5, 3)
    free = np.array([0, 1, 0, 0, 0, 0, 0, 0, 2, 4], float)
    totals = np.array([3.0, 3.0])
    np.savez(
        path, n_atoms=np.array([3, 2], "u1"), Z=numbers, R=positions, U0=totals, atomref_U0=free
    )
    name, found = molecules(2)
    water, fluoride = sorted(found, key=lambda molecule: -len(molecule.numbers))
    assert name == "QM9"
    assert water.numbers.tolist() == [8, 1, 1] and fluoride.numbers.tolist() == [1, 9]
    assert np.array_equal(fluoride.positions, positions[3:])
    energies = [water.energy, fluoride.energy]
    assert energies == pytest.approx([-27.211386, -2 * 27.211386])


def test_without_the_file_known_molecules_are_rattled_and_repeat(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RIGIDITIES_DATA", str(tmp_path))
    monkeypatch.setattr(molecules_module, "BESIDE", tmp_path)
    name, found = molecules(300)
    assert (name, len(found)) == ("G2", 300)
    assert {z for one in found for z in one.numbers.tolist()} == set(SPECIES)
    assert all(one.positions.shape == (len(one.numbers), 3) for one in found)
    assert min(len(one.numbers) for one in found) > 1
    first = found[0]
    (again, *_) = [one for one in found[1:] if one.energy == first.energy]
    assert again.numbers.tolist() == first.numbers.tolist()
    moved = again.positions - first.positions
    assert 0.01 < np.sqrt(np.mean(moved**2)) / 2**0.5 < 0.1
    known = G2[molecule_name(first)]
    assert first.energy == pytest.approx(0.0433641 * known["enthalpy"])


def molecule_name(found: Molecule) -> str:
    """The name in G2 of the geometry before it was rattled."""
    for name in G2:
        atoms = molecule(name)
        same = atoms.numbers.tolist() == found.numbers.tolist()
        if same and np.abs(atoms.positions - found.positions).max() < 0.3:
            return name
    raise AssertionError(found)
