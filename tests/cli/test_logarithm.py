"""A prediction of log y gives that of y: quantiles, probabilities and scores follow exactly."""

import pytest
import torch
from scipy import stats

from rigidities.cli.logarithm import in_target_unit
from rigidities.prediction.distribution import Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from rigidities.prediction.prediction import Prediction

F64 = torch.float64


def prediction(distribution, rows=40, support=None):
    generator = torch.Generator().manual_seed(0)
    mean, spread = torch.rand(2, rows, 1, generator=generator, dtype=F64)
    noise = (0.1 + 0.4 * spread).square()
    return Prediction(
        mean=8 + mean,
        epistemic=0.2 * noise,
        noise=0.8 * noise,
        rigidity=torch.ones(rows, 1, dtype=F64),
        distribution=distribution,
        support=support,
    )


SHAPES = 0.4 * torch.randn(3, 40, 1, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
BASES = {"gaussian": Gaussian(), "student-t": StudentT(5.0), "mixture": Mixture(*SHAPES)}


@pytest.mark.parametrize("name", BASES)
def test_quantiles_and_probabilities_are_those_of_the_logarithm(name):
    log_p = prediction(BASES[name])
    p = in_target_unit(log_p)
    for level in (0.01, 0.5, 0.95):
        torch.testing.assert_close(p.quantile(level), log_p.quantile(level).exp())
    y = (log_p.mean + 0.7 * log_p.std).exp()
    torch.testing.assert_close(p.cdf(y), log_p.cdf(y.log()))
    torch.testing.assert_close(p.tail(y), log_p.tail(y.log()))
    torch.testing.assert_close(p.log_prob(y), log_p.log_prob(y.log()) - y.log())
    torch.testing.assert_close(p.mean, log_p.mean.exp())
    half = ((log_p.mean + log_p.std).exp() - (log_p.mean - log_p.std).exp()) / 2
    torch.testing.assert_close(p.std, half)


def test_scores_of_a_gaussian_logarithm_are_those_of_a_lognormal():
    log_p = prediction(Gaussian())
    p = in_target_unit(log_p)
    exact = stats.lognorm(s=log_p.std.numpy(), scale=log_p.mean.exp().numpy())
    assert p.centre.numpy() == pytest.approx(exact.mean(), rel=2e-3)
    y = (log_p.mean - 0.4 * log_p.std).exp()
    # CRPS of a lognormal: Baran and Lerch, "Log-normal distribution based EMOS models", 2015.
    s, z = log_p.std, (y.log() - log_p.mean) / log_p.std
    below = torch.special.ndtr
    crps = y * (2 * below(z) - 1) - 2 * (log_p.mean + s.square() / 2).exp() * (
        below(z - s) + below(s / 2**0.5) - 1
    )
    torch.testing.assert_close(p.crps(y), crps, rtol=5e-3, atol=0)


def test_picked_rows_and_impossible_values_keep_their_meaning():
    p = in_target_unit(prediction(BASES["mixture"]))
    torch.testing.assert_close(p[3:7].quantile(0.9), p.quantile(0.9)[3:7])
    flat = p[torch.ones_like(p.mean, dtype=torch.bool)]
    torch.testing.assert_close(flat.quantile(0.1), p.quantile(0.1)[:, 0])
    negative = torch.full_like(p.mean, -1.0)
    assert (p.cdf(negative) == 0).all()
    assert (p.log_prob(negative) == -torch.inf).all()
    assert (p.distribution.mirrored.cdf((p.mean - negative) / p.unit) == 1).all()


def test_bounds_of_the_logarithm_become_bounds_of_the_target():
    p = in_target_unit(prediction(Gaussian(), support=(8.2, 8.8)))
    low, high = p.interval(0.99)
    assert float(low.min()) == pytest.approx(torch.tensor(8.2).exp().item(), rel=1e-6)
    assert float(high.max()) == pytest.approx(torch.tensor(8.8).exp().item(), rel=1e-6)
    inside = (p.centre >= low) & (p.centre <= high)
    assert inside.all()
