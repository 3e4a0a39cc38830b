"""Mixtures of Student-t distributions: each method equals SciPy's, brute force or its limit."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import stdtr

from rigidities.prediction.distribution import StudentT, distribution_named
from rigidities.prediction.mixture import Components, Mixture
from tests.support.refusals import refused

F64 = torch.float64
CASES = {  # shares, offsets, widths
    "one": ([1.0], [0.3], [1.7]),
    "two": ([0.3, 0.7], [-1.0, 0.5], [0.4, 1.2]),
    "three": ([0.2, 0.5, 0.3], [-2.0, 0.1, 1.5], [0.5, 1.0, 2.0]),
    "equal": ([0.2, 0.5, 0.3], [0.7, 0.7, 0.7], [1.5, 1.5, 1.5]),
    "far apart": ([0.5, 0.25, 0.25], [-300.0, 0.0, 30.0], [0.1, 1.0, 0.3]),
    "wide and narrow": ([0.4, 0.6], [0.0, 0.3], [1.0, math.exp(5)]),
    "thirty widths away": ([0.4, 0.6], [0.0, 30 * math.exp(5)], [1.0, math.exp(5)]),
    "extreme": ([0.01, 0.9, 0.09], [0.0, 30.0, -8.0], [math.exp(-5), math.exp(4), 1.0]),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LEVELS = (1e-12, 1e-6, 1e-3, 0.05, 0.25, 0.5, 0.75, 0.95, 1 - 1e-6)


def mixture(case, dtype=F64):
    share, offset, width = (torch.tensor(values, dtype=F64) for values in case)
    return Mixture(share.log().to(dtype), offset.to(dtype), width.log().to(dtype))


def places(case):
    """Where to compare: in and beside each component, and far out."""
    _, offset, width = case
    near = [m + c * w for m, w in zip(offset, width, strict=True) for c in (-3, -0.4, 0, 1.5)]
    return torch.tensor([-1e4, *near, 1e4], dtype=F64)


def average(case, of_component, z):
    """The mean over components of a function of z, offset and width."""
    return sum(p * of_component(np.asarray(z), m, w) for p, m, w in zip(*case, strict=True))


def oracle_cdf(case, z):
    return average(case, lambda z, m, w: stats.t.cdf(z, 4, m, w), z)


def integral(fn, case, low=-math.inf, high=math.inf):
    """SciPy's quadrature, piece by piece on the scales of all components."""
    _, offset, width = case
    scales = [s * 4.0**k for s in (-1, 1) for k in range(-1, 8)]
    cuts = {m + c * w for m, w in zip(offset, width, strict=True) for c in [0, *scales]}
    edges = [low, *sorted(c for c in cuts if low < c < high), high]
    options = {"epsabs": 1e-13, "epsrel": 1e-11, "limit": 200}
    return sum(quad(fn, *piece, **options)[0] for piece in pairwise(edges))


def probability(case, power=1, sign=1):
    """A power of F, or of 1 - F for the sign -1, as a function of numbers."""

    def value(x):
        total = 0.0
        for p, m, w in zip(*case, strict=True):
            total += p * stdtr(4, sign * (x - m) / w)
        return total**power

    return value


# --- SciPy and brute force ----------------------------------------------------------------------


