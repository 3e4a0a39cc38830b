"""Scores of predictive distributions, row by row, against slow formulas."""

import math

import numpy as np
import pytest
import torch
from experiments.judging.predictive import (
    Normal,
    RowScores,
    corrected,
    differences,
    fifths,
    log_mass,
    row_scores,
    summary,
    with_and_without,
)
from scipy import integrate, stats

import rigidities as rg
from tests.support.tensors import normal

ROWS = 40


def gaussians(rows: int = ROWS) -> tuple[Normal, torch.Tensor]:
    mean, spread, target = normal(3, rows)
    return Normal(mean, spread.exp()), target


# --- the distributions
# ------------------------------------------------------------------------------------


def test_the_gaussian_crps_is_the_integral_of_the_squared_distance_of_the_cdfs() -> None:
    distribution, target = gaussians(5)
    for mean, std, y, found in zip(
        distribution.mean, distribution.std, target, distribution.crps(target), strict=True
    ):
        cdf = stats.norm(float(mean), float(std)).cdf
        below = integrate.quad(lambda x, cdf=cdf: cdf(x) ** 2, -60, float(y), limit=200)[0]
        above = integrate.quad(lambda x, cdf=cdf: (1 - cdf(x)) ** 2, float(y), 60, limit=200)[0]
        assert float(found) == pytest.approx(below + above, rel=1e-6)


def test_density_cdf_and_interval_of_a_gaussian_are_scipys() -> None:
    distribution, target = gaussians()
    oracle = stats.norm(distribution.mean.numpy(), distribution.std.numpy())
    assert distribution.log_prob(target).numpy() == pytest.approx(oracle.logpdf(target.numpy()))
    assert distribution.cdf(target).numpy() == pytest.approx(oracle.cdf(target.numpy()))
    for ours, theirs in zip(distribution.interval(0.8), oracle.interval(0.8), strict=True):
        assert ours.numpy() == pytest.approx(theirs)


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_judged_whatever_their_shape_and_precision() -> None:
    distribution, target = gaussians()
    flat = row_scores(distribution, target, step=0.3)
    column = Normal(distribution.mean[:, None].float(), distribution.std[:, None].float())
    shaped = row_scores(column, target[:, None].float(), step=0.3)
    for name, value in vars(shaped).items():
        assert value.shape == (ROWS,) and value.dtype == torch.float64
        torch.testing.assert_close(value, getattr(flat, name), rtol=1e-3, atol=1e-4)


