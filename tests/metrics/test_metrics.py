"""Metrics against slow references: integrals, loops, scipy and scikit-learn."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score

from rigidities import Prediction, metrics
from rigidities.prediction.distribution import Gaussian, StudentT
from tests.support.refusals import refused

THREE = ("nll", "nll_gain", "crps", "coverage", "interval_score", "miscalibration_area", "ence")
RANKED = ("spearman", "ause", "binned", "binned_log_ratio", "slope", "calibration_curve", "summary")
NEED_POSITIVE_STD = (
    "nll", "nll_gain", "crps", "miscalibration_area", "ence", "calibration_curve",
    "binned_log_ratio", "slope",
)  # fmt: skip


def rows(count: int = 400, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """Mean, std and target whose errors are Gaussian with std times scale."""
    random = np.random.default_rng(seed)
    mean, std = random.normal(size=count), np.exp(random.normal(size=count))
    return mean, std, mean + scale * std * random.normal(size=count)


def tied_rows(count: int = 60, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Rows with few distinct std and |error|."""
    random = np.random.default_rng(seed)
    mean = random.integers(-2, 3, count).astype(float)
    return mean, random.integers(1, 5, count) / 2, mean + random.integers(-3, 4, count)


# --- oracles ---------------------------------------------------------------------------------


def test_rmse_and_mae_equal_the_norms_of_the_error() -> None:
    mean, _, target = rows()
    error = target - mean
    assert metrics.rmse(mean, target) == pytest.approx(np.linalg.norm(error) / math.sqrt(400))
    assert metrics.mae(mean, target) == pytest.approx(np.linalg.norm(error, 1) / 400)


def test_sharpness_is_the_root_of_the_mean_variance() -> None:
    _, std, _ = rows()
    assert metrics.sharpness(std) == pytest.approx(np.linalg.norm(std) / math.sqrt(400))


def test_nll_equals_the_log_density_of_scipy() -> None:
    mean, std, target = rows()
    expected = -stats.norm(mean, std).logpdf(target).mean()
    assert metrics.nll(mean, std, target) == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough
def test_nll_gain_is_measured_from_the_best_constant_bar() -> None:
    mean, std, target = rows()
    constants = np.geomspace(0.1, 100, 4001)
    best = min(metrics.nll(mean, np.full_like(mean, c), target) for c in constants)
    expected = best - metrics.nll(mean, std, target)
    assert metrics.nll_gain(mean, std, target) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("target", [-3.0, 0.4, 1.0, 7.0])
def test_crps_equals_its_integral_over_the_distribution_function(target: float) -> None:
    mean, std = 0.4, 1.7
    distribution = stats.norm(mean, std)
    left = integrate.quad(lambda y: distribution.cdf(y) ** 2, mean - 40, target, limit=200)[0]
    right = integrate.quad(lambda y: distribution.sf(y) ** 2, target, mean + 40, limit=200)[0]
    assert metrics.crps([mean], [std], [target]) == pytest.approx(left + right, rel=1e-8)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.9, 0.999])
def test_intervals_agree_with_those_of_scipy(level: float) -> None:
    mean, std, target = rows()
    low, high = stats.norm(mean, std).interval(level)
    miss = np.maximum(low - target, 0) + np.maximum(target - high, 0)
    score = np.mean(high - low + 2 / (1 - level) * miss)
    inside = np.mean((low <= target) & (target <= high))
    assert metrics.coverage(mean, std, target, level) == pytest.approx(inside)
    assert metrics.interval_width(std, level) == pytest.approx(np.mean(high - low))
    assert metrics.interval_score(mean, std, target, level) == pytest.approx(score)


def test_calibration_curve_gives_the_coverage_at_every_level() -> None:
    mean, std, target = rows(50)
    nominal, observed = metrics.calibration_curve(mean, std, target)
    for level in np.linspace(0.01, 0.99, 37):
        step = torch.searchsorted(nominal, level, right=True) - 1
        assert float(observed[step]) == metrics.coverage(mean, std, target, level)
    assert (nominal[0], observed[0], nominal[-1], observed[-1]) == (0, 0, 1, 1)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_miscalibration_area_equals_the_integral_on_a_fine_grid(scale: float) -> None:
    mean, std, target = rows(70, scale=scale)
    levels = (np.arange(20_000) + 0.5) / 20_000
    radius = stats.norm.ppf((1 + levels) / 2)
    covered = (np.abs(target - mean) / std)[:, None] <= radius
    expected = np.abs(covered.mean(0) - levels).mean()
    assert metrics.miscalibration_area(mean, std, target) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("count", "bins"), [(400, 10), (403, 10), (7, 7), (5, 1)])
