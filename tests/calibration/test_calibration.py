"""Calibration against brute force: dense grids, numerical minimisation, explicit refits."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import rigidities as rg
from tests.support import oracle

WIDTH = 8
CRITERIA = {
    "nll": oracle.nll,
    "crps": oracle.crps,
    "absolute": oracle.absolute,
    "bins": oracle.bins,
}


@dataclass(frozen=True)
class Problem:
    """A linear model, so that the features are its inputs and a one."""

    model: nn.Linear
    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor

    @property
    def residual(self) -> np.ndarray:
        return (self.y_valid - self.model(self.x_valid)).detach().numpy()

    def quadratic(self, ridge: float) -> np.ndarray:
        return oracle.quadratic(features(self.x), features(self.x_valid), ridge).numpy()

    def fitted(self) -> rg.LastLayerRigidity:
        return rg.LastLayerRigidity(self.model).fit((self.x, self.y))


def features(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    return layer


def problem(rows: int = 200, targets: int = 1, seed: int = 0, ridge: float = 3.0) -> Problem:
    """Validation residuals that truly have the variance 4 q at the given ridge.

    The features span two decades, so that the ridge has an optimum inside the spectrum.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    widths = torch.logspace(0, -2, WIDTH, dtype=torch.float64)
    model = linear(normal(targets, WIDTH), normal(targets))
    x = normal(rows, WIDTH) * widths
    x_valid = normal(rows, WIDTH) * widths * torch.exp(normal(rows, 1))
    std = 2 * oracle.quadratic(features(x), features(x_valid), ridge).sqrt()
    with torch.no_grad():
        y = model(x) + 0.3 * normal(rows, targets)
        y_valid = model(x_valid) + std[:, None] * normal(rows, targets)
    return Problem(model, x, y, x_valid, y_valid)


def size(criterion: str) -> int:
    """Rows: a binned criterion needs several bins of a hundred."""
    return 1000 if criterion == "bins" else 200


def calibrated(p: Problem, **options: object) -> tuple[rg.LastLayerRigidity, object]:
    uq = p.fitted()
    return uq, uq.calibrate((p.x_valid, p.y_valid), **options)


# --- criteria on validation rows ----------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
def test_criterion_is_no_worse_than_on_a_dense_grid(criterion):
    p = problem(size(criterion))
    uq, _ = calibrated(p, criterion=criterion)
    evaluate = CRITERIA[criterion]
    ridges, scales = np.logspace(-4, 3, 71), np.logspace(-1, 2, 31)
    residual = p.residual[:, 0]
    best = oracle.best_on_grid(evaluate, residual, p.quadratic, scales, ridges)
    assert ridges[0] < best.ridge < ridges[-1] and scales[0] < best.alpha2 < scales[-1]
    value = evaluate(residual, uq.scale.item() ** 2 * p.quadratic(float(uq.ridge)))
    assert value <= best.value + 1e-6 * abs(best.value)


@pytest.mark.parametrize("ridge", [None, 0.01, 30.0])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_scale_is_the_best_one_for_its_ridge(criterion, ridge):
    p = problem(size(criterion), seed=1)
    uq, report = calibrated(p, criterion=criterion, ridge=ridge)
    if ridge is not None:
        assert float(uq.ridge) == ridge
    q, residual = p.quadratic(float(uq.ridge)), p.residual[:, 0]
    evaluate = CRITERIA[criterion]
    found = minimize_scalar(
        lambda t: evaluate(residual, np.exp(t) * q),
        bounds=(-15, 15),
        method="bounded",
        options={"xatol": 1e-9},
    )
    # A minimum found from values alone has half the digits of its value.
    assert 2 * np.log(uq.scale.item()) == pytest.approx(found.x, abs=2e-5)
    at_scale = evaluate(residual, uq.scale.item() ** 2 * q)
    assert at_scale <= found.fun + 1e-9 * abs(found.fun)
    assert float(report.ridge) == float(uq.ridge)
    torch.testing.assert_close(torch.as_tensor(report.scale), torch.as_tensor(uq.scale))


def test_scale_in_closed_form():
    p = problem(seed=2)
    residual, q = p.residual[:, 0], p.quadratic(0.5)
    nll, _ = calibrated(p, criterion="nll", ridge=0.5)
    assert nll.scale.item() ** 2 == pytest.approx(np.mean(residual**2 / q), rel=1e-9)
    absolute, _ = calibrated(p, criterion="absolute", ridge=0.5)
    expected = np.sqrt(np.pi / 2) * np.mean(np.abs(residual) / np.sqrt(q))
    assert absolute.scale.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("criterion", ["nll", "crps"])
