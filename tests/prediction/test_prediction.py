"""Predictions: intervals, quantiles, samples, densities and scores of the predictive
distribution."""

import math
from dataclasses import replace

import pytest
import torch

from rigidities import Prediction
from rigidities.calibration.conformal import Conformal
from rigidities.prediction.distribution import Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from tests.prediction.distribution_oracle import SKEWED, Oracle
from tests.support.refusals import refused

F64 = torch.float64
ONE = torch.ones(4, 2, dtype=F64)
P = Prediction(mean=3 * ONE, epistemic=9 * ONE, noise=16 * ONE, rigidity=ONE)
SHAPE = torch.tensor(SKEWED, dtype=F64).expand(4, 2, 3, 2)

CASES = {  # distribution and oracle
    "gaussian": (Gaussian(), Oracle()),
    "t": (StudentT(3.0), Oracle(3.0)),
    "mixture": (Mixture(*SHAPE.unbind(2)), Oracle(4.0, SKEWED)),
}
SUPPORTS = {
    "unbounded": None,
    "positive": (0.0, None),
    "capped": (None, 5.0),
    "both": (0.0, 5.0),
}
DISTRIBUTIONS = pytest.mark.parametrize(("distribution", "oracle"), CASES.values(), ids=CASES)
BOUNDED = pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)


def bounds(support):
    low, high = support or (None, None)
    return -math.inf if low is None else low, math.inf if high is None else high


# --- moments ------------------------------------------------------------------------------------


def test_variance_is_the_sum_of_its_parts():
    assert torch.equal(P.variance, 25 * ONE)
    assert torch.equal(P.std, 5 * ONE)


@DISTRIBUTIONS
def test_the_variance_is_the_distributions_second_moment_about_the_models_mean(
    distribution, oracle
):
    p = replace(P, distribution=distribution)
    second, mean = oracle.moment(lambda x: x * x), oracle.moment(lambda x: x)
    torch.testing.assert_close(p.unit, 5 / math.sqrt(second) * ONE, rtol=1e-5, atol=0)
    torch.testing.assert_close(p.centre, 3 + p.unit * mean, rtol=1e-5, atol=0)
    assert torch.equal(p.std, 5 * ONE) and torch.equal(p.mean, P.mean)


# --- brute force --------------------------------------------------------------------------------


@BOUNDED
@DISTRIBUTIONS
def test_scores_and_probabilities_are_those_of_the_bounded_distribution(
    distribution, oracle, support
):
    p, (low, high) = replace(P, distribution=distribution, support=support), bounds(support)
    scale = float(p.unit[0, 0])

    def z(value):
        return (value - 3) / scale

    def bounded(x):
        return min(max(3 + scale * x, low), high)

    torch.testing.assert_close(p.centre, oracle.moment(bounded) * ONE, rtol=1e-6, atol=1e-6)
    for y in (0.0, 2.7, 5.0):
        below, score = oracle.cdf(z(y)), scale * oracle.crps(z(y), z(low), z(high))
        density = math.log(oracle.density(z(y)) / scale)
        expected = math.log(below) if y == low else density
        expected = math.log(1 - below) if y == high else expected
        torch.testing.assert_close(p.cdf(y * ONE), (1.0 if y >= high else below) * ONE)
        torch.testing.assert_close(p.crps(y * ONE), score * ONE, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p.log_prob(y * ONE), expected * ONE, rtol=1e-6, atol=1e-6)


@DISTRIBUTIONS
def test_a_target_beyond_a_bound_is_impossible_and_its_score_says_how_far(distribution, oracle):
    p = replace(P, distribution=distribution, support=(0.0, 5.0))
    for y, bound, below in ((-2.0, 0.0, 0), (8.0, 5.0, 1)):
        assert p.log_prob(y * ONE).tolist() == [[-math.inf] * 2] * 4
        assert torch.equal(p.cdf(y * ONE), below * ONE)
        torch.testing.assert_close(p.crps(y * ONE), p.crps(bound * ONE) + abs(y - bound))


@BOUNDED
@DISTRIBUTIONS
def test_quantiles_intervals_and_samples_stay_within_the_support(distribution, oracle, support):
    p, (low, high) = replace(P, distribution=distribution, support=support), bounds(support)
    free = replace(p, support=None)
    for level in (0.01, 0.2, 0.5, 0.99):
        torch.testing.assert_close(free.cdf(free.quantile(level)), level * ONE)
        assert torch.equal(p.quantile(level), free.quantile(level).clamp(low, high))
    torch.testing.assert_close(p.interval(0.9)[0], p.quantile(0.05))
    torch.testing.assert_close(p.interval(0.9)[1], p.quantile(0.95))
    draws = p.sample(500, torch.Generator().manual_seed(0))
    assert draws.shape == (500, 4, 2) and bool(((draws >= low) & (draws <= high)).all())
    assert torch.equal(draws, p.sample(500, torch.Generator().manual_seed(0)))
    for y in (0.0, 2.0, 5.0):
        share = (draws <= y).double().mean((0, 1, 2))
        assert float(share) == pytest.approx(float(p.cdf(y * ONE)[0, 0]), abs=0.035)
    error = 4 * float(draws.std()) / math.sqrt(draws.numel())
    assert float(draws.mean()) == pytest.approx(float(p.centre.mean()), abs=error)


