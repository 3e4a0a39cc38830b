"""The power series of the NTK: the paper's cubic terms against the recursion itself."""

import math
from fractions import Fraction

import pytest
import torch

from rigidities.theory.kernels import (
    FullyConnected,
    activation,
    cubic_corrections,
    dual_series,
    odd_coefficients,
    recursion_series,
)
from tests.support.refusals import refused

F64 = torch.float64


def exact_cubics(a, b, depth):
    """Cubic coefficients of NTK and NNGP by the recursion's first two orders, in fractions."""
    nngp, nngp3, ntk, ntk3 = Fraction(1), Fraction(0), Fraction(1), Fraction(0)
    for _ in range(depth):
        new3 = a * nngp3 + b / 6 * nngp**3
        new = a * nngp
        # ntk * (a + b/2 nngp^2) added
        ntk3 = new3 + a * ntk3 + b / 2 * nngp**2 * ntk
        ntk = new + a * ntk
        nngp, nngp3 = new, new3
    return (nngp, nngp3), (ntk, ntk3)


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("a", [Fraction(1), Fraction(9, 10), Fraction(1, 3)])
def test_the_cubic_terms_equal_exact_composition(a, depth):
    b = Fraction(7, 5)
    (nngp, nngp3), (ntk, ntk3) = exact_cubics(a, b, depth)
    assert ntk == (depth + 1) * nngp == (depth + 1) * a**depth
    found = cubic_corrections(float(a), float(b), depth)
    assert found.linear == pytest.approx(float(ntk3))
    assert found.nngp == pytest.approx(float(ntk3 - (depth + 1) * nngp3))
    assert found.difference == pytest.approx(abs(found.linear) - abs(found.nngp))
    assert found.difference > 0


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_difference_at_slope_one_is_the_limit(depth):
    at_one = cubic_corrections(1.0, -0.4, depth)
    assert at_one.difference == pytest.approx(depth * (depth + 1) / 6 * 0.4)
    near = cubic_corrections(1 - 1e-9, -0.4, depth)
    assert near.difference == pytest.approx(at_one.difference, rel=1e-6)
    assert at_one.linear < 0 and at_one.nngp < 0


@pytest.mark.parametrize("name", ["erf", "tanh", "sin"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_cubic_terms_are_the_recursions_limit(name, depth):
    """Richardson's extrapolation of (K - (l+1) ...) / xi^3 to xi = 0."""
    a, b = odd_coefficients(name)
    expected = cubic_corrections(a, b, depth)
    net = FullyConnected(depth, name, input_scale=1.0, normalised=True)

    def quotients(xi):
        x = torch.tensor([[1.0, 0.0], [xi, math.sqrt(1 - xi**2)]], dtype=F64)
        nngp, ntk = (k[0, 1].item() for k in net.kernels(x))
        linear = ntk - (depth + 1) * a**depth * xi
        return linear / xi**3, (ntk - (depth + 1) * nngp) / xi**3

    coarse, fine = quotients(0.08), quotients(0.04)
    limit = [(4 * f - c) / 3 for c, f in zip(coarse, fine, strict=True)]
    assert limit[0] == pytest.approx(expected.linear, rel=2e-3)
    assert limit[1] == pytest.approx(expected.nngp, rel=2e-3)


@pytest.mark.parametrize("name", ["erf", "tanh", "sin", "gelu", "relu", "silu"])
def test_the_series_sums_to_the_dual(name):
    series = dual_series(name, 60)
    assert float(series.sum()) <= 1 + 1e-12
    phi, one = activation(name).normalised(), torch.ones((), dtype=F64)
    for xi in (-0.5, 0.1, 0.6):
        value = sum(c * xi**n for n, c in enumerate(series.tolist()))
        assert value == pytest.approx(phi.dual(one, one, xi * one).item(), abs=1e-10)


def test_the_derivatives_at_zero_are_those_of_the_closed_form():
    a, b = odd_coefficients("erf")  # (2/pi) asin(2 xi / 3) / ((2/pi) asin(2/3))
    norm = math.asin(2 / 3)
    assert a == pytest.approx(2 / 3 / norm, rel=1e-12)
    assert b == pytest.approx((2 / 3) ** 3 / norm, rel=1e-11)
    a, b = odd_coefficients("sin")  # sinh(xi) / sinh(1)
    assert (a, b) == pytest.approx((1 / math.sinh(1), 1 / math.sinh(1)), rel=1e-12)


def test_the_power_series_equals_the_recursion_at_finite_correlation():
    nngp, ntk = recursion_series(dual_series("tanh", 40), 3)
    xi = 0.5
    x = torch.tensor([[1.0, 0.0], [xi, math.sqrt(1 - xi**2)]], dtype=F64)
    expected = FullyConnected(3, "tanh", input_scale=1.0, normalised=True).kernels(x)
    powers = xi ** torch.arange(40, dtype=F64)
    assert (nngp @ powers).item() == pytest.approx(expected.nngp[0, 1].item(), rel=1e-9)
    assert (ntk @ powers).item() == pytest.approx(expected.ntk[0, 1].item(), rel=1e-9)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0.3).to(F64),
        lambda x: torch.sin(500 * x),
        lambda x: torch.tanh(x) + 0.01 * torch.sin(500 * x),
        lambda x: torch.relu(x - 0.3),
    ],
    ids=["jump", "fast", "partly fast", "kink"],
)
def test_a_series_that_does_not_converge_is_an_error(function):
    refused(r"does not converge: 64 and 128 panels differ by", dual_series, function, 3)


def test_jumps_and_kinks_at_multiples_of_a_half_cost_nothing():
    step = dual_series(lambda x: (x > 0.5).to(F64), 2, normalised=False)
    tail = 0.5 * math.erfc(0.5 / math.sqrt(2))
    density = math.exp(-1 / 8) / math.sqrt(2 * math.pi)
    assert step.tolist() == pytest.approx([tail**2, density**2], rel=1e-13)
    slope = dual_series(torch.nn.functional.hardtanh, 2, normalised=False)[1].item()
    assert slope == pytest.approx(math.erf(1 / math.sqrt(2)) ** 2, rel=1e-13)


def test_even_parts_and_bad_numbers_are_refused():
    refused("'gelu' is not odd: even terms carry", odd_coefficients, "gelu")
    refused(r"Expected 0 < a <= 1 and depth >= 1", cubic_corrections, 1.2, 1.0, 2)
    refused("depth=0", cubic_corrections, 0.5, 1.0, 0)
    refused("terms must be at least 1", dual_series, "erf", 0)
