"""The reader of QM9: the file, the package it is made from, and the splits."""

import csv
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import files, qm9
from tests.support import synthetic_data
from tests.support.refusals import refused

COUNT = 40
needs_file = pytest.mark.skipif(files.find(qm9.NAMES) is None, reason="qm9.npz is not here")
needs_package = pytest.mark.skipif(qm9.package() is None, reason="qm9pack is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a made-up file."""
    folder = tmp_path_factory.mktemp("made")
    synthetic_data._qm9(folder / "qm9.npz", np.random.default_rng(9), COUNT)
    files.seal(folder / "qm9.npz")
    return folder


@pytest.fixture(scope="module")
def fields(made: Path) -> dict[str, np.ndarray]:
    with np.load(made / "qm9.npz") as stored:
        return dict(stored)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache is empty, there is no other place and no package."""
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setattr(files, "BESIDE", tmp_path / "beside")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(qm9, "PACKAGE", "qm9pack_of_the_tests")
    return tmp_path / "cache" / "rigidities"


@pytest.fixture
def tables(nowhere: Path, fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same molecules as an installed package that must not be imported: its tables."""
    folder = tmp_path / "site" / qm9.PACKAGE / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
    ends = np.cumsum(fields["n_atoms"], dtype=int)
    for part, rows in zip(qm9.PARTS, np.array_split(np.arange(COUNT), 3), strict=True):
        with (folder / part).open("w", encoding="utf-8", newline="") as stream:
            stream.write(",".join(line_of(fields, ends, 0)) + "\n")
            writer = csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
            writer.writerows(line_of(fields, ends, row).values() for row in rows)
    monkeypatch.syspath_prepend(str(folder.parents[1]))
    monkeypatch.setattr(qm9, "PUBLISHED", qm9.Totals.of(fields))
    return folder


def line_of(fields: dict[str, np.ndarray], ends: np.ndarray, row: int) -> dict[str, object]:
    """The cells of a molecule, by column."""
    atoms = slice(ends[row] - fields["n_atoms"][row], ends[row])
    numbers = fields["Z"][atoms].tolist()
    symbols = ["HCNOF"[[1, 6, 7, 8, 9].index(number)] for number in numbers]
    written = [[np.format_float_positional(x) for x in place] for place in fields["R"][atoms]]
    return {
        "XYZ_file": f"dsgdb9nsd_{row:06d}.xyz",
        "Index": int(fields["id"][row]),
        "SMILES": "C(=O)[C@H]",
        "InChi": "InChI=1S/C2H4/c1-2/h1,2H",
        "N_atoms": len(numbers),
        "Stoichiometry": str([numbers.count(z) for z in (1, 6, 7, 8, 9)]).replace(" ", ""),
        "Elements": str(symbols).replace(" ", ""),
        "XYZ_Ang": str(written).replace(" ", "").replace("'", ""),
        "Dipole_debye": 0.0,
        "InternalEnergy_0K_au": float(fields["U0"][row]),
    }


# --- the molecules -------------------------------------------------------------------------------


def test_energies_are_in_kilocalories_and_positions_in_angstrom(made: Path, fields) -> None:
    read = qm9.read(made)
    assert len(read) == len(read.structures) == COUNT
    assert torch.equal(read.ids, torch.from_numpy(fields["id"]).long())
    assert read.energy.dtype == read.structures.positions.dtype == torch.float64
    assert np.allclose(read.energy, fields["U0"] * 627.509474, rtol=1e-8)
    assert read.atom_energy[1].item() == pytest.approx(-313.92605, abs=1e-4)
    assert np.array_equal(read.structures.positions.numpy(), fields["R"].astype(np.float64))
    assert np.array_equal(read.structures.numbers.numpy(), fields["Z"])
    # The attraction of the made-up atoms: all that is left below the energies of the free ones.
    ends = [0, *np.cumsum(fields["n_atoms"], dtype=int)]
    free = [read.atom_energy[read.structures.numbers[a:b]].sum() for a, b in pairwise(ends)]
    below = (torch.stack(free) - read.energy) / 627.509474
    assert below.min() > 0.1 and below.max() < 3


def test_picked_molecules_keep_their_atoms_and_energies(made: Path) -> None:
    read = qm9.read(made)
    rows = np.array([7, 0, 39, 7])
    some = read.picked(rows)
    assert torch.equal(some.ids, read.ids[rows]) and torch.equal(some.energy, read.energy[rows])
    parts = read.structures.positions.split(read.structures.counts.tolist())
    assert torch.equal(some.structures.positions, torch.cat([parts[row] for row in rows]))
    assert some.structures.counts.tolist() == [len(parts[row]) for row in rows]
    assert torch.equal(some.atom_energy, read.atom_energy)
    assert torch.equal(read.picked(torch.from_numpy(rows)).ids, some.ids)


def test_random_splits_are_partitions_of_the_sizes_asked_for() -> None:
    for count, sizes in [(130_831, (10_000, 10_000)), (25, (10, 10)), (3, (1, 1))]:
        split = qm9.random(count, 0, 5, train=sizes[0], valid=sizes[1])
        assert (len(split.train), len(split.valid)) == sizes
        joined = np.concatenate([split.train, split.valid, split.test])
        assert np.array_equal(np.sort(joined), np.arange(count))
    default = qm9.random(130_831, 0, 5)
    assert (len(default.train), len(default.valid), len(default.test)) == (10_000, 10_000, 110_831)


def test_every_k_and_seed_has_a_split_of_its_own() -> None:
    first = qm9.random(500, 1, 2, train=50, valid=50)
    assert np.array_equal(first.train, qm9.random(500, 1, 2, train=50, valid=50).train)
    for k, seed in [(2, 1), (1, 1), (2, 2)]:
        assert not np.array_equal(first.train, qm9.random(500, k, seed, train=50, valid=50).train)


@pytest.mark.parametrize(
    ("count", "train", "valid"), [(20_000, 10_000, 10_000), (30, 30, 5), (30, 0, 5), (30, 5, 0)]
)
def test_a_split_with_an_empty_part_is_refused(count: int, train: int, valid: int) -> None:
    said = rf"got {train} for training, {valid} for .* of {count} left .*Pass smaller"
    refused(said, qm9.random, count, 0, 0, train=train, valid=valid)


# --- the file ------------------------------------------------------------------------------------


def test_a_missing_file_is_said_with_all_places_and_the_package(nowhere: Path, tmp_path) -> None:
    with pytest.raises(files.MissingDataError) as caught:
        qm9.read()
    said = str(caught.value)
    assert said == qm9.missing()
    for words in ("qm9.npz is in none", "beside", str(nowhere), "Set RIGIDITIES_DATA"):
        assert words in said
    assert f"pip install {qm9.PACKAGE}" in said and not nowhere.exists()


def test_the_file_is_found_in_the_usual_order(nowhere: Path, made: Path, monkeypatch) -> None:
    assert qm9.missing() is not None
    monkeypatch.setenv(files.VARIABLE, str(made))
    assert qm9.missing() is None and len(qm9.read()) == COUNT


def rewritten(folder: Path, fields: dict[str, np.ndarray], **changes: np.ndarray | None) -> Path:
    kept = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    np.savez(folder / "qm9.npz", **kept)
    files.seal(folder / "qm9.npz")
    return folder


def test_a_file_that_does_not_fit_together_is_refused(tmp_path: Path, fields) -> None:
    said = r"Expected the shapes .*, got .*qm9\.npz\. Delete it and get it again"
    for change in ({"Z": fields["Z"][1:]}, {"R": fields["R"][:, :2]}, {"U0": fields["U0"][1:]}):
        refused(said, qm9.read, rewritten(tmp_path, fields, **change), error=files.FormatError)
    with pytest.raises(files.FormatError, match=r"missing \['atomref_U0'\]"):
        qm9.read(rewritten(tmp_path, fields, atomref_U0=None))
    with pytest.raises(files.FormatError, match=r"numbers \[1, 6, 7, 8, 9\], got .*\b10\b"):
        qm9.read(rewritten(tmp_path, fields, Z=fields["Z"] + (fields["Z"] == 9).astype(np.uint8)))
    for name in ("R", "U0"):
        holed = fields[name].copy()
        holed[3] = np.nan
        with pytest.raises(files.FormatError, match=f"finite numbers in {name} of"):
            qm9.read(rewritten(tmp_path, fields, **{name: holed}))


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, fields) -> None:
    rewritten(tmp_path, fields)
    (tmp_path / "qm9.npz.sha256").unlink()
    refused("ba908b1683e78a04", qm9.read, tmp_path, error=files.ChecksumError)
    assert len(qm9.read(tmp_path, check=False)) == COUNT


