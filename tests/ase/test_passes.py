"""How many passes bars of forces and stress take; they equal the dense ones in any case."""

from collections import Counter

import numpy as np
import pytest
import torch

import rigidities as rg
from rigidities.ase import graphs
from rigidities.models import derivatives
from tests.support.nets import derivative_scale
from tests.support.pairs import CUTOFF, VOIGT, Pairs, crystals

WORK = ["energy", "forces", "stress"]
FEATURES = 9  # eight and the bias's
TOLD = hasattr(torch.ones(1, requires_grad=True).exp().grad_fn, "_input_metadata")
pytestmark = pytest.mark.skipif(not TOLD, reason="this torch does not tell what a graph carries")


class LooksAtItsGradient(torch.autograd.Function):
    """The identity, with a backward pass that cannot be batched."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert bool(torch.isfinite(gradient).all())
        return gradient


class Unbatchable(Pairs):
    def forward(self, z, vectors, edge_index, batch, count):
        vectors = LooksAtItsGradient.apply(vectors)
        return super().forward(z, vectors, edge_index, batch, count)


def energies(model, batch):
    i, j = batch["edge_index"]
    vectors = batch["pos"][j] - batch["pos"][i] + batch["shifts"]
    count = len(batch["ptr"]) - 1
    return model(batch["z"], vectors, batch["edge_index"], batch["batch"], count)


def fitted(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind().double()
    host = graphs(model, energies, cutoff=CUTOFF).fit(crystals(20, 0))
    ridge = 1e-3 * float(host.uq.gram.matrix.diagonal().sum())
    host.calibrate(crystals(12, 1), method=rg.Paper(ridge=ridge))
    return host


@pytest.fixture(scope="module", params=[Pairs, Unbatchable])
def host(request):
    return fitted(request.param)


@pytest.fixture
def atoms():
    (structure,) = crystals(1, 2)
    # 54 coordinates and strains: more than features, so that backward passes are fewer
    return structure * (2, 2, 1)


@pytest.fixture
def passes(host, atoms, monkeypatch):
    """Counts forward passes, and backward passes of the features by their kind."""
    counts = Counter()
    grad = torch.autograd.grad

    def counted(outputs, inputs, grad_outputs=None, **options):
        batched = options.get("is_grads_batched", False)
        if isinstance(outputs, torch.Tensor) and outputs.numel() == FEATURES:
            counts["batched" if batched else "single"] += 1
        return grad(outputs, inputs, grad_outputs, **options)

    hook = host.model.net.register_forward_hook(lambda *_: counts.update(["forward"]))
    host.calculator(force_bars=False).calculate(atoms, WORK)  # the model is checked for the hook
    counts.clear()
    monkeypatch.setattr(torch.autograd, "grad", counted)
    yield counts
    hook.remove()


def results(host, atoms):
    calculator = host.calculator(members=0)
    calculator.calculate(atoms, WORK)
    return calculator.results


def dense_bars(host, atoms):
    """Of forces and stress: one backward pass for each weight of the readout, in plain torch."""
    (batch,) = host.batches([atoms])
    x = batch["pos"].clone().requires_grad_()
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    mixed = torch.eye(3, dtype=torch.float64) + (strain + strain.mT) / 2
    moved = {"pos": x @ mixed, "shifts": batch["shifts"] @ mixed}
    weights = list(host.model.head.parameters())
    energy = energies(host.model, {**batch, **moved}).sum()
    parts = torch.autograd.grad(energy, weights, create_graph=True)
    rows = []
    for feature in torch.cat([part.flatten() for part in parts]):
        by_atoms, by_strain = torch.autograd.grad(feature, [x, strain], retain_graph=True)
        six = torch.stack([by_strain[i, j] for i, j in VOIGT])
        rows.append(torch.cat([by_atoms.flatten(), six]))
    jacobian = torch.stack(rows)
    matrix = host.uq.gram.matrix.squeeze()
    matrix = matrix + host.uq.ridge * torch.eye(len(matrix), dtype=torch.float64)
    variance = (jacobian * torch.linalg.solve(matrix, jacobian)).sum(0)
    bars = (derivative_scale(host.uq) * variance.sqrt()).numpy()
    return bars[:-6].reshape(-1, 3), bars[-6:] / atoms.get_volume()


def check_dense(found, host, atoms):
    forces, stress = dense_bars(host, atoms)
    np.testing.assert_allclose(found["forces_std"], forces, rtol=1e-8)
    np.testing.assert_allclose(found["stress_std"], stress, rtol=1e-8)


def test_forces_and_stress_share_one_forward_pass_and_one_batched_backward_pass(
    host, atoms, passes
):
    found = results(host, atoms)
    refused = {"single": FEATURES} if isinstance(host.model, Unbatchable) else {}
    assert passes == Counter({"forward": 1, "batched": 1} | refused)
    check_dense(found, host, atoms)


def test_a_batched_pass_that_is_refused_is_not_tried_again(host, atoms, passes, monkeypatch):
    monkeypatch.setattr(derivatives, "CPU_BYTES", 1 << 18)
    found = results(host, atoms)
    if isinstance(host.model, Unbatchable):
        assert passes == Counter({"forward": 1, "batched": 1, "single": FEATURES})
    else:
        assert passes["forward"] == 1 and passes["batched"] > 1
    check_dense(found, host, atoms)


def test_gradients_too_large_for_the_cache_are_pulled_one_by_one(host, atoms, passes, monkeypatch):
    monkeypatch.setattr(derivatives, "BATCHED_BYTES", 0)
    found = results(host, atoms)
    assert passes == Counter({"forward": 1, "single": FEATURES})
    check_dense(found, host, atoms)


def test_what_a_graph_carries_counts_each_operation_once():
    x = torch.ones(10, dtype=torch.float64, requires_grad=True)
    y = x * 2
    values = y.sin() + y.cos()  # five operations, with that which leads to x
    assert derivatives._graph_size(values) == (5, 5 * 80)
    assert derivatives.at_once(values) == 64
    assert derivatives._graph_size(torch.ones(3)) == (1, 0)
