"""Rows of a target: training rows are what a readout refitted without them would leave."""

from dataclasses import replace

import pytest
import torch

from rigidities.calibration import words
from rigidities.calibration.full import far_rows
from rigidities.calibration.robust import FAR, clipped_mean, reach
from rigidities.calibration.rows import TargetView
from tests.support.density_rows import target_view, view_of
from tests.support.tensors import close, normal

F64 = torch.float64


def test_seen_rows_are_those_of_a_refit_without_them():
    f, y, ridge = normal(30, 4), normal(30, seed=1), 0.7
    weight = 0.5 + torch.rand(30, dtype=F64, generator=torch.Generator().manual_seed(2))

    def refit(rows):
        whole = (f[rows].T * weight[rows]) @ f[rows] + ridge * torch.eye(4)
        return whole, torch.linalg.solve(whole, (f[rows].T * weight[rows]) @ y[rows])

    whole, w = refit(torch.ones(30, dtype=torch.bool))
    q = (f * torch.linalg.solve(whole, f.T).T).sum(1)
    columns = [y - f @ w, q, weight, f @ w, torch.ones_like(q), f]
    found = view_of(*columns, seen=True)
    for i in (0, 7, 29):
        without, own = refit(torch.arange(30) != i)
        close(found.residual[i], y[i] - f[i] @ own)
        close(found.q[i], f[i] @ torch.linalg.solve(without, f[i]))
    assert bool(found.seen.all())
    new = view_of(*columns, seen=False)
    close(new.residual, columns[0])
    close(new.q, q)


def test_a_row_that_the_fit_nearly_interpolates_is_enlarged_twentyfold_at_most():
    columns = [torch.ones(2), torch.tensor([0.99, 0.5]), torch.ones(2), *torch.zeros(2, 2)]
    found = view_of(*columns, torch.zeros(2, 1), seen=True)
    close(found.residual, torch.tensor([20.0, 2.0]))


def test_masked_rows_are_left_out():
    error = torch.tensor([1.0, torch.nan, 3.0], dtype=F64)
    other = torch.ones(3, dtype=F64) / 2
    found = view_of(error, other, other, other, other, other[:, None], seen=False)
    assert found.residual.tolist() == [1.0, 3.0]


def test_one_outlier_counts_once_in_a_clipped_mean():
    squares = normal(400).square()
    close(clipped_mean(squares), squares.clamp(max=float(25 * squares.median() / 0.455)).mean())
    wild = squares.clone()
    wild[0] = 1e8
    assert float(clipped_mean(wild) / clipped_mean(squares)) < 1.1


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("zeros", [0, 300])
def test_an_outlier_of_any_size_moves_a_clipped_mean_by_one_row(size, zeros):
    squares = normal(400).square()
    squares[:zeros] = 0
    wild = squares.clone()
    wild[-1] = size**2
    assert float(clipped_mean(wild) / clipped_mean(squares)) < 1.3


@pytest.mark.parametrize("size", [1e6, 1e12, 1e30, 1e200])
def test_a_far_residual_counts_as_one_within_reach(size):
    error = normal(200)
    limit = reach(error)
    assert limit == float("inf")  # none is beyond
    error[7] = -size
    limit = reach(error)
    unit = float(error.abs().median()) / 0.455**0.5
    assert limit == pytest.approx(FAR * unit, rel=0.02)
    one = torch.ones(200, dtype=F64)
    found = view_of(error, one, one, one, one, one[:, None], seen=False)
    assert float(found.residual[7]) == pytest.approx(-limit)
    assert torch.equal(found.residual[8:], error[8:])


def test_many_far_residuals_are_no_outliers():
    error = normal(200)
    error[:20] *= 1e6
    assert reach(error) == float("inf")


def test_far_rows_are_named_by_their_place_in_the_data():
    error = normal(100)
    error[[3, 5]] = torch.tensor([1e9, torch.nan], dtype=F64)
    farthest, count = far_rows(error, torch.arange(50, 150))
    assert count == 1 and "53 (residual 1e+09" in words.far_rows(farthest, count, FAR)
    assert far_rows(normal(100), torch.arange(100)) == ([], 0)