def test_ence_equals_a_loop_over_bins(count: int, bins: int) -> None:
    mean, std, target = rows(count)
    parts = np.array_split(np.argsort(std), bins)
    expected = 0.0
    for part in parts:
        rmv = math.sqrt(np.mean(std[part] ** 2))
        expected += abs(rmv - math.sqrt(np.mean((target - mean)[part] ** 2))) / rmv / bins
    assert metrics.ence(mean, std, target, bins) == pytest.approx(expected)


@pytest.mark.parametrize("make", [rows, tied_rows])
def test_spearman_equals_that_of_scipy(make) -> None:
    mean, std, target = make()
    expected = stats.spearmanr(np.abs(target - mean), std).statistic
    assert metrics.spearman(mean, std, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("make", [rows, tied_rows])
def test_ause_equals_a_loop_over_removed_rows(make) -> None:
    mean, std, target = make(150)
    squared, total = (target - mean) ** 2, 0.0
    shared_by_ties = np.array([squared[std == each].mean() for each in std])
    by_std, by_error = shared_by_ties[np.argsort(-std)], np.sort(squared)[::-1]
    for removed in range(150):
        total += math.sqrt(by_std[removed:].mean()) - math.sqrt(by_error[removed:].mean())
    expected = total / 150 / math.sqrt(squared.mean())
    assert metrics.ause(mean, std, target) == pytest.approx(expected)


@pytest.mark.parametrize("decimals", [0, 1, 12])
def test_auroc_equals_that_of_scikit_learn_with_and_without_ties(decimals: int) -> None:
    random = np.random.default_rng(1)
    inside = np.exp(random.normal(0, 1, 80)).round(decimals)
    outside = np.exp(random.normal(1, 1, 50)).round(decimals)
    labels = np.repeat([0, 1], [80, 50])
    expected = roc_auc_score(labels, np.concatenate([inside, outside]))
    assert metrics.auroc(inside, outside) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", [299, 300, 301])
def test_bins_equal_a_loop_and_all_complete_ones_are_kept(count: int) -> None:
    mean, std, target = rows(count)
    variance, mse = metrics.binned(mean, std, target, bin_size=100)
    order = np.argsort(std)
    assert len(variance) == len(mse) == count // 100
    for index in range(count // 100):
        part = order[100 * index : 100 * (index + 1)]
        assert float(variance[index]) == pytest.approx(np.mean(std[part] ** 2))
        assert float(mse[index]) == pytest.approx(np.mean((target - mean)[part] ** 2))


def test_numbers_of_bins_follow_from_the_bins() -> None:
    mean, std, target = rows(1000)
    variance, mse = (part.numpy() for part in metrics.binned(mean, std, target, 50))
    ratio = np.abs(np.log10(mse / variance)).mean()
    fit = stats.linregress(np.log(variance), np.log(mse))
    span = np.log10(variance.max() / variance.min())
    assert metrics.binned_log_ratio(mean, std, target, 50) == pytest.approx(ratio)
    assert metrics.slope(mean, std, target, 50) == pytest.approx(fit.slope)
    assert metrics.decades(std, 50) == pytest.approx(span)


def test_summary_repeats_the_single_metrics() -> None:
    mean, std, target = rows(500)
    for name, value in metrics.summary(mean, std, target).items():
        takes = {"rmse": (mean, target), "mae": (mean, target)}
        takes |= dict.fromkeys(("sharpness", "interval_width", "decades"), (std,))
        assert value == getattr(metrics, name)(*takes.get(name, (mean, std, target))), name


# --- distributions
# ------------------------------------------------------------------------------------


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 60))
def test_order_of_rows_never_matters_even_with_ties(seed: int, count: int) -> None:
    mean, std, target = tied_rows(count, seed)
    order = np.random.default_rng(seed).permutation(count)
    before = metrics.summary(mean, std, target)
    after = metrics.summary(mean[order], std[order], target[order])
    del before["ence"], after["ence"]  # its bins cut through ties
    assert after == pytest.approx(before, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
def test_units_of_the_target_change_only_what_has_units(seed, unit, shift) -> None:
    mean, std, target = rows(120, seed)
    before = metrics.summary(mean, std, target)
    after = metrics.summary(unit * mean + shift, unit * std, unit * target + shift)
    for name in ("rmse", "mae", "crps", "interval_score", "interval_width", "sharpness"):
        before[name] *= unit
    before["nll"] += math.log(unit)
    assert after == pytest.approx(before, rel=1e-6, abs=1e-8, nan_ok=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_scores_stay_within_their_bounds(seed: int, scale: float) -> None:
    mean, std, target = rows(50, seed, scale)
    assert 0 <= metrics.miscalibration_area(mean, std, target) <= 0.5
    assert metrics.ause(mean, std, target) >= -1e-12
    assert 0 <= metrics.auroc(std, np.abs(target)) <= 1
    assert metrics.auroc(std, target**2) == pytest.approx(1 - metrics.auroc(target**2, std))
    assert 0 < metrics.crps(mean, std, target) <= metrics.mae(mean, target) + metrics.sharpness(std)


def test_proper_scores_are_lowest_for_the_right_bars() -> None:
    mean, std, target = rows(20_000)
    for score in (metrics.nll, metrics.crps, metrics.interval_score):
        right = score(mean, std, target)
        assert right < score(mean, 0.8 * std, target)
        assert right < score(mean, 1.25 * std, target)


# --- limits ----------------------------------------------------------------------------------


def test_right_bars_score_as_theory_says() -> None:
    mean, std, target = rows(100_000)
    numbers = metrics.summary(mean, std, target)
    assert numbers["coverage"] == pytest.approx(0.9, abs=0.005)
    assert numbers["miscalibration_area"] < 1 / math.sqrt(100_000)
    assert numbers["slope"] == pytest.approx(1, abs=0.02)
    assert numbers["ence"] < 0.02
    assert numbers["nll_gain"] > 0.5


def test_miscalibration_area_of_right_bars_is_about_a_third_of_the_standard_error() -> None:
    areas = [metrics.miscalibration_area(*rows(400, seed)) for seed in range(300)]
    assert np.mean(areas) * math.sqrt(400) == pytest.approx(math.sqrt(2 * math.pi) / 8, rel=0.08)


def test_crps_tends_to_the_absolute_error_as_bars_vanish() -> None:
    mean, std, target = rows()
    expected = metrics.mae(mean, target)
    assert metrics.crps(mean, 1e-9 * std, target) == pytest.approx(expected, rel=1e-6)


def test_constant_bars_span_no_decades_and_rank_nothing() -> None:
    mean, _, target = rows(1000)
    numbers = metrics.summary(mean, np.full(1000, 0.1), target)
    assert numbers["decades"] == pytest.approx(0, abs=1e-12)
    assert math.isnan(numbers["slope"]) and math.isnan(numbers["spearman"])
    best = np.full(1000, metrics.rmse(mean, target))
    assert metrics.nll_gain(mean, best, target) == pytest.approx(0, abs=1e-12)


def test_bars_equal_to_the_errors_rank_like_the_oracle() -> None:
    mean, _, target = rows()
    std = np.abs(target - mean)
    assert metrics.ause(mean, std, target) == pytest.approx(0, abs=1e-12)
    assert metrics.spearman(mean, std, target) == pytest.approx(1)
    assert metrics.slope(mean, std, target, 10) == pytest.approx(1)
    assert metrics.binned_log_ratio(mean, std, target, 10) == pytest.approx(0, abs=1e-12)


def test_errors_that_are_all_zero_give_limits_and_no_failure() -> None:
    mean, std, _ = rows(200)
    numbers = metrics.summary(mean, std, mean)
    assert numbers["ause"] == 0
    assert numbers["miscalibration_area"] == 0.5
    assert numbers["nll_gain"] == -math.inf and numbers["binned_log_ratio"] == math.inf
    assert math.isnan(numbers["slope"]) and math.isnan(numbers["spearman"])


def test_summary_of_few_rows_leaves_the_binned_numbers_undefined() -> None:
    numbers = metrics.summary(*rows(9))
    undefined = {name for name, value in numbers.items() if math.isnan(value)}
    assert undefined == {"ence", "binned_log_ratio", "slope", "decades"}


# --- contracts -------------------------------------------------------------------------------


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.setflags(write=False)
    return values


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda a: a.tolist(), id="list"),
        pytest.param(lambda a: a[:, None], id="column"),
        pytest.param(lambda a: a[None, :, None], id="row-of-columns"),
        pytest.param(read_only, id="read-only"),
        pytest.param(lambda a: a[::-1].copy()[::-1], id="negative-stride"),
        pytest.param(torch.from_numpy, id="tensor"),
        pytest.param(lambda a: torch.tensor(a, requires_grad=True), id="tensor-with-gradient"),
    ],
)
@pytest.mark.parametrize("name", [*THREE, "spearman", "ause", "slope"])
def test_every_kind_of_array_gives_the_same_float(name: str, convert) -> None:
    mean, std, target = rows(300)
    metric = getattr(metrics, name)
    value = metric(convert(mean), convert(std), target)
    assert type(value) is float
    assert value == metric(mean, std, target)