@ALL
def test_densities_and_probabilities_are_scipys(case):
    distribution, z = mixture(case), places(case)
    density = average(case, lambda z, m, w: stats.t.pdf(z, 4, m, w), z)
    np.testing.assert_allclose(distribution.log_density(z), np.log(density), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(distribution.cdf(z), oracle_cdf(case, z), rtol=1e-11)
    above = average(case, lambda z, m, w: stats.t.sf(z, 4, m, w), z)
    np.testing.assert_allclose(distribution.mirrored.cdf(-z), above, rtol=1e-11)


@ALL
def test_moments_are_scipys(case):
    distribution = mixture(case)
    mean = average(case, lambda _, m, w: stats.t.mean(4, m, w), 0.0)
    second = average(case, lambda _, m, w: stats.t.var(4, m, w) + m**2, 0.0)
    assert float(distribution.mean) == pytest.approx(mean, rel=1e-12)
    assert float(distribution.second) == pytest.approx(second, rel=1e-12)


@ALL
def test_quantiles_invert_the_distribution_function(case):
    distribution = mixture(case)
    level = torch.tensor(LEVELS, dtype=F64)
    z = distribution.quantile(level)
    np.testing.assert_allclose(oracle_cdf(case, z), level, rtol=1e-10)
    other = distribution.mirrored.quantile(1 - level)
    np.testing.assert_allclose(oracle_cdf(case, -other[3:]), level[3:], rtol=1e-10)
    ends = distribution.quantile(torch.tensor([0.0, 1.0, -0.1, 1.1, math.nan], dtype=F64))
    assert ends[:2].tolist() == [-math.inf, math.inf] and bool(ends[2:].isnan().all())


@ALL
def test_shortfalls_are_those_of_quadrature(case):
    distribution = mixture(case)
    scale = float(distribution.second.sqrt())
    for draws in (1, 2):
        for z in places(case)[1:-1].tolist():
            found = float(distribution.shortfall(torch.tensor(z, dtype=F64), draws))
            expected = integral(probability(case, draws), case, high=z)
            assert found == pytest.approx(expected, rel=1e-8, abs=1e-9 * scale)


@ALL
def test_scores_are_those_of_quadrature(case):
    distribution, z = mixture(case), places(case)
    found = distribution.crps(z)
    for x, score in zip(z.tolist(), found.tolist(), strict=True):
        expected = integral(probability(case, 2), case, high=x)
        expected += integral(probability(case, 2, -1), case, low=x)
        assert score == pytest.approx(expected, rel=1e-8)
    # The base class adds up two shortfalls.
    two = distribution.shortfall(z, 2) + distribution.mirrored.shortfall(-z, 2)
    torch.testing.assert_close(found, two, rtol=1e-7, atol=0)


@ALL
def test_draws_follow_the_distribution_and_the_generator(case):
    distribution, like = mixture(case), torch.zeros(2, dtype=F64)
    draws = distribution.sample(like, 40_000, torch.Generator().manual_seed(3))
    assert draws.shape == (40_000, 2)
    again = distribution.sample(like, 40_000, torch.Generator().manual_seed(3))
    assert torch.equal(draws, again)
    for column in draws.unbind(1):
        assert stats.kstest(distribution.cdf(column).numpy(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(distribution.cdf(draws).T)[0, 1]) < 0.03
    assert len(distribution.sample(like, 3, None)) == 3


def test_tails_keep_their_digits():
    z = -torch.logspace(-8, 60, 200, dtype=F64)
    expected = stats.t.cdf(z.numpy(), 4)
    np.testing.assert_allclose(Mixture().cdf(z).numpy(), expected, rtol=1e-12)
    tail = torch.logspace(-199, -0.302, 200, dtype=F64)
    z = Mixture().quantile(tail)
    torch.testing.assert_close(Mixture().cdf(z), tail, rtol=1e-13, atol=0)
    far = torch.tensor([-1e5], dtype=F64)  # the integral of 3 / z^4
    assert float(Mixture().shortfall(far)) == pytest.approx(1e-15, rel=1e-9)


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_equal_components_are_one_student_t(count):
    width, offset = 1.7, 0.3
    case = ([1 / count] * count, [offset] * count, [width] * count)
    distribution, student = mixture(case), StudentT(4.0)
    z = torch.linspace(-9, 9, 19, dtype=F64)
    x = offset + width * z
    close = torch.testing.assert_close
    close(distribution.cdf(x), student.cdf(z))
    close(distribution.log_density(x), student.log_density(z) - math.log(width))
    close(distribution.crps(x), width * student.crps(z))
    for draws in (1, 2):
        close(distribution.shortfall(x, draws), width * student.shortfall(z, draws))
    level = z.sigmoid()
    close(distribution.quantile(level), offset + width * student.quantile(level))


def test_a_component_without_a_share_changes_nothing():
    two = mixture(CASES["two"])
    three = mixture(([0.3, 0.0, 0.7], [-1.0, 1e3, 0.5], [0.4, 1e-3, 1.2]))
    z = torch.linspace(-3, 3, 7, dtype=F64)
    for ask in ("cdf", "log_density", "crps", "shortfall"):
        torch.testing.assert_close(getattr(three, ask)(z), getattr(two, ask)(z))
    torch.testing.assert_close(three.quantile(z.sigmoid()), two.quantile(z.sigmoid()))


# --- searches -----------------------------------------------------------------------------------


def random_mixture(rows, count, spread, generator_seed=0):
    generator = torch.Generator().manual_seed(generator_seed)
    logit, offset, log_width = (
        torch.randn(*rows, count, generator=generator, dtype=F64) for _ in range(3)
    )
    return Mixture(spread * logit, 5 * spread * offset, (2 * spread * log_width).clamp(-5, 4))


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_quantiles_of_any_mixture_are_found(count, spread):
    distribution = random_mixture((2_000,), count, spread)
    level = torch.tensor(LEVELS, dtype=F64)[:, None]
    found = distribution.cdf(distribution.quantile(level))
    torch.testing.assert_close(found, level.expand_as(found), rtol=1e-10, atol=0)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 3.0])
def test_quantiles_for_graphs_are_those_of_the_distribution(spread):
    distribution = random_mixture((500, 2), 3, spread)
    level = torch.tensor([0.001, 0.05, 0.5, 0.9, 0.999], dtype=F64)[:, None, None]
    components = Components.of(distribution.logit, distribution.offset, distribution.log_width)
    found = components.quantile_in_graph(level)
    assert found.shape == (5, 500, 2)
    off = (found - distribution.quantile(level)).abs() / distribution.second.sqrt()
    assert float(off.max()) < 1e-6


class Quantiles(torch.nn.Module):
    """What a frozen module computes, in fewer steps."""

    def forward(self, logit, offset, log_width, level):
        return Components.of(logit, offset, log_width).quantile_search(level, 8)[0]