def test_rows_without_features_say_nothing_about_q():
    rows = rows_with(normal(10))
    q = torch.tensor([0.0, 1e-9, 1.0, 2, 1, 1, 1, 1, 1, 1], dtype=F64)
    found = replace(rows, q=q)
    assert found.informative.tolist() == [False] * 2 + [True] * 8
    assert float(found.usual_q) == pytest.approx(9 / 8)
    none = replace(rows, q=torch.zeros(10, dtype=F64))
    assert not bool(none.informative.any())
    assert float(none.usual_q) == 1


@pytest.mark.parametrize("zeros", [300, 399])
def test_mostly_zero_squares_keep_their_mean(zeros):
    squares = normal(400).square()
    squares[:zeros] = 0
    close(clipped_mean(squares), squares.mean())


def rows_with(targets: torch.Tensor) -> TargetView:
    mean = 0.8 * normal(len(targets), seed=3)
    one = torch.ones_like(mean)
    seen = torch.zeros(len(mean)).bool()
    return target_view(targets - mean, one, mean, mean[:, None], one, seen)


@pytest.mark.parametrize(
    ("targets", "step"),
    [
        ((2 * normal(200)).round(), 1.0),
        ((2 * normal(200)).round() * 0.25, 0.25),
        (normal(200), 0.0),
        ((500 * normal(200)).round() / 500, 0.0),  # finer than the residuals
        (torch.full((200,), 3.0, dtype=F64), 0.0),
        (normal(200) + 1e7, 0.0),
    ],
    ids=["whole", "quarters", "continuous", "fine", "equal", "far offset"],
)
def test_a_grid_of_targets_is_seen(targets, step):
    rows = rows_with(targets).with_forecast(None)
    assert rows.grid_step == pytest.approx(step, rel=1e-4)


def test_held_rows_are_all_where_every_row_was_seen():
    rows = rows_with(normal(5))
    assert len(rows.held_out) == 5
    seen = replace(rows, seen=~rows.seen)
    assert len(seen.held_out) == 5
    joined = rows.followed_by(seen)
    assert len(joined.held_out) == 5
    assert len(joined.reference) == 10  # fewer than twenty seen rows fix no units


def test_rows_come_in_an_order_of_their_own():
    """Last bits of predictions move no row, and equal targets go by their predictions."""
    target = torch.cat([normal(40), torch.full((20,), 0.3, dtype=F64)]).float().double()
    mean = normal(60, seed=1)
    q = normal(60, seed=2).square()

    def ordered(order, noise):
        means = mean[order] * (1 + 1e-15 * noise)
        features = q[order, None]
        seen = torch.zeros(60, dtype=torch.bool)
        view = target_view(target[order] - means, q[order], means, features, q[order], seen)
        return view.in_order()

    expected = ordered(torch.arange(60), torch.zeros(60))
    close(expected.target, target.sort().values)
    equal = (expected.target - 0.3).abs() < 1e-6
    assert int(equal.sum()) == 20
    assert bool((expected.mean[equal].diff() > 0).all())
    assert torch.equal(expected.features[:, 0], expected.q)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(60, generator=generator)
        found = ordered(order, torch.randn(60, dtype=F64, generator=generator))
        assert torch.equal(found.q, expected.q)


def test_rows_whose_target_is_not_known_come_last_in_order_of_their_predictions():
    ones = torch.ones(4, dtype=F64)
    mean = torch.tensor([3.0, 1.0, 2.0, 0.0], dtype=F64)
    view = target_view(ones, ones, mean, ones[:, None], ones, ones > 0)
    view = replace(view, target=torch.tensor([torch.nan, torch.nan, 5.0, 4.0], dtype=F64))
    assert view.in_order().mean.tolist() == [0, 2, 1, 3]
