"""The ASE calculator: energies and forces are the model's, bars are those of `uq`, times units."""

import copy
import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.emt import EMT
from ase.calculators.fd import calculate_numerical_forces
from ase.constraints import FixAtoms
from ase.io import Trajectory, read, write
from ase.md.langevin import Langevin
from ase.md.verlet import VelocityVerlet
from ase.mep import NEB
from ase.neighborlist import neighbor_list
from ase.optimize import BFGS

import rigidities as rg
from ase import Atoms, units
from rigidities.ase import RigidityCalculator, UncertainStructureError, with_error_bars
from rigidities.ase.structures import closest_pair
from tests.support.clusters import (
    SPECIES,
    TRAIN,
    VALID,
    Counting,
    Crystal,
    Net,
    cluster,
    fitted,
    fitted_crystals,
)
from tests.support.nets import calibrated, derivative_scale
from tests.support.refusals import refused


@pytest.fixture(scope="module", params=[2, 1], ids=["a head per species", "one head"])
def uq(request):
    return fitted(request.param)


def tensors(atoms):
    return torch.tensor(atoms.positions), torch.tensor(atoms.numbers)


# --- values and bars --------------------------------------------------------------------------


def test_energy_and_forces_are_the_models_and_its_derivatives(uq, atoms):
    atoms.calc = RigidityCalculator(uq)
    positions, numbers = tensors(atoms)
    energy = uq.model(positions.requires_grad_(), numbers)
    (slope,) = torch.autograd.grad(energy.sum(), positions)
    assert atoms.get_potential_energy() == pytest.approx(energy.item(), rel=1e-12)
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()
    np.testing.assert_allclose(atoms.get_forces(), -slope, rtol=1e-10, atol=1e-12)
    results = atoms.calc.results
    assert type(results["energy"]) is type(results["energy_std"]) is float
    assert results["forces"].dtype == results["forces_std"].dtype == np.float64


def test_forces_are_the_numerical_derivative_of_the_energy(uq, atoms):
    atoms.calc = RigidityCalculator(uq, energy_unit=units.Hartree, baseline={"Cu": 1.0, "Au": 2.0})
    expected = calculate_numerical_forces(atoms, eps=1e-4)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(atoms.get_forces(), expected, rtol=1e-5, atol=1e-4)


def test_bars_are_those_of_predict_and_gradient_times_units(uq, atoms):
    energy_unit, length_unit = units.Hartree, units.Bohr
    atoms.positions *= length_unit
    atoms.calc = RigidityCalculator(uq, energy_unit=energy_unit, length_unit=length_unit)
    atoms.get_forces()
    positions, numbers = tensors(atoms)
    batch = [(positions / length_unit, numbers)]
    energy, slope = uq.predict(batch), uq.gradient(batch, wrt=0)
    results = atoms.calc.results
    assert 0.01 < float(energy.noise / energy.variance) < 1
    assert results["energy"] == pytest.approx(energy_unit * energy.mean.item(), rel=1e-12)
    assert results["energy_std"] == pytest.approx(energy_unit * energy.std.item(), rel=1e-12)
    unit = energy_unit / length_unit
    np.testing.assert_allclose(results["forces"], -unit * slope.mean, rtol=1e-12)
    np.testing.assert_allclose(results["forces_std"], unit * slope.std, rtol=1e-12)


def by_weights(model, positions, numbers):
    """Derivatives of one structure's energy by the heads' weights, differentiable."""
    weights = [weight for head in model.heads for weight in head.parameters()]
    found = torch.autograd.grad(model(positions, numbers).sum(), weights, create_graph=True)
    return torch.cat([part.flatten() for part in found])


