"""The plots of a report: they show the rows, the bins and the curves that the metrics have."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from rigidities import metrics, plots
from rigidities.report import figures
from rigidities.report.rows import MOST_SHOWN, TargetRows, rows_to_show
from rigidities.report.scores import bin_sizes
from tests.support.report_rows import changed, columns, page, rows

pytestmark = pytest.mark.usefixtures("short")


def test_quotes_stay_quotes_in_what_plotly_shows() -> None:
    part = replace(rows(60), inputs={'the "name"': ["5' & <b>"] * 60})
    (text, *_) = figures.hover_texts(part, torch.arange(1))
    assert text.endswith('the "name": 5\' &amp; &lt;b&gt;')


def test_the_band_of_the_coverage_is_said_to_hold_at_each_level() -> None:
    assert "at each level in 95 % of cases" in figures.coverage(rows(100)).caption


def test_plotly_accepts_every_plot() -> None:
    from plotly import graph_objects

    mean, std, target = columns(700)
    found = page(mean, std, target, inputs={"mass": std}).figures
    assert len(found) == 6
    for figure in found.values():
        for traces in figure["traces"].values():
            for layout in figure["layouts"].values():
                graph_objects.Figure(data=traces, layout=layout)


def test_every_row_is_drawn_on_logarithmic_axes_zeros_at_the_lower_edge() -> None:
    _, std, target = columns(300)
    error = target.clone()
    error[:7] = 0
    figure = figures.errors(std, error, hover="t0")
    drawn, below, *lines = figure.traces[""]
    low, high = figure.layouts[figures.LOG]["yaxis"]["range"]
    hidden = error.abs() < 10**low
    assert drawn["y"] == pytest.approx(error.abs().tolist(), rel=1e-5)
    assert below["meta"]["picks"] == hidden.nonzero()[:, 0].tolist()
    assert set(range(7)) <= set(below["meta"]["picks"])
    assert 10**low < float(std.min()) < float(std.max()) < 10**high
    slopes = sorted(line["y"][1] / line["x"][1] for line in lines)
    factors = [factor for sigmas in (1, 2, 3) for factor in plots.confidence_factors(sigmas)]
    assert slopes == pytest.approx(sorted([1, *factors]), rel=1e-5)


@pytest.mark.parametrize(("count", "sizes"), [(29, []), (30, [10]), (1000, [10, 20, 50, 100, 200])])
def test_bins_are_offered_that_make_sense(count: int, sizes: list[int]) -> None:
    assert list(bin_sizes(count)) == sizes


def test_bins_of_every_size_are_those_of_the_metrics() -> None:
    part = rows(1000)
    figure = figures.binned(figures.all_bins(part))
    assert figure.chosen == "100"
    for bin_size, traces in figure.traces.items():
        variance, mse = metrics.binned(part.mean, part.std, part.target, int(bin_size))
        assert traces[-1]["x"] == pytest.approx(variance.tolist(), rel=1e-5)
        assert traces[-1]["y"] == pytest.approx(mse.tolist(), rel=1e-5)


@pytest.mark.parametrize("bin_size", [10, 20, 100, 1000])
def test_the_band_of_the_bins_holds_ninety_five_per_cent(bin_size: int) -> None:
    low, high = figures.mse_band(bin_size)
    distribution = stats.chi2(bin_size)
    assert distribution.cdf(high * bin_size) - distribution.cdf(low * bin_size) == pytest.approx(
        0.95, abs=2e-3
    )
    assert distribution.cdf(low * bin_size) == pytest.approx(0.025, abs=2e-3)


def test_the_coverage_curve_is_that_of_the_metrics() -> None:
    part = rows(200)
    curve = figures.coverage(part).traces[""][-1]
    for level in (0.3, 0.68, 0.9):
        observed = max(y for x, y in zip(curve["x"], curve["y"], strict=True) if x <= level)
        expected = metrics.coverage(part.mean, part.std, part.target, level)
        assert observed == pytest.approx(expected, abs=1e-5)


def test_dropping_rows_leaves_the_error_of_the_rest() -> None:
    part = rows(100)
    curve = figures.sparsification(part).traces[""][-1]
    order = part.std.argsort()
    for dropped, left in list(zip(curve["x"], curve["y"], strict=True))[::9]:
        kept = order[: round((1 - dropped) * 100)]
        assert left == pytest.approx(metrics.rmse(part.mean[kept], part.target[kept]), rel=1e-5)


def test_the_histogram_counts_every_row() -> None:
    part = changed(target=lambda t: torch.where(torch.arange(500) < 6, t + 1e3, t))
    bars, curve = figures.histogram(part).traces[""]
    assert sum(bars["y"]) == 500
    assert bars["y"][-1] >= 6
    assert max(curve["y"]) == pytest.approx(500 * 0.25 / math.sqrt(2 * math.pi), rel=1e-5)


@pytest.mark.thorough
def test_many_rows_are_thinned_and_the_extreme_ones_kept() -> None:
    mean, std, target = columns(20_000)
    part = TargetRows(mean, std, target)
    index = rows_to_show(part)
    assert len(index) == len(set(index.tolist())) == MOST_SHOWN
    for key in (std, (target - mean).abs(), part.z.abs()):
        assert set(key.topk(100).indices.tolist()) <= set(index.tolist())
    found = page(mean, std, target)
    shown = len(found.embedded("hovers")["t0"])
    assert 1_000 < shown <= MOST_SHOWN
    assert f"Scatter plots show {shown} of the 20000 rows" in found.text
    assert len(found.figures["t0-errors"]["traces"][""][0]["x"]) == shown
    outermost = int((target - mean).abs().argmax())
    assert any(
        text.startswith(f"<b>row {outermost}</b>") for text in found.embedded("hovers")["t0"]
    )


def test_few_rows_are_all_shown_without_a_word() -> None:
    found = page(*columns(20))
    assert "Scatter plots show" not in found.text
    assert "t0-binned" not in found.figures
    assert len(found.figures["t0-errors"]["traces"][""][0]["x"]) == 20
