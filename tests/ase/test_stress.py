"""Stress and its error bar: finite strains of the energy, and of the features, by brute force."""

import numpy as np
import pytest
import torch
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.fd import calculate_numerical_stress
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS

import rigidities as rg
from ase import units
from rigidities.ase import RigidityCalculator, UncertainStructureError, with_error_bars
from tests.support.clusters import Crystal, fitted_crystals
from tests.support.nets import derivative_scale
from tests.support.refusals import refused

VOIGT = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]


def in_bohr(atoms):
    positions, cell = atoms.positions / units.Bohr, atoms.cell.array / units.Bohr
    return Crystal(torch.tensor(positions), torch.tensor(cell))


OPTIONS = {
    "inputs": in_bohr,
    "wrt": "pos",
    "strained": ("cell",),
    "energy_unit": units.Hartree,
    "length_unit": units.Bohr,
}


@pytest.fixture(scope="module")
def fitted():
    return fitted_crystals(in_bohr)


@pytest.fixture
def uq(fitted):
    return fitted[0]


@pytest.fixture
def atoms(fitted):
    """A sheared crystal, so that all six components count."""
    found = fitted[1].copy()
    found.set_cell(found.cell @ [[1, 0.03, 0], [0, 1.02, -0.02], [0.01, 0, 0.97]], scale_atoms=True)
    return found


def strained_features(uq, atoms, strain):
    moved = atoms.copy()
    moved.set_cell(moved.cell @ (np.eye(3) + strain), scale_atoms=True)
    return uq.features([in_bohr(moved)])[0].numpy()


def unit_strain(i, j):
    strain = np.zeros((3, 3))
    strain[i, j] += 0.5
    strain[j, i] += 0.5
    return strain


@pytest.mark.parametrize("bars", [True, False])
def test_stress_is_the_numerical_derivative_of_the_energy_by_strain(uq, atoms, bars):
    atoms.calc = RigidityCalculator(uq, force_bars=bars, **OPTIONS)
    expected = calculate_numerical_stress(atoms, eps=1e-5)
    assert np.abs(expected).min() > 1e-3
    np.testing.assert_allclose(atoms.get_stress(), expected, rtol=1e-6, atol=1e-8)
    assert atoms.get_stress(voigt=False).shape == (3, 3)


def test_its_bar_is_a_dense_solve_with_finite_strains_of_the_features(uq, atoms):
    atoms.calc = RigidityCalculator(uq, **OPTIONS)
    atoms.get_stress()
    eps, columns = 1e-5, []
    for pair in VOIGT:
        up, down = (
            strained_features(uq, atoms, sign * eps * unit_strain(*pair)) for sign in (1, -1)
        )
        columns.append((up - down) / (2 * eps))
    matrix = uq.gram.matrix.numpy() + uq.ridge * np.eye(uq.gram.width)
    variance = [g @ np.linalg.solve(matrix, g) for g in columns]
    expected = float(derivative_scale(uq)) * np.sqrt(variance) * units.Hartree / atoms.get_volume()
    np.testing.assert_allclose(atoms.calc.results["stress_std"], expected, rtol=1e-6)


def test_forces_and_energy_do_not_change_with_the_stress_beside_them(uq, atoms):
    alone = RigidityCalculator(uq, **{**OPTIONS, "strained": ()})
    alone.get_property("forces", atoms)
    atoms.calc = RigidityCalculator(uq, **OPTIONS)
    atoms.get_forces()
    assert set(atoms.calc.results) == set(alone.results) | {"stress", "stress_std"}
    for name, value in alone.results.items():
        np.testing.assert_allclose(atoms.calc.results[name], value, rtol=1e-9, atol=1e-12)


def test_without_force_bars_the_bar_of_the_stress_comes_when_it_is_asked_for(uq, atoms):
    atoms.calc = RigidityCalculator(uq, force_bars=False, **OPTIONS)
    atoms.get_stress()
    assert not {"stress_std", "forces_std"} & set(atoms.calc.results)
    assert (atoms.calc.get_property("stress_std", atoms) > 0).all()
    kept = with_error_bars(atoms)
    assert kept.info["stress_std"].shape == (6,)
    np.testing.assert_array_equal(kept.get_stress(), atoms.get_stress())


def test_the_limit_of_the_stress_does_not_depend_on_the_axes(uq, atoms):
    calculator = RigidityCalculator(uq, **OPTIONS)
    found = []
    for _ in range(2):
        bars = calculator.get_property("stress_std", atoms)
        found.append(np.sqrt((bars[:3] ** 2).sum() + 2 * (bars[3:] ** 2).sum()))
        atoms.rotate(40, (1, 2, 3), rotate_cell=True)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    for factor in (0.99, 1.01):
        limits = {"stress_std": factor * found[0]}
        atoms.calc = RigidityCalculator(uq, limits=limits, force_bars=False, **OPTIONS)
        if factor > 1:
            atoms.get_stress()
        else:
            words = rf"bar of the stress is {found[0]:.4g} eV/Å\^3, above the limit"
            refused(words, atoms.get_stress, error=UncertainStructureError)


def test_cells_can_be_relaxed(uq, atoms):
    atoms.calc = RigidityCalculator(uq, force_bars=False, **OPTIONS)
    before = atoms.get_potential_energy()
    BFGS(FrechetCellFilter(atoms, mask=[True] * 3 + [False] * 3), logfile=None).run(steps=3)
    assert atoms.get_potential_energy() < before


def test_where_there_is_no_stress_the_message_says_why(uq, atoms):
    calculator = RigidityCalculator(uq, **{**OPTIONS, "strained": ()})
    with pytest.raises(PropertyNotImplementedError, match=r"no stress.*strained=.*got none"):
        calculator.get_property("stress", atoms)
    atoms.pbc = False
    for name in ("stress", "stress_std"):
        with pytest.raises(
            PropertyNotImplementedError, match=r"got \('cell',\), and a periodic structure"
        ):
            RigidityCalculator(uq, **OPTIONS).get_property(name, atoms)
    forces = RigidityCalculator(uq, **OPTIONS).get_property("forces", atoms)
    assert forces.shape == (len(atoms), 3)


def test_a_strained_input_that_is_not_there_is_refused_by_name(uq, atoms):
    calculator = RigidityCalculator(uq, **{**OPTIONS, "strained": "shifts"})
    refused("no input 'shifts'", calculator.get_property, "stress", atoms)


def test_prediction_and_gradient_of_one_pass_are_those_of_two(uq, atoms):
    batch = [in_bohr(atoms)]
    prediction, gradient = uq.predict(batch), uq.gradient(batch, "pos")
    for bars in (True, False):
        both = uq.predict_with_gradient(batch, "pos", gradient_bars=bars)
        torch.testing.assert_close(both[0].mean, prediction.mean)
        torch.testing.assert_close(both[0].std, prediction.std)
        torch.testing.assert_close(both[1].mean, gradient.mean)
        if bars:
            torch.testing.assert_close(both[1].std, gradient.std)
        else:
            assert both[1].std.isnan().all() and both[1].std.shape == gradient.std.shape


def test_a_gradient_without_bars_has_the_shape_of_several_outputs_too():
    torch.manual_seed(0)
    x, y = torch.randn(30, 3).double(), torch.randn(30, 2).double()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    uq = rg.LastLayerRigidity(model.double()).fit((x[:20], y[:20]))
    uq.calibrate((x[20:], y[20:]), method="paper")
    expected = uq.gradient(x[:4])
    _, found = uq.predict_with_gradient(x[:4], gradient_bars=False)
    assert found.summed is expected.summed is False
    torch.testing.assert_close(found.mean, expected.mean)
