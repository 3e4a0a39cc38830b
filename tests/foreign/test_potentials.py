"""`rigidities.ase` around models of other libraries: their own values, and bars by hand."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress

import rigidities as rg
from rigidities.ase import graphs, mace, schnetpack
from tests.foreign.molecules import mace_model
from tests.support.nets import derivative_scale
from tests.support.pairs import CUTOFF, VOIGT, Pairs, crystals, strained_bars

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

TRAIN, VALID = crystals(24, 0), crystals(16, 1)


@pytest.fixture
def atoms():
    (found,) = crystals(1, 2)
    found.calc = None
    return found


def calibrated(host, **options):
    host.fit(TRAIN, **options)
    host.calibrate(VALID, method=rg.Paper(ridge=1e-3 * float(host.uq.gram.matrix.diagonal().sum())))
    return host


def copper_and_gold(dtype=torch.float64):
    model = mace_model(numbers=[29, 79])
    return model.to(dtype)


@pytest.fixture(scope="module")
def fitted_mace():
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        host = calibrated(mace(copper_and_gold()))
    torch.set_default_dtype(before)
    return host


def energy_of(host, batch, positions, strain):
    """The energy with positions and a symmetric strain of everything, in plain torch."""
    mixed = torch.eye(3, dtype=torch.float64) + (strain + strain.mT) / 2
    moved = {key: batch[key] @ mixed for key in ("cell", "shifts")}
    return host.model({**batch, "positions": positions @ mixed, **moved}, compute_force=False)[
        "energy"
    ]


def readout_weights(model):
    named = dict(model.named_parameters())
    return [named["readouts.0.linear.weight"], named["readouts.1.linear_2.weight"]]


def by_weights(host, batch, positions, strain):
    """Derivatives of one energy by the readouts' weights, differentiable."""
    energy = energy_of(host, batch, positions, strain)
    found = torch.autograd.grad(energy.sum(), readout_weights(host.model), create_graph=True)
    return torch.cat([part.flatten() for part in found])


def brute_force(host, atoms):
    """Bars of energy, forces and stress: every entry of the Jacobian by a pass of its own."""
    zero = torch.zeros(3, 3, dtype=torch.float64)
    rows = []
    for one in TRAIN:
        (batch,) = host.batches([one])
        rows.append(by_weights(host, batch, batch["positions"], zero).detach() / len(one))
    rows = torch.stack(rows)
    matrix = rows.mT @ rows + host.uq.ridge * torch.eye(rows.shape[1], dtype=torch.float64)
    (batch,) = host.batches([atoms])
    x, strain = batch["positions"].clone().requires_grad_(), zero.clone().requires_grad_()
    features = by_weights(host, batch, x, strain)
    columns = [torch.autograd.grad(one, [x, strain], retain_graph=True) for one in features]
    slopes = torch.stack([part.flatten() for part, _ in columns])
    strains = torch.stack([torch.stack([part[i, j] for i, j in VOIGT]) for _, part in columns])

    def bars(jacobian, scale):
        return (scale * (jacobian * torch.linalg.solve(matrix, jacobian)).sum(0).sqrt()).numpy()

    scale = derivative_scale(host.uq)
    energy = bars(features.detach()[:, None], host.uq.scale)
    stress = bars(strains, scale) / atoms.get_volume()
    return energy.item(), bars(slopes, scale).reshape(-1, 3), stress


def test_mace_gives_the_values_of_its_own_calculator_and_bars_of_brute_force(fitted_mace, atoms):
    from mace.calculators import MACECalculator

    host = fitted_mace
    for weight in host.model.parameters():
        weight.requires_grad_(True)
    expected = brute_force(host, atoms)
    atoms.calc = host.calculator()
    atoms.get_stress()
    found = atoms.calc.results
    own = MACECalculator(models=host.model, device="cpu", default_dtype="float64")
    for name in ("energy", "forces", "stress"):
        value = own.get_property(name, atoms)
        np.testing.assert_allclose(found[name], value, rtol=1e-8, atol=1e-10)
    for name, value in zip(("energy_std", "forces_std", "stress_std"), expected, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-8)


def test_a_mace_calculator_is_taken_as_its_model(fitted_mace, atoms):
    from mace.calculators import MACECalculator

    own = MACECalculator(
        models=fitted_mace.model, device="cpu", default_dtype="float64", energy_units_to_eV=2.0
    )
    host = mace(own)
    assert host.model is fitted_mace.model and host.energy_unit == 2.0
    calibrated(host)
    found = host.calculator(force_bars=False)
    for name in ("energy", "forces", "stress"):
        expected = own.get_property(name, atoms)
        np.testing.assert_allclose(found.get_property(name, atoms), expected, rtol=1e-9, atol=1e-12)
    own.models = own.models * 2
    with pytest.raises(ValueError, match=r"one model, got 2.*\.models"):
        mace(own)


