"""90 % intervals of `calibrate(valid)` hold 90 %, where the distribution is known and the paper's
is not it.

Fixed random features with a readout in closed form: nothing is trained.
"""

import pytest
import torch

import rigidities as rg
from tests.support.random_features import (
    Sets,
    draw,
    heavy_noise,
    normal_noise,
    random_feature_net,
    sets,
    signal,
    skewed_noise,
)

NOISES = {"heteroscedastic": normal_noise, "skewed": skewed_noise, "heavy": heavy_noise}


def calibrated(data: Sets, method="full") -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(data.model).fit(data.train)
    return uq.calibrate(data.valid, method=method)


def inside(uq, x, y, level: float = 0.9) -> torch.Tensor:
    """Whether intervals hold their targets."""
    low, high = uq.predict(x).interval(level)
    return ((y >= low) & (y <= high)).double()[:, 0]


@pytest.fixture(scope="module", params=NOISES)
def world(request):
    data = sets(NOISES[request.param], (800, 400, 4000), width=16)
    return request.param, data, calibrated(data), calibrated(data, "paper")


def test_intervals_hold_their_level(world):
    _, data, uq, _ = world
    for level, slack in ((0.9, 0.04), (0.5, 0.06)):
        assert abs(float(inside(uq, *data.test, level).mean()) - level) < slack


def test_intervals_hold_on_either_side_of_the_inputs(world):
    """Where noise is low and where it is high; the paper's bars hold too much or too little."""
    name, data, uq, paper = world
    x, y = data.test
    worst = {}
    for which, one in (("auto", uq), ("paper", paper)):
        held = inside(one, x, y)
        parts = [float(held[side].mean()) for side in (x[:, 0] < -0.6, x[:, 0] > 0.6)]
        worst[which] = max(abs(part - 0.9) for part in parts)
    assert worst["auto"] < 0.075
    if name == "heteroscedastic":
        assert worst["paper"] > 0.09


def test_each_tail_holds_its_share(world):
    """A skewed distribution: intervals are no wider than they must be on the other side."""
    _, data, uq, _ = world
    x, y = data.test
    right = x[:, 0] > 0.2
    low, high = uq.predict(x).interval(0.9)
    for beyond in (y < low, y > high):
        assert abs(float(beyond[right].double().mean()) - 0.05) < 0.05


def test_the_likelihood_of_new_rows_is_better_than_the_papers(world):
    name, data, uq, paper = world
    x, y = data.test
    gain = float((uq.predict(x).log_prob(y) - paper.predict(x).log_prob(y)).mean())
    assert gain > {"heteroscedastic": 0.1, "skewed": 0.1, "heavy": 0.05}[name]


def test_the_guard_keeps_coverage_outside_the_training_rows():
    """Trained on one corner, judged on the whole cube: without the guard too few are held."""
    generator = torch.Generator().manual_seed(9)
    parts = [draw(n, normal_noise, i) for i, n in enumerate((1600, 800))]
    train, valid = ((x[x[:, 2] < 0], y[x[:, 2] < 0]) for x, y in parts)
    x = 2 * torch.rand(2000, 3, generator=generator, dtype=torch.float64) - 1
    x[:, 2] = 0.3 + 0.7 * torch.rand(2000, generator=generator, dtype=torch.float64)
    y = signal(x) + normal_noise(x, generator)
    data = Sets(random_feature_net(*train, width=16), train, valid, (x, y))
    held = {}
    for guard in (True, False):
        held[guard] = float(inside(calibrated(data, rg.Full(guard=guard)), x, y).mean())
    assert held[True] > 0.85
    assert held[False] < held[True] - 0.05


def test_clipped_targets_with_their_support_are_held_as_often_as_they_can_be():
    """An interval that reaches the bound holds all of the mass there, and what lies off it 90 %."""
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(4500, 3, generator=generator, dtype=torch.float64) - 1
    noise = 0.5 * torch.randn(4500, 1, generator=generator, dtype=torch.float64)
    y = (0.5 + torch.sin(2 * x[:, :1]) + 0.4 * x[:, 1:2] + noise).clamp(min=0)
    train, valid, test = zip(*(part.split([1000, 500, 3000]) for part in (x, y)), strict=True)
    uq = rg.LastLayerRigidity(random_feature_net(*train, width=16)).fit(train)
    uq.calibrate(valid, method=rg.Full(support=(0, None)))
    p, target = uq.predict(test[0]), test[1]
    at = target == 0
    assert 0.2 < float(at.double().mean()) < 0.5
    low, high = p.interval(0.9)
    held = ((target >= low) & (target <= high)).double()
    mass = p.cdf(torch.zeros_like(target))
    possible = torch.where(low > 0, 0.9, (0.9 + mass.clamp(max=0.05)))
    possible = torch.where(high <= 0, mass, possible)
    assert abs(float(held.mean() - possible.mean())) < 0.025
    assert abs(float(held[~at].mean()) - 0.9) < 0.03
    # the probability integral transform, drawn evenly within the mass at the bound, is uniform
    below = torch.where(at, 0.0, p.cdf(target))
    drawn = torch.rand(target.shape, generator=generator, dtype=torch.float64)
    pit = below + drawn * (p.cdf(target) - below)
    deciles = torch.histc(pit, 10, 0, 1) / len(pit)
    assert float((deciles - 0.1).abs().max()) < 0.03


@pytest.mark.thorough
def test_mostly_zero_targets_are_held_by_99_percent_intervals():
    """A noise that follows how seldom targets leave zero must not be too small for those rows."""
    held = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6000, 3, generator=generator, dtype=torch.float64)
        draws = torch.randn(6000, generator=generator, dtype=torch.float64)
        leaves = torch.rand(6000, generator=generator) < torch.sigmoid(x[:, 0] - 1.4)
        y = torch.where(leaves, (0.5 * x[:, 1] + 0.5 * draws).exp(), 0.0)[:, None]
        train, valid, test = zip(*(part.split([2000, 1000, 3000]) for part in (x, y)), strict=True)
        uq = rg.LastLayerRigidity(random_feature_net(*train, width=40)).fit(train)
        uq.calibrate(valid)
        held.append(float(inside(uq, *test, 0.99).mean()))
    assert 0.98 < sum(held) / 2 < 0.997  # 0.983 on average over eight seeds
