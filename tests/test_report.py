"""Reports: what the page says is true of the rows, and it asks nobody for anything."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from conftest import Trained, trained
from pages import Page, shorten
from rigidities import metrics, plots, report
from rigidities.report import figures
from rigidities.report.cautions import cautions
from rigidities.report.labelled_data import labelled
from rigidities.report.rows import MOST_SHOWN, Rows, rows_of, shown
from rigidities.report.scores import METRICS, Judged, bin_sizes
from rigidities.report.verdict import gain_and_error, needed_factor, resolution, size, verdict

EVIL = "<script>window.bad = 1</script>"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def columns(count: int = 400, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std and target whose errors are Gaussian with std times scale."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, z = torch.randn(3, count, generator=generator, dtype=torch.float64)
    std = (0.7 * log_std).exp()
    return 3 * mean, std, 3 * mean + scale * std * z


def rows(count: int = 400, scale: float = 1.0, seed: int = 0) -> Rows:
    return Rows(*columns(count, scale, seed))


def page(*arrays: Any, **options: Any) -> Page:
    return Page(report.html(*arrays, **options))


# --- the verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "headline", "words"),
    [
        (1.0, "These bars can be trusted", "About right"),
        (1.25, "Use these bars with care: they are too narrow", "Too narrow"),
        (2.5, "far too narrow", "2.48 times as wide"),
        (0.4, "Do not trust these bars", "Too wide"),
    ],
)
def test_the_verdict_follows_the_size_of_the_bars(scale: float, headline: str, words: str) -> None:
    found = verdict(Judged(rows(2000, scale)))
    assert headline in found.headline
    assert words in found.findings[0].text


def test_bars_that_tell_nothing_are_no_better_than_a_constant_one() -> None:
    mean, std, target = columns(2000)
    alike = std.square().mean().sqrt().expand_as(std)
    found = verdict(Judged(Rows(mean, alike, target)))
    assert "same size" in found.findings[1].text
    shuffled = Rows(
        mean, std[torch.randperm(2000, generator=torch.Generator().manual_seed(1))], target
    )
    found = verdict(Judged(shuffled))
    assert found.status == "bad"
    assert "Worse than one constant bar" in found.findings[1].text
    assert "do not mark larger errors" in found.findings[2].text


def test_bars_upside_down_are_called_so() -> None:
    mean, std, target = columns(1000)
    found = verdict(Judged(Rows(mean, 1 / std, target)))
    assert "lower" not in found.findings[2].text
    assert "Larger bars go with smaller errors" in found.findings[2].text


def test_with_few_rows_there_is_no_verdict() -> None:
    assert "Too few rows for a verdict: 12" in verdict(Judged(rows(12))).headline


def test_bars_times_the_needed_factor_hold_ninety_per_cent() -> None:
    for count in (37, 100, 1003):
        part = rows(count, scale=1.7)
        wider = part.std * needed_factor(part) * (1 + 1e-12)
        covered = metrics.coverage(part.mean, wider, part.target)
        assert covered == pytest.approx(math.ceil(0.9 * count) / count, abs=1e-9)


def test_the_gain_is_that_of_the_metrics_and_its_error_that_of_resampling() -> None:
    part = rows(500)
    gain, error = gain_and_error(part)
    assert gain == pytest.approx(metrics.nll_gain(part.mean, part.std, part.target))
    generator = torch.Generator().manual_seed(0)
    again = []
    for _ in range(400):
        index = torch.randint(500, (500,), generator=generator)
        again.append(metrics.nll_gain(part.mean[index], part.std[index], part.target[index]))
    assert error == pytest.approx(float(torch.tensor(again).std()), rel=0.2)


def test_right_bars_fail_the_coverage_test_as_often_as_chance_says() -> None:
    failed = sum("About right" not in size(rows(300, seed=seed)).text for seed in range(400))
    assert 5 <= failed <= 40


def test_errors_of_zero_are_no_obstacle() -> None:
    mean, std, _ = columns(100)
    part = Rows(mean, std, mean.clone())
    assert "Every error is zero" in resolution(part).text
    assert "Do not trust" in page(mean, std, mean).text


# --- the metrics -------------------------------------------------------------------------------


def test_every_metric_of_the_summary_is_explained() -> None:
    assert set(METRICS) == set(metrics.summary(*columns()))
    assert all(metric.sentence.endswith(".") and metric.ideal for metric in METRICS.values())


def test_the_table_shows_the_metrics_of_all_rows_beside_those_of_a_constant_bar() -> None:
    mean, std, target = columns(6000)
    found = page(mean, std, target)
    constant = torch.full_like(std, metrics.rmse(mean, target))
    for label, key in (("NLLNeg", "nll"), ("CRPS", "crps"), ("AUSE", "ause")):
        cells = found.row(label)
        ours, theirs = metrics.summary(mean, std, target), metrics.summary(mean, constant, target)
        assert float(cells[1]) == pytest.approx(ours[key], rel=5e-3)
        assert float(cells[2]) == pytest.approx(theirs[key], rel=5e-3)


def test_what_right_bars_would_score_is_what_they_score() -> None:
    part = rows(1000)
    expected = Judged(part).right
    fresh = [
        metrics.summary(part.mean, part.std, part.mean + part.std * z)
        for z in torch.randn(20, 1000, generator=torch.Generator().manual_seed(7)).double()
    ]
    for key in ("nll", "coverage", "spearman", "miscalibration_area"):
        values = torch.tensor([scores[key] for scores in fresh])
        error = float(values.std()) * math.sqrt(1 / 20 + 1 / 20)
        assert expected[key][0] == pytest.approx(float(values.mean()), abs=4 * error)
        assert expected[key][1] == pytest.approx(float(values.std()), rel=0.8)


def test_the_report_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    report.html(*columns(100))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_same_rows_give_the_same_page() -> None:
    assert report.html(*columns(5100)) == report.html(*columns(5100))


# --- cautions ----------------------------------------------------------------------------------


def changed(**parts: Callable[[Tensor], Tensor]) -> Rows:
    part = rows(500)
    return replace(part, **{key: change(getattr(part, key)) for key, change in parts.items()})


def test_good_rows_raise_no_caution() -> None:
    mean, _, z = columns(500)
    assert cautions(Rows(mean, torch.ones_like(mean) * 2, mean + 0.1 * (z - mean))) == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (rows(20), "20 rows: every figure"),
        (changed(std=lambda s: torch.where(s == s.max(), 50.0, s)), "more than 5 times the median"),
        (changed(target=lambda t: t + 3), "too low on average"),
        (changed(target=lambda t: t - 3), "too high on average"),
        (
            changed(target=lambda t: torch.where(torch.arange(500) < 6, t + 1e3, t)),
            "6 of 500 rows (1.2 %) err by more than 4 bars",
        ),
        (
            Rows(*(torch.cat([part, part[:50]]) for part in columns(500))),
            "50 of 550 rows (9.1 %) repeat",
        ),
    ],
)
def test_what_is_wrong_with_rows_is_said(part: Rows, words: str) -> None:
    assert any(words in sentence for sentence in cautions(part))


def test_bars_too_narrow_as_a_whole_are_no_heavy_tails() -> None:
    assert not any("heavy tails" in sentence for sentence in cautions(rows(2000, scale=4)))


def test_rows_with_bars_beyond_the_reference_are_counted() -> None:
    part = rows(1000)
    usual = torch.linspace(0.01, float(part.std.median()), 5000, dtype=torch.float64)
    (found,) = [s for s in cautions(part, reference=usual) if "reference" in s]
    beyond = int((part.std > usual.sort().values[4994]).sum())
    assert found.startswith(f"{beyond} of 1000 rows")
    assert not any("reference" in s for s in cautions(part, reference=part.std))


def test_rows_like_the_reference_are_hardly_ever_called_unlike_it() -> None:
    called = 0
    for seed in range(200):
        usual = rows(100 + 20 * seed, seed=2 * seed).std
        sentences = cautions(rows(500, seed=2 * seed + 1), reference=usual)
        called += any("reference" in sentence for sentence in sentences)
    assert called <= 3


def test_the_warnings_of_the_calibration_stand_on_the_page(net: Trained) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    found = replace(uq.calibrate(net.valid), duplicates=3, samples=200, at_edge="upper", stale=True)
    text = page(*columns(), calibration=found).text
    assert "3 of 200 calibration rows stand in the training data" in text
    assert "upper end of its range" in text
    assert "since the calibration" in text
    assert "Effective rank" in text
    assert f"{found.ridge:#.4g}" in text


# --- the plots ---------------------------------------------------------------------------------


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
    figure = figures.errors(std, error, {"rows": "t0"})
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
    law = stats.chi2(bin_size)
    assert law.cdf(high * bin_size) - law.cdf(low * bin_size) == pytest.approx(0.95, abs=2e-3)
    assert law.cdf(low * bin_size) == pytest.approx(0.025, abs=2e-3)


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


def test_many_rows_are_thinned_and_the_extreme_ones_kept() -> None:
    mean, std, target = columns(20_000)
    part = Rows(mean, std, target)
    index = shown(part)
    assert len(index) == len(set(index.tolist())) == MOST_SHOWN
    for key in (std, (target - mean).abs(), part.z.abs()):
        assert set(key.topk(100).indices.tolist()) <= set(index.tolist())
    found = page(mean, std, target)
    assert f"Scatter plots show {MOST_SHOWN} of the 20000 rows" in found.text
    assert len(found.figures["t0-errors"]["traces"][""][0]["x"]) == MOST_SHOWN
    assert len(found.embedded("hovers")["t0"]) == MOST_SHOWN


def test_few_rows_are_all_shown_without_a_word() -> None:
    found = page(*columns(20))
    assert "Scatter plots show" not in found.text
    assert "t0-binned" not in found.figures
    assert len(found.figures["t0-errors"]["traces"][""][0]["x"]) == 20


# --- the page ----------------------------------------------------------------------------------


def test_the_page_asks_the_network_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with plotly's own script
    found = page(*columns(60))
    attributes = [attribute for _, attribute in found.elements]
    assert not any({"src", "href", "action", "data"} & set(each) for each in attributes)
    assert not any(re.search(r"url\(|@import", style) for style in found.styles)
    (policy,) = [a["content"] for a in attributes if a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert sum("plotly.js v" in script for script in found.running) == 1
    assert len(found.running) == 2


def test_text_from_data_stays_text() -> None:
    mean, std, target = columns(60)
    inputs = {EVIL: [EVIL] * 60, "%{x}": ["</script><b>"] * 60}
    text = report.html(mean, std, target, title=EVIL, names=[EVIL], inputs=inputs)
    found = Page(text)
    assert len(found.running) == 2
    assert EVIL in found.text
    assert EVIL not in text
    assert found.text.count(EVIL) >= 3
    (hover, *_) = found.embedded("hovers")["t0"]
    assert "&lt;script&gt;" in hover
    assert "<script" not in hover
    assert "&lt;/script&gt;&lt;b&gt;" in hover
    assert not [tag for tag, _ in found.elements if tag == "b"]


def test_a_point_tells_its_row() -> None:
    mean, std, target = columns(60)
    names = [f"molecule {k}" for k in range(60)]
    hovers = page(mean, std, target, inputs={"name": names}, first_row=1).embedded("hovers")["t0"]
    assert hovers[4].startswith("<b>row 5</b>")
    assert f"prediction {mean[4]:.6g} ± {std[4]:.3g}" in hovers[4]
    assert f"true value {target[4]:.6g}" in hovers[4]
    assert hovers[4].endswith("name: molecule 4")


def test_plots_have_labels_and_controls_can_be_reached() -> None:
    found = page(*columns(500))
    places = [a for tag, a in found.elements if tag == "div" and a.get("class") == "plot"]
    assert len(places) == 6
    assert all(a["role"] == "img" and a["aria-label"] for a in places)
    assert {a["id"] for a in places} == set(found.figures)
    boxes = [a for _, a in found.elements if a.get("class") == "box"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)
    assert sum(tag == "select" for tag, _ in found.elements) == 1
    assert sum(a.get("type") == "radio" for _, a in found.elements) == 4


def test_each_target_has_a_section_and_all_stand_in_one_table() -> None:
    parts = [columns(200, scale=s) for s in (1.0, 2.0, 1.0)]
    mean, std, target = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    found = page(mean, std, target, names=["energy", "dipole", "gap"])
    sections = [a["data-target"] for tag, a in found.elements if tag == "section"]
    assert sections == ["t0", "t1", "t2"]
    for name, (m, s, t) in zip(["energy", "dipole", "gap"], parts, strict=True):
        assert float(found.row(name)[1]) == pytest.approx(metrics.rmse(m, t), rel=5e-3)
        assert found.row(name)[4] == f"{100 * metrics.coverage(m, s, t):.1f} %"
    assert found.row("dipole")[6] == "Too narrow"


def test_of_many_targets_the_first_have_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_TARGETS", 3)
    mean, std, target = (part.reshape(10, 15) for part in columns(150))
    found = page(mean, std, target)
    assert sum(tag == "section" for tag, _ in found.elements) == 3
    assert "sections 3" in found.text
    assert found.row("target 14")


def test_of_larger_outputs_every_number_is_a_row() -> None:
    mean, std, target = (part.reshape(10, 4, 5) for part in columns(200))
    (part,) = rows_of(mean, std, target, inputs={"name": list("abcdefghij")})
    assert len(part) == 200
    assert part.inputs["name"][:21] == ["a"] * 20 + ["b"]


def test_importing_the_report_imports_no_plotly() -> None:
    for path in Path(report.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not re.match(r"(import|from) plotly\b", ast.unparse(node))


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "rigidities\[report\]"'):
        report.html(*columns(40))


# --- bad arrays --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"std": [1.0, 0.0, 2.0]}, "Expected std > 0, got 0 in row 1."),
        ({"std": [-1.0, 1.0, -2.0]}, "Expected std >= 0, got -2"),
        ({"std": [1.0, 1.0]}, "one shape"),
        ({"target": [1.0, math.nan, 1.0]}, "Expected target to be finite"),
        ({"names": ["a", "b"]}, "Expected 1 names"),
        ({"inputs": {"mass": [1, 2]}}, "Expected 3 values in the input 'mass'"),
        ({"inputs": torch.zeros(3, 2, 2)}, "Expected inputs by name"),
        ({"reference": [math.inf]}, "finite"),
    ],
)
def test_bad_arrays_are_refused(options: dict[str, Any], words: str) -> None:
    good = {"mean": [1.0, 2.0, 3.0], "std": [1.0, 1.0, 1.0], "target": [1.0, 2.5, 3.0]}
    with pytest.raises(ValueError, match=re.escape(words)):
        report.html(**{**good, **options})


# --- writing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained()


@pytest.fixture(scope="module")
def uq(net: Trained) -> rg.LastLayerRigidity:
    fitted = rg.LastLayerRigidity(net.model).fit(net.train)
    fitted.calibrate(net.valid, noise="constant")
    return fitted


def test_a_fitted_model_and_labelled_data_give_a_report(
    net: Trained, uq: rg.LastLayerRigidity, tmp_path: Path
) -> None:
    x, y = net.test
    found = Page(report.write(tmp_path / "r.html", uq, (x, y)).read_text(encoding="utf-8"))
    mean, std = (part.detach() for part in uq(x))
    assert float(found.row("NLLNeg")[1]) == pytest.approx(metrics.nll(mean, std, y), rel=5e-3)
    assert "Calibration" in found.text
    assert "input 3: " in found.embedded("hovers")["t0"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_a_shuffled_loader_keeps_rows_and_targets_together(
    net: Trained, uq: rg.LastLayerRigidity
) -> None:
    x, y = net.test
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    mean, std, target, inputs = labelled(uq, loader)
    assert inputs is not None
    expected = uq(inputs)
    assert torch.allclose(mean, expected[0].detach())
    assert torch.allclose(std, expected[1].detach())
    assert metrics.rmse(mean, target) == pytest.approx(metrics.rmse(uq(x)[0].detach(), y), rel=1e-5)


def test_an_iterator_of_batches_and_flat_targets_will_do(
    net: Trained, uq: rg.LastLayerRigidity
) -> None:
    x, y = net.test
    mean, _, target, _ = labelled(uq, iter([(x[:50], y[:50, 0]), (x[50:], y[50:, 0])]))
    assert mean.shape == target.shape == y.shape
    assert torch.equal(target, y)


def test_test_rows_unlike_the_reference_are_reported(
    net: Trained, uq: rg.LastLayerRigidity, tmp_path: Path
) -> None:
    far = (10 * net.test[0], net.test[1])
    text = Page(report.write(tmp_path / "r.html", uq, far, reference=net.valid).read_text()).text
    assert "unlike those that the bars were calibrated on" in text


def test_bars_without_calibration_are_not_trusted_silently(net: Trained, tmp_path: Path) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    with pytest.warns(UserWarning, match="not calibrated"):
        written = report.write(tmp_path / "r.html", uq, net.test)
    assert "their scale means nothing" in Page(written.read_text()).text


def test_data_without_targets_are_refused(
    net: Trained, uq: rg.LastLayerRigidity, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Expected labelled data, got batches without a target"):
        report.write(tmp_path / "r.html", uq, net.test[0])
    with pytest.raises(ValueError, match="got none"):
        report.write(tmp_path / "r.html", uq, [])
    with pytest.raises(ValueError, match="Expected targets shaped like the predictions"):
        report.write(tmp_path / "r.html", uq, (net.test[0], net.test[1].expand(-1, 3)))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        report.save(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        report.save(tmp_path / "nowhere" / "r.html", "")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        report.save(tmp_path, "")

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(PermissionError, match=r"Cannot write into the folder .*Permission denied"):
        report.save(tmp_path / "r.html", "")