def test_what_a_mace_does_not_have_is_refused_by_name(fitted_mace, atoms):
    from mace.calculators import MACECalculator

    with pytest.raises(ValueError, match=r"heads, \['Default'\], got 'nope'"):
        mace(fitted_mace.model, head="nope")
    own = {"models": fitted_mace.model, "device": "cpu", "default_dtype": "float64"}
    with pytest.raises(ValueError, match="length_units_to_A must be 1"):
        mace(MACECalculator(**own, length_units_to_A=0.5))
    atoms.symbols[0] = "Pt"
    with pytest.raises(ValueError, match="has no Pt"):
        fitted_mace.batches([atoms])


def test_another_model_than_schnetpacks_is_refused():
    with pytest.raises(TypeError, match="NeuralNetworkPotential, got a Linear"):
        schnetpack(torch.nn.Linear(2, 1))


def test_a_mace_in_single_precision_and_a_fit_of_forces_give_finite_bars(atoms):
    host = calibrated(mace(copper_and_gold(torch.float32)), forces_weight=0.1)
    atoms.calc = host.calculator()
    bars = atoms.calc.get_property("forces_std", atoms)
    assert bars.shape == (4, 3) and np.isfinite(bars).all()
    report = host.uq.calibration_report
    assert float(report.gradient_scale) != float(host.uq.scale)  # calibrated on forces


def test_files_bring_back_the_bars(fitted_mace, atoms, tmp_path):
    import rigidities as rg

    host = mace(fitted_mace.model)
    fitted_mace.uq.save(tmp_path / "uq.safetensors")
    host.uq = rg.LastLayerRigidity.load(
        tmp_path / "uq.safetensors", host.model, forward=host.forward
    )
    expected = fitted_mace.calculator().get_property("stress_std", atoms)
    np.testing.assert_allclose(host.calculator().get_property("stress_std", atoms), expected)


def painn():
    import schnetpack as spk

    return spk.model.NeuralNetworkPotential(
        representation=spk.representation.PaiNN(
            n_atom_basis=8,
            n_interactions=1,
            radial_basis=spk.nn.GaussianRBF(n_rbf=6, cutoff=CUTOFF),
            cutoff_fn=spk.nn.CosineCutoff(CUTOFF),
        ),
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[
            spk.atomistic.Atomwise(n_in=8, output_key="energy"),
            spk.atomistic.Forces(),
        ],
        input_dtype_str="float64",
    ).double()


def pair_model():
    return graphs(Pairs().double(), by_pyg, cutoff=CUTOFF)


def by_pyg(model, given):
    from torch_geometric.data import Batch

    batch = Batch(**given)
    i, j = batch.edge_index
    vectors = batch.pos[j] - batch.pos[i] + batch.shifts
    return model(batch.z, vectors, batch.edge_index, batch.batch, batch.num_graphs)


@pytest.mark.parametrize("make", [lambda: schnetpack(painn()), pair_model], ids=["painn", "pyg"])
def test_forces_stress_and_their_bars_are_those_of_finite_differences(make, atoms):
    host = calibrated(make())
    atoms.calc = host.calculator()
    atoms.get_stress()
    results = atoms.calc.results
    still = atoms.copy()
    still.calc = host.calculator(force_bars=False)
    np.testing.assert_allclose(results["stress"], calculate_numerical_stress(still), atol=1e-7)
    np.testing.assert_allclose(results["forces"], calculate_numerical_forces(still), atol=1e-6)
    expected = strained_bars(host, atoms)
    np.testing.assert_allclose(results["stress_std"], expected, rtol=1e-4)


def test_pygs_own_schnet_is_called_with_numbers_positions_and_batch(atoms):
    from torch_geometric.nn.models import SchNet

    class Neighbours(torch.nn.Module):
        """For the library's own, which wants a compiled extension."""

        def forward(self, pos, batch):
            near = (torch.cdist(pos, pos) < 10) & (batch[:, None] == batch)
            pairs = (near & ~torch.eye(len(pos), dtype=torch.bool)).nonzero().T
            return pairs, (pos[pairs[0]] - pos[pairs[1]]).norm(dim=-1)

    model = SchNet(hidden_channels=8, num_filters=8, num_interactions=1, num_gaussians=6)
    model.interaction_graph = Neighbours()
    host = calibrated(graphs(model.double()))
    atoms.calc = host.calculator()
    expected = model(*(torch.tensor(part) for part in (atoms.numbers, atoms.positions)))
    assert atoms.get_potential_energy() == pytest.approx(expected.item(), rel=1e-9)
    assert (np.abs(atoms.get_forces()) > 0).any()


def test_batches_hold_several_structures_as_they_are_one_by_one(fitted_mace):
    whole = fitted_mace.uq.predict(fitted_mace.batches(VALID))
    each = [fitted_mace.uq.predict(fitted_mace.batches([atoms])).mean for atoms in VALID]
    torch.testing.assert_close(whole.mean, torch.cat(each))


@pytest.mark.slow
def test_the_examples_dynamics_stop_at_the_limit(capsys):
    path = Path(__file__).parents[2] / "examples" / "mace_dynamics.py"
    runpy.run_path(str(path), run_name="__main__")
    *_, stop, message = capsys.readouterr().out.splitlines()
    assert stop.startswith("stop")
    assert "bar of the energy" in message and "above the limit energy_std = 0.05" in message