def test_reported_value_is_the_criterion_on_the_validation_rows(criterion):
    p = problem(seed=3)
    uq, report = calibrated(p, criterion=criterion)
    variance = uq.scale.item() ** 2 * p.quadratic(float(uq.ridge))
    expected = CRITERIA[criterion](p.residual[:, 0], variance)
    assert float(report.value) == pytest.approx(expected, rel=1e-6)


def test_reported_gain_is_over_the_best_constant_error_bar():
    p = problem(seed=3)
    uq, report = calibrated(p)
    residual = p.residual[:, 0]
    constant = oracle.nll(residual, np.full_like(residual, np.mean(residual**2)))
    variance = uq.scale.item() ** 2 * p.quadratic(float(uq.ridge))
    assert float(report.nll_constant) == pytest.approx(constant, rel=1e-9)
    assert float(report.gain) == pytest.approx(constant - oracle.nll(residual, variance), rel=1e-6)


def test_several_targets_share_the_ridge_and_each_has_its_scale():
    p = problem(targets=3, seed=4)
    with torch.no_grad():
        offset = (p.y_valid - p.model(p.x_valid)) * torch.tensor([1.0, 10.0, 0.1])
        p = Problem(p.model, p.x, p.y, p.x_valid, p.model(p.x_valid) + offset)
    uq, _ = calibrated(p)

    def total(ridge: float) -> float:
        q = p.quadratic(ridge)
        return sum(oracle.nll(r, np.mean(r**2 / q) * q) for r in p.residual.T)

    q = p.quadratic(float(uq.ridge))
    expected = np.sqrt(np.mean(p.residual**2 / q[:, None], 0))
    np.testing.assert_allclose(uq.scale.numpy(), expected, rtol=1e-9)
    least = min(total(s) for s in np.logspace(-4, 3, 71))
    assert total(float(uq.ridge)) <= least + 1e-6 * abs(least)


def test_a_constant_noise_floor_is_no_worse_than_on_a_dense_grid():
    p = problem(seed=5)
    generator = torch.Generator().manual_seed(5)
    floor = 0.5 * torch.randn(p.y_valid.shape, generator=generator, dtype=torch.float64)
    p = Problem(p.model, p.x, p.y, p.x_valid, p.y_valid + floor)
    uq, report = calibrated(p, noise="constant")
    residual = p.residual[:, 0]
    quadratics = [p.quadratic(ridge) for ridge in np.logspace(-4, 3, 57)]
    best = np.inf
    for rho in np.concatenate([[0.0], np.logspace(-4, 3, 57)]):
        for q in quadratics:
            shape = q + rho
            best = min(best, oracle.nll(residual, np.mean(residual**2 / shape) * shape))
    variance = uq.scale.item() ** 2 * p.quadratic(float(uq.ridge)) + float(report.noise)
    assert oracle.nll(residual, variance) <= best + 1e-4 * abs(best)
    np.testing.assert_allclose(
        uq.predict(p.x_valid).variance.detach().numpy()[:, 0], variance, rtol=1e-8
    )


# --- criteria on training rows ------------------------------------------------------------------


def test_evidence_chooses_the_ridge_of_the_largest_marginal_likelihood():
    p = problem(seed=6)
    uq, _ = calibrated(p, criterion="evidence")
    f, y = features(p.x).numpy(), p.y.numpy()[:, 0]
    ridges = np.logspace(-4, 3, 36)
    values = [oracle.evidence(f, y, s) for s in ridges]
    assert 0 < np.argmax(values) < len(ridges) - 1
    found = oracle.evidence(f, y, float(uq.ridge))
    assert found >= max(values) - 1e-6 * abs(max(values))
    # The evidence's own scale is the noise's: the scale comes from the residuals.
    q, residual = p.quadratic(float(uq.ridge)), p.residual[:, 0]
    assert uq.scale.item() ** 2 == pytest.approx(np.mean(residual**2 / q), rel=1e-6)


