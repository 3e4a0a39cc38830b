"""Functions of a formula's predictions and parameters equal `uncertainties` and dense ones."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
import uncertainties
from scipy import optimize
from torch import nn
from uncertainties import umath

import rigidities as rg
from tests.support.refusals import refused
from tests.support.rigidity_oracle import F64

TIMES = torch.linspace(0, 10, 40, dtype=F64)


def peak(p, t, exp=torch.exp):
    return p["height"] * exp(-(((t - p["shape"][0]) / p["shape"][1]) ** 2) / 2)


@pytest.fixture(scope="module")
def fitted():
    """A peak in a dict, its rigidity with the residual scale, and SciPy's covariance."""

    def flat(t, *w):
        return peak({"height": w[0], "shape": w[1:]}, t, np.exp)

    t = TIMES.numpy()
    y = flat(t, 5.0, 4.0, 1.2) + 0.2 * np.random.default_rng(0).normal(size=40)
    popt, pcov = optimize.curve_fit(flat, t, y, p0=(4, 5, 1), xtol=1e-14, ftol=1e-14)
    params = {"height": torch.tensor(popt[0]), "shape": torch.tensor(popt[1:])}
    pr = rg.PredictionRigidity(peak, params).fit(TIMES, torch.tensor(y))
    return pr.set_scale(pr.residual_scale), popt, pcov


def exact(pr, popt):
    """The parameters as `uncertainties` has them."""
    w = uncertainties.correlated_values(popt, pr.parameter_covariance.numpy())
    return {"height": w[0], "shape": w[1:]}


def test_an_integral_and_a_ratio_equal_uncertainties(fitted):
    pr, popt, _ = fitted
    p = exact(pr, popt)
    y = [peak(p, t, umath.exp) for t in TIMES.tolist()]
    expected = [np.trapezoid(y, TIMES.numpy()), y[10] / y[20]]
    derived = pr.propagate(lambda y: torch.stack([torch.trapezoid(y, TIMES), y[10] / y[20]]), TIMES)
    np.testing.assert_allclose(derived.mean, [one.n for one in expected], rtol=1e-9)
    np.testing.assert_allclose(
        derived.covariance, uncertainties.covariance_matrix(expected), rtol=1e-8
    )


def test_a_function_of_the_parameters_equals_uncertainties(fitted):
    pr, popt, _ = fitted
    for fn in (lambda p: p["height"] * p["shape"][1], lambda p: p["shape"][0] / p["height"] ** 2):
        expected, derived = fn(exact(pr, popt)), pr.propagate(fn)
        assert float(derived.mean) == pytest.approx(expected.n, rel=1e-9)
        assert float(derived.std) == pytest.approx(expected.s, rel=1e-9)


def test_the_error_of_a_searched_half_maximum_is_the_spread_over_samples(fitted):
    pr, _, _ = fitted

    def half(p):
        rest = lambda t: float(peak(p, torch.tensor(t, dtype=F64)) - 1.0)  # noqa: E731
        return optimize.brentq(rest, 4, 9)

    draws = pr.sample(800, torch.Generator().manual_seed(0))
    spread = np.std([half({k: v[i] for k, v in draws.items()}) for i in range(800)])
    assert float(pr.propagate(half).std) == pytest.approx(spread, rel=0.1)


def test_parameters_have_scipys_errors_in_their_container(fitted):
    pr, _, pcov = fitted
    std = np.sqrt(np.diag(pcov))
    assert pr.parameter_std.keys() == {"height", "shape"} and pr.parameter_std["height"].ndim == 0
    np.testing.assert_allclose(pr.parameter_std["height"], std[0], rtol=1e-6)
    np.testing.assert_allclose(pr.parameter_std["shape"], std[1:], rtol=1e-6)
    np.testing.assert_allclose(pr.parameter_covariance, pcov, rtol=1e-5, atol=1e-9)
    expected = pcov / np.outer(std, std)
    np.testing.assert_allclose(pr.parameter_correlation, expected, rtol=1e-5, atol=1e-6)