def test_bars_of_forces_equal_a_dense_solve_with_the_full_jacobian(uq, atoms):
    model = uq.model
    rows = [by_weights(model, p, z).detach() for p, z in zip(*TRAIN[:2], strict=True)]
    rows = torch.stack(rows)
    matrix = rows.T @ rows + uq.ridge * torch.eye(rows.shape[1], dtype=torch.float64)
    positions, numbers = tensors(atoms)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: by_weights(model, x, numbers), positions
    ).flatten(1)
    variance = (jacobian * torch.linalg.solve(matrix, jacobian)).sum(0)
    expected = (derivative_scale(uq) * variance.sqrt()).reshape(-1, 3)
    atoms.calc = RigidityCalculator(uq)
    atoms.get_forces()
    np.testing.assert_allclose(atoms.calc.results["forces_std"], expected, rtol=1e-8)
    f = by_weights(model, positions, numbers).detach()
    q = f @ torch.linalg.solve(matrix, f)
    std = (uq.scale.square() * q + uq.calibration_report.noise_level).sqrt().item()
    assert atoms.calc.results["energy_std"] == pytest.approx(std, rel=1e-8)


def test_errors_on_fresh_structures_are_as_large_as_their_bars(one):
    rng, ratios = np.random.default_rng(21), []
    for _ in range(60):
        fresh = cluster(rng)
        calculator = RigidityCalculator(one)
        error = calculator.get_property("energy", fresh) - fresh.get_potential_energy()
        ratios.append(error / calculator.results["energy_std"])
    assert 1 / 3 < np.sqrt(np.mean(np.square(ratios))) < 3  # nets from other seeds: up to 2.2


def test_bars_do_not_turn_with_the_structure(one, atoms):
    atoms.calc = RigidityCalculator(one)
    bars = np.linalg.norm(atoms.calc.get_property("forces_std", atoms), axis=1)
    energy_std = atoms.calc.results["energy_std"]
    atoms.rotate(40, (1, 2, 3))
    turned = np.linalg.norm(atoms.calc.get_property("forces_std", atoms), axis=1)
    np.testing.assert_allclose(turned, bars, rtol=1e-9)
    assert atoms.calc.results["energy_std"] == pytest.approx(energy_std, rel=1e-9)


def test_a_single_precision_model_gives_double_precision_results(one, atoms):
    model = copy.deepcopy(one.model).float()
    data = [(p.float(), z, y[None].float()) for p, z, y in zip(*TRAIN, strict=True)]
    single = rg.LastLayerRigidity(model).fit(data)
    single.calibrate(
        [(p.float(), z, y[None].float()) for p, z, y in zip(*VALID, strict=True)], method="paper"
    )
    atoms.calc = RigidityCalculator(single)
    assert atoms.get_forces().dtype == np.float64
    reference = RigidityCalculator(one)
    np.testing.assert_allclose(
        atoms.get_forces(), reference.get_property("forces", atoms), atol=1e-4
    )


def test_a_lone_atom_has_an_energy_and_no_force(one):
    atoms = Atoms("Cu", calculator=RigidityCalculator(one))
    assert np.isfinite(atoms.get_potential_energy())
    assert (atoms.get_forces() == 0).all()
    assert atoms.calc.results["forces_std"].shape == (1, 3)


def composition(atoms):
    copper = int((atoms.numbers == 29).sum())
    return 1.5 * copper - 0.25 * (len(atoms) - copper)


@pytest.mark.parametrize(
    "baseline", [{"Cu": 1.5, 79: -0.25}, composition], ids=["by element", "function"]
)
def test_a_baseline_moves_the_energy_alone(one, atoms, baseline):
    atoms.calc = RigidityCalculator(one)
    atoms.get_forces()
    plain = atoms.calc.results
    atoms.calc = RigidityCalculator(one, baseline=baseline)
    atoms.get_forces()
    moved, shift = atoms.calc.results, composition(atoms)
    assert moved["energy"] - plain["energy"] == pytest.approx(shift, rel=1e-9)
    assert moved["free_energy"] == moved["energy"]
    assert moved["energy_std"] == plain["energy_std"]
    for name in ("forces", "forces_std"):
        np.testing.assert_array_equal(moved[name], plain[name])


# --- what the model takes ---------------------------------------------------------------------