def test_intervals_and_quantiles_are_those_of_the_normal_distribution():
    distribution = torch.distributions.Normal(P.mean, P.std)
    low, high = P.interval(0.9)
    torch.testing.assert_close(distribution.cdf(high) - distribution.cdf(low), 0.9 * ONE)
    torch.testing.assert_close(P.quantile(0.2), distribution.icdf(0.2 * ONE))
    torch.testing.assert_close(P.quantile(0.5), P.mean)


def test_a_small_mass_at_a_bound_keeps_its_digits():
    far = replace(P, mean=-97 * ONE, support=(None, 3.0))  # twenty standard deviations away
    expected = math.log(math.erfc(20 / math.sqrt(2)) / 2)
    single = Prediction(-97 * ONE.float(), 9 * ONE.float(), 16 * ONE.float(), ONE.float())
    for p in (far, replace(single, support=(None, 3.0))):
        torch.testing.assert_close(p.log_prob(3 * ONE), (expected * ONE).to(p.mean))
        assert float(p.crps(3 * ONE)[0, 0]) == pytest.approx(100 - 5 / math.sqrt(math.pi))


def test_a_target_at_a_bound_is_there_in_any_precision():
    p = replace(P, support=(0.1, 4.9))
    for y in (0.1, 4.9):
        single, double = (torch.full((4, 2), y, dtype=kind) for kind in (torch.float32, F64))
        for ask in (p.log_prob, p.cdf, p.crps):
            torch.testing.assert_close(ask(single), ask(double), rtol=1e-12, atol=0)


# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["log_prob", "cdf", "crps"])
def test_targets_are_matched_to_the_prediction_and_do_not_broadcast(ask):
    column = Prediction(ONE[:, :1], ONE[:, :1], ONE[:, :1], ONE[:, :1])
    assert getattr(column, ask)(torch.zeros(4)).shape == (4, 1)
    refused(r"shaped like the prediction, \(4, 2\), got \(2,\)", getattr(P, ask), torch.zeros(2))


@DISTRIBUTIONS
def test_half_precision_predictions_are_computed_in_single(distribution, oracle):
    half = Prediction(*(part.to(torch.bfloat16) for part in (3 * ONE, 9 * ONE, 16 * ONE, ONE)))
    half, whole = (
        replace(half, distribution=distribution, support=(0.1, None)),
        replace(P, distribution=distribution, support=(0.1, None)),
    )
    exact = torch.tensor([[0.1, 1.37]] * 4, dtype=F64)
    y = exact.float()
    for ask in ("log_prob", "cdf", "crps"):
        found = getattr(half, ask)(y)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, getattr(whole, ask)(exact).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(half.quantile(0.9), whole.quantile(0.9).float())
    assert half.sample(2).dtype == half.centre.dtype == torch.float32


@DISTRIBUTIONS
def test_a_prediction_that_is_nan_gives_nan_there_alone(distribution, oracle):
    mean = torch.tensor([[math.nan, 3.0]] * 4, dtype=F64)
    p = replace(P, mean=mean, epistemic=9 * mean, distribution=distribution, support=(0.0, None))
    found = (p.crps(ONE), p.log_prob(ONE), p.quantile(0.3), p.centre, p.sample(1)[0], p.cdf(ONE))
    for values in found:
        assert values.isnan().tolist() == [[True, False]] * 4
    target = torch.tensor([[math.nan, 3.0]] * 4)
    for ask in (P.crps, P.log_prob, P.cdf):
        assert ask(target).isnan().tolist() == [[True, False]] * 4


@pytest.mark.parametrize("level", [0, 1, -0.1, 2])
def test_impossible_levels_are_refused(level):
    refused("between 0 and 1", P.interval, level)
    refused("between 0 and 1", P.quantile, level)


def test_a_support_that_is_empty_is_refused():
    refused(
        r"Expected support=\(lowest, highest\).*got \(5.0, 0.0\)", replace, P, support=(5.0, 0.0)
    )


def test_conformal_intervals_are_those_of_their_rows():
    class Doubled:
        def interval(self, prediction, level):
            return prediction.mean - 2 * level, prediction.mean + 2 * level

    refused(r"conformalize\(x, y\) after calibrate", P.interval, 0.9, conformal=True)
    guaranteed = replace(P, conformal=Doubled())
    for conformal in (None, True):
        low, high = guaranteed.interval(0.8, conformal=conformal)
        torch.testing.assert_close(high - low, 3.2 * ONE)
    for p in (P, guaranteed):
        assert torch.equal(p.interval(0.8, conformal=False)[0], P.quantile(0.1))
    assert torch.equal(P.interval(0.8)[0], P.quantile(0.1))


def test_predictions_are_frozen():
    with pytest.raises(AttributeError):
        P.mean = ONE


def test_a_prediction_goes_to_another_device_with_all_that_it_holds():
    bound = Conformal.of(replace(P, distribution=CASES["mixture"][0]), P.mean).bound(
        targets=torch.arange(2)
    )
    p = replace(P, distribution=CASES["mixture"][0], conformal=bound, support=(0.0, None))
    there = p.to("meta")
    held = [
        *vars(there).values(),
        *vars(there.distribution).values(),
        *vars(there.conformal).values(),
    ]
    held += vars(there.conformal.conformal).values()
    devices = [one.device.type for one in held if isinstance(one, torch.Tensor)]
    assert set(devices) == {"meta"} and len(devices) >= 10 and there.support == p.support
    back = p.to("cpu")
    assert torch.equal(back.quantile(0.3), p.quantile(0.3))
