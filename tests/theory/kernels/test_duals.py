"""Dual activations: closed forms and Mehler series equal plain two-dimensional quadrature."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from rigidities.theory.kernels import activation, by_quadrature, dual_series
from rigidities.theory.kernels import quadrature as rules
from tests.support.refusals import refused

F64 = torch.float64
ONE = torch.ones((), dtype=F64)
VARIANCES = [0.0, 1e-4, 1.0, 2.5]
CORRELATIONS = [-1.0, -0.999999, -0.7, 0.0, 0.2, 0.95, 1 - 1e-9, 1.0]


def cases():
    """Every pair of variances with every correlation, as p, q, r."""
    p, q, rho = torch.meshgrid(
        torch.tensor(VARIANCES, dtype=F64),
        torch.tensor(VARIANCES, dtype=F64),
        torch.tensor(CORRELATIONS, dtype=F64),
        indexing="ij",
    )
    return p.flatten(), q.flatten(), (rho * (p * q).sqrt()).flatten()


def plain_quadrature(function, p, q, r, order=200):
    """E over N(0, C) by the product rule and the Cholesky factor of C."""
    x = np.linspace(-9, 9, order)  # trapezoidal: exponentially accurate for these functions
    w = stats.norm.pdf(x) * (x[1] - x[0])
    z1, z2 = torch.as_tensor(x)[:, None], torch.as_tensor(x)[None]
    weights = torch.as_tensor(w)[:, None] * torch.as_tensor(w)[None]
    values = []
    for a, b, c in zip(p.tolist(), q.tolist(), r.tolist(), strict=True):
        slope = c / math.sqrt(a) if a > 0 else 0.0
        rest = math.sqrt(max(b - slope**2, 0.0))
        u, v = math.sqrt(a) * z1 + 0 * z2, slope * z1 + rest * z2
        values.append(float((weights * function(u) * function(v)).sum()))
    return torch.tensor(values, dtype=F64)


def slope(function):
    def derivative(x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(function(x).sum(), x)[0]

    return derivative


SMOOTH = {
    "identity": lambda x: x * 1.0,
    "erf": torch.erf,
    "gelu": lambda x: x * torch.special.ndtr(x),
    "sin": torch.sin,
    "tanh": torch.tanh,
    "silu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_the_duals_equal_plain_quadrature(name):
    phi, found = SMOOTH[name], activation(name)
    expected = plain_quadrature(phi, *cases())
    torch.testing.assert_close(found.dual(*cases()), expected, rtol=1e-9, atol=1e-10)
    expected = plain_quadrature(slope(phi), *cases())
    torch.testing.assert_close(found.slope_dual(*cases()), expected, rtol=1e-9, atol=2e-9)


def relu_expectation(p, q, r, *, derivative):
    """Integral over u of the conditional expectation of v given u, split at the kink."""
    s = math.sqrt(q - r * r / p)

    def density(u):
        m = r / p * u
        inner = stats.norm.cdf(m / s)
        if not derivative:
            inner = u * (m * inner + s * stats.norm.pdf(m / s))
        return inner * stats.norm.pdf(u, scale=math.sqrt(p))

    return integrate.quad(density, 0, 14 * math.sqrt(p), epsabs=1e-13, epsrel=1e-12, limit=200)[0]


@pytest.mark.parametrize("rho", [-0.99, -0.5, 0.0, 0.3, 0.999])
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.2, 3.0)])
def test_the_relu_duals_equal_the_integral(p, q, rho):
    r = rho * math.sqrt(p * q)
    args = [torch.tensor(value, dtype=F64) for value in (p, q, r)]
    relu = activation("relu")
    expected = relu_expectation(p, q, r, derivative=False)
    assert relu.dual(*args).item() == pytest.approx(expected, abs=1e-10)
    expected = relu_expectation(p, q, r, derivative=True)
    assert relu.slope_dual(*args).item() == pytest.approx(expected, abs=1e-10)


def test_the_relu_dual_keeps_its_digits_at_the_ends():
    relu = activation("relu")
    assert relu.dual(ONE, ONE, ONE).item() == 0.5
    assert abs(relu.dual(ONE, ONE, -ONE).item()) < 1e-16
    assert relu.slope_dual(ONE, ONE, ONE).item() == 0.5
    assert relu.slope_dual(ONE, ONE, -ONE).item() == 0.0
    gap = 1e-10  # 1 - rho; theta = sqrt(2 gap) to first order
    theta = math.sqrt(2 * gap)
    share = relu.slope_dual(ONE, ONE, ONE - gap).item()
    assert share == pytest.approx((math.pi - theta) / (2 * math.pi), rel=1e-11)


def test_zero_variance_gives_no_nan_and_the_plain_value():
    zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
    for name in ("erf", "gelu", "identity", "relu", "silu", "sin", "tanh"):
        phi = activation(name)
        assert phi.dual(zero, one, zero).item() == pytest.approx(0.0, abs=1e-15), name
        assert math.isfinite(phi.slope_dual(zero, zero, zero).item()), name
    assert activation("gelu").slope_dual(zero, zero, zero).item() == pytest.approx(0.25)
    assert activation("relu").slope_dual(zero, zero, zero).item() == 0.25


def test_large_variances_do_not_overflow():
    big = torch.tensor(1e8, dtype=F64)
    assert activation("sin").dual(big, big, big).item() == pytest.approx(0.5)
    assert activation("erf").dual(big, big, big).item() == pytest.approx(1, abs=1e-3)
    assert activation("gelu").dual(big, big, big).item() == pytest.approx(5e7, rel=1e-6)


@pytest.mark.parametrize("name", ["erf", "gelu", "sin", "tanh", "silu"])
def test_the_slope_dual_is_the_derivative_by_the_covariance(name):
    p, q, r = (torch.tensor(v, dtype=F64) for v in (0.8, 1.7, 0.6))
    phi, step = activation(name).normalised(), 1e-4
    difference = (phi.dual(p, q, r + step) - phi.dual(p, q, r - step)) / (2 * step)
    assert phi.slope_dual(p, q, r).item() == pytest.approx(difference.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["erf", "gelu", "sin"])
def test_the_mehler_series_equals_the_closed_form(name):
    p, q, r = cases()
    phi = activation(name)
    series = by_quadrature(phi.function)
    torch.testing.assert_close(series.dual(p, q, r), phi.dual(p, q, r), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        series.slope_dual(p, q, r), phi.slope_dual(p, q, r), rtol=1e-9, atol=1e-9
    )


def test_broadcasting_equals_the_elementwise_result():
    g = torch.Generator().manual_seed(0)
    x, z = torch.randn(5, 3, generator=g, dtype=F64), torch.randn(4, 3, generator=g, dtype=F64)
    p, q, r = x.square().sum(1)[:, None], z.square().sum(1)[None], x @ z.T
    for name in ("tanh", "relu", "identity"):
        phi = activation(name)
        whole = phi.dual(p, q, r)
        assert whole.shape == (5, 4) and whole.dtype == F64
        single = [phi.dual(p[i, 0], q[0, j], r[i, j]) for i in range(5) for j in range(4)]
        torch.testing.assert_close(whole, torch.stack(single).reshape(5, 4), rtol=0, atol=1e-9)


def test_splitting_for_memory_changes_nothing(monkeypatch):
    p = torch.linspace(0.1, 2, 9, dtype=F64)[:, None]
    q = torch.linspace(0.2, 1, 7, dtype=F64)[None]
    r = 0.4 * (p * q).sqrt()
    whole = activation("tanh").dual(p, q, r)
    monkeypatch.setattr(rules, "_BLOCK", 10)
    torch.testing.assert_close(activation("tanh").dual(p, q, r), whole, rtol=0, atol=0)
    monkeypatch.setattr(rules, "_MOST", 5)
    torch.testing.assert_close(activation("tanh").dual(p, q, r), whole, rtol=0, atol=1e-10)


def test_normalised_means_a_unit_second_moment():
    for name in ("erf", "gelu", "relu", "silu", "sin", "tanh"):
        assert activation(name).normalised().moment(ONE).item() == pytest.approx(1, abs=1e-14)


def test_torch_modules_and_functions_map_to_the_closed_forms():
    assert activation(nn.ReLU()) is activation("relu")
    assert activation(nn.functional.gelu) is activation("gelu")
    assert activation(nn.SiLU()).name == "silu"
    rough = activation(nn.GELU(approximate="tanh"))
    assert rough.name == "GELU" and rough.raw_dual is not activation("gelu").raw_dual
    assert rough.moment(ONE).item() == pytest.approx(
        activation("gelu").moment(ONE).item(), abs=1e-3
    )
    assert rough.moment(ONE).item() != activation("gelu").moment(ONE).item()


@pytest.mark.parametrize(
    "function",
    [
        torch.sign,
        torch.nn.functional.leaky_relu,
        lambda x: torch.sin(90 * x),
        lambda x: torch.tanh(x) + 0.01 * torch.sin(90 * x),
        lambda x: torch.sin(60 * x),
        lambda x: torch.sin(62 * x),
        lambda x: torch.cos(250 * x),
        lambda x: x + torch.sin(30 * x).square() / 30,
    ],
    ids=["jump", "kink", "fast", "partly fast", "60", "62", "250", "snake"],
)
def test_a_quadrature_that_does_not_converge_is_an_error(function):
    with pytest.raises(ValueError, match=r"does not converge: orders 2048 and 4096 differ by"):
        by_quadrature(function).dual(ONE, ONE, ONE / 2)


def test_no_wave_passes_for_a_slower_one():
    """Multiples of each grid's own frequency, where every node sees the same phase, and others."""
    steps = [float(rules.hermite_rule(order)[0].diff()[0]) for order in (32, 64, 128)]
    waves = [2 * math.pi * k / h + d for h in steps for k in (1, 2, 7) for d in (0.0, 0.3)]
    for wave in waves:
        with pytest.raises(ValueError, match="does not converge"):
            by_quadrature(lambda x, wave=wave: torch.sin(wave * x + 1)).dual(ONE, ONE, ONE)
    for wave in (1.0, 8.0, 25.0):
        phi = by_quadrature(lambda x, wave=wave: torch.sin(wave * x + 1))
        expected = (1 - math.cos(2) * math.exp(-2 * wave**2)) / 2
        assert phi.dual(ONE, ONE, ONE).item() == pytest.approx(expected, abs=1e-12)


