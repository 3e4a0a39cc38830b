"""Calibration against brute force: dense grids, numerical minimisation, explicit refits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import rigidities as rg
from rigidities.calibration.evidence import evidence
from rigidities.calibration.methods import Paper
from tests.support import nets, oracle
from tests.support.refusals import refused

WIDTH = 8
CRITERIA = {
    "nll": oracle.nll,
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
    uq.calibrate((p.x_valid, p.y_valid), method=Paper(**options))
    return uq, uq.calibration_report


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


@pytest.mark.parametrize("criterion", ["nll"])
def test_reported_value_is_the_criterion_on_the_validation_rows(criterion):
    p = problem(seed=3)
    uq, report = calibrated(p, criterion=criterion)
    variance = uq.scale.item() ** 2 * p.quadratic(float(uq.ridge))
    expected = CRITERIA[criterion](p.residual[:, 0], variance)
    assert float(report.value) == pytest.approx(expected, rel=1e-6)


def test_reported_gain_is_over_the_constant_bar_of_the_other_folds():
    p = problem(seed=3)
    _, report = calibrated(p, ridge=0.5)
    residual, q = p.residual[:, 0], p.quadratic(0.5)
    gains = np.empty_like(residual)
    for k in range(5):
        out = np.arange(len(residual)) % 5 == k
        scale2 = np.mean(residual[~out] ** 2 / q[~out])
        constant = np.mean(residual[~out] ** 2)
        for i in out.nonzero()[0]:
            bars = oracle.nll(residual[i : i + 1], scale2 * q[i : i + 1])
            gains[i] = oracle.nll(residual[i : i + 1], np.full(1, constant)) - bars
    assert report.gain == pytest.approx(gains.mean(), rel=1e-9)
    assert report.gain_error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5, rel=1e-9)
    alone = [np.delete(gains, i).mean() for i in range(len(gains))]
    farthest = max(alone, key=lambda without: abs(without - gains.mean()))
    assert report.gain_without == pytest.approx(farthest, rel=1e-9)


def test_the_constant_bar_is_the_root_mean_square_error_of_the_calibration_rows():
    p = problem(seed=3)
    _, report = calibrated(p)
    residual = p.residual[:, 0]
    assert report.constant.tolist() == pytest.approx([np.mean(residual**2) ** 0.5], rel=1e-9)
    constant = oracle.nll(residual, np.full_like(residual, np.mean(residual**2)))
    assert report.nll_constant == pytest.approx(constant, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Target 1. The calibration rows have an RMS error")
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
    variance = uq.scale.item() ** 2 * p.quadratic(float(uq.ridge)) + float(report.noise_level)
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
    values = [oracle.restricted_evidence(f, y, s) for s in ridges]
    assert 0 < np.argmax(values) < len(ridges) - 1
    found = oracle.restricted_evidence(f, y, float(uq.ridge))
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
    uq.calibrate((p.x_valid, p.y_valid), method=Paper(criterion="evidence"))
    root = weights.sqrt()[:, None]
    f, y = (root * features(p.x)).numpy(), (root * p.y).numpy()[:, 0]
    best = max(oracle.restricted_evidence(f, y, s) for s in np.logspace(-4, 3, 36))
    assert oracle.restricted_evidence(f, y, float(uq.ridge)) >= best - 1e-6 * abs(best)


@pytest.mark.parametrize("biases", [[WIDTH], [0, WIDTH], [0, 1, WIDTH]])
def test_the_evidence_is_that_of_contrasts_which_no_bias_changes(biases):
    p = problem(seed=6)
    x = p.x.clone()
    x[:, 0], x[:, 1] = 2.0, torch.arange(len(x))  # a bias that another equals takes no second row
    rows = features(x)
    gram = rg.Gram(WIDTH + 1)
    w = torch.cat([p.model.weight, p.model.bias[:, None]], 1).detach().mT
    gram.update(rows, residuals=p.y - rows @ w)
    value = evidence(gram, rg.Posterior.from_gram(gram, 1.0), w, torch.tensor(biases))
    ridges = torch.tensor([0.01, 0.3, 20.0], dtype=torch.float64)
    left = len(x) - len(biases) + (0 in biases)
    y = p.y.numpy()[:, 0]
    expected = [oracle.restricted_evidence(rows.numpy(), y, float(s), biases) for s in ridges]
    np.testing.assert_allclose(-left * value(ridges).numpy(), expected, rtol=1e-9)


def test_the_evidence_of_no_more_rows_than_biases_is_refused():
    p = problem(seed=6)
    uq = rg.LastLayerRigidity(p.model).fit((p.x[:1], p.y[:1]))
    refused(
        "more rows than the readout has biases, got 1",
        uq.calibrate,
        (p.x, p.y),
        method=Paper(criterion="evidence"),
    )


@pytest.mark.parametrize(("offset", "known"), [(1e5, True), (1e7, False), (1e8, False)])
def test_the_evidence_of_residuals_beside_a_far_offset_is_right_or_refused(offset, known):
    p = problem(seed=6)
    uq = rg.LastLayerRigidity(p.model).fit((p.x, p.y + offset))
    if not known:
        refused(
            "lost to rounding",
            uq.calibrate,
            (p.x_valid, p.y_valid),
            method=Paper(criterion="evidence"),
        )
        return
    uq.calibrate((p.x_valid, p.y_valid), method=Paper(criterion="evidence"))
    expected, _ = calibrated(p, criterion="evidence")
    assert float(uq.ridge) == pytest.approx(float(expected.ridge), rel=0.05)


@pytest.mark.parametrize("wild", [1e3, 1e9])
def test_the_evidence_after_a_wild_row_is_forgotten_is_right_or_refused(wild):
    p = problem(seed=6)
    x, y = torch.cat([p.x, p.x[:1] + 1]), torch.cat([p.y, p.y[:1] + wild])
    uq = rg.LastLayerRigidity(p.model).fit((x, y)).forget((x[-1:], y[-1:]))
    if wild > 1e8:
        refused(
            "needs the residuals of the fit",
            uq.calibrate,
            (p.x, p.y),
            method=Paper(criterion="evidence"),
        )
        return
    _, one = calibrated(p, criterion="evidence")
    report = uq.calibrate(
        (p.x_valid, p.y_valid), method=Paper(criterion="evidence")
    ).calibration_report
    assert report.value == pytest.approx(one.value, rel=1e-6)


def ridge_regression(p: Problem, ridge: float) -> Problem:
    """The same data with a last layer refitted at a ridge."""
    w = oracle.ridge_solution(features(p.x).numpy(), p.y.numpy()[:, 0], ridge)
    model = linear(torch.from_numpy(w[None, :-1]), torch.from_numpy(w[-1:]))
    return Problem(model, p.x, p.y, p.x_valid, p.y_valid)


@pytest.mark.parametrize("ridge", [0.05, 2.0])
def test_leave_one_out_equals_explicit_refits(ridge):
    p = ridge_regression(problem(seed=7), ridge)
    uq = p.fitted()
    uq.calibrate(train=(p.x, p.y), method=Paper(criterion="loo", ridge=ridge))
    residual, q = oracle.leave_one_out(features(p.x).numpy(), p.y.numpy()[:, 0], ridge)
    assert uq.scale.item() ** 2 == pytest.approx(np.mean(residual**2 / q), rel=1e-8)


def test_leave_one_out_chooses_the_ridge_of_the_least_nll():
    p = ridge_regression(problem(seed=8), 0.5)
    uq = p.fitted()
    uq.calibrate(train=(p.x, p.y), method=Paper(criterion="loo"))
    error = (p.y - p.model(p.x)).detach().numpy()[:, 0]

    def profile(ridge: float) -> float:
        h = oracle.quadratic(features(p.x), features(p.x), ridge).numpy()
        residual, q = error / (1 - h), h / (1 - h)
        return oracle.nll(residual, np.mean(residual**2 / q) * q)

    least = min(profile(s) for s in np.logspace(-4, 3, 71))
    assert profile(float(uq.ridge)) <= least + 1e-6 * abs(least)


# --- invariances --------------------------------------------------------------------------------

ALL = [*CRITERIA, "evidence", "loo"]
NOISES = ["none", "constant", "bayes"]
each_way = pytest.mark.parametrize(("criterion", "noise"), [(c, n) for c in ALL for n in NOISES])


@dataclass(frozen=True)
class Sums:
    """Energies: sums over the atoms of two species, each with a head and a bias of its own."""

    model: nn.Module
    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor

    @classmethod
    def of(cls, p: Problem, a: float = 1.0, b: Sequence[float] = (0.0, 0.0)) -> "Sums":
        """Of a problem's rows, one atom each: y -> a y + b_1 n_1 + b_2 n_2."""
        weight, bias = p.model.weight.data, p.model.bias.data
        shifted = [a * bias + float(one) for one in b]
        heads = [linear(a * weight, shifted[0]), linear(-2 * a * weight, shifted[1])]

        def run(net: nets.Net, atoms: Tensor, count: Tensor) -> Tensor:
            one, two = (head(atoms).squeeze(-1) for head in net.heads)
            place = torch.arange(4)
            first, second = place < count[:, :1], place >= count[:, 1:]
            return (one * first).sum(1, keepdim=True) + (two * second).sum(1, keepdim=True)

        model = nets.Net(run, heads=nn.ModuleList(heads))
        pairs = []
        for x, y in ((p.x, p.y), (p.x_valid, p.y_valid)):
            atoms = x.reshape(-1, 4, WIDTH)
            count = torch.arange(2 * len(atoms)).reshape(-1, 2) % 5
            noise = (y - p.model(x)).detach().reshape(-1, 4)[:, :1]
            with torch.no_grad():
                pairs += [(atoms, count), model(atoms, count) + a * noise]
        return cls(model, *pairs)