def test_the_librarys_predictions_are_judged_like_gaussians() -> None:
    distribution, target = gaussians()
    zero = torch.zeros_like(distribution.mean)
    p = rg.Prediction(distribution.mean, zero, distribution.std.square(), zero + 1)
    ours, theirs = row_scores(p, target, 0.5), row_scores(distribution, target, 0.5)
    for name, value in vars(ours).items():
        torch.testing.assert_close(value, getattr(theirs, name), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("away", [0.0, 1.5, 6.0, 12.0, 30.0])
def test_the_mass_of_a_cell_keeps_its_digits_in_the_tails(away: float) -> None:
    for sign in (-1, 1):
        distribution = Normal(torch.zeros(1).double(), torch.ones(1).double())
        found = float(log_mass(distribution, torch.tensor([sign * away]).double(), 0.5))
        near, far = (stats.norm.logsf(away + side) for side in (-0.25, 0.25))
        assert found == pytest.approx(near + math.log1p(-math.exp(far - near)), rel=1e-3)


def test_masses_of_all_cells_sum_to_one() -> None:
    grid = torch.arange(-20, 21).double()
    distribution = Normal(torch.full_like(grid, 0.3), torch.full_like(grid, 1.7))
    assert float(log_mass(distribution, grid, 1.0).exp().sum()) == pytest.approx(1, abs=1e-6)


def test_another_unit_changes_scores_as_if_everything_had_been_in_it() -> None:
    distribution, target = gaussians()
    unit, step = 7.0, 0.3
    found = row_scores(distribution, target, step).in_unit(unit)
    direct = row_scores(
        Normal(unit * distribution.mean, unit * distribution.std), unit * target, unit * step
    )
    for name, value in vars(found).items():
        torch.testing.assert_close(value, getattr(direct, name))


def test_a_unit_leaves_out_what_a_method_has_not() -> None:
    one = torch.ones(3).double()
    rows = RowScores(one, one, one, 0 * one, 2 * one).in_unit(3.0)
    assert rows.nll is None and rows.crps is None and rows.cell is None
    assert set(summary(rows)) == {
        *("rmse", "coverage_90", "interval_score", "fifths_of_prediction", "fifths_of_bar")
    }


# --- summaries -----------------------------------------------------------------------------------


def test_the_summary_is_that_of_a_loop_over_the_rows() -> None:
    distribution, target = gaussians()
    rows = row_scores(distribution, target, 0.4)
    found = summary(rows)
    scores, held = [], []
    for low, high, y in zip(rows.low.tolist(), rows.high.tolist(), target.tolist(), strict=True):
        held.append(low <= y <= high)
        short = max(low - y, 0) + max(y - high, 0)
        scores.append(high - low + 20 * short)
    assert found["interval_score"] == pytest.approx(np.mean(scores))
    assert found["coverage_90"] == pytest.approx(np.mean(held))
    assert found["rmse"] == pytest.approx(
        float((distribution.mean - target).square().mean().sqrt())
    )
    assert found["nll"] == pytest.approx(-float(distribution.log_prob(target).mean()))
    assert found["cell"] == pytest.approx(-float(log_mass(distribution, target, 0.4).mean()))
    assert 0 < np.mean(held) < 1
    order = np.argsort(distribution.std.numpy())
    expected = [np.array(held)[part].mean() for part in np.array_split(order, 5)]
    assert found["fifths_of_bar"] == pytest.approx(expected)
    order = np.argsort(distribution.mean.numpy())
    expected = [np.array(held)[part].mean() for part in np.array_split(order, 5)]
    assert found["fifths_of_prediction"] == pytest.approx(expected)


def test_fifths_of_a_constant_bar_are_those_of_the_order_given() -> None:
    held = torch.arange(10).double()
    assert fifths(torch.ones(10), held) == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_copies_of_training_rows_are_left_out_of_one_summary() -> None:
    distribution, target = gaussians()
    rows = row_scores(distribution, target)
    copied = torch.arange(ROWS) % 3 == 0
    found = with_and_without(rows, copied)
    assert found["all"] == summary(rows)
    some = Normal(distribution.mean[~copied], distribution.std[~copied])
    assert found["new"] == pytest.approx(summary(row_scores(some, target[~copied])))


# --- over the splits -----------------------------------------------------------------------------


def test_errors_over_splits_know_that_training_rows_overlap() -> None:
    values = [0.1, 0.4, -0.3, 0.2]
    mean, error = corrected(values, test=10, train=90)
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) * math.sqrt(1 / 4 + 1 / 9))
    naive = np.std(values, ddof=1) / 2
    assert corrected(values, test=0, train=1)[1] == pytest.approx(naive)
    assert math.isnan(corrected([1.0], test=1, train=9)[1])


def test_twenty_splits_of_nine_tenths_have_errors_nearly_twice_as_large() -> None:
    values = np.linspace(-1, 1, 20).tolist()
    ratio = corrected(values, 10, 90)[1] / corrected(values, 0, 1)[1]
    assert ratio == pytest.approx(1.8, abs=0.01)


def test_differences_pair_the_numbers_that_both_have() -> None:
    ones = [{"nll": 1.0, "crps": 2.0, "fifths_of_bar": [1.0]}, {"nll": 2.0, "crps": 5.0}]
    others = [{"nll": 0.5, "fifths_of_bar": [1.0]}, {"nll": 0.5}]
    assert differences(ones, others, 1, 9) == {"nll": corrected([0.5, 1.5], 1, 9)}
