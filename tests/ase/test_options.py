"""The calculator's units, species, limits and costs: what is right, what is refused, what runs."""

import numpy as np
import pytest
import torch
from ase.calculators.fd import calculate_numerical_forces
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import Trajectory, read
from ase.md.verlet import VelocityVerlet

import rigidities as rg
from ase import Atoms, units
from rigidities.ase import RigidityCalculator, UncertainStructureError, with_error_bars
from rigidities.ase.structures import closest_pair
from tests.support.clusters import (
    TRAIN,
    VALID,
    Counting,
    Crystal,
    fitted_crystals,
    surroundings,
)
from tests.support.nets import calibrated
from tests.support.refusals import refused

# --- units of one's own inputs ----------------------------------------------------------------


def in_bohr(atoms):
    positions, cell = atoms.positions / units.Bohr, atoms.cell.array / units.Bohr
    return Crystal(torch.tensor(positions), torch.tensor(cell))


@pytest.fixture(scope="module")
def periodic():
    return fitted_crystals(in_bohr)


IN_BOHR = {"wrt": "pos", "energy_unit": units.Hartree, "length_unit": units.Bohr}


@pytest.mark.parametrize("bars", [True, False])
def test_own_inputs_in_other_units_give_the_numerical_derivative(periodic, bars):
    uq, atoms = periodic
    atoms = atoms.copy()
    atoms.calc = RigidityCalculator(uq, inputs=in_bohr, force_bars=bars, **IN_BOHR)
    expected = calculate_numerical_forces(atoms, eps=1e-4)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(atoms.get_forces(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "length_unit"),
    [
        (lambda a: Crystal(torch.tensor(a.positions), torch.tensor(a.cell.array)), units.Bohr),
        (in_bohr, 1.0),
        (lambda a: Crystal(torch.tensor(a.get_scaled_positions()), torch.eye(3).double()), 1.0),
    ],
    ids=["unit not applied", "unit not named", "scaled positions"],
)
def test_own_inputs_in_another_unit_than_named_are_refused(periodic, inputs, length_unit):
    uq, atoms = periodic
    options = {**IN_BOHR, "length_unit": length_unit}
    calculator = RigidityCalculator(uq, inputs=inputs, **options)
    with pytest.raises(ValueError, match=r"'pos' is not atoms\.positions / length_unit.*unit"):
        calculator.get_property("forces", atoms)


def test_positions_may_be_wrapped_shifted_rounded_and_in_a_batch_of_one(periodic, one, atoms):
    uq, crystal = periodic

    def wrapped(given):
        moved = given.copy()
        moved.positions += [1.0, 2.0, 3.0]
        moved.wrap()
        return in_bohr(moved)

    crystal = crystal.copy()
    crystal.positions[3] -= 2 * crystal.cell[1]
    plain = RigidityCalculator(uq, inputs=in_bohr, **IN_BOHR).get_property("forces", crystal)
    found = RigidityCalculator(uq, inputs=wrapped, **IN_BOHR).get_property("forces", crystal)
    np.testing.assert_allclose(found, plain, atol=1e-9)
    rounded = RigidityCalculator(
        one,
        inputs=lambda a: (
            torch.tensor(a.positions).float().double()[None],
            torch.tensor(a.numbers)[None],
        ),
    )
    expected = RigidityCalculator(one).get_property("forces", atoms)
    np.testing.assert_allclose(rounded.get_property("forces", atoms), expected, atol=1e-4)


# --- elements that no readout knows -----------------------------------------------------------


def test_a_structure_that_no_readout_saw_is_refused(one):
    strange = Atoms("Pt2", [[0, 0, 0], [0, 0, 2.5]])
    for name in ("energy", "forces"):
        with pytest.raises(ValueError, match=r"exactly zero: no readout got.*Pt2.*species="):
            RigidityCalculator(one).get_property(name, strange)


def test_a_zero_bar_of_named_species_is_believed():
    class Bound(torch.nn.Module):
        """Lone atoms have no energy."""

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(16, 1, bias=False)

        def forward(self, positions, numbers):
            if positions.ndim == 2:
                positions, numbers = positions[None], numbers[None]
            return self.head(surroundings(positions, numbers)).sum(1)[:, 0]

    uq = calibrated(rg.LastLayerRigidity(Bound().double()).fit(TRAIN), VALID)
    calculator = RigidityCalculator(uq, species=["Cu", "Au"])
    assert calculator.get_property("energy_std", Atoms("Cu")) == 0
    refused("exactly zero", RigidityCalculator(uq).get_property, "energy_std", Atoms("Cu"))


# --- forces without their bars ----------------------------------------------------------------


def counting(model):
    return calibrated(Counting(model).fit(TRAIN), VALID)