def test_a_fit_on_keywords_takes_the_default_inputs_too(one, atoms):
    keys = ("positions", "numbers", "y")
    named = rg.LastLayerRigidity(one.model).fit(dict(zip(keys, TRAIN, strict=True)))
    named.calibrate(dict(zip(keys, VALID, strict=True)), method=rg.Paper(noise="bayes"))
    results = []
    for calculator in (
        RigidityCalculator(one),
        RigidityCalculator(named),
        RigidityCalculator(named, wrt="positions"),
        RigidityCalculator(one, wrt=0),
        RigidityCalculator(one, inputs=lambda a: {"positions": a.positions, "numbers": a.numbers}),
        RigidityCalculator(
            one, inputs=lambda a: {"numbers": a.numbers, "positions": a.positions}, wrt="positions"
        ),
    ):
        calculator.get_property("forces", atoms)
        results.append(calculator.results)
    for other in results[1:]:
        assert other["energy_std"] == pytest.approx(results[0]["energy_std"], rel=1e-9)
        for name in ("forces", "forces_std"):
            np.testing.assert_allclose(other[name], results[0][name], rtol=1e-8, atol=1e-12)


def crystal(atoms):
    return Crystal(torch.tensor(atoms.positions), torch.tensor(atoms.cell.array))


@pytest.fixture(scope="module")
def periodic():
    return fitted_crystals(crystal)


def test_a_batch_object_with_a_cell_gives_periodic_forces(periodic):
    uq, atoms = periodic
    atoms = atoms.copy()
    atoms.calc = RigidityCalculator(uq, inputs=crystal, wrt="pos")
    forces, energy = atoms.get_forces(), atoms.get_potential_energy()
    np.testing.assert_allclose(forces, calculate_numerical_forces(atoms, eps=1e-4), atol=1e-7)
    bars = atoms.calc.get_property("forces_std", atoms)
    assert bars.shape == forces.shape and (bars > 0).all()
    atoms.positions[0] += atoms.cell[0]
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=1e-10)


def test_of_named_inputs_the_first_holds_the_positions(periodic):
    uq, atoms = periodic
    named = rg.LastLayerRigidity(uq.model)
    named.fit([{**vars(crystal(atoms)), "y": torch.ones(1).double()}])
    inputs = {"pos": atoms.positions, "cell": atoms.cell.array}
    calculator = RigidityCalculator(named, inputs=lambda _: inputs)
    with pytest.warns(UserWarning, match="not calibrated"):
        forces = calculator.get_property("forces", atoms)
    expected = RigidityCalculator(uq, inputs=crystal, wrt="pos").get_property("forces", atoms)
    np.testing.assert_allclose(forces, expected, rtol=1e-10, atol=1e-12)


def test_default_inputs_warn_once_that_a_cell_is_left_out(one, atoms):
    atoms.set_cell([20, 20, 20])
    atoms.pbc = True
    atoms.calc = RigidityCalculator(one)
    with pytest.warns(UserWarning, match="periodic.*inputs="):
        atoms.get_potential_energy()
    atoms.rattle(0.01)
    atoms.get_potential_energy()


# --- what is computed, and when ---------------------------------------------------------------


def test_only_what_is_asked_is_computed_and_only_once(one, atoms):
    uq = calibrated(Counting(one.model).fit(TRAIN), VALID)
    atoms.calc = RigidityCalculator(uq)
    for _ in range(2):
        atoms.get_potential_energy()
        assert atoms.calc.get_property("energy_std", atoms) > 0
        assert "forces" not in atoms.calc.results
    assert (uq.predictions, uq.gradients) == (1, 0)
    for _ in range(2):
        atoms.get_forces()
        atoms.calc.get_property("forces_std", atoms)
        atoms.get_potential_energy()
    assert (uq.predictions, uq.gradients) == (1, 1)
    before = atoms.get_forces()
    atoms.positions[0, 0] += 0.01
    assert np.abs(atoms.get_forces() - before).max() > 1e-4
    assert (uq.predictions, uq.gradients) == (1, 2)  # energy and forces of one pass
    atoms.positions[0, 0] += 0.01
    atoms.get_potential_energy()
    assert "forces_std" not in atoms.calc.results
    assert (uq.predictions, uq.gradients) == (2, 2)