def moved(p: Problem, a: float, b: float) -> Problem:
    """y -> a y + b, the readout with it."""
    model = linear(a * p.model.weight.data, a * p.model.bias.data + b)
    return Problem(model, p.x, a * p.y + b, p.x_valid, a * p.y_valid + b)


def std_after(p: Any, criterion: str, noise: str, weight: Any = None) -> tuple[float, Tensor]:
    """Ridge and error bars on the validation rows."""
    uq = rg.LastLayerRigidity(p.model)

    def together(x: Any, y: Tensor) -> tuple[Tensor, ...]:
        return (*x, y) if isinstance(x, tuple) else (x, y)

    train, valid = together(p.x, p.y), together(p.x_valid, p.y_valid)
    uq.fit(train, sample_weight=weight)
    data = {"train": train} if criterion == "loo" else {"x": valid}
    uq.calibrate(**data, method=Paper(criterion=criterion, noise=noise))
    return float(uq.ridge), uq.predict(valid).std.detach()


def same(left: tuple[float, Tensor], right: tuple[float, Tensor], factor: float = 1.0) -> None:
    assert right[0] == pytest.approx(left[0], rel=1e-6)
    torch.testing.assert_close(right[1], factor * left[1], rtol=1e-6, atol=0)


@each_way
def test_the_unit_and_offset_of_the_target_move_the_error_bars_by_the_unit_alone(criterion, noise):
    p, a = problem(size(criterion), targets=2, seed=9), -250.0
    same(std_after(p, criterion, noise), std_after(moved(p, a, 1000.0), criterion, noise), -a)


