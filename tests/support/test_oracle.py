"""The references themselves, against closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch import nn

from tests.support import oracle, zoo


def test_jacobian_of_a_linear_layer_is_its_input_and_a_one():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    jacobian = oracle.readout_jacobian(layer, lambda m: m(x.double()), ["weight", "bias"])
    expected = torch.zeros(5, 2, 8, dtype=torch.float64)
    for k in range(2):
        expected[:, k, 3 * k : 3 * k + 3] = x.double()
        expected[:, k, 6 + k] = 1
    torch.testing.assert_close(jacobian, expected)


def test_jacobian_leaves_the_model_as_it_was():
    layer = nn.Linear(3, 1).requires_grad_(False)
    oracle.readout_jacobian(layer, lambda m: m(torch.ones(2, 3).double()), ["weight"])
    assert layer.weight.dtype == torch.float32
    assert layer.training and not layer.weight.requires_grad and layer.weight.grad is None


@pytest.mark.parametrize(
    "id", [i for i in zoo.IDS if zoo.OUTCOMES[i] in ("plain", "linear", "part")]
)
def test_cases_called_linear_are_linear_in_the_readout_weights(id):
    case = zoo.build(id)
    names = case.parameters
    finite = oracle.difference_jacobian(case.model, case.call, names)
    assert finite.abs().max() > 1e-3
    if case.differentiable:
        exact = oracle.readout_jacobian(case.model, case.call, names)
        rounding = 1e-9 if finite.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(finite.double(), exact.double(), rtol=rounding, atol=rounding)


# One is linear in each weight alone, but not in all of them together.
@pytest.mark.parametrize(
    "id",
    [i for i in zoo.IDS if zoo.OUTCOMES[i] == "local" and i != "head_with_an_adapter_inside"],
)
def test_cases_called_local_are_not_linear_in_the_readout_weights(id):
    case = zoo.build(id)
    finite = oracle.difference_jacobian(case.model, case.call, case.parameters)
    exact = oracle.readout_jacobian(case.model, case.call, case.parameters)
    assert (finite - exact).abs().max() > 1e-3


@pytest.mark.parametrize("id", zoo.IDS)
def test_building_a_case_twice_gives_the_same_model_and_data(id):
    first, second, other = zoo.build(id), zoo.build(id), zoo.build(id, draw=1)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
        assert torch.equal(tensor, other.model.state_dict()[name])
    assert torch.equal(first.target, second.target)
    assert not torch.equal(first.target, other.target)


def test_quadratic_keeps_its_digits_where_the_normal_equations_lose_them():
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(50, 4, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    singular = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)
    q = oracle.quadratic(u * singular @ v.T, v.T, ridge=1e-14)
    torch.testing.assert_close(q, 1 / (singular.square() + 1e-14), rtol=1e-8, atol=0)


def test_quadratic_agrees_with_the_inverse_of_the_weighted_gram():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(30, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(oracle.gram(features, weights) + 0.3 * torch.eye(4))
    expected = torch.einsum("nd,de,ne->n", features, inverse, features)
    torch.testing.assert_close(oracle.quadratic(features, features, 0.3, weights), expected)


def test_curvature_of_known_losses():
    y, t = torch.tensor([[0.3, -2.0], [1.5, 4.0]]), torch.zeros(2, 2)
    half_square = oracle.curvature(lambda p, t: 0.5 * (p - t) ** 2, y, t)
    assert torch.equal(half_square, torch.ones(2, 2, dtype=torch.float64))
    huber = oracle.curvature(lambda p, t: nn.functional.huber_loss(p, t, reduction="none"), y, t)
    assert huber.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    log_cosh = oracle.curvature(lambda p, t: (p - t).cosh().log().sum(-1), y, t)
    torch.testing.assert_close(log_cosh, 1 / y.double().cosh() ** 2)
    assert oracle.curvature(lambda p, t: (p - t).abs(), y, t).abs().max() == 0


def test_crps_from_its_integral_equals_the_closed_form():
    rng = np.random.default_rng(0)
    residual, variance = 3 * rng.normal(size=100), rng.uniform(0.01, 4, size=100)
    residual[0] = 40.0
    z = residual / np.sqrt(variance)
    closed = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
    expected = np.mean(np.sqrt(variance) * closed)
    assert oracle.crps(residual, variance) == pytest.approx(expected, rel=1e-7)


def test_scale_of_least_nll_and_least_absolute_criterion():
    rng = np.random.default_rng(1)
    residual, q = rng.normal(size=400), rng.uniform(0.5, 2, size=400)
    grid = np.linspace(0.3, 1.5, 1201)
    least = grid[np.argmin([oracle.nll(residual, a * q) for a in grid])]
    assert least == pytest.approx(np.mean(residual**2 / q), abs=1e-3)
    least = grid[np.argmin([oracle.absolute(residual, a * q) for a in grid])]
    assert least == pytest.approx(np.pi / 2 * np.mean(np.abs(residual) / np.sqrt(q)) ** 2, abs=1e-3)


def test_bins_are_zero_when_every_bin_has_its_variance():
    variance = np.repeat([1.0, 4.0, 9.0], 100)
    assert oracle.bins(np.sqrt(variance), variance) == pytest.approx(0)
    assert oracle.bins(np.sqrt(2 * variance), variance) == pytest.approx(math.log(2) ** 2)
    assert oracle.bins(np.ones(250), np.ones(250)) == pytest.approx(0)


def test_evidence_equals_its_eigenvalue_form():
    rng = np.random.default_rng(2)
    features, target, ridge = rng.normal(size=(40, 3)), rng.normal(size=40), 0.7
    lam, v = np.linalg.eigh(features.T @ features)
    explained = ((v.T @ features.T @ target) ** 2 / (lam + ridge)).sum()
    rest = target @ target - explained
    expected = -20 * (math.log(2 * math.pi * rest / 40) + 1)
    expected += 1.5 * math.log(ridge) - 0.5 * np.log(lam + ridge).sum()
    assert oracle.evidence(features, target, ridge) == pytest.approx(expected, rel=1e-10)


def test_evidence_is_the_gaussian_density_at_its_best_noise():
    rng = np.random.default_rng(4)
    features, target, ridge = rng.normal(size=(20, 3)), rng.normal(size=20), 2.0
    shape = np.eye(20) + features @ features.T / ridge
    densities = [
        multivariate_normal(np.zeros(20), noise * shape).logpdf(target)
        for noise in np.linspace(0.3, 3, 271)
    ]
    assert oracle.evidence(features, target, ridge) == pytest.approx(max(densities), abs=1e-3)


def test_leave_one_out_by_refits_equals_the_leverage_formula():
    rng = np.random.default_rng(3)
    features, target, ridge = rng.normal(size=(30, 4)), rng.normal(size=30), 0.5
    h = oracle.quadratic(torch.from_numpy(features), torch.from_numpy(features), ridge).numpy()
    error = target - features @ oracle.ridge_solution(features, target, ridge)
    residual, q = oracle.leave_one_out(features, target, ridge)
    np.testing.assert_allclose(residual, error / (1 - h), rtol=1e-10)
    np.testing.assert_allclose(q, h / (1 - h), rtol=1e-10)


def test_best_on_grid_finds_the_smallest_value():
    best = oracle.best_on_grid(
        lambda r, v: float(((v - 6.0) ** 2).sum()),
        np.zeros(1),
        lambda s: np.array([s]),
        [2],
        [1, 3],
    )
    assert best == (0.0, 2.0, 3.0)
