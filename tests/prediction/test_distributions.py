"""Distributions of unit scale: each equals brute force, its own inverse and its limits."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from rigidities.prediction.distribution import Distribution, Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from tests.prediction.distribution_oracle import SKEWED, Oracle
from tests.support.refusals import refused

F64 = torch.float64
CASES = {  # distribution, oracle, error of the distribution, error of its moments
    "gaussian": (Gaussian(), Oracle(), 1e-9, 1e-9),
    "t of 3": (StudentT(3.0), Oracle(3.0), 1e-8, 1e-9),
    "t of 2.2": (StudentT(2.2), Oracle(2.2), 1e-7, 1e-8),
    "mixture": (Mixture(*torch.tensor(SKEWED, dtype=F64)), Oracle(4.0, SKEWED), 1e-8, 1e-9),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
DISTRIBUTIONS = pytest.mark.parametrize(
    "distribution", [case[0] for case in CASES.values()], ids=CASES
)
Z = (-6.0, -1.3, 0.4, 2.5)


def close(found, expected, tolerance):
    assert found.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance)


# --- brute force --------------------------------------------------------------------------------


@ALL
def test_densities_and_probabilities_are_those_of_quadrature(case):
    distribution, oracle, error, _ = case
    z = torch.tensor(Z, dtype=F64)
    close(distribution.log_density(z).exp(), [float(oracle.density(x)) for x in Z], error)
    close(distribution.cdf(z), [oracle.cdf(x) for x in Z], error)
    close(distribution.mirrored.cdf(-z), [1 - oracle.cdf(x) for x in Z], error)


@ALL
def test_moments_are_those_of_quadrature(case):
    distribution, oracle, _, error = case
    assert float(distribution.mean) == pytest.approx(oracle.moment(lambda x: x), abs=error)
    assert float(distribution.second) == pytest.approx(oracle.moment(np.square), rel=error)


@ALL
def test_shortfalls_are_those_of_quadrature(case):
    distribution, oracle, error, _ = case
    expected = [oracle.moment(lambda x, z=z: max(z - x, 0.0)) for z in (-1.3, 0.4)]
    close(distribution.shortfall(torch.tensor([-1.3, 0.4], dtype=F64)), expected, error)
    expected = oracle.crps(0.4, high=0.4)  # of two draws, the left half of a score
    close(distribution.shortfall(torch.tensor([0.4], dtype=F64), 2), [expected], 1e-7 + error)


@ALL
def test_scores_are_those_of_quadrature(case):
    distribution, oracle, error, _ = case
    z = (-1.3, 0.4, 6.0)
    close(distribution.crps(torch.tensor(z, dtype=F64)), [oracle.crps(x) for x in z], 1e-7 + error)


@DISTRIBUTIONS
def test_quantiles_invert_the_distribution_function(distribution):
    level = torch.tensor([1e-12, 1e-6, 0.05, 0.5, 0.77, 0.95, 1 - 1e-6], dtype=F64)
    torch.testing.assert_close(
        distribution.cdf(distribution.quantile(level)), level, rtol=1e-10, atol=1e-15
    )
    ends = distribution.quantile(torch.tensor([0.0, 1.0, math.nan], dtype=F64))
    assert ends[:2].tolist() == [-math.inf, math.inf] and bool(ends[2].isnan())


@DISTRIBUTIONS
def test_the_mirrored_distribution_is_that_of_the_other_sign(distribution):
    z = torch.tensor(Z, dtype=F64)
    torch.testing.assert_close(distribution.mirrored.log_density(-z), distribution.log_density(z))
    torch.testing.assert_close(distribution.mirrored.cdf(-z), 1 - distribution.cdf(z))
    torch.testing.assert_close(
        torch.as_tensor(distribution.mirrored.mean), -torch.as_tensor(distribution.mean)
    )


@DISTRIBUTIONS
def test_draws_follow_the_distribution_and_the_generator(distribution):
    like, n = torch.zeros(2, dtype=F64), 40_000
    draws = distribution.sample(like, n, torch.Generator().manual_seed(3))
    assert draws.shape == (n, 2)
    assert torch.equal(draws, distribution.sample(like, n, torch.Generator().manual_seed(3)))
    for column in draws.unbind(1):
        assert stats.kstest(distribution.cdf(column).numpy(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(distribution.cdf(draws).T)[0, 1]) < 0.08
    assert len(distribution.sample(like, 3, None)) == 3


# --- Student's distribution
# ------------------------------------------------------------------------------

FREEDOM = [2.01, 2.5, 5.0, 39.0, 61.0, 1e3, 1e4, 1e7]


@pytest.mark.parametrize("df", FREEDOM)
def test_students_tails_keep_their_digits(df):
    z = torch.cat([torch.linspace(-38, 0, 500, dtype=F64), -torch.logspace(-8, 8, 99, dtype=F64)])
    expected = stats.t.cdf(z.numpy(), df)
    kept = expected > 1e-290
    found = StudentT(df).cdf(z).numpy()
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-10)
    np.testing.assert_allclose(StudentT(df).cdf(-z).numpy(), 1 - found)
    log_density = StudentT(df).log_density(z).numpy()
    np.testing.assert_allclose(log_density, stats.t.logpdf(z.numpy(), df), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("df", FREEDOM)
def test_students_quantiles_are_scipys(df):
    tail = torch.logspace(-12, -0.31, 60, dtype=F64)
    level = torch.cat([tail, 1 - tail])
    expected = stats.t.ppf(level.numpy(), df)
    np.testing.assert_allclose(StudentT(df).quantile(level).numpy(), expected, rtol=1e-9)


def test_one_distribution_has_parameters_for_each_target():
    df, z = torch.tensor([2.5, 4.0, 80.0]), torch.randn(6, 3, dtype=F64)
    shapes = torch.randn(3, 6, 3, 2, dtype=F64)
    distributions = (
        (StudentT(df), lambda k: StudentT(df[k])),
        (Mixture(*shapes), lambda k: Mixture(*shapes[:, :, k])),
    )
    for distribution, one in distributions:
        for ask in ("cdf", "log_density", "crps", "shortfall"):
            columns = [getattr(one(k), ask)(z[:, k]) for k in range(3)]
            torch.testing.assert_close(getattr(distribution, ask)(z), torch.stack(columns, 1))
        level = z.sigmoid()
        columns = [one(k).quantile(level[:, k]) for k in range(3)]
        torch.testing.assert_close(distribution.quantile(level), torch.stack(columns, 1))
        for name in ("second", "mean"):
            expected = [torch.as_tensor(getattr(one(k), name), dtype=F64) for k in range(3)]
            expected = torch.stack(expected, -1)
            got = torch.as_tensor(getattr(distribution, name), dtype=F64)
            torch.testing.assert_close(got.expand(expected.shape), expected)


def test_limits_are_the_distributions_they_tend_to():
    z = torch.linspace(-5, 5, 11, dtype=F64)
    alike = Mixture(torch.randn(3, dtype=F64), *torch.zeros(2, 3, dtype=F64))
    pairs = ((StudentT(1e9), Gaussian(), 1e-7), (alike, StudentT(4.0), 1e-8))
    for distribution, limit, error in pairs:
        for ask in ("cdf", "log_density", "crps", "shortfall"):
            expected = getattr(limit, ask)(z)
            torch.testing.assert_close(
                getattr(distribution, ask)(z), expected, rtol=error, atol=error
            )
        level = torch.tensor([0.01, 0.4, 0.9], dtype=F64)
        torch.testing.assert_close(
            distribution.quantile(level), limit.quantile(level), rtol=error, atol=0
        )
        assert float(distribution.second) == pytest.approx(limit.second, rel=error)
        assert float(distribution.mean) == pytest.approx(0, abs=error)


@pytest.mark.parametrize("df", [2.0, 1, math.inf, math.nan, [3.0, 2.0]])
def test_degrees_of_freedom_without_a_variance_are_refused(df):
    refused("degrees of freedom above two.*got", StudentT, df)


# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@DISTRIBUTIONS
def test_everything_is_finite_far_out_and_in_few_digits(distribution, dtype):
    distribution = distribution.each(lambda field: field.to(dtype))
    z = torch.tensor([-1e8, -40.0, 0.0, 3.0, 1e8]).to(dtype)
    for ask in (
        distribution.cdf,
        distribution.crps,
        distribution.log_density,
        distribution.shortfall,
    ):
        found = ask(z)
        assert found.dtype == torch.float32 and bool(found.isfinite().all())
    assert distribution.cdf(z)[[0, 4]].tolist() == pytest.approx([0, 1], abs=1e-5)
    assert float(distribution.crps(z)[4]) == pytest.approx(float(z[4]), rel=1e-4)
    assert bool(distribution.cdf(torch.tensor([math.nan])).isnan())
    assert bool(distribution.crps(torch.tensor([math.nan])).isnan())


def test_each_reaches_the_parameters_of_each_prediction():
    distribution = Mixture(*torch.randn(3, 5, 2, 3))
    z = torch.randn(5, 2)
    torch.testing.assert_close(
        distribution.each(lambda field: field[1:3]).cdf(z[1:3]), distribution.cdf(z)[1:3]
    )
    assert distribution.each(lambda field: field[1:3]).second.shape == (2, 2)
    assert StudentT(3.0).each(lambda field: field[1:]) == StudentT(3.0)


def test_distributions_are_equal_where_their_settings_are():
    assert StudentT([3.0, 4.0]) == StudentT(torch.tensor([3.0, 4.0])) != StudentT([3.0, 5.0])
    assert StudentT() == StudentT(5.0) and Mixture() != StudentT(4.0)


@dataclass(frozen=True)
class Logistic(Distribution):
    """What a user writes: three methods."""

    name = "logistic"

    def quantile(self, level):
        return level.logit()

    def log_density(self, z):
        return -z - 2 * torch.nn.functional.softplus(-z)

    def sample(self, like, n, generator):
        return torch.rand((n, *like.shape), generator=generator, dtype=like.dtype).logit()


def test_a_distribution_of_three_methods_says_what_else_it_needs():
    distribution, z = Logistic(), torch.zeros(3, dtype=F64)
    assert (distribution.second, distribution.mean, distribution.each(None)) == (
        1.0,
        0.0,
        distribution,
    )
    asks = {
        "cdf": distribution.cdf,
        "shortfall": distribution.crps,
        "mirrored": lambda _: distribution.mirrored,
    }
    for name, ask in asks.items():
        with pytest.raises(
            NotImplementedError, match=f"need `{name}` of the distribution 'logistic'"
        ):
            ask(z)