def test_results_handed_out_are_copies(one, atoms):
    atoms.calc = RigidityCalculator(one)
    atoms.calc.get_property("forces_std", atoms)[:] = 0
    assert (atoms.calc.get_property("forces_std", atoms) > 0).all()


def test_calculate_by_hand_forgets_the_structure_before(one, atoms):
    calculator = RigidityCalculator(one)
    calculator.calculate(atoms, ["forces"])
    moved = atoms.copy()
    moved.rattle(0.1, seed=1)
    first = calculator.results["energy"]
    calculator.calculate(moved, ["energy"])
    assert "forces" not in calculator.results
    assert calculator.results["energy"] != first
    properties = calculator.calculate_properties(atoms, ["energy", "forces"])
    assert properties["energy"] == first


def test_other_properties_are_not_implemented(one, atoms):
    atoms.calc = RigidityCalculator(one)
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()


def test_few_members_give_other_bars_and_the_same_forces(one, atoms):
    exact, drawn = RigidityCalculator(one), RigidityCalculator(one, members=4)
    np.testing.assert_allclose(
        drawn.get_property("forces", atoms), exact.get_property("forces", atoms), rtol=1e-10
    )
    ratio = drawn.results["forces_std"] / exact.get_property("forces_std", atoms)
    assert np.abs(ratio - 1).max() > 0.01 and 0.2 < ratio.mean() < 3


# --- limits -----------------------------------------------------------------------------------


def stretched(atoms, factor=1.35):
    far = atoms.copy()
    far.positions *= factor
    return far


def test_a_bar_beyond_its_limit_raises_after_the_results_are_stored(one, atoms):
    reference = RigidityCalculator(one)
    reference.get_property("forces", atoms)
    bars = np.linalg.norm(reference.results["forces_std"], axis=1)
    worst, std = int(bars.argmax()), reference.results["energy_std"]
    above = {"energy_std": 1.01 * std, "forces_std": 1.01 * bars.max()}
    RigidityCalculator(one, limits=above).get_property("forces", atoms)
    for limits, words in (
        ({**above, "energy_std": 0.99 * std}, rf"energy is {std:.4g} eV.*fit again"),
        (
            {**above, "forces_std": 0.99 * bars.max()},
            rf"atom {worst} \({atoms.symbols[worst]}\) is {bars.max():.4g} eV/Å",
        ),
    ):
        calculator = RigidityCalculator(one, limits=limits)
        with pytest.raises(UncertainStructureError, match=words) as caught:
            calculator.get_property("forces", atoms)
        for results in (caught.value.results, calculator.results):
            np.testing.assert_array_equal(results["forces"], reference.results["forces"])
            assert results["energy_std"] == std
        assert caught.value.atoms == atoms and caught.value.atoms is not atoms
        assert caught.value.atoms.calc is None and caught.value.atoms is not calculator.atoms
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value) and again.atoms == atoms


def test_a_limit_of_forces_says_nothing_of_an_energy_alone(one, atoms):
    atoms.calc = RigidityCalculator(one, limits={"forces_std": 1e-9})
    atoms.get_potential_energy()
    refused("force on atom", atoms.get_forces, error=UncertainStructureError)


def heated(atoms, seed=0, temperature_K=300):
    rng, friction = np.random.default_rng(seed), 0.02 / units.fs
    target = {"temperature_K": temperature_K, "friction": friction}
    return Langevin(atoms, 4 * units.fs, **target, fixcm=False, rng=rng)


def start(one, **options):
    atoms = cluster(np.random.default_rng(11), spread=0.05)
    atoms.calc = RigidityCalculator(one, **options)
    return atoms, 2.5 * RigidityCalculator(one).get_property("energy_std", atoms)


