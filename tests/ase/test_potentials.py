"""Hosts of potentials: labels, units and batches of lists of atoms, without any other library."""

import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress

import rigidities as rg
from ase import units
from rigidities.ase import UncertainStructureError, graphs, mace, schnetpack
from rigidities.notices import missing
from tests.support.pairs import CUTOFF, Pairs, crystals, strained_bars
from tests.support.refusals import refused

TRAIN, VALID = crystals(20, 0), crystals(12, 1)
PER_ATOM = {"Cu": -1.0, "Au": 0.5}


def energies(model, batch):
    i, j = batch["edge_index"]
    vectors = batch["pos"][j] - batch["pos"][i] + batch["shifts"]
    count = len(batch["ptr"]) - 1
    return model(batch["z"], vectors, batch["edge_index"], batch["batch"], count)


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pairs().double()


def calibrated(host, **options):
    host.fit(TRAIN, **options)
    host.calibrate(VALID, method=rg.Paper(ridge=1e-3 * float(host.uq.gram.matrix.diagonal().sum())))
    return host


@pytest.fixture(scope="module")
def host():
    found = graphs(model(), energies, cutoff=CUTOFF, baseline=PER_ATOM)
    return calibrated(found, forces_weight=0.1)


@pytest.fixture
def atoms():
    (found,) = crystals(1, 2)
    found.calc = None
    return found


def check(host, atoms):
    """Forces, stress and the stress's bar, by finite differences."""
    atoms.calc = host.calculator()
    atoms.get_stress()
    still = atoms.copy()
    still.calc = host.calculator(force_bars=False)
    results = atoms.calc.results
    forces, stress = calculate_numerical_forces(still), calculate_numerical_stress(still)
    np.testing.assert_allclose(results["forces"], forces, atol=1e-5 * np.abs(forces).max())
    np.testing.assert_allclose(results["stress"], stress, atol=1e-5 * np.abs(stress).max())
    np.testing.assert_allclose(results["stress_std"], strained_bars(host, atoms), rtol=1e-4)


def test_a_model_with_neighbours_gives_forces_stress_and_bars(host, atoms):
    check(host, atoms)


def test_units_of_energy_and_length_are_those_of_labels_and_results(host, atoms):
    def in_bohr(model, batch):  # the same energies
        scaled = {key: units.Bohr * batch[key] for key in ("pos", "cell", "shifts")}
        return energies(model, {**batch, **scaled}) / units.Hartree

    known = {"energy_unit": units.Hartree, "length_unit": units.Bohr, "baseline": PER_ATOM}
    other = calibrated(graphs(host.model, in_bohr, cutoff=CUTOFF, **known))
    check(other, atoms)
    plain, found = host.calculator(), other.calculator()
    for name in ("energy", "forces", "stress"):
        expected = plain.get_property(name, atoms)
        np.testing.assert_allclose(found.get_property(name, atoms), expected, rtol=1e-8, atol=1e-12)
    (labels,) = other.batches(TRAIN[:1], ("energy", "forces"))
    fixed = sum(PER_ATOM[symbol] for symbol in TRAIN[0].symbols)
    energy = (TRAIN[0].get_potential_energy() - fixed) / units.Hartree
    assert labels["y"].item() == pytest.approx(energy)
    slope = -TRAIN[0].get_forces() * units.Bohr / units.Hartree
    np.testing.assert_allclose(labels["slope"], slope)


def test_batches_hold_several_structures_as_they_are_one_by_one(host):
    whole = host.uq.predict(host.batches(VALID))
    each = [host.uq.predict(host.batches([atoms])).mean for atoms in VALID]
    torch.testing.assert_close(whole.mean, torch.cat(each))


def test_a_fit_is_that_of_the_batches_with_their_weights_and_forces(host):
    by_hand = rg.LastLayerRigidity(host.model, forward=energies)
    batches = host.batches(TRAIN, ("energy", "forces"))
    by_hand.fit(batches, gradient_loss=rg.GradientLoss("pos", weight=0.1, target="slope"))
    torch.testing.assert_close(host.uq.gram.matrix, by_hand.gram.matrix)
    assert host.species == {29, 79} and host.labels == ("energy", "forces")
    report = host.uq.calibration_report
    assert float(report.gradient_scale) != float(host.uq.scale)  # calibrated on forces


def gram(frames, weight=None, **options):
    """Of a generator of structures."""
    found = graphs(model(), energies, cutoff=CUTOFF, weight=weight)
    return found.fit((one for one in frames), **options).uq.gram.matrix


def test_weights_are_those_of_each_structure_and_the_users_own_go_first():
    sizes = [TRAIN[0], TRAIN[1].repeat((2, 1, 1)), TRAIN[2]]
    sizes[1].info["energy"] = 1.0
    found = gram(sizes, lambda atoms: 1 / len(atoms) ** 2)
    expected = sum(gram([one]) / len(one) ** 2 for one in sizes)
    torch.testing.assert_close(found, expected)
    ones = {"sample_weight": lambda batch: torch.ones(len(batch["ptr"]) - 1)}
    torch.testing.assert_close(gram(sizes, lambda atoms: 7.0, **ones), gram(sizes))