def test_float32_is_summed_in_float64() -> None:
    mean = torch.full((1000,), 16_777_216.0, dtype=torch.float32)
    assert metrics.rmse(mean, mean.double() + 0.5) == 0.5


@pytest.mark.parametrize("name", [*THREE, *RANKED])
def test_rows_that_do_not_fit_are_not_finite_or_negative_are_refused_by_name(name: str) -> None:
    metric, (mean, std, target) = getattr(metrics, name), rows(12)
    other = target.reshape(4, 3)
    refused(r"target of the same shape, got \(12,\) and \(4, 3\)", metric, mean, std, other)
    refused(r"mean and std of the same shape, got \(12,\) and \(\)", metric, mean, 0.5, target)
    refused("Expected values in mean, got none", metric, [], [], [])
    mean, std, target = rows(200)
    refused(r"Expected std >= 0, got -", metric, mean, -std, target)
    target[3:5] = np.nan, np.inf
    refused("Expected target to be finite, got 2 of 200", metric, mean, std, target)


@pytest.mark.parametrize("name", NEED_POSITIVE_STD)
def test_zero_bars_are_refused_where_they_divide(name: str) -> None:
    mean, std, target = rows(200)
    std[:3] = 0
    refused("Expected std > 0, got 3 of 200 values zero", getattr(metrics, name), mean, std, target)