def test_evidence_with_sample_weights_is_that_of_the_whitened_rows():
    # A loss weight c divides the noise, so the evidence is that of sqrt(c) f and sqrt(c) y. Rows
    # given twice at half the weight are twice as many observations, and do change it.
    p = problem(seed=6)
    weights = torch.linspace(0.2, 3.0, len(p.x), dtype=torch.float64)
    uq = rg.LastLayerRigidity(p.model)
    uq.fit((p.x, p.y), sample_weight=lambda batch: weights)
    uq.calibrate((p.x_valid, p.y_valid), criterion="evidence")
    root = weights.sqrt()[:, None]
    f, y = (root * features(p.x)).numpy(), (root * p.y).numpy()[:, 0]
    best = max(oracle.evidence(f, y, s) for s in np.logspace(-4, 3, 36))
    assert oracle.evidence(f, y, float(uq.ridge)) >= best - 1e-6 * abs(best)


def ridge_regression(p: Problem, ridge: float) -> Problem:
    """The same data with a last layer refitted at a ridge."""
    w = oracle.ridge_solution(features(p.x).numpy(), p.y.numpy()[:, 0], ridge)
    model = linear(torch.from_numpy(w[None, :-1]), torch.from_numpy(w[-1:]))
    return Problem(model, p.x, p.y, p.x_valid, p.y_valid)


@pytest.mark.parametrize("ridge", [0.05, 2.0])
def test_leave_one_out_equals_explicit_refits(ridge):
    p = ridge_regression(problem(seed=7), ridge)
    uq = p.fitted()
    uq.calibrate(train=(p.x, p.y), criterion="loo", ridge=ridge)
    residual, q = oracle.leave_one_out(features(p.x).numpy(), p.y.numpy()[:, 0], ridge)
    assert uq.scale.item() ** 2 == pytest.approx(np.mean(residual**2 / q), rel=1e-8)


def test_leave_one_out_chooses_the_ridge_of_the_least_nll():
    p = ridge_regression(problem(seed=8), 0.5)
    uq = p.fitted()
    uq.calibrate(train=(p.x, p.y), criterion="loo")
    error = (p.y - p.model(p.x)).detach().numpy()[:, 0]

    def profile(ridge: float) -> float:
        h = oracle.quadratic(features(p.x), features(p.x), ridge).numpy()
        residual, q = error / (1 - h), h / (1 - h)
        return oracle.nll(residual, np.mean(residual**2 / q) * q)

    least = min(profile(s) for s in np.logspace(-4, 3, 71))
    assert profile(float(uq.ridge)) <= least + 1e-6 * abs(least)


# --- invariances --------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", [*CRITERIA, "evidence"])
def test_error_bars_scale_with_the_target(criterion):
    p = problem(size(criterion), seed=9)
    a, b = -250.0, 0.0 if criterion == "evidence" else 7.0  # its prior is centred at zero weights
    model = linear(a * p.model.weight.data, a * p.model.bias.data + b)
    scaled = Problem(model, p.x, a * p.y + b, p.x_valid, a * p.y_valid + b)
    uq, _ = calibrated(p, criterion=criterion)
    other, _ = calibrated(scaled, criterion=criterion)
    assert float(other.ridge) == pytest.approx(float(uq.ridge), rel=1e-3)
    expected, std = uq.predict(p.x_valid).std, other.predict(p.x_valid).std
    torch.testing.assert_close(std, abs(a) * expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_twice_the_rows_at_half_the_weight_change_nothing(criterion):
    p = problem(size(criterion), seed=10)
    uq, _ = calibrated(p, criterion=criterion)
    twice = rg.LastLayerRigidity(p.model)
    half = lambda batch: torch.full((len(batch[0]),), 0.5, dtype=torch.float64)  # noqa: E731
    twice.fit((torch.cat([p.x, p.x]), torch.cat([p.y, p.y])), sample_weight=half)
    torch.testing.assert_close(twice.gram.matrix, uq.gram.matrix)
    twice.calibrate((p.x_valid, p.y_valid), criterion=criterion)
    assert float(twice.ridge) == pytest.approx(float(uq.ridge), rel=1e-4)
    torch.testing.assert_close(twice.predict(p.x_valid).std, uq.predict(p.x_valid).std)


@pytest.mark.parametrize("criterion", [*CRITERIA, "evidence"])
def test_the_order_of_the_features_does_not_matter(criterion):
    p = problem(size(criterion), seed=11)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    model = linear(p.model.weight.data[:, order], p.model.bias.data)
    shuffled = Problem(model, p.x[:, order], p.y, p.x_valid[:, order], p.y_valid)
    uq, _ = calibrated(p, criterion=criterion)
    other, _ = calibrated(shuffled, criterion=criterion)
    assert float(other.ridge) == pytest.approx(float(uq.ridge), rel=1e-4)
    expected = uq.predict(p.x_valid).std
    torch.testing.assert_close(other.predict(p.x_valid[:, order]).std, expected)
