"""Conformal intervals hold what they promise, on draws whose distribution the bars get wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from rigidities.calibration.conformal import Conformal, bar_cuts, group_labels
from rigidities.prediction.distribution import Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from rigidities.prediction.prediction import Prediction
from tests.support.refusals import refused

F64 = torch.float64
PLAIN = ("tails", "counts", "place", "labels")
LEVELS = (0.5, 0.8, 0.9, 0.95)
WORLDS = 3000
"""Draws of calibration and test rows, each a target of its own."""


def predicted(mean, scale, **options):
    zero, distribution = torch.zeros_like(mean), options.get("distribution", Gaussian())
    return Prediction(mean, zero, scale.square() * distribution.second, zero + 1, **options)


def draws(n, seed, worlds=WORLDS, **options):
    """Skewed, heteroscedastic targets (n, worlds); their bars are too narrow and shifted."""
    generator = np.random.default_rng(seed)
    x = generator.uniform(0.2, 2.0, (n, worlds))
    y = torch.from_numpy(x + x * (generator.gamma(2.0, 1.0, x.shape) - 2.0))
    x = torch.from_numpy(x)
    if (support := options.get("support")) is not None:
        y = y.clamp(*support)
    return predicted(x + 0.1, 0.3 + 0.4 * x, **options), y


def held(found, prediction, target, level, **rows):
    low, high = found.bound(**rows).interval(prediction, level)
    return ((low <= target) & (target <= high)).double()


def assert_mean(share, value):
    """Over worlds, within three standard errors; rows are (n, worlds)."""
    means = share.mean(0)
    error = float(means.std()) / math.sqrt(len(means))
    assert abs(float(means.mean()) - value) <= 3 * error


@pytest.mark.parametrize("n", [9, 50, 200])
@pytest.mark.parametrize("level", LEVELS)
def test_coverage_over_draws_is_the_rank_over_n_plus_one_and_never_less_than_the_level(n, level):
    found = Conformal.of(*draws(n, seed=n))
    prediction, target = draws(40, seed=1)
    expected = math.ceil(round((n + 1) * level, 9)) / (n + 1)
    assert expected >= level
    if expected == 1:
        with pytest.warns(UserWarning, match=r"infinite: 9 rows are too few for level 0.95.* 19"):
            assert held(found, prediction, target, level).all()
        return
    assert_mean(held(found, prediction, target, level), expected)


def test_the_uncorrected_intervals_of_those_draws_hold_less():
    prediction, target = draws(400, seed=2)
    low, high = prediction.interval(0.9)
    assert float(((low <= target) & (target <= high)).double().mean()) < 0.85


@pytest.mark.parametrize("level", [0.07, 0.5, 0.7, 0.9, 0.95, 0.98])
def test_ends_are_quantiles_at_the_exact_rank_of_the_scores(level):
    prediction, target = draws(99, seed=3, worlds=1)
    u = stats.norm.cdf(target.numpy(), prediction.mean.numpy(), prediction.std.numpy()).ravel()
    c = sorted(abs(2 * u - 1))[math.ceil(round(100 * level, 9)) - 1]
    low, high = Conformal.of(prediction, target).bound().interval(prediction, level)
    normal = stats.norm(prediction.mean.numpy(), prediction.std.numpy())
    np.testing.assert_allclose(low.numpy(), normal.ppf((1 - c) / 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(high.numpy(), normal.ppf((1 + c) / 2), rtol=1e-5, atol=1e-5)


def test_intervals_grow_with_the_level_from_one_list():
    prediction, target = draws(200, seed=4, worlds=1)
    bound = Conformal.of(prediction, target).bound()
    widths = [
        float((high - low).mean())
        for low, high in (bound.interval(prediction, level) for level in LEVELS)
    ]
    assert widths == sorted(widths) and len(set(widths)) == 4


def mixture(shape):
    """A distribution of its own for each entry."""
    generator = torch.Generator().manual_seed(0)
    return Mixture(*torch.randn(3, *shape, 2, dtype=F64, generator=generator) / 2)


DISTRIBUTIONS = {
    "gaussian": lambda shape: Gaussian(),
    "t": lambda shape: StudentT(4.0),
    "mixture": mixture,
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scores_far_out_keep_their_digits_on_either_side(distribution, sign, dtype):
    zero, far = torch.zeros(10, dtype=dtype), 1 if distribution == "gaussian" else 1e4
    one = DISTRIBUTIONS[distribution]((1,))
    prediction = predicted(zero, zero + 1, distribution=one.each(lambda t: t.expand(10, 2)))
    target = sign * far * torch.linspace(10, 19, 10, dtype=dtype)
    low, high = Conformal.of(prediction, target).bound().interval(prediction, 0.5)
    assert (high if sign > 0 else -low).tolist() == pytest.approx([15.0 * far] * 10, rel=1e-5)


@pytest.mark.parametrize(("distribution", "level"), [("t", 0.5), ("mixture", 0.9)])
def test_coverage_is_as_good_under_a_distribution_of_each_row(distribution, level):
    calibration, target = draws(
        29, seed=30, worlds=300, distribution=DISTRIBUTIONS[distribution]((29, 300))
    )
    test, y = draws(10, seed=31, worlds=300, distribution=DISTRIBUTIONS[distribution]((10, 300)))
    found = Conformal.of(calibration, target)
    assert_mean(held(found, test, y, level), math.ceil(30 * level) / 30)
    bound = replace(test, conformal=found.bound())
    for end, by_the_distribution in zip(
        bound.interval(level), bound.interval(level, conformal=False), strict=True
    ):
        assert not torch.allclose(end, by_the_distribution)
    assert torch.equal(bound.quantile(0.3), test.quantile(0.3))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_interval_within_a_tail_is_that_between_two_quantiles(distribution):
    prediction, _ = draws(30, seed=32, worlds=2, distribution=DISTRIBUTIONS[distribution]((30, 2)))
    tail = torch.linspace(0.01, 0.99, 60, dtype=F64).reshape(30, 2)
    for one, other in zip(prediction.within(tail), (tail / 2, 1 - tail / 2), strict=True):
        torch.testing.assert_close(prediction.cdf(one), other, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(prediction.tail(one), tail, rtol=1e-6, atol=1e-9)


def test_each_target_has_its_own_scores_and_masked_ones_are_left_out():
    prediction, target = draws(60, seed=5, worlds=3)
    target[:40, 1] = torch.nan
    both = Conformal.of(prediction, target)
    assert both.counts.tolist() == [60, 20, 60]
    bounds = both.bound().interval(prediction, 0.9)
    for k in range(3):
        known = ~target[:, k].isnan()
        one = predicted(prediction.mean[:, k], prediction.std[:, k])
        some = predicted(one.mean[known], one.std[known])
        alone = Conformal.of(some, target[known, k]).bound().interval(one, 0.9)
        for bound, own in zip(bounds, alone, strict=True):
            torch.testing.assert_close(bound[:, k], own)


def test_the_targets_of_entries_may_stand_in_any_dimension():
    prediction, target = draws(60, seed=6, worlds=6)
    which = torch.tensor([0, 1]).repeat(3)
    wide = predicted(prediction.mean.reshape(60, 3, 2), prediction.std.reshape(60, 3, 2))
    turned = predicted(wide.mean.mT, wide.std.mT)
    named = Conformal.of(prediction, target, targets=which)
    last = Conformal.of(wide, target.reshape(60, 3, 2))
    across = Conformal.of(turned, target.reshape(60, 3, 2).mT, targets=torch.tensor([[0], [1]]))
    assert named.counts.tolist() == last.counts.tolist() == across.counts.tolist() == [180, 180]
    for other in (last, across):
        assert torch.equal(named.tails, other.tails)


def test_every_group_is_covered_where_all_rows_together_miss_them():
    labels = torch.tensor([7, -1]).repeat_interleave(60)[:, None]
    calibration, target = draws(120, seed=7)
    target[:60] = calibration.mean[:60] + 4 * (target[:60] - calibration.mean[:60])
    found = Conformal.of(calibration, target, labels=labels)
    test, y = draws(80, seed=8)
    y[:40] = test.mean[:40] + 4 * (y[:40] - test.mean[:40])
    ours = torch.tensor([7, -1]).repeat_interleave(40)[:, None]
    inside = held(found, test, y, 0.9, labels=ours)
    for group in (inside[:40], inside[40:]):
        assert_mean(group, 55 / 61)
    together = held(Conformal.of(calibration, target), test, y, 0.9)
    assert float(together[:40].mean()) < 0.85 < 0.95 < float(together[40:].mean())


def test_fifths_of_the_bar_are_each_covered():
    worlds = 600
    train, _ = draws(500, seed=9, worlds=worlds)
    cuts = bar_cuts(train.std)
    assert cuts.shape == (worlds, 4)
    shares = (train.std[..., None] > cuts).double().mean((0, 1))
    assert shares.tolist() == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.005)
    found = Conformal.of(*draws(500, seed=10, worlds=worlds), cuts=cuts)
    assert int(found.counts.min()) >= 50
    test, y = draws(100, seed=11, worlds=worlds)
    inside, fifth = held(found, test, y, 0.9), (test.std[..., None] > cuts).sum(-1)
    shares = [float(inside[fifth == number].mean()) for number in range(5)]
    assert shares == pytest.approx([0.9 + 0.5 / 101] * 5, abs=0.01)
    together = held(Conformal.of(*draws(500, seed=10, worlds=worlds)), test, y, 0.9)
    assert float(together[fifth == 0].mean()) > 0.93 and float(together[fifth == 4].mean()) < 0.88


def test_groups_of_the_bar_that_have_few_rows_join_their_neighbours():
    std = torch.cat([torch.full((n,), s) for n, s in [(60, 1), (20, 2), (30, 3), (55, 4), (9, 5)]])
    prediction = predicted(torch.zeros(174, dtype=F64), std.to(F64))
    cuts = torch.tensor([[1.5, 2.5, 3.5, 4.5]], dtype=F64)
    found = Conformal.of(prediction, prediction.std, cuts=cuts)
    assert found.place.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert found.counts.tolist() == [60, 50, 64, 174]
    assert "in 5 groups by the bar" in found.sentences[0]
    merged = "small groups are merged: 2, 3 with 50 rows; 4, 5 with 64 rows."
    assert merged in found.sentences[0]


SMALL = torch.tensor([3] * 6 + [0] * 40 + [1] * 12 + [2] * 60)[:, None]
"""Groups of 6, 40, 12 and 60 rows; the smallest has the largest errors."""


def small_groups(seed):
    prediction, target = draws(len(SMALL), seed)
    wide = torch.where(SMALL == 3, 2.0, 1.0)
    return prediction, prediction.mean + wide * (target - prediction.mean)


@pytest.mark.thorough
def test_each_group_holds_its_level_or_is_infinite_and_named():
    found = Conformal.of(*small_groups(seed=40), labels=SMALL)
    test, y = small_groups(seed=41)
    with pytest.warns(UserWarning, match=r"level 0.9.* 9 rows: 3 with 6 rows\. .*one label"):
        low, high = found.bound(SMALL).interval(test, 0.9)
    small = (SMALL == 3)[:, 0]
    assert low[small].eq(-math.inf).all() and high[small].eq(math.inf).all()
    assert low[~small].isfinite().all() and high[~small].isfinite().all()
    inside = ((low <= y) & (y <= high)).double()
    for group, count in ((0, 40), (1, 12), (2, 60)):
        assert_mean(
            inside[(group == SMALL)[:, 0]], math.ceil((count + 1) * 0.9 - 1e-9) / (count + 1)
        )


def test_a_small_group_is_finite_at_the_levels_that_its_rows_reach():
    found = Conformal.of(*small_groups(seed=42), labels=SMALL)
    test, y = small_groups(seed=43)
    small = (SMALL == 3)[:, 0]
    assert_mean(held(found, test, y, 0.8, labels=SMALL)[small], 6 / 7)


def test_a_report_names_groups_that_are_too_small():
    prediction, target = draws(60, seed=44, worlds=2)
    labels = torch.tensor([5] * 6 + [7] * 54)[:, None]
    target[:4, 1] = torch.nan
    _, said = Conformal.of(prediction, target, labels=labels).sentences
    assert "need 9 rows: 5 of target 0 with 6 rows, 5 of target 1 with 2 rows. Their" in said
    assert "give small groups one label" in said


def test_small_groups_by_label_have_lists_of_their_own():
    labels = torch.tensor([4] * 20 + [9] * 200 + [1] * 45 + [2] * 80)[:, None]
    prediction, target = draws(345, seed=12, worlds=1)
    found = Conformal.of(prediction, target, labels=labels)
    assert found.labels.tolist() == [1, 2, 4, 9]
    assert found.counts[found.place].tolist() == [[45, 80, 20, 200, 345]]
    rest = Conformal.of(*part((prediction, target), (labels == 4)[:, 0]))
    first = int(found.counts[:2].sum())
    assert torch.equal(found.tails[first : first + 20], rest.tails)


def part(both, rows):
    prediction, target = both
    return predicted(prediction.mean[rows], prediction.std[rows]), target[rows]


def test_fewer_rows_than_groups_by_the_bar_need_are_one_list():
    prediction, target = draws(30, seed=13, worlds=1)
    found = Conformal.of(prediction, target, cuts=torch.tensor([[0.5, 0.9]], dtype=F64))
    assert found.counts.tolist() == [30, 30]
    assert found.place.tolist() == [[0, 0, 0, 1]]


def test_a_label_that_was_never_seen_is_a_group_of_no_rows():
    prediction, target = draws(120, seed=14, worlds=1)
    found = Conformal.of(prediction, target, labels=torch.arange(120)[:, None] % 2)
    for label in (5, -1):
        with pytest.warns(UserWarning, match=f"{label} with 0 rows"):
            low, high = found.bound(torch.full((120, 1), label)).interval(prediction, 0.9)
        assert low.eq(-math.inf).all() and high.eq(math.inf).all()


def test_rows_without_labels_take_the_threshold_of_all_rows_and_it_is_said():
    prediction, target = draws(120, seed=14, worlds=1)
    found = Conformal.of(prediction, target, labels=torch.arange(120)[:, None] % 2)
    together = Conformal.of(prediction, target).bound().interval(prediction, 0.9)
    with pytest.warns(UserWarning, match="have no group.* groups= to load"):
        assert_close(found.bound().interval(prediction, 0.9), together)


def assert_close(ones, others):
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other)


def test_too_few_rows_give_the_whole_line_or_the_support_with_a_warning():
    prediction, target = draws(8, seed=15, worlds=1)
    found = Conformal.of(prediction, target)
    with pytest.warns(UserWarning, match="8 of 8 .* infinite: 8 rows are .* level 0.9, .* needs 9"):
        low, high = found.bound().interval(prediction, 0.9)
    assert low.eq(-math.inf).all() and high.eq(math.inf).all()
    with pytest.warns(UserWarning, match="are infinite"):
        low, high = found.bound().interval(replace(prediction, support=(0.0, None)), 0.9)
    assert low.eq(0).all() and high.eq(math.inf).all()
    with pytest.warns(UserWarning, match="are infinite"):
        bounds = found.bound().interval(replace(prediction, support=(-1.0, 2.0)), 0.9)
    assert [bound.unique().tolist() for bound in bounds] == [[-1.0], [2.0]]


def test_tied_scores_are_held_together():
    zero = torch.zeros(20)
    prediction = predicted(zero, zero + 1)
    target = torch.tensor([0.0] * 4 + [1.0] * 6 + [-1.0] * 6 + [2.0] * 4)
    bound = Conformal.of(prediction, target).bound()
    for level, reach in ((0.05, 0.0), (0.5, 1.0), (0.75, 1.0), (0.8, 2.0)):
        low, high = bound.interval(prediction, level)
        assert (low <= -reach).all() and (high >= reach).all()
        assert high.max() == pytest.approx(reach, abs=1e-5)


def test_the_row_that_set_the_threshold_is_held_whatever_the_rounding():
    for seed in range(10):
        prediction, target = draws(9, seed=seed, worlds=20, distribution=StudentT(3.0))
        inside = held(Conformal.of(prediction, target), prediction, target, 0.5)
        assert inside.sum(0).eq(5).all()


def test_bounds_of_a_support_are_meant_in_the_precision_of_the_prediction():
    mean = torch.linspace(0, 0.4, 20)
    prediction = predicted(mean, torch.ones(20), support=(0.1, 0.7))
    target = torch.tensor([0.1, 0.7] * 10)
    low, high = Conformal.of(prediction, target).bound().interval(prediction, 0.95)
    assert ((low <= target) & (target <= high)).all()


def test_targets_beyond_a_support_are_as_far_out_as_can_be():
    zero = torch.zeros(4)
    prediction = predicted(zero, zero + 1, support=(-1.0, 1.0))
    assert prediction.tail(torch.tensor([-1.5, -1.0, 0.5, 1.5])).tolist() == pytest.approx(
        [0, 2 * stats.norm.cdf(-1), 2 * stats.norm.cdf(-0.5), 0]
    )


def test_cuts_of_the_bar_are_those_of_each_target():
    std = torch.tensor([[1.0, 10.0], [2.0, 20.0]], dtype=F64).repeat(60, 1)
    prediction = predicted(torch.zeros_like(std), std)
    target = std * torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64).repeat(60, 1)
    found = Conformal.of(prediction, target, cuts=torch.tensor([[1.5], [15.0]], dtype=F64))
    assert found.counts.tolist() == [60, 60, 120] * 2
    _, high = found.bound().interval(prediction, 0.9)
    torch.testing.assert_close(high, target, rtol=1e-4, atol=0)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_targets_at_the_bounds_of_a_support_are_covered(level):
    support = (0.3, 1.5)
    found = Conformal.of(*draws(50, seed=16, support=support))
    test, y = draws(60, seed=17, support=support)
    at_a_bound = (y == 0.3) | (y == 1.5)
    assert 0.3 < float(at_a_bound.double().mean()) < 0.7
    low, high = found.bound().interval(test, level)
    assert low.min() >= 0.3 and high.max() <= 1.5
    inside = held(found, test, y, level).mean(0)
    assert float(inside.mean()) >= level - 3 * float(inside.std()) / math.sqrt(WORLDS)


def test_the_score_of_an_atom_is_the_smallest_between_its_two_values_of_u():
    mean = torch.tensor([-1.0, 0.5, 2.0], dtype=F64)
    prediction = predicted(mean, torch.ones(3, dtype=F64), support=(0.0, 1.0))
    u = torch.special.ndtr
    for y, spans in (
        (0.0, [(0.0, u(0.0 - m)) for m in mean]),
        (1.0, [(u(1.0 - m), 1.0) for m in mean]),
    ):
        grids = [torch.linspace(float(a), float(b), 100001, dtype=F64) for a, b in spans]
        expected = sorted(float((2 * grid - 1).abs().min()) for grid in grids)
        scores = 1 - Conformal.of(prediction, torch.full((3,), y, dtype=F64)).tails
        assert scores.tolist() == pytest.approx(expected, abs=1e-4)


def test_files_keep_everything_but_the_function():
    prediction, target = draws(200, seed=18, worlds=2)
    for options in (
        {},
        {"cuts": bar_cuts(prediction.std)},
        {"labels": torch.arange(200)[:, None] % 3},
    ):
        found = Conformal.of(prediction, target, **options)
        again = Conformal(**found.tensors())
        assert again.tensors().keys() == found.tensors().keys() == {*PLAIN, *options}
        labels = options.get("labels")
        bounds = [one.bound(labels).interval(prediction, 0.8) for one in (found, again)]
        assert_close(*bounds)
        moved = found.to(torch.device("cpu"))
        assert all(torch.equal(moved.tensors()[name], one) for name, one in found.tensors().items())


def test_labels_are_whole_numbers_one_per_row_for_all_its_outputs():
    output = torch.zeros(3, 2)
    for labels in (
        [1, 0, 2],
        np.array([1, 0, 2]),
        torch.tensor([[1], [0], [2]], dtype=torch.int32),
    ):
        found = group_labels(lambda _, one=labels: one, None, output)
        assert found.dtype == torch.int64 and found.tolist() == [[1, 1], [0, 0], [2, 2]]
    assert group_labels(lambda b: b > 0, torch.tensor([1, -1]), output[:2, 0]).tolist() == [1, 0]
    for wrong in (["a", "b", "c"], [0.5, 1.0, 2.0], [1, 2], None):
        refused("one whole number per row", group_labels, lambda _, one=wrong: one, None, output)


def test_bad_input_is_refused():
    prediction, target = draws(20, seed=20, worlds=1)
    refused("kept no training rows", bar_cuts, None)
    refused(r"shaped .* \(20, 1\), got \(5, 1\)", Conformal.of, prediction, target[:5])
    refused("need targets", Conformal.of, prediction, target * torch.nan)
    broken = replace(prediction, mean=prediction.mean * torch.nan)
    refused("finite predictions", Conformal.of, broken, target)
    refused("between 0 and 1", Conformal.of(prediction, target).bound().interval, prediction, 1.0)


def test_a_bar_of_zero_holds_an_exact_prediction_and_nothing_else():
    zero = torch.zeros(9)
    prediction = predicted(zero, zero)
    found = Conformal.of(prediction, torch.tensor([0.0] * 5 + [1.0] * 4))
    low, high = found.bound().interval(prediction, 0.5)
    assert low.eq(0).all() and high.eq(0).all()
    with pytest.warns(UserWarning, match="targets that are impossible under the distribution"):
        low, high = found.bound().interval(prediction, 0.6)
    assert low.eq(-math.inf).all() and high.eq(math.inf).all()


def test_the_report_says_rows_groups_and_the_guarantee_as_it_is():
    prediction, target = draws(120, seed=21, worlds=2)
    target[:50, 1] = torch.nan
    (plain,) = Conformal.of(prediction, target).sentences
    assert "from 120 rows (70 for the target" in plain and "groups" not in plain
    assert "on average over draws of calibration and test rows" in plain
    assert "not for every single input. The rows must not have been used for training" in plain