def hotter_and_hotter(atoms, steps=400):
    """The bars along a trajectory whose thermostat is turned up at each step."""
    dynamics = heated(atoms)
    for step, _ in enumerate(dynamics.irun(steps)):
        yield atoms.calc.results["energy_std"]
        dynamics.set_temperature(temperature_K=300 + 300 * step)


def test_heated_dynamics_stop_at_the_limit_by_error_and_by_hand_at_the_same_step(one):
    atoms, limit = start(one)
    bars = []
    for bar in hotter_and_hotter(atoms):
        bars.append(bar)
        if bar > limit:
            break
    assert 5 < len(bars) < 400
    assert max(bars[:-1]) <= limit < bars[-1]

    guarded, _ = start(one, limits={"energy_std": limit})
    seen = []
    with pytest.raises(UncertainStructureError, match="Label it") as caught:
        seen.extend(hotter_and_hotter(guarded))
    assert seen == bars[:-1]
    np.testing.assert_allclose(caught.value.atoms.positions, atoms.positions, rtol=1e-12)
    assert caught.value.results["energy_std"] == bars[-1]


def test_dynamics_at_constant_energy_keep_it(one):
    atoms, _ = start(one)
    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    totals = [atoms.get_total_energy() for _ in dynamics.irun(30)]
    assert atoms.get_kinetic_energy() > 0.01
    assert np.ptp(totals) < 0.01 * atoms.get_kinetic_energy()


def test_a_relaxation_ends_where_forces_vanish(one):
    atoms, _ = start(one)
    before = atoms.get_potential_energy()
    assert BFGS(atoms, logfile=None).run(fmax=1e-3, steps=100)
    assert np.abs(atoms.get_forces()).max() < 1e-3
    assert atoms.get_potential_energy() < before
    atoms.set_constraint(FixAtoms([0]))
    atoms.rattle(0.05, seed=0)
    assert (atoms.get_forces()[0] == 0).all() and (atoms.calc.results["forces"][0] != 0).all()


def test_a_relaxation_stops_where_the_model_does_not_know(one, atoms):
    std = RigidityCalculator(one).get_property("energy_std", atoms)
    far = stretched(atoms, 1.5)
    far.calc = RigidityCalculator(one, limits={"energy_std": std})
    with pytest.raises(UncertainStructureError):
        BFGS(far, logfile=None).run(fmax=0.01, steps=50)


def test_images_of_a_path_may_share_one_fit(one):
    atoms, _ = start(one)
    images = [atoms.copy() for _ in range(4)]
    images[-1].positions[0] += 0.3
    for image in images:
        image.calc = RigidityCalculator(one)
    path = NEB(images, method="improvedtangent")
    path.interpolate()
    assert path.get_forces().shape == (8, 3)
    assert all("forces_std" in image.calc.results for image in images[1:-1])


# --- copies and files -------------------------------------------------------------------------


def test_a_deep_copy_calculates_the_same_by_itself(one, atoms):
    atoms.calc = RigidityCalculator(one, limits={"energy_std": 100.0}, baseline={"Cu": 1, "Au": 2})
    forces = atoms.get_forces()
    twin = copy.deepcopy(atoms)
    assert twin.calc is not atoms.calc and twin.calc.uq is not one
    np.testing.assert_array_equal(twin.get_forces(), forces)
    twin.positions *= 1.01
    again = RigidityCalculator(one).get_property("forces_std", twin)
    np.testing.assert_allclose(twin.calc.get_property("forces_std", twin), again, rtol=1e-10)
    np.testing.assert_array_equal(atoms.get_forces(), forces)
    assert atoms.copy().calc is None


def test_a_plain_trajectory_keeps_energy_and_forces_and_drops_the_bars(one, tmp_path):
    atoms, _ = start(one)
    dynamics = VelocityVerlet(atoms, 1 * units.fs, trajectory=str(tmp_path / "plain.traj"))
    dynamics.run(3)
    dynamics.close()
    last = read(tmp_path / "plain.traj")
    assert last.get_potential_energy() == atoms.get_potential_energy()
    np.testing.assert_array_equal(last.get_forces(), atoms.get_forces())
    assert "energy_std" not in last.calc.results and "energy_std" not in last.info