def test_quantiles_for_graphs_can_be_exported():
    distribution = random_mixture((6, 2), 3, 0.5)
    level = torch.tensor([0.05, 0.95], dtype=F64)[:, None, None]
    fields = (distribution.logit, distribution.offset, distribution.log_width)
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = ({0: rows}, {0: rows}, {0: rows}, None)
    graph = torch.export.export(Quantiles(), (*fields, level), dynamic_shapes=shapes).module()
    other = random_mixture((17, 2), 3, 0.5, generator_seed=1)
    found = graph(other.logit, other.offset, other.log_width, level)
    torch.testing.assert_close(found, other.quantile(level))


# --- contract -----------------------------------------------------------------------------------


def test_levels_and_rows_broadcast():
    distribution = random_mixture((5, 2), 3, 0.5)
    level = torch.tensor([0.1, 0.5, 0.9], dtype=F64)
    z = torch.linspace(-2, 2, 4, dtype=F64)[:, None, None]
    assert distribution.quantile(level[0]).shape == (5, 2)
    for row in range(5):
        for target in range(2):
            entry = distribution.each(lambda field, at=(row, target): field[at])
            found = distribution.quantile(level[:, None, None])[:, row, target]
            torch.testing.assert_close(found, entry.quantile(level))
            for ask in ("cdf", "log_density", "crps", "shortfall"):
                found = getattr(distribution, ask)(z)[:, row, target]
                torch.testing.assert_close(found, getattr(entry, ask)(z[:, 0, 0]))
            found = distribution.shortfall(z, 2)[:, row, target]
            torch.testing.assert_close(found, entry.shortfall(z[:, 0, 0], 2))


def test_no_rows_give_no_values():
    distribution = Mixture(*[torch.zeros(0, 2, 3) for _ in range(3)])
    z = torch.zeros(0, 2)
    for ask in ("cdf", "log_density", "crps", "shortfall", "quantile"):
        found = getattr(distribution, ask)(z)
        assert found.shape == (0, 2) and found.dtype == torch.float32
    assert distribution.quantile(torch.full((4, 1, 1), 0.5)).shape == (4, 0, 2)
    assert distribution.sample(z, 3, None).shape == (3, 0, 2)
    assert distribution.second.shape == distribution.mean.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_everything_is_finite_far_out_and_in_few_digits(case, dtype):
    distribution = mixture(case, dtype)
    z = torch.tensor([-1e8, -40.0, 0.0, 3.0, 1e8]).to(dtype)
    for ask in ("cdf", "crps", "log_density", "shortfall"):
        found = getattr(distribution, ask)(z)
        assert found.dtype == torch.float32 and bool(found.isfinite().all())
        double = distribution.each(lambda field: field.to(F64))
        torch.testing.assert_close(found, getattr(double, ask)(z.to(F64)).float())
    level = torch.tensor([0.1, 0.5]).to(dtype)
    assert distribution.quantile(level).dtype == distribution.mean.dtype == torch.float32
    assert distribution.second.dtype == distribution.sample(z, 2, None).dtype == torch.float32


def test_parameters_that_are_nan_give_nan_there_alone():
    healthy, nan = torch.zeros(3, dtype=F64), torch.full((3,), math.nan, dtype=F64)
    both, fine = torch.stack([healthy, nan]), torch.stack([healthy, healthy])
    z = torch.full((2,), 0.3, dtype=F64)
    for fields in ((both, fine, fine), (fine, both, fine), (fine, fine, both)):
        distribution = Mixture(*fields)
        for ask in ("cdf", "crps", "log_density", "quantile"):
            assert getattr(distribution, ask)(z).isnan().tolist() == [False, True]
    assert bool(Mixture().cdf(torch.tensor([math.nan])).isnan())
    assert bool(Mixture().crps(torch.tensor([math.nan])).isnan())


def test_settings_make_the_distribution_again():
    for dtype in (torch.float32, F64):
        distribution = mixture(CASES["three"], dtype)
        float(distribution.second)  # what is cached is no setting
        settings = distribution.settings()
        assert set(settings) == {"logit", "offset", "log_width"}
        again = Mixture(**settings)
        assert again == distribution and hash(again) == hash(distribution)
        assert again != distribution.mirrored == again.mirrored
    assert distribution_named("mixture") == Mixture()


def test_the_mirrored_distribution_is_that_of_the_other_sign():
    distribution = random_mixture((5,), 3, 0.5)
    z = torch.linspace(-3, 3, 5, dtype=F64)
    close = torch.testing.assert_close
    close(distribution.mirrored.log_density(-z), distribution.log_density(z))
    close(distribution.mirrored.cdf(-z), 1 - distribution.cdf(z))
    close(distribution.mirrored.crps(-z), distribution.crps(z))
    close(distribution.mirrored.mean, -distribution.mean)
    close(distribution.mirrored.second, distribution.second)


@pytest.mark.parametrize("shapes", [((4, 3), (4, 2), (4, 3)), ((0,),) * 3, ((),) * 3])
def test_fields_that_do_not_match_are_refused(shapes):
    refused("each of its components.*got the shapes", Mixture, *map(torch.zeros, shapes))