def test_evidence_has_no_prior_on_the_bias_of_any_module_either():
    p = problem(size("evidence"), seed=9)

    class Affine(nn.Module):
        def __init__(self, own: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(own.weight.data), nn.Parameter(own.bias.data)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mT + self.bias

    ridges = []
    for one in (p, moved(p, 1.0, 1000.0)):
        uq = rg.LastLayerRigidity(Affine(one.model), layer="").fit((one.x, one.y))
        uq.calibrate((one.x_valid, one.y_valid), method=Paper(criterion="evidence"))
        ridges.append(uq.ridge)
    assert uq.readout.kind == "parameters" and ridges[1] == pytest.approx(ridges[0], rel=1e-6)


@each_way
def test_an_offset_for_each_atom_changes_nothing(criterion, noise):
    p = problem(4 * size(criterion), seed=9)
    plain = std_after(Sums.of(p), criterion, noise)
    same(plain, std_after(Sums.of(p, 3.0, (-400.0, 70.0)), criterion, noise), 3.0)


@each_way
def test_the_order_of_rows_and_features_does_not_matter(criterion, noise):
    p = problem(size(criterion), seed=11)
    generator = torch.Generator().manual_seed(0)
    rows, some = (torch.randperm(n, generator=generator) for n in (len(p.x), WIDTH))
    model = linear(p.model.weight.data[:, some], p.model.bias.data)
    x, x_valid = p.x[rows][:, some], p.x_valid[rows][:, some]
    other = Problem(model, x, p.y[rows], x_valid, p.y_valid[rows])
    ridge, std = std_after(p, criterion, noise)
    same((ridge, std[rows]), std_after(other, criterion, noise))


@each_way
def test_the_unit_of_the_weights_does_not_matter(criterion, noise):
    # They divide the noise of an observation: relative to each other, whatever their sum.
    p = problem(size(criterion), seed=12)
    weigh = lambda batch: batch[0][:, 0].detach().abs() + 0.1  # noqa: E731
    ridge, std = std_after(p, criterion, noise, weigh)
    heavy = std_after(p, criterion, noise, lambda batch: 500.0 * weigh(batch))
    same((500 * ridge, std), heavy)


@pytest.mark.parametrize("noise", ["none", "constant"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_thrice_the_rows_at_a_third_of_the_weight_change_nothing(criterion, noise):
    # But for evidence, loo and noise="bayes", which take copies for further observations.
    p = problem(size(criterion), seed=10)
    thrice = Problem(p.model, p.x.repeat(3, 1), p.y.repeat(3, 1), p.x_valid, p.y_valid)
    third = lambda batch: torch.full((len(batch[0]),), 1 / 3, dtype=torch.float64)  # noqa: E731
    same(std_after(p, criterion, noise), std_after(thrice, criterion, noise, third))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("criterion", ["nll", "evidence"])
def test_calibration_rows_given_twice_change_nothing(criterion, noise):
    p = problem(seed=13)
    twice = Problem(p.model, p.x, p.y, p.x_valid.repeat(2, 1), p.y_valid.repeat(2, 1))
    ridge, std = std_after(p, criterion, noise)
    same((ridge, std.repeat(2, 1)), std_after(twice, criterion, noise))


def half_empty(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of inputs, every third of which is zero, and noisy targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    x[::3] = 0
    noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.3 * noise


@pytest.mark.parametrize("criterion", ["nll", "bins", "evidence"])
def test_rows_without_features_are_left_out_of_the_papers_form_with_a_notice(criterion):
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    uq = rg.LastLayerRigidity(model).fit(half_empty(90, 0))
    x, y = half_empty(300, 1)
    some = x.any(1)
    plain = uq.calibrate(x[some], y[some], method=Paper(criterion=criterion)).calibration_report
    with pytest.warns(UserWarning, match="features of 100 of 300 rows are zero"):
        report = uq.calibrate(x, y, method=Paper(criterion=criterion)).calibration_report
    assert report.calibration.ridge == pytest.approx(plain.calibration.ridge)
    torch.testing.assert_close(report.calibration.scale, plain.calibration.scale)
    assert report.nll == pytest.approx(plain.nll) and math.isfinite(report.nll)
    assert report.nll_constant == pytest.approx(plain.nll_constant)
    assert any("left out of the calibration" in remark for remark in report.remarks)
    std = uq.predict(x).std
    assert bool((std[~some] == 0).all()) and bool((std[some] > 0).all())


@pytest.mark.parametrize("method", ["full", Paper(noise="constant")])
def test_a_noise_is_the_bar_of_rows_without_features(method):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    uq = rg.LastLayerRigidity(model).fit(half_empty(300, 0))
    x, y = half_empty(300, 1)
    uq.calibrate(x, y, method=method)
    std = uq.predict(x).std[::3]
    assert bool((std > 0.2).all()) and bool((std < 0.45).all())