def test_no_two_orders_share_a_grid():
    sizes = [len(rules.hermite_rule(order)[0]) for order in rules.ORDERS]
    steps = [float(rules.hermite_rule(order)[0].diff()[0]) for order in rules.ORDERS]
    assert all(a < b for a, b in pairwise(sizes))
    for a, b in pairwise(steps):
        ratios = [a / b * k for k in range(1, 30)]
        assert min(abs(ratio - round(ratio)) for ratio in ratios) > 1e-3


def test_the_quadrature_adapts_to_large_variances():
    p = torch.tensor(25.0, dtype=F64)
    grid = torch.linspace(-60, 60, 2_000_001, dtype=F64)
    density = torch.exp(-grid.square() / 50) / math.sqrt(50 * math.pi)
    tanh = activation("tanh")
    expected = torch.trapezoid(torch.tanh(grid).square() * density, grid)
    assert tanh.moment(p).item() == pytest.approx(expected.item(), abs=1e-10)
    expected = torch.trapezoid(torch.cosh(grid).pow(-4) * density, grid)
    assert tanh.slope_dual(p, p, p).item() == pytest.approx(expected.item(), abs=1e-9)


def test_derivatives_are_there_in_inference_mode_too():
    expected = activation("tanh").slope_dual(ONE, ONE, ONE / 2)
    with torch.inference_mode():
        found = activation("tanh").slope_dual(ONE, ONE, ONE / 2)
    assert found.item() == expected.item()