def test_a_loss_of_derivatives_does_as_a_weight_of_forces(host):
    loss = rg.GradientLoss("pos", weight=0.1)
    torch.testing.assert_close(gram(TRAIN, gradient_loss=loss), host.uq.gram.matrix)


def test_forces_that_were_not_trained_are_calibrated_and_leave_the_gram_alone():
    plain, unforced = (
        graphs(model(), energies, cutoff=CUTOFF, baseline=PER_ATOM).fit(TRAIN, forces_weight=weight)
        for weight in (None, 0)
    )
    assert torch.equal(unforced.uq.gram.matrix, plain.uq.gram.matrix)
    unforced.calibrate(VALID, method="paper")
    scale = unforced.uq.calibration_report.gradient_scale
    assert float(scale) != float(unforced.uq.scale)


def test_a_model_without_a_cell_is_warned_of_periodic_structures():
    with pytest.warns(UserWarning, match="periodic.*Pass a forward so that it gets the cell"):
        graphs(OfSystems().double()).batches(TRAIN[:4])
    molecule = TRAIN[0].copy()
    molecule.pbc = False
    graphs(OfSystems().double()).batches([molecule])  # nothing is said


def test_a_host_is_printed_in_a_line(host):
    assert len(repr(host)) < 400 and "energy_unit=1.0" in repr(host)


def test_a_host_refuses_elements_that_were_not_fitted_and_stops_at_limits(host, atoms):
    atoms.calc = host.calculator(limits={"energy_std": 1e-9})
    refused("bar of the energy", atoms.get_potential_energy, error=UncertainStructureError)
    atoms.symbols[0] = "Pt"
    refused("not trained on Pt", atoms.get_potential_energy)


class System(NamedTuple):
    """As `metatomic.torch.System` is called."""

    types: torch.Tensor
    positions: torch.Tensor
    cell: torch.Tensor
    pbc: torch.Tensor


class OfSystems(torch.nn.Module):
    """Nearest images within a cell, as a model of metatomic sees it: a list of systems."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)

    def forward(self, systems):
        return {"energy": torch.stack([self.one(system) for system in systems])}

    def one(self, system):
        i, j = torch.triu_indices(len(system.types), len(system.types), 1)
        apart = (system.positions[i] - system.positions[j]) @ torch.linalg.inv(system.cell)
        apart = (apart - apart.round().detach()) @ system.cell
        return self.head(self.net(apart.norm(dim=-1, keepdim=True) - 2.5)).sum(0)


def by_systems(model, batch):
    counts = batch["ptr"].diff().tolist()
    columns = batch["z"].split(counts), batch["pos"].split(counts), batch["cell"], batch["pbc"]
    return model([System(*one) for one in zip(*columns, strict=True)])["energy"]


def test_models_of_lists_of_systems_are_called_by_a_forward_of_a_few_lines(atoms):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = graphs(OfSystems().double(), by_systems)
    check(calibrated(found), atoms)


def test_labels_come_from_the_calculator_or_from_named_keys(host):
    keyed = graphs(host.model, energies, cutoff=CUTOFF, energy_key="E", forces_key="F")
    atoms = TRAIN[0].copy()
    atoms.info["E"], atoms.arrays["F"] = 1.5, np.ones((4, 3))
    (found,) = keyed.batches([atoms], ("energy", "forces"))
    assert found["y"].item() == 1.5 and (found["slope"] == -1).all()
    bare = TRAIN[0].copy()
    refused(r"no energy: there is no 'E' in atoms\.info.*energy_key=", keyed.fit, [bare])
    refused(r"no 'energy' in atoms\.info", host.batches, [bare], ("energy",))
    bare.info["energy"] = 1.0
    words = r"has no forces: there is no 'forces' in atoms\.arrays.*forces_key="
    refused(words, host.batches, [bare], ("energy", "forces"))
    assert host.species == {29, 79}


@pytest.mark.parametrize(("host", "package"), [(mace, "mace-torch"), (schnetpack, "schnetpack")])
def test_without_its_library_a_host_says_what_to_install(host, package, monkeypatch):
    for name in ("mace", "schnetpack", "schnetpack.interfaces"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        host(torch.nn.Linear(1, 1))


def test_a_dependency_of_a_host_that_is_missing_is_named_itself():
    with pytest.raises(ModuleNotFoundError, match="No module named 'e3nn'"):
        missing(ModuleNotFoundError("No module named 'e3nn'", name="e3nn"), "mace", "mace-torch")


def test_one_structure_in_place_of_a_list_is_refused(host):
    with pytest.raises(TypeError, match=r"list of ase\.Atoms, got one"):
        host.fit(TRAIN[0])