def test_what_a_subset_holds_fixed_has_no_error():
    params = {"height": torch.tensor(5.0), "shape": torch.tensor([4.0, 1.2])}
    held = rg.PredictionRigidity(peak, params, subset="height", ridge=0.1)
    held.fit(TIMES.float(), peak(params, TIMES.float())).set_scale(1.0)
    assert held.parameter_std["shape"].tolist() == [0.0, 0.0]
    assert held.parameter_covariance.shape == (1, 1)
    bump = peak({"height": 1.0, "shape": [4.0, 1.2]}, TIMES)
    expected = (bump.square().sum() + 0.1) ** -0.5
    torch.testing.assert_close(held.parameter_std["height"].double(), expected, rtol=1e-5, atol=0)
    derived = held.propagate(lambda p: 2 * p["height"] + p["shape"].sum())
    torch.testing.assert_close(derived.std, 2 * expected, rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.linspace(-1, 1, 12, dtype=F64)[:, None]
    return model, x, model(x).detach()


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_every_form_propagates_the_covariance_of_predictions(net, form):
    model, x, y = net
    pr = rg.PredictionRigidity(model, ridge=0.1, form=form, tolerance=1e-8).fit(x, y)
    pr.set_scale(3.0)
    derived = pr.propagate(lambda y: y[:5, 0] - y[5:10, 1], x)
    covariance = pr.covariance(x)
    slope = torch.zeros(5, 12, 2, dtype=F64)
    for i in range(5):
        slope[i, i, 0], slope[i, i + 5, 1] = 1, -1
    dense = torch.einsum("anb,nbmc,dmc->ad", slope, covariance, slope)
    torch.testing.assert_close(derived.covariance, dense, rtol=1e-6, atol=1e-8)
    total = pr.propagate(torch.sum, x[:2])  # fewer predictions than parameters
    torch.testing.assert_close(total.variance, covariance[:2, :, :2].sum(), rtol=1e-6, atol=0)
    if form == "dense":
        assert pr.parameter_covariance.shape == (14, 14)
        return
    message = rf"The {form} form keeps no covariance of the parameters.*form='dense'.*sample\("
    refused(message, pr.propagate, lambda p: p["0.bias"])
    refused(message, lambda: pr.parameter_std)
    refused(message, lambda: pr.parameter_correlation)


def test_an_unfitted_rigidity_propagates_nothing(net):
    unfitted = rg.PredictionRigidity(net[0])
    refused(r"no fit yet. Call fit\(x, y\) first", unfitted.propagate, torch.sum, net[1])
    refused("no fit yet", unfitted.propagate, torch.sum)
    refused("no fit yet", lambda: unfitted.parameter_std)


@pytest.mark.parametrize("form", ["dense", "dual", "matrix-free"])
def test_fn_is_called_as_often_as_the_parameters_ask(form):
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    calls, w = [], torch.tensor([1.0, 2.0], dtype=F64)
    pr = (
        rg.PredictionRigidity(lambda w, x: x @ w, w, ridge=1e-3, form=form)
        .fit(x, x @ w)
        .set_scale(1.0)
    )
    derived = pr.propagate(lambda y: calls.append(1) or y.mean(), x)
    inverse = torch.linalg.inv(x.mT @ x + 1e-3 * torch.eye(2, dtype=F64))
    torch.testing.assert_close(derived.variance, x.mean(0) @ inverse @ x.mean(0), rtol=1e-4, atol=0)
    assert len(calls) == 1 + 6 * 2


def test_a_scale_that_holds_the_noise_is_warned_of():
    draw = torch.Generator().manual_seed(0)
    x, error = (torch.randn(60, *k, generator=draw, dtype=F64) for k in ((2,), ()))
    y = x.sum(1) + error
    w = torch.linalg.lstsq(x[:40], y[:40, None]).solution[:, 0]
    pr = rg.PredictionRigidity(lambda w, x: x @ w, w).fit(x[:40], y[:40])
    pr.calibrate(x[40:], y[40:], method="paper")
    for asked in (lambda: pr.parameter_std, lambda: pr.propagate(torch.mean, x)):
        with pytest.warns(
            UserWarning, match=r"includes the noise.*fit again and call set_scale\(res"
        ):
            asked()
    pr.parameter_correlation, pr.predict(x)
    pr.fit(x[:40], y[:40]).set_scale(pr.residual_scale)
    theirs = sm.OLS(y[:40].numpy(), x[:40].numpy()).fit().bse
    np.testing.assert_allclose(pr.parameter_std, theirs, rtol=1e-8)
