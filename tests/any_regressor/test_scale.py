"""The scale of a fit before any calibration: from its residuals, or with a warning."""

import math
import warnings

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration.methods import Paper
from rigidities.losses import GaussianNLL
from tests.support.rigidity_oracle import F64
from tests.support.tensors import normal

X = torch.linspace(-1, 1, 30, dtype=F64)
DESIGN = torch.stack([torch.ones_like(X), X], 1)
NEW = torch.tensor([-2.0, 0.1, 3.0], dtype=F64)
NOISE = 0.01
Y = 1 + 2 * X + NOISE * normal(30, seed=4)
WEIGHT = torch.linspace(0.5, 3.0, 30, dtype=F64)
UNSCALED = r"have no scale: scale 1 is used.*calibrate\(x, y\), or set_scale"


def line(w, x):
    return w[0] + w[1] * x


def two_lines(w, x):
    return torch.stack([w[0] + w[1] * x, w[2] - x], 1)


def solution(y, weight=None):
    root = torch.ones_like(X) if weight is None else weight.sqrt()
    return torch.linalg.lstsq(root[:, None] * DESIGN, (root * y)[:, None]).solution[:, 0]


W = solution(Y)


def fitted(loss="mse", **options):
    return rg.PredictionRigidity(line, W, loss, **options).fit(X, Y)


def warns_once_of_a_default_scale(pr, x):
    """A warning at the first error bar, scale 1, and no warning for rigidities."""
    assert pr.scale == 1.0
    rigidity = pr.rigidity(x)
    with pytest.warns(UserWarning, match=UNSCALED):
        variance = pr.variance(x)
    torch.testing.assert_close(variance, 1 / rigidity)
    pr.predict(x)
    pr.covariance(x)


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["OLS", "WLS"])
@pytest.mark.parametrize("hessian", ["gauss-newton", "exact"])
def test_the_bars_of_a_squared_loss_are_the_textbooks_without_a_calibration(hessian, weight):
    w = solution(Y, weight)
    pr = rg.PredictionRigidity(line, w, hessian=hessian).fit(X, Y, sample_weight=weight)
    factor = torch.ones_like(X) if weight is None else weight
    s2 = float((factor * (Y - line(w, X)).square()).sum()) / (30 - 2)
    assert pr.scale == pytest.approx(math.sqrt(s2)) == pr.residual_scale
    inverse = torch.linalg.inv(DESIGN.mT @ (factor[:, None] * DESIGN))
    rows = torch.stack([torch.ones_like(NEW), NEW], 1)
    q = torch.einsum("np,pq,nq->n", rows, inverse, rows)
    torch.testing.assert_close(pr.predict(NEW).std, (s2 * q).sqrt())
    torch.testing.assert_close(pr.parameter_covariance, s2 * inverse)
    torch.testing.assert_close(pr.rigidity(NEW), 1 / q)  # without the scale


def test_the_bars_of_a_line_follow_the_noise_of_its_data():
    standardised = []
    for seed in range(200):
        y = 1 + 2 * X + NOISE * normal(30, seed=seed)
        p = rg.PredictionRigidity(line, solution(y)).fit(X, y).predict(NEW)
        standardised.append((p.mean - line([1.0, 2.0], NEW)) / p.std)
    # A Student-t of 28 degrees of freedom: 1.04, give or take 0.05 for 200 draws.
    assert float(torch.stack(standardised).square().mean().sqrt()) == pytest.approx(1.04, abs=0.2)


def test_a_ridge_leaves_the_effective_number_of_parameters():
    ridge = 5.0
    gram = DESIGN.mT @ DESIGN
    shifted = gram + ridge * torch.eye(2, dtype=F64)
    w = torch.linalg.solve(shifted, DESIGN.mT @ Y)
    rank = float(torch.trace(torch.linalg.solve(shifted, gram)))
    rss = float((Y - line(w, X)).square().sum())
    for form in ("dense", "dual"):
        pr = rg.PredictionRigidity(line, w, ridge=ridge, form=form).fit(X, Y)
        assert pr.scale == pytest.approx(math.sqrt(rss / (30 - rank)))