def test_without_force_bars_forces_cost_one_backward_pass_until_bars_are_asked_for(one, atoms):
    uq = counting(one.model)
    atoms.calc = RigidityCalculator(uq, force_bars=False, limits={"energy_std": 100.0})
    forces = atoms.get_forces()
    assert "forces_std" not in atoms.calc.results and uq.gradients == 0
    assert "forces_std" not in with_error_bars(atoms).info
    slope = one.gradient([(torch.tensor(atoms.positions), torch.tensor(atoms.numbers))], wrt=0)
    np.testing.assert_allclose(forces, -slope.mean, rtol=1e-10, atol=1e-13)
    VelocityVerlet(atoms, 1 * units.fs).run(3)
    assert uq.gradients == 0
    expected = RigidityCalculator(uq).get_property("forces_std", atoms)
    np.testing.assert_allclose(atoms.calc.get_property("forces_std", atoms), expected, rtol=1e-12)
    assert uq.gradients == 2
    assert "forces_std" in with_error_bars(atoms).info


def test_a_limit_of_force_bars_has_them_computed(one, atoms):
    uq = counting(one.model)
    atoms.calc = RigidityCalculator(uq, force_bars=False, limits={"forces_std": 1e-9})
    refused("force on atom", atoms.get_forces, error=UncertainStructureError)
    assert uq.gradients == 1


def test_by_default_dynamics_keep_the_bars_of_forces(one, atoms):
    atoms.calc = RigidityCalculator(one)
    VelocityVerlet(atoms, 1 * units.fs).run(2)
    assert (atoms.calc.results["forces_std"] > 0).all()


def test_forces_of_a_model_that_hides_its_positions_are_refused(one, atoms):
    class Detached(type(one.model)):
        def forward(self, positions, numbers):
            return super().forward(positions.detach(), numbers)

    uq = calibrated(rg.LastLayerRigidity(Detached(2).double()).fit(TRAIN), VALID)
    for bars in (True, False):
        with pytest.raises(ValueError, match="does not depend on this input"):
            RigidityCalculator(uq, force_bars=bars).get_property("forces", atoms)


def test_forces_alone_come_in_inference_mode_too(one, atoms):
    expected = RigidityCalculator(one).get_property("forces", atoms)
    with torch.inference_mode():
        found = RigidityCalculator(one, force_bars=False).get_property("forces", atoms)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


# --- limits and files -------------------------------------------------------------------------


def test_an_uncertain_structure_is_refused_each_time_and_can_still_be_written(one, atoms, tmp_path):
    atoms.calc = RigidityCalculator(one, limits={"forces_std": 1e-9})
    atoms.get_potential_energy()
    for _ in range(2):
        with pytest.raises(UncertainStructureError, match="force on atom") as stop:
            atoms.get_forces()
    with pytest.raises(UncertainStructureError):
        atoms.get_potential_energy()
    kept = with_error_bars(atoms)
    assert kept.info["energy_std"] == stop.value.results["energy_std"]
    np.testing.assert_array_equal(kept.info["forces_std"], stop.value.results["forces_std"])
    assert kept.get_potential_energy() == stop.value.results["energy"]
    assert kept == stop.value.atoms
    with Trajectory(tmp_path / "last.traj", "w") as file:
        file.write(atoms)
    np.testing.assert_array_equal(read(tmp_path / "last.traj").get_forces(), kept.get_forces())
    atoms.positions *= 1.01
    assert np.isfinite(atoms.get_potential_energy())


def test_bars_of_a_frame_before_are_not_kept(one, atoms):
    atoms.info.update(energy_std=-1.0, forces_std=-np.ones((4, 3)), name="mine")
    atoms.calc = RigidityCalculator(one)
    kept = with_error_bars(atoms)
    assert set(kept.info) == {"energy_std", "name"} and kept.info["energy_std"] > 0
    assert isinstance(kept.calc, SinglePointCalculator)


# --- bad input --------------------------------------------------------------------------------


def test_a_fit_on_keywords_counts_its_inputs_too(one, atoms):
    keys = ("positions", "numbers", "y")
    uq = rg.LastLayerRigidity(one.model).fit(dict(zip(keys, TRAIN, strict=True)))
    uq.calibrate(dict(zip(keys, VALID, strict=True)), method="paper")
    calculator = RigidityCalculator(uq, inputs=lambda a: (a.positions, a.numbers, a.cell.array))
    refused(r"takes 2 inputs, got 3 .*Pass inputs=", calculator.get_property, "energy", atoms)
    for wrt in (2, -1):
        with pytest.raises(ValueError, match=rf"no input {wrt}\. Name one of positions, numbers"):
            RigidityCalculator(uq, wrt=wrt).get_property("forces", atoms)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ([5, 5, 1e-7], r"0 \(Cu\) and its own image are 1e-07 Å"),
        ([[5, 0, 0], [0, 5, 0], [5, 5, 0]], "cell is flat"),
        ([[5, 0, 0], [5, 1e-7, 0], [0, 0, 5]], "cell is flat"),
        ([[5, 0, 0], [10, 0, 0], [0, 0, 5]], "cell is flat"),
    ],
)
def test_a_flat_cell_is_refused_at_once(one, cell, words):
    refused(words, RigidityCalculator(one).get_property, "energy", Atoms("Cu", cell=cell, pbc=True))


def test_a_flat_cell_that_does_not_repeat_is_no_obstacle(one):
    atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 0.3]], cell=[[5, 0, 0], [10, 0, 0], [0, 0, 5]])
    assert closest_pair(atoms, 0.5) == (0, 1, pytest.approx(0.3))
    assert np.isfinite(RigidityCalculator(one).get_property("energy", atoms))