def test_bars_survive_in_a_trajectory_and_in_extended_xyz(one, tmp_path):
    atoms, _ = start(one)
    dynamics = VelocityVerlet(atoms, 1 * units.fs)
    bars = []
    with Trajectory(tmp_path / "bars.traj", "w") as file:
        for _ in dynamics.irun(3):
            file.write(with_error_bars(atoms))
            bars.append(atoms.calc.results)
    write(tmp_path / "bars.xyz", read(tmp_path / "bars.traj", index=":"), format="extxyz")
    for name in ("bars.traj", "bars.xyz"):
        frames = read(tmp_path / name, index=":")
        assert len(frames) == 4
        for frame, results in zip(frames, bars, strict=True):
            assert frame.info["energy_std"] == pytest.approx(results["energy_std"], rel=1e-12)
            np.testing.assert_allclose(frame.info["forces_std"], results["forces_std"], rtol=1e-12)
            assert frame.get_potential_energy() == pytest.approx(results["energy"], abs=1e-7)
            np.testing.assert_allclose(frame.get_forces(), results["forces"], atol=1e-7)
    assert atoms.info == {}


def test_bars_for_a_file_are_those_of_the_structure_as_it_stands(one, atoms):
    atoms.calc = RigidityCalculator(one)
    atoms.get_forces()
    atoms.positions *= 1.1
    kept = with_error_bars(atoms)
    assert set(kept.info) == {"energy_std"}
    fresh = RigidityCalculator(one).get_property("energy_std", atoms)
    assert kept.info["energy_std"] == pytest.approx(fresh, rel=1e-12)
    atoms.calc = EMT()
    with pytest.raises(TypeError, match=r"RigidityCalculator, got EMT\. Set atoms\.calc"):
        with_error_bars(atoms)


# --- bad input --------------------------------------------------------------------------------


def test_no_structure_an_empty_one_and_a_lost_atom_are_refused(one, atoms):
    calculator = RigidityCalculator(one)
    refused(r"Set atoms\.calc", calculator.calculate)
    for ask in ("energy", "forces"):
        refused("no atoms", calculator.get_property, ask, Atoms())
    atoms.positions[2, 1] = np.nan
    lost = r"atom 2 .* not finite.*shorter time step"
    refused(lost, calculator.get_property, "energy", atoms)


@pytest.mark.parametrize("species", [SPECIES, ("Cu", "Au")])
def test_an_unknown_element_is_named(one, atoms, species):
    calculator = RigidityCalculator(one, species=species)
    assert np.isfinite(calculator.get_property("energy", atoms))
    atoms.symbols[1] = "Pt"
    with pytest.raises(ValueError, match=r"not trained on Pt: species= contains Cu, Au\. Label"):
        calculator.get_property("energy", atoms)
    refused("symbol or atomic number, got 'Xx'", RigidityCalculator, one, species=["Xx"])


def test_without_species_the_models_own_error_is_passed_on(atoms):
    class Table(Net):
        def forward(self, positions, numbers):
            if (numbers == 78).any():
                raise KeyError("no such element: 78")
            return super().forward(positions, numbers)

    uq = calibrated(rg.LastLayerRigidity(Table().double()).fit(TRAIN), VALID)
    atoms.symbols[1] = "Pt"
    with pytest.raises(KeyError, match="no such element: 78"):
        RigidityCalculator(uq).get_property("energy", atoms)


def test_atoms_on_top_of_each_other_are_named_with_their_distance(one, atoms):
    calculator = RigidityCalculator(one)
    atoms.positions[3] = atoms.positions[1]
    for shift, shown in ((0.0, "0"), (0.06, "0.06")):
        atoms.positions[3, 2] += shift
        words = rf"1 \({atoms.symbols[1]}\) and 3 \({atoms.symbols[3]}\) are {shown} Å"
        refused(words, calculator.get_property, "forces", atoms)
    atoms.positions[3, 2] += 0.06
    assert np.isfinite(calculator.get_property("energy", atoms))