def test_all_outputs_share_one_residual_scale():
    y = torch.stack([Y, 0.5 - X + NOISE * normal(30, seed=5)], 1)
    slope, offset = solution(Y), (y[:, 1] + X).mean()
    w = torch.stack([*slope, offset])
    pr = rg.PredictionRigidity(two_lines, w).fit(X, y)
    rss = float((y - two_lines(w, X)).square().sum())
    assert pr.scale == pytest.approx(math.sqrt(rss / (60 - 3)))


@pytest.mark.parametrize(
    "loss",
    ["huber", "log-cosh", nn.SmoothL1Loss(reduction="none"), lambda y, t: (y - t) ** 2 / NOISE],
    ids=["huber", "log-cosh", "torch's", "a function"],
)
def test_other_losses_warn_once_that_there_is_no_scale(loss):
    warns_once_of_a_default_scale(fitted(loss), NEW)


def test_the_variance_of_a_gaussian_is_its_scale():
    pr = fitted(GaussianNLL(NOISE**2))
    assert pr.scale == 1.0
    inverse = NOISE**2 * torch.linalg.inv(DESIGN.mT @ DESIGN)
    torch.testing.assert_close(pr.parameter_covariance, inverse)


def test_without_more_rows_than_parameters_residuals_give_no_scale():
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    x = X[:, None]
    y = model(x).detach() + NOISE * normal(30, 1, seed=6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The parameters are not a minimum")
        pr = rg.PredictionRigidity(model, ridge=1e-3).fit(x, y)
    assert pr.residual_scale > 0  # the ridge leaves some degrees of freedom, but too few
    warns_once_of_a_default_scale(pr, NEW[:, None])


@pytest.mark.parametrize("case", ["no residuals", "rounding", "no targets", "matrix-free"])
def test_a_squared_loss_without_known_residuals_warns_once(case):
    if case == "no residuals":
        w = torch.tensor([1.0, 2.0], dtype=F64)
        pr = rg.PredictionRigidity(line, w).fit(X, line(w, X))
    elif case == "rounding":
        w = torch.tensor([1.0, 2.0], dtype=F64)
        pr = rg.PredictionRigidity(line, w).fit(X, line(w, X) + 1e-13 * normal(30, seed=7))
    elif case == "no targets":
        pr = rg.PredictionRigidity(line, W).fit(X)
    else:
        pr = fitted(ridge=1e-6, form="matrix-free")
    warns_once_of_a_default_scale(pr, NEW)


@pytest.mark.parametrize(
    "ask",
    [
        lambda pr: pr.predict(NEW),
        lambda pr: pr.variance(NEW),
        lambda pr: pr.covariance(NEW),
        lambda pr: pr.sample(2),
        lambda pr: pr.parameter_std,
        lambda pr: pr.propagate(lambda y: y.sum(), NEW),
    ],
    ids=["predict", "variance", "covariance", "sample", "parameter_std", "propagate"],
)
def test_every_error_bar_without_a_scale_warns_until_one_is_given(ask):
    pr = fitted("huber")
    with pytest.warns(UserWarning, match=UNSCALED):
        ask(pr)
    ask(fitted("huber").set_scale(1.0))
    calibrated = fitted("huber")
    calibrated.calibrate(X, Y, method=Paper(noise="constant"))
    ask(calibrated)
    with pytest.warns(UserWarning, match=UNSCALED):
        ask(pr.fit(X, Y))


def test_a_file_keeps_where_the_scale_comes_from(tmp_path):
    path = tmp_path / "pr"
    pr = fitted()
    pr.save(path)
    again = rg.PredictionRigidity.load(path, line, W)
    torch.testing.assert_close(again.predict(NEW).std, pr.predict(NEW).std)
    assert again.summary() == pr.summary()
    fitted("huber").save(path)
    warns_once_of_a_default_scale(rg.PredictionRigidity.load(path, line, W, "huber"), NEW)


def test_the_summary_says_that_the_scale_comes_from_the_residuals():
    pr = fitted()
    said = f"standard error {pr.scale:.4g}, which is the scale: 30 rows, 2 fitted directions"
    assert said in pr.summary()
    assert "standard error" not in pr.set_scale(2.0).summary()
    assert "standard error" not in fitted("huber").summary()
    pr.calibrate(X, Y, method="paper")
    assert "standard error" not in pr.summary()
