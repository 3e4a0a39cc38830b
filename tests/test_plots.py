"""Plots: the confidence lines against theory and sampling, and what is drawn where."""

import math
import sys
from collections.abc import Iterator
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from scipy.integrate import trapezoid

from rigidities import Prediction, metrics, plots
from rigidities.prediction.distribution import StudentT
from tests.support.refusals import refused

PARITY = ("errors", "binned", "calibration")


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    yield
    plt.close("all")


def rows(count: int = 500, unit: float = 1.0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Mean, std and target whose errors are Gaussian with std times scale."""
    generator = torch.Generator().manual_seed(0)
    mean, log_std, z = torch.randn(3, count, generator=generator, dtype=torch.float64)
    std = unit * log_std.exp()
    return mean, std, mean + scale * std * z


def points(ax: Axes) -> np.ndarray:
    """All scattered points, (N, 2); bands are not rasterised."""
    scattered = [c.get_offsets() for c in ax.collections if c.get_rasterized()]
    return np.concatenate([np.asarray(offsets) for offsets in scattered])


def lines(ax: Axes) -> dict[str, np.ndarray]:
    return {str(line.get_label()): line.get_xydata() for line in ax.lines}


# --- confidence factors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigmas", "low", "high"), [(1, 0.3313, 1.8975), (2, 0.0513, 2.8331), (3, 0.00317, 3.7625)]
)
def test_confidence_factors_take_their_known_values(sigmas: int, low: float, high: float) -> None:
    assert plots.confidence_factors(sigmas) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("sigmas", [1e-6, 0.3, 1, 2, 2.5, 3, 5, 10, 30])
def test_confidence_factors_hold_the_probability_at_equal_density(sigmas: float) -> None:
    low, high = plots.confidence_factors(sigmas)
    outside = math.erf(low / math.sqrt(2)) + math.erfc(high / math.sqrt(2))
    assert 0 < low < 1 < high
    assert outside == pytest.approx(math.erfc(sigmas / math.sqrt(2)), rel=1e-9)
    assert math.log(low) - low**2 / 2 == pytest.approx(math.log(high) - high**2 / 2, rel=1e-9)


@pytest.mark.parametrize("sigmas", [1, 2, 3])
def test_as_many_sampled_errors_lie_between_the_lines(sigmas: int) -> None:
    low, high = plots.confidence_factors(sigmas)
    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).abs()
    share, expected = float(((low < z) & (z < high)).double().mean()), math.erf(sigmas / 2**0.5)
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 1e6))


def test_no_interval_on_the_log_axis_is_shorter() -> None:
    low, high = plots.confidence_factors(1)
    for shift in (0.9, 1.1):
        start = math.erf(low * shift / math.sqrt(2))
        inside = torch.tensor(start + math.erf(1 / math.sqrt(2)), dtype=torch.float64)
        end = math.sqrt(2) * float(torch.erfinv(inside))
        assert end / (low * shift) > high / low


@pytest.mark.parametrize("sigmas", [0, -1, 31, math.nan])
def test_confidence_factors_refuse_what_has_none(sigmas: float) -> None:
    refused("Expected 0 < sigmas <= 30", plots.confidence_factors, sigmas)


# --- what is drawn ---------------------------------------------------------------------------


def test_errors_draws_every_row_and_the_right_lines() -> None:
    mean, std, target = rows()
    ax = plots.errors(mean, std, target)
    drawn, error = points(ax), (target - mean).abs()
    bottom = ax.get_ylim()[0]
    expected = torch.stack([std, error.clamp(min=bottom)], 1).numpy()
    assert np.sort(drawn, 0) == pytest.approx(np.sort(expected, 0))
    slopes = sorted(line.get_ydata()[0] / line.get_xdata()[0] for line in ax.lines)
    factors = [factor for sigmas in (1, 2, 3) for factor in plots.confidence_factors(sigmas)]
    assert slopes == pytest.approx(sorted([1, *factors]), rel=1e-5)


def test_zero_errors_stay_visible_on_the_lower_edge() -> None:
    mean, std, target = rows(50)
    target[:7] = mean[:7]
    ax = plots.errors(mean, std, target)
    assert (points(ax)[:, 1] == ax.get_ylim()[0]).sum() == 7


def test_errors_that_are_all_zero_can_be_drawn() -> None:
    mean, std, _ = rows(200)
    for draw in (plots.errors, plots.binned, plots.calibration):
        ax = draw(mean, std, mean)
        ax.figure.canvas.draw()
        assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()


def test_binned_draws_the_bins_and_tells_what_a_constant_bar_would_hide() -> None:
    mean, std, target = rows(1050)
    ax = plots.binned(mean, std, target, bin_size=50)
    assert points(ax) == pytest.approx(
        torch.stack(metrics.binned(mean, std, target, 50), 1).numpy()
    )
    text = ax.get_legend().get_title().get_text()
    assert f"slope {metrics.slope(mean, std, target, 50):.2f}" in text
    assert f"{metrics.decades(std, 50):.2f} decades" in text
    assert f"rank correlation {metrics.spearman(mean, std, target):.2f}" in text
    assert f"NLL gain {metrics.nll_gain(mean, std, target):.2f}" in text


@pytest.mark.parametrize("count", [40, 20_000])
def test_calibration_draws_the_observed_coverage_and_its_area(count: int) -> None:
    mean, std, target = rows(count, scale=2)
    ax = plots.calibration(mean, std, target)
    x, y = lines(ax)["observed"].T
    assert np.interp(0.9, x, y) == pytest.approx(metrics.coverage(mean, std, target), abs=0.03)
    area = metrics.miscalibration_area(mean, std, target)
    assert trapezoid(np.abs(y - x), x) == pytest.approx(area, abs=2e-3)
    assert f"area {area:.3f}" in ax.get_legend_handles_labels()[1]
    assert len(x) <= 4000


def test_along_sorts_by_input_and_draws_bands_and_points() -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    ax = plots.along(x, 10 * x, 1 + x, target=x, train=([0.5, 1.5], [1.0, 2.0]))
    assert lines(ax)["mean"].tolist() == [[0, 0], [1, 10], [2, 20]]
    for k in (1, 2):
        (band,) = (c for c in ax.collections if c.get_label() == f"±{k}σ")
        corners = band.get_paths()[0].vertices
        assert corners[:, 1].max() == pytest.approx(20 + 3 * k)
        assert corners[:, 1].min() == pytest.approx(-k)
    assert sorted(points(ax).tolist()) == [[0, 0], [0.5, 1], [1, 1], [1.5, 2], [2, 2]]
    assert ax.get_legend_handles_labels()[1] == ["mean", "±1σ", "±2σ", "target", "train"]


@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e6])
def test_parity_plots_have_equal_limits_that_hold_all_points(name: str, unit: float) -> None:
    ax = getattr(plots, name)(*rows(unit=unit))
    assert ax.get_xlim() == ax.get_ylim()
    assert ax.get_box_aspect() == 1
    if name != "calibration":
        low, high = ax.get_xlim()
        assert points(ax).min() >= low and points(ax).max() <= high


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.5, 5.0])
@pytest.mark.parametrize("name", ["errors", "binned"])
def test_log_axes_carry_between_two_and_ten_labels_that_do_not_overlap(name, spread) -> None:
    mean, std, target = rows(2000)
    wide = 3e-4 * std**spread
    ax = getattr(plots, name)(mean, wide, mean + wide * (target - mean) / std)
    renderer = ax.figure.canvas.get_renderer()
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    labels = [
        label.get_window_extent(renderer)
        for tick, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
        if low <= tick <= high and label.get_text()
    ]
    assert 2 <= len(labels) <= 10
    assert all(a.x1 < b.x0 for a, b in pairwise(labels))
    assert not any(label.get_text() for label in ax.get_xticklabels(minor=True))


# --- contracts -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARITY)
def test_plots_draw_on_the_axes_they_are_given_and_open_no_other(name: str) -> None:
    _, (left, right) = plt.subplots(1, 2)
    assert getattr(plots, name)(*rows(), ax=left) is left
    assert plots.along([0, 1], [0, 1], [1, 1], ax=right) is right
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize("name", PARITY)
def test_plots_take_tensors_arrays_and_lists_alike(name: str) -> None:
    mean, std, target = rows()
    draw = getattr(plots, name)
    one = draw(mean[:, None], std, target.clone().requires_grad_())
    other = draw(mean.tolist(), std.numpy(), target.numpy())
    for a, b in zip(one.lines, other.lines, strict=True):
        assert a.get_xydata() == pytest.approx(b.get_xydata())


def test_plots_leave_the_global_settings_alone() -> None:
    before = matplotlib.rcParams.copy()
    for name in PARITY:
        getattr(plots, name)(*rows())
    plots.along([0, 1], [0, 1], [1, 1])
    assert matplotlib.rcParams == before


@pytest.mark.thorough
def test_large_plots_are_rasterised_and_draw_without_warnings(tmp_path) -> None:
    mean, std, target = rows(30_000)
    plots.errors(mean, std, target).figure.savefig(tmp_path / "errors.pdf")
    plots.calibration(mean, std, target).figure.savefig(tmp_path / "calibration.pdf")
    plots.along(mean, mean, std, target=target).figure.savefig(tmp_path / "along.png")
    assert (tmp_path / "errors.pdf").stat().st_size < 500_000
    assert (tmp_path / "calibration.pdf").stat().st_size < 200_000


@pytest.mark.parametrize("name", PARITY)
def test_bad_input_is_refused_before_anything_is_opened(name: str) -> None:
    mean, std, target = rows()
    refused("Expected mean and target of one shape", getattr(plots, name), mean, std, target[:-1])
    std[0] = 0
    refused("Expected std > 0", getattr(plots, name), mean, std, target)
    refused("Expected x and mean of one shape", plots.along, [0, 1], [0], [1])
    with pytest.raises(ValueError, match="Expected inputs and targets of one shape"):
        plots.along([0, 1], [0, 1], [1, 1], train=([0, 1], [0]))
    assert not plt.get_fignums()


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    refused(r'pip install "rigidities\[plots\]"', plots.errors, *rows(), error=ImportError)


# --- a Prediction in place of mean and std -------------------------------------------------------


def heavy(count: int = 200) -> tuple[Prediction, torch.Tensor]:
    """Predictions with a Student-t distribution, and targets."""
    mean, std, target = rows(count)
    variance = std.square()
    return Prediction(mean, 0 * variance, variance, variance, distribution=StudentT(3.0)), target


@pytest.mark.parametrize("name", ["errors", "binned"])
def test_a_prediction_is_drawn_as_its_mean_and_std(name: str) -> None:
    p, target = heavy()
    draw = getattr(plots, name)
    np.testing.assert_allclose(points(draw(p, target)), points(draw(p.mean, p.std, target)))


def test_calibration_draws_the_coverage_of_the_distribution() -> None:
    p, target = heavy()
    drawn = lines(plots.calibration(p, target=target))["observed"]
    nominal, observed = metrics.calibration_curve(p, target)
    np.testing.assert_allclose(drawn[:, 0], nominal.repeat_interleave(2)[1:])
    np.testing.assert_allclose(drawn[:, 1], observed.repeat_interleave(2)[:-1])
    gaussian = lines(plots.calibration(p.mean, p.std, target))["observed"]
    assert np.abs(gaussian - drawn).max() > 0.01


def test_along_draws_the_intervals_of_the_distribution() -> None:
    p, target = heavy(3)
    ax = plots.along([2.0, 0.0, 1.0], p, target)
    for k, label in ((1, "68 %"), (2, "95 %")):
        low, high = p.interval(math.erf(k / math.sqrt(2)))
        (band,) = (c for c in ax.collections if c.get_label() == label)
        corners = band.get_paths()[0].vertices
        assert corners[:, 1].min() == pytest.approx(float(low.min()))
        assert corners[:, 1].max() == pytest.approx(float(high.max()))
    assert len(points(ax)) == 3