def test_zero_bars_are_accepted_where_nothing_divides() -> None:
    zero, one = np.zeros(4), np.ones(4)
    assert metrics.coverage(zero, zero, one) == 0
    assert metrics.interval_score(zero, zero, one, level=0.5) == 4
    assert metrics.sharpness(zero) == metrics.interval_width(zero) == 0
    assert metrics.auroc(zero, one) == 1


@pytest.mark.parametrize("level", [0, 1, -0.1, 90, math.nan])
def test_levels_outside_zero_and_one_are_refused(level: float) -> None:
    mean, std, target = rows(5)
    refused("level must lie between 0 and 1, got", metrics.coverage, mean, std, target, level)


@pytest.mark.parametrize("size", [0, 6])
def test_bins_that_rows_cannot_fill_are_refused(size: int) -> None:
    mean, std, target = rows(5)
    with pytest.raises(ValueError, match=f"Expected bin_size from 1 to .* 5, got {size}"):
        metrics.binned(mean, std, target, bin_size=size)
    refused(f"Expected bins from 1 to .* 5, got {size}", metrics.ence, mean, std, target, bins=size)


@pytest.mark.thorough
def test_metrics_import_neither_scipy_nor_matplotlib() -> None:
    code = (
        "import sys, rigidities.metrics, rigidities.plots;"
        "sys.exit(any(name in sys.modules for name in ('scipy', 'matplotlib', 'sklearn')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a Prediction in place of mean and std -------------------------------------------------------


def heavy(count: int = 40) -> tuple[Prediction, torch.Tensor]:
    """Predictions with a Student-t distribution, and targets."""
    mean, std, target = (torch.tensor(t).reshape(-1, 2).float() for t in rows(count))
    variance = std.square()
    return Prediction(
        mean, 0.3 * variance, 0.7 * variance, variance, distribution=StudentT(3.0)
    ), target


def test_a_prediction_stands_for_mean_and_std() -> None:
    p, y = heavy()
    for name in ("spearman", "ause", "ence", "binned", "slope", "binned_log_ratio", "nll_gain"):
        metric = getattr(metrics, name)
        options = {"bin_size": 10} if name in ("binned", "slope", "binned_log_ratio") else {}
        gaussian = replace(p, distribution=Gaussian())
        for found in (metric(gaussian, y, **options), metric(mean=gaussian, target=y, **options)):
            torch.testing.assert_close(
                found, metric(p.mean, p.std, y, **options), rtol=1e-5, atol=1e-5
            )
    assert metrics.binned(p, y, 10)[0].shape == (4,)
    assert metrics.rmse(p, y) == metrics.rmse(p.mean, y)
    assert metrics.mae(p, y) == metrics.mae(p.mean, y)
    assert metrics.sharpness(p) == metrics.sharpness(p.std)
    assert metrics.decades(p, 10) == metrics.decades(p.std, 10)
    assert metrics.auroc(p, p * 2) == metrics.auroc(p.std, 2 * p.std)


def test_scores_of_a_prediction_are_those_of_its_distribution() -> None:
    p, y = heavy()
    distribution = stats.t(3, p.mean.double().numpy(), p.unit.double().numpy())
    low, high = distribution.interval(0.8)
    outside = np.maximum(low - y.numpy(), 0) + np.maximum(y.numpy() - high, 0)
    assert metrics.nll(p, y) == pytest.approx(-distribution.logpdf(y.numpy()).mean(), rel=1e-5)
    assert metrics.crps(p, y) == pytest.approx(float(p.crps(y).mean()), rel=1e-5)
    assert metrics.coverage(p, y, 0.8) == (outside == 0).mean()
    assert metrics.coverage(p, target=y, level=0.8) == (outside == 0).mean()
    assert metrics.interval_width(p, 0.8) == pytest.approx((high - low).mean(), rel=1e-5)
    expected = (high - low + 2 / 0.2 * outside).mean()
    assert metrics.interval_score(p, y, 0.8) == pytest.approx(expected, rel=1e-5)
    nominal, observed = metrics.calibration_curve(p, y)
    levels = np.sort(np.abs(2 * distribution.cdf(y.numpy()) - 1).ravel())
    np.testing.assert_allclose(nominal[1:-1], levels, atol=1e-6)
    assert len(observed) == y.numel() + 2
    found = metrics.summary(p, y, bin_size=10)
    assert found["nll"] == metrics.nll(p, y) and found["coverage"] == metrics.coverage(p, y)
    assert found["miscalibration_area"] == metrics.miscalibration_area(p, y)


def test_large_means_in_single_precision_lose_no_digits_of_the_bars() -> None:
    mean, std = torch.full((50,), 1e5), torch.linspace(0.003, 0.01, 50)
    p, y = Prediction(mean, 0 * std, std.square(), std), mean.double() + 0.5 * std
    for score in (metrics.nll, metrics.crps, metrics.coverage, metrics.interval_score):
        assert score(p, y) == pytest.approx(score(mean.double(), p.std.double(), y), rel=1e-6)
    assert metrics.interval_width(p) == pytest.approx(metrics.interval_width(p.std.double()))


def test_what_does_not_fit_a_prediction_is_refused() -> None:
    p, y = heavy()
    for score in (metrics.nll, metrics.coverage, metrics.ence, metrics.binned, metrics.summary):
        refused(
            rf"got another std. Call {score.__name__}\(p, ", score, p, p.std, y, error=TypeError
        )
        refused("got another std", score, p, std=p.std, target=y, error=TypeError)
    refused(r"target of the same shape, got \(20, 2\) and \(20,\)", metrics.nll, p, y[:, 0])
    refused("missing 1 required positional argument: 'target'", metrics.nll, p, error=TypeError)
    refused("got another std", metrics.nll, p, y, y, error=TypeError)
    refused("more than one array. Use p.mean", metrics.rmse, y, p, error=TypeError)