def test_images_on_top_of_each_other_are_found_across_the_cell(periodic):
    uq, atoms = periodic
    atoms = atoms.copy()
    atoms.calc = RigidityCalculator(uq, inputs=crystal, wrt="pos")
    atoms.positions[5] = atoms.positions[2] + atoms.cell[0] - atoms.cell[2] + [0, 0.04, 0]
    refused(r"2 \(Cu\) and 5 \(Cu\) are 0\.04 Å", atoms.get_potential_energy)
    tiny = Atoms("Cu", cell=[5, 5, 0.05], pbc=True, calculator=atoms.calc)
    refused(r"0 \(Cu\) and its own image are 0\.05 Å", tiny.get_potential_energy)


@pytest.mark.parametrize("pbc", list(itertools.product([False, True], repeat=3)))
def test_the_closest_pair_is_that_of_a_full_neighbour_list(pbc):
    rng = np.random.default_rng(5)
    for within in (0.3, 0.8, 2.5):
        cell = 2 * np.eye(3) + rng.uniform(-0.6, 0.6, (3, 3))
        atoms = Atoms("Cu6", 8 * rng.uniform(-1, 1, (6, 3)), cell=cell, pbc=pbc)
        first, second, distance = neighbor_list("ijd", atoms, within)
        found = closest_pair(atoms, within)
        if not len(distance):
            assert found is None
            continue
        i, j, shortest = found
        assert shortest == pytest.approx(distance.min(), rel=1e-9)
        assert (i, j) in set(zip(first, second, strict=True))


def test_a_periodic_direction_without_a_cell_has_no_images(one):
    atoms = Atoms("Cu2", [[0, 0, 0], [0, 0, 3.0]], pbc=True)
    assert closest_pair(atoms, 0.5) is None


def test_a_missing_fit_is_told_at_once_and_a_missing_calibration_at_the_first_use(one, atoms):
    refused(r"Call fit\(x, y\) first", RigidityCalculator, rg.LastLayerRigidity(one.model))
    refused("LastLayerRigidity, got Net", RigidityCalculator, one.model, error=TypeError)
    atoms.calc = RigidityCalculator(rg.LastLayerRigidity(one.model).fit(TRAIN))
    with pytest.warns(UserWarning, match=r"not calibrated.*calibrate\(x, y\)"):
        atoms.get_forces()
    atoms.rattle(0.01)
    atoms.get_forces()


def test_an_output_that_is_not_one_number_is_refused(one, atoms):
    class PerAtom(Net):
        def forward(self, positions, numbers):
            return self.local(positions[None], numbers[None])[0, :, 0]

    model = PerAtom(heads=1).double()
    rows = [(p, z, y.expand(4)) for p, z, y in zip(*TRAIN, strict=True)]
    uq = calibrated(rg.LastLayerRigidity(model).fit(rows[:60]), rows[60:])
    with pytest.raises(ValueError, match=r"one number for the structure, got .*\(4,\)\. Let the"):
        RigidityCalculator(uq).get_property("forces", atoms)


def test_a_calibrated_noise_is_divided_by_the_loss_weight_of_the_structure(atoms):
    weight = lambda batch: torch.full((len(batch[-1]),), 0.25, dtype=torch.float64)  # noqa: E731
    uq = rg.LastLayerRigidity(Net().double()).fit(TRAIN, sample_weight=weight)
    uq.calibrate(VALID, method=rg.Paper(noise="constant"))
    weights = (None, 1.0), (lambda atoms: 1 / len(atoms), 1.0), (lambda atoms: 0.05, 5.0)
    for given, factor in weights:  # 0.25 is what the rows of the fit have, and what None stands for
        calculator = RigidityCalculator(uq, sample_weight=given)
        bar = calculator.get_property("energy_std", atoms)
        found = uq.predict([calculator._batch(atoms)[0]])
        expected = found.epistemic + factor * float(uq.noise_model.level)
        assert float(uq.noise_model.level) > 0
        assert bar == pytest.approx(float(expected) ** 0.5, rel=1e-12)
    with pytest.raises(ValueError, match="sample_weight must be a positive number, got 0"):
        RigidityCalculator(uq, sample_weight=lambda atoms: 0).get_property("energy", atoms)