def test_bad_covariances_are_refused_by_name():
    one, phi = torch.ones((), dtype=F64), activation("erf")
    refused("Variances must not be negative, got -1", phi.dual, -one, one, one)
    refused("exceeds sqrt", phi.dual, one, one, 2 * one)
    refused(r"NaN or infinity \(in q\)", phi.slope_dual, one, one / 0, one)


def test_bad_activations_are_refused_by_name():
    refused(r"Unknown activation 'selu'. Known: erf, gelu, identity", activation, "selu")
    refused("got int", activation, 3, error=TypeError)
    refused("NaN or infinity", activation(torch.log).moment, ONE)
    refused("must act on each number separately", activation(lambda x: x.sum(-1)).moment, ONE)
    with pytest.raises(ValueError, match="Write it in torch operations"):
        activation(lambda x: torch.as_tensor(np.tanh(x.detach().numpy()))).slope_dual(ONE, ONE, ONE)
    refused("is zero", activation(lambda x: 0 * x).normalised)


def test_the_relu_series_has_the_known_coefficients():
    found = dual_series("relu", 5, normalised=False)
    expected = torch.tensor([1 / (2 * math.pi), 0.25, 1 / (4 * math.pi), 0, 1 / (48 * math.pi)])
    torch.testing.assert_close(found, expected.to(F64), rtol=1e-7, atol=1e-12)