# --- the package ---------------------------------------------------------------------------------


def test_the_package_becomes_a_file_that_the_next_run_reads(
    tables: Path, nowhere: Path, fields, monkeypatch
) -> None:
    monkeypatch.setenv(files.OFFLINE, "1")  # nothing is downloaded
    assert qm9.missing() is None
    first = qm9.read()
    assert sorted(path.name for path in nowhere.iterdir()) == ["qm9.npz", "qm9.npz.sha256"]
    with np.load(nowhere / "qm9.npz") as stored:
        for name in qm9.FIELDS:
            assert np.array_equal(stored[name], fields[name]), name
            assert stored[name].dtype == fields[name].dtype, name
    for part in qm9.PARTS:
        (tables / part).unlink()
    again = qm9.read()
    assert torch.equal(first.energy, again.energy)
    assert first.structures.digest() == again.structures.digest()
    assert qm9.PACKAGE not in sys.modules


def test_a_function_may_say_where_the_tables_are(tables: Path, nowhere: Path, monkeypatch) -> None:
    monkeypatch.setattr(qm9, "PACKAGE", "qm9pack_that_is_nowhere")
    assert qm9.missing() is not None
    assert len(qm9.read(fetch=lambda: tables)) == COUNT
    assert qm9.missing() is None


def test_the_package_is_not_asked_where_a_folder_is_given(tables, nowhere, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(files.MissingDataError, match=r"not in the folder given: .*give no folder"):
        qm9.read(tmp_path / "empty", fetch=lambda: tables)
    assert qm9.missing(tmp_path / "empty") is not None and not nowhere.exists()


def at_first(old: str, new: str) -> Callable[[list[str]], list[str]]:
    """Another text in the line of the first molecule."""
    return lambda lines: [lines[0], lines[1].replace(old, new, 1), *lines[2:]]


DAMAGES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "cut short": (lambda lines: [*lines[:-1], lines[-1][:120]], "unexpected end of data"),
    "a line lost": (lambda lines: lines[:-1], f"molecules={COUNT}, .* got .*={COUNT - 1}"),
    "a quote lost": (
        lambda lines: [*lines[:3], lines[3].replace('"[[', "[["), *lines[4:]],
        "line 4",
    ),
    "cells lost": (lambda lines: [*lines[:-1], "1,2,3\n"], "out of range"),
    "stoichiometry": (at_first('"[', '"[1'), r"line 2: molecule \d+ .*stoichiometry"),
    "element": (at_first("'H'", "'S'"), "'S'"),
    "coordinate lost": (
        at_first("[[", "[[1.,"),
        r"line 2: molecule \d+ of \d+ atoms has \d+ coordinates",
    ),
    "words": (at_first("[[", "[[x"), "'x"),
    "position": (at_first("[[", "[[1"), "square=.* got .*square="),
    "energy": (
        lambda lines: [*lines[:-1], lines[-1].rpartition(",")[0] + ",-1.\n"],
        "got .*energy=",
    ),
    "column": (lambda lines: [lines[0].replace("Elements", "elements"), *lines[1:]], "not in list"),
    "empty": (lambda lines: [], "'Index' is not in list"),
    "order": (lambda lines: [lines[0], *lines[:0:-1]], "every molecule once, in order"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tables_are_refused_with_file_and_remedy(tables, nowhere, damage) -> None:
    change, said = DAMAGES[damage]
    path = tables / qm9.PARTS[2]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(change(lines)), encoding="utf-8")
    with pytest.raises(files.FormatError, match=said) as caught:
        qm9.read()
    assert str(tables) in str(caught.value) and "pip install --force" in str(caught.value)
    assert list(nowhere.iterdir()) == []


def test_a_table_that_is_not_there_is_named(tables: Path, nowhere: Path) -> None:
    (tables / qm9.PARTS[1]).unlink()
    refused(r"qm9_part2\.csv, and there is none.*reinstall", qm9.read, error=files.FormatError)
    assert list(nowhere.iterdir()) == []


# --- the published set ---------------------------------------------------------------------------


@needs_file
def test_the_published_set_has_the_published_energies() -> None:
    read = qm9.read()
    structures = read.structures
    assert (len(read), len(structures.numbers)) == (130_831, 2_359_210)
    assert (structures.counts.min(), structures.counts.max()) == (3, 29)
    assert read.energy[0].item() == pytest.approx(-40.47893 * 627.509474, rel=1e-8)  # methane
    species = list(qm9.ELEMENTS.values())
    atomised = read.energy - structures.composition(species) @ read.atom_energy[species]
    volts = atomised / 23.060547830619
    assert volts.mean().item() == pytest.approx(-76.116, abs=1e-3)
    assert volts.std().item() == pytest.approx(10.324, abs=1e-3)
    free = torch.tensor([qm9.FREE_ATOM[number] for number in species], dtype=torch.float64)
    assert torch.allclose(read.atom_energy[species], free * 627.509474, rtol=1e-8)


@needs_package
@needs_file
def test_the_package_and_the_published_file_agree() -> None:
    folder = qm9.package()
    made = qm9.checked(qm9.table(folder), folder)
    stored = files.fields(files.find(qm9.NAMES), qm9.FIELDS)
    assert np.abs(made["R"] - stored["R"]).max() < 1e-6
    for name in ("id", "n_atoms", "Z", "U0", "atomref_U0"):
        assert np.array_equal(made[name], stored[name]), name


# --- the made-up set -----------------------------------------------------------------------------


def test_the_made_up_molecules_are_plausible(tmp_path: Path) -> None:
    synthetic_data.write(tmp_path)
    read = qm9.read(tmp_path)
    assert len(read) == 400 and set(read.structures.numbers.tolist()) == {1, 6, 7, 8, 9}
    assert read.structures.counts.min() >= 3 and read.structures.counts.max() <= 12
    for places in read.structures.positions.split(read.structures.counts.tolist()):
        nearest = (torch.cdist(places, places) + 9 * torch.eye(len(places))).min(1).values
        assert nearest.min() > 0.9 and nearest.max() < 1.6