def test_an_energy_that_is_not_a_number_is_refused_and_not_stored(one, atoms):
    class Fragile(Net):
        def forward(self, positions, numbers):
            far = positions.square().sum((-1, -2)).max() > 1e4
            return super().forward(positions, numbers) * (float("nan") if far else 1.0)

    uq = calibrated(rg.LastLayerRigidity(Fragile().double()).fit(TRAIN), VALID)
    calculator = RigidityCalculator(uq)
    atoms.positions[0] += 1000
    for _ in range(2):
        refused("output for this batch is NaN", calculator.get_property, "energy", atoms)
        assert calculator.results == {}


def test_an_infinite_slope_is_refused(one, atoms):
    class Kinked(Net):
        def forward(self, positions, numbers):
            height = positions[..., 0, 2] - 10.0
            scale = 1 + height.square().sqrt()
            return super().forward(positions, numbers) * scale

    uq = calibrated(rg.LastLayerRigidity(Kinked().double()).fit(TRAIN), VALID)
    atoms.positions[:, 2] += 10 - atoms.positions[0, 2]
    atoms.positions[0, 2] = 10.0  # exactly, where the root's slope is infinite
    with pytest.raises(ValueError, match="forces for this structure is NaN"):
        RigidityCalculator(uq).get_property("forces", atoms)


def test_wrong_numbers_of_inputs_and_wrong_names_are_refused(one, atoms):
    calculator = RigidityCalculator(one, inputs=lambda a: (a.positions, a.numbers, a.cell.array))
    refused(r"fitted with 2 inputs, got 3 .*Pass inputs=", calculator.get_property, "energy", atoms)
    calculator = RigidityCalculator(one, wrt="coordinates")
    refused("no input 'coordinates'", calculator.get_property, "forces", atoms)


def test_derivatives_by_something_else_than_positions_are_refused(periodic):
    uq, atoms = periodic
    calculator = RigidityCalculator(uq, inputs=crystal, wrt="cell")
    refused(r"positions of 8 atoms, got .*\(3, 3\).*wrt=", calculator.get_property, "forces", atoms)


def test_a_baseline_without_an_element_is_refused(one, atoms):
    atoms.symbols[:] = "Au"
    with pytest.raises(ValueError, match=r"no energy for Au\. Add it, in eV"):
        RigidityCalculator(one, baseline={"Cu": 1.0}).get_property("energy", atoms)
    with pytest.raises(ValueError, match=r"baseline of Au4 is nan"):
        RigidityCalculator(one, baseline=lambda a: float("nan")).get_property("energy", atoms)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": {"energy": 0.1}}, "accepts energy_std, forces_std, stress_std, got energy"),
        ({"limits": {"energy_std": 0.0}}, "limit of energy_std must be a positive number, got 0"),
        ({"limits": {"forces_std": float("nan")}}, "limit of forces_std must be a positive"),
        ({"energy_unit": -1.0}, "energy_unit must be a positive number"),
        ({"length_unit": float("inf")}, "length_unit must be a positive number"),
        ({"limits": {"stress_std": 0.1}}, "no stress.*strained=.*got none"),
    ],
)
def test_impossible_options_are_refused(one, options, words):
    refused(words, RigidityCalculator, one, **options)


def test_options_cannot_be_set_afterwards_unnoticed(one):
    with pytest.raises(TypeError, match="no parameters to set, got limits"):
        RigidityCalculator(one).set(limits={"energy_std": 0.1})


def test_without_ase_the_import_names_the_extra():
    code = "import sys; sys.modules['ase'] = None\nimport rigidities\nimport rigidities.ase"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    words = (
        'ModuleNotFoundError: This feature of rigidities needs ase: pip install "rigidities[ase]"'
    )
    assert words in done.stderr
