"""Predictions: intervals, quantiles, samples and densities of the predictive law."""

import pytest
import torch

from rigidities import Prediction
from tests.support.refusals import refused

ONE = torch.ones(4, 2, dtype=torch.float64)
P = Prediction(mean=3 * ONE, epistemic=9 * ONE, noise=16 * ONE, rigidity=ONE)


def test_variance_is_the_sum_of_its_parts():
    assert torch.equal(P.variance, 25 * ONE)
    assert torch.equal(P.std, 5 * ONE)


def test_intervals_and_quantiles_are_those_of_the_normal_law():
    law = torch.distributions.Normal(P.mean, P.std)
    low, high = P.interval(0.9)
    torch.testing.assert_close(law.cdf(high) - law.cdf(low), 0.9 * ONE)
    torch.testing.assert_close(P.quantile(0.2), law.icdf(0.2 * ONE))
    torch.testing.assert_close(P.quantile(0.5), P.mean)


def test_log_prob_is_that_of_the_normal_law_and_does_not_broadcast():
    y = torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(P.log_prob(y), torch.distributions.Normal(3.0, 5.0).log_prob(y))
    column = Prediction(ONE[:, :1], ONE[:, :1], ONE[:, :1], ONE[:, :1])
    assert column.log_prob(torch.zeros(4)).shape == (4, 1)
    refused(r"shaped like the prediction, \(4, 2\), got \(2,\)", P.log_prob, torch.zeros(2))


def test_samples_have_mean_and_spread_and_follow_the_generator():
    draws = P.sample(50_000, torch.Generator().manual_seed(0))
    assert draws.shape == (50_000, 4, 2)
    torch.testing.assert_close(draws.mean(0), P.mean, atol=0.15, rtol=0)
    torch.testing.assert_close(draws.std(0), P.std, atol=0.1, rtol=0)
    again = P.sample(50_000, torch.Generator().manual_seed(0))
    assert torch.equal(draws, again)


@pytest.mark.parametrize("level", [0, 1, -0.1, 2])
def test_impossible_levels_are_refused(level):
    refused("between 0 and 1", P.interval, level)
    refused("between 0 and 1", P.quantile, level)


def test_predictions_are_frozen():
    with pytest.raises(AttributeError):
        P.mean = ONE
