"""Plots: the confidence lines against theory and sampling, and what is drawn where."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from scipy.integrate import trapezoid
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities import Prediction, metrics, plots
from rigidities.prediction.distribution import StudentT
from tests.support.refusals import refused

PARITY = ("errors", "binned", "calibration")


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
    refused(
        "Expected mean and target of the same shape", getattr(plots, name), mean, std, target[:-1]
    )
    std[0] = 0
    refused("Expected std > 0", getattr(plots, name), mean, std, target)
    refused("Expected x and mean of the same shape", plots.along, [0, 1], [0], [1])
    with pytest.raises(ValueError, match="Expected inputs and targets of the same shape"):
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


# --- p.plot and uq.plot ----------------------------------------------------------------------


def bounded(count: int = 200) -> tuple[Prediction, torch.Tensor]:
    """Heavy-tailed predictions of values that cannot be negative, and targets."""
    p, target = heavy(count)
    return replace(p, support=(0.0, None)), target.clamp(min=0)


def intervals_drawn(ax: Axes) -> np.ndarray:
    """Place, low and high of every vertical line, (N, 3), sorted."""
    found = []
    for collection in ax.collections:
        if isinstance(collection, LineCollection):
            found += [(*path[0], path[1][1]) for path in collection.get_segments()]
    return np.array(sorted(found))


def shares(ax: Axes) -> dict[str, float]:
    """The shares that the legend has of covered and missed true values, in per cent."""
    labels = ax.get_legend_handles_labels()[1]
    parts = [label.removesuffix(" %").split(": ") for label in labels if label.endswith(" %")]
    return {part[0]: float(part[1]) for part in parts if len(part) == 2}


def offsets(ax: Axes, beginning: str) -> np.ndarray:
    """The points whose entry in the legend begins so."""
    (found,) = (c for c in ax.collections if str(c.get_label()).startswith(beginning))
    return np.asarray(found.get_offsets())


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_parity_draws_the_intervals_of_the_distribution_at_the_true_values(level: float) -> None:
    p, y = bounded()
    ax = p.plot(y, level=level)
    low, high = p.interval(level)
    assert float(low.min()) == 0  # a bound cuts some of them
    expected = sorted(zip(y.tolist(), low.tolist(), high.tolist(), strict=True))
    np.testing.assert_allclose(intervals_drawn(ax), expected)
    is_covered = (low <= y) & (y <= high)
    for beginning, chosen in (("covered", is_covered), ("missed", ~is_covered)):
        expected_points = torch.stack([y, p.mean], 1)[chosen].numpy()
        assert np.sort(offsets(ax, beginning), 0) == pytest.approx(np.sort(expected_points, 0))
        assert shares(ax)[beginning] == round(100 * float(chosen.double().mean()), 1)
    assert ax.get_legend().get_title().get_text() == f"{100 * level:g} % intervals"
    assert ax.get_xlim() == ax.get_ylim()


def test_the_legend_counts_all_rows_where_a_thousand_are_drawn() -> None:
    mean, std, target = rows(3000)
    p = Prediction(mean, 0 * std, std.square(), std)
    for ax in (p.plot(target), p.plot(target, kind="rows"), plots.parity(mean, std, target)):
        assert shares(ax)["covered"] == round(100 * metrics.coverage(p, target), 1)
        assert len(intervals_drawn(ax)) == plots.MOST_INTERVALS
        assert "1,000 of 3,000 rows drawn" in ax.get_legend().get_title().get_text()
    assert {target.min().item(), target.max().item()} <= set(intervals_drawn(ax)[:, 0])


def test_without_true_values_rows_are_drawn_in_the_order_of_their_predictions() -> None:
    p, y = bounded(50)
    low, high = p.interval(0.9)
    order = p.mean.argsort()
    expected = torch.stack([torch.arange(50.0), low[order], high[order]], 1).numpy()
    ax = p.plot()
    np.testing.assert_allclose(intervals_drawn(ax), expected)
    np.testing.assert_allclose(offsets(ax, "predicted")[:, 1], p.mean[order])
    with_truth = p.plot(y, kind="rows")
    np.testing.assert_allclose(intervals_drawn(with_truth), expected)
    assert shares(with_truth)["covered"] == round(100 * metrics.coverage(p, y), 1)


def test_a_curve_along_an_input_has_a_band_of_the_distribution() -> None:
    x = torch.linspace(0, 3, 40, dtype=torch.float64)
    p = replace(heavy(40)[0], mean=x.sin())
    y = p.mean + 3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    ax = p.plot(y, x=x, level=0.8)
    low, high = p.interval(0.8)
    (band,) = (c for c in ax.collections if c.get_label() == "80 %")
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.round(9).tolist()}
    for ends in (low, high):
        expected = torch.stack([x, ends], 1).numpy().round(9).tolist()
        assert {tuple(corner) for corner in expected} <= corners
    is_covered = (low <= y) & (y <= high)
    assert shares(ax)["covered"] == round(100 * float(is_covered.double().mean()), 1)
    np.testing.assert_allclose(lines(p.plot(x=x))["mean"], torch.stack([x, p.mean], 1))


def test_rows_that_form_no_curve_are_drawn_with_single_intervals() -> None:
    p, y = bounded()
    x = torch.linspace(0, 1, 200)
    ax = p.plot(y, x=x)
    assert "mean" not in lines(ax)
    low, high = p.interval(0.9)
    np.testing.assert_allclose(intervals_drawn(ax), torch.stack([x, low, high], 1), rtol=1e-6)
    assert "mean" in lines(p.plot(y, x=x, kind="along"))


@pytest.mark.parametrize("kind", ["errors", "binned", "calibration"])
def test_a_kind_is_the_function_of_that_name(kind: str) -> None:
    p, y = heavy(2000)
    ax, direct = p.plot(y, kind=kind), getattr(plots, kind)(p, y)
    for a, b in zip(ax.lines, direct.lines, strict=True):
        np.testing.assert_array_equal(a.get_xydata(), b.get_xydata())
    assert ax.get_xscale() == direct.get_xscale()
    assert (ax.get_xscale() == "log") == (kind != "calibration")


def test_few_rows_are_binned_too() -> None:
    p, y = heavy(200)
    assert len(points(p.plot(y, kind="binned"))) == 20


def test_parity_keeps_logarithmic_axes_and_draws_what_they_can_show() -> None:
    p, y = heavy()
    _, ax = plt.subplots()
    ax.set(xscale="log", yscale="log")
    p, y = replace(p, mean=p.mean.exp()), y.exp()
    assert p.plot(y, ax=ax) is ax
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    assert ax.get_yscale() == "log" and 0 < low < float(y.min()) and float(y.max()) < high


def test_one_target_of_several_is_drawn_by_number_or_name() -> None:
    p, y = heavy(60)
    both = Prediction(*(torch.stack([t, 2 * t], 1) for t in (p.mean, p.epistemic, p.noise, p.std)))
    truth = torch.stack([y, 2 * y], 1)
    frame = pd.DataFrame(truth.numpy(), columns=["depth", "width"])
    expected = intervals_drawn(both[:, 1].plot(2 * y))
    for true in (truth, frame, 2 * y):
        for target in (1, -1):
            np.testing.assert_allclose(intervals_drawn(both.plot(true, target=target)), expected)
    ax = both.plot(frame, target="width")
    np.testing.assert_allclose(intervals_drawn(ax), expected)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("true width", "predicted width")
    refused("has 2 targets, .* one of 0, 1\\.", both.plot, truth)
    refused("one of 0, 1, 'depth', 'width'", both.plot, frame)
    refused("Expected target to be one of .*; got 2", both.plot, truth, target=2)
    refused(r"Expected target to be one of .*; got 1\.5", both.plot, truth, target=1.5)
    refused("Expected target to be one of .*; got 'area'", both.plot, frame, target="area")
    assert len(intervals_drawn(both.plot(target=0))) == 60


def test_true_values_and_inputs_may_come_from_any_library() -> None:
    p, y = heavy(30)
    x = p.mean
    expected = intervals_drawn(p.plot(y, x=x, kind="rows"))
    kinds = (torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t[:, None].requires_grad_())
    for change in (*kinds, lambda t: pd.Series(t.numpy(), index=range(5, 35), name="named")):
        ax = p.plot(change(y), x=change(x), kind="rows")
        np.testing.assert_allclose(intervals_drawn(ax), expected)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("named", "named")


def test_an_input_of_several_is_drawn_by_number_or_name() -> None:
    p, y = heavy(30)
    inputs = torch.stack([p.mean, y], 1)
    frame = pd.DataFrame(inputs.numpy(), columns=["a", "b"])
    for x, along in ((inputs, 1), (frame, "b"), (frame, 1), ({"a": p.mean, "b": y}, "b")):
        places = intervals_drawn(p.plot(x=x, along=along, kind="rows"))[:, 0]
        np.testing.assert_allclose(places, y.sort().values)
    refused("There are 2 inputs, .* one of 'a', 'b'", p.plot, x=frame)
    refused("There are 2 inputs, .* one of 0, 1", p.plot, x=inputs)
    refused("Expected along to be one of 0, 1; got 'a'", p.plot, x=inputs, along="a")
    days = np.arange(len(inputs)).astype("datetime64[D]")
    with pytest.raises(TypeError, match="Expected numbers, got dates"):
        p.plot(x=days)
    refused("Pass the inputs too", p.plot, y, along=0)
    loader = DataLoader(TensorDataset(inputs))
    refused("Expected the inputs as a tensor, .* DataLoader", p.plot, x=loader, error=TypeError)


def test_intervals_without_an_end_reach_to_the_edge() -> None:
    p, y = heavy(30)
    endless = replace(p, conformal=_Endless())
    for ax in (endless.plot(y), endless.plot(y, kind="rows", conformal=True)):
        bottom, top = ax.get_ylim()
        assert (intervals_drawn(ax)[:, 1:] == (bottom, top)).all()
        assert np.isfinite([bottom, top]).all() and shares(ax)["covered"] == 100
    ax = endless.plot(y, x=y, kind="along", conformal=True)
    assert np.isfinite(ax.get_ylim()).all()
    ax.figure.canvas.draw()


class _Endless:
    """Conformal intervals of too few rows."""

    wide = ()

    def interval(self, p: Prediction, level: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(p.mean, -math.inf), torch.full_like(p.mean, math.inf)

    def resolved(self, p: Prediction) -> "_Endless":
        return self


def test_plots_of_predictions_refuse_what_does_not_go_together() -> None:
    p, y = heavy(30)
    refused("Expected kind to be one of parity, rows, .* got 'scatter'", p.plot, y, kind="scatter")
    refused(r"one true value per row, \(30,\), got \(29,\)", p.plot, y[:-1])
    refused(r"one input per row, \(30,\), got \(29,\)", p.plot, y, x=y[:-1])
    refused("compares predictions with true values", p.plot, kind="errors")
    refused("needs an input to draw along", p.plot, y, kind="along")
    refused('x= is for kind="along" and kind="rows"', p.plot, y, x=y, kind="parity")
    refused("level must lie between 0 and 1", p.plot, y, level=90)
    refused("draws no intervals", p.plot, y, kind="errors", conformal=True)
    refused("A conformal interval needs rows", p.plot, y, conformal=True)
    refused("Pass level=0.9", plots.along, y, p, conformal=True)
    assert not plt.get_fignums()


def test_a_prediction_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    p, y = heavy(30)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    refused(r'pip install "rigidities\[plots\]"', p.plot, y, error=ImportError)


@pytest.fixture(scope="module", params=["last layer", "any regressor"])
def fitted(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A straight line in two inputs with error bars, and new rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(300, 1, generator=generator, dtype=torch.float64)
    if request.param == "last layer":
        linear = torch.nn.Linear(2, 1, dtype=torch.float64).requires_grad_(False)
        linear.weight[:], linear.bias[:] = 1.0, 0.0
        uq: Any = rg.LastLayerRigidity(linear).fit(x[:100], y[:100])
    else:
        weights = torch.ones(2, dtype=torch.float64)
        uq = rg.PredictionRigidity(lambda w, x: x @ w[:, None], weights).fit(x[:100], y[:100])
    uq.calibrate(x[100:200], y[100:200], method=rg.Paper(noise="constant"))
    return uq, x[200:], y[200:]


def test_a_fitted_object_predicts_and_draws(fitted) -> None:
    uq, x, y = fitted
    p = uq.predict(x)
    expected = intervals_drawn(p.plot(y))
    assert len(expected) == 100
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True)
    for data in ((x, y), ((x, y),), (loader,)):
        np.testing.assert_allclose(intervals_drawn(uq.plot(*data)), expected)
    np.testing.assert_allclose(intervals_drawn(uq.plot(x)), intervals_drawn(p.plot()))
    np.testing.assert_allclose(
        intervals_drawn(uq.plot(x, y, along=1, level=0.5)),
        intervals_drawn(p.plot(y, x=x[:, 1], level=0.5)),
    )
    names = ["left", "right"]
    ax = uq.plot(pd.DataFrame(x.numpy(), columns=names), y.numpy(), along="right")
    np.testing.assert_allclose(intervals_drawn(ax), intervals_drawn(p.plot(y, x=x[:, 1])))
    assert ax.get_xlabel() == "right"
    ax = uq.plot((x, y), along=0, kind="rows")
    assert shares(ax)["covered"] == round(100 * metrics.coverage(p, y), 1)
