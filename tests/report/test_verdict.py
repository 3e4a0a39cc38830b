"""Verdict, metrics and cautions of a report: no more sure than the rows allow."""

import math
import re
from dataclasses import replace

import pytest
import torch
from benchmarks.verdict import FAULTS, called_right, right
from benchmarks.verdict import found as verdict_on
from scipy import stats

import rigidities as rg
from rigidities import metrics, report
from rigidities.calibration.coverage import TAIL, Held, fifths, held_by_chance, normal_scores
from rigidities.prediction.law import Gaussian, StudentT, Tilted
from rigidities.prediction.prediction import Prediction
from rigidities.report.judgement import (
    FEW,
    Caution,
    cautions,
    gain_and_error,
    judgement,
    resolution,
    size,
)
from rigidities.report.rows import Rows
from rigidities.report.scores import METRICS, Judged
from tests.support.nets import Trained
from tests.support.report_rows import changed, columns, page, rows

pytestmark = pytest.mark.usefixtures("short")


# --- the verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "headline", "words"),
    [
        (1.0, "These bars can be trusted", "About right"),
        (1.25, "Use these bars with care: they are too narrow", "Too narrow"),
        (2.5, "far too narrow", "2\\.[45]. times as wide"),
        (0.4, "Do not trust these bars", "Too wide"),
    ],
)
def test_the_verdict_follows_the_size_of_the_bars(scale: float, headline: str, words: str) -> None:
    found = judgement(Judged(rows(2000, scale)))
    assert headline in found.headline
    assert re.search(words, found.findings[0].text)


def test_bars_that_tell_nothing_are_no_better_than_a_constant_one() -> None:
    mean, std, target = columns(2000)
    alike = std.square().mean().sqrt().expand_as(std)
    found = judgement(Judged(Rows(mean, alike, target)))
    assert "same size" in found.findings[2].text
    shuffled = Rows(
        mean, std[torch.randperm(2000, generator=torch.Generator().manual_seed(1))], target
    )
    found = judgement(Judged(shuffled))
    assert found.status == "bad"
    assert "Worse than one constant bar" in found.findings[2].text
    assert "do not mark larger errors" in found.findings[3].text


def test_bars_upside_down_are_called_so() -> None:
    mean, std, target = columns(1000)
    found = judgement(Judged(Rows(mean, 1 / std, target)))
    assert "lower" not in found.findings[3].text
    assert "Larger bars go with smaller errors" in found.findings[3].text


@pytest.mark.parametrize("count", [3, 12, FEW - 1])
def test_from_few_rows_there_is_no_verdict_and_nothing_is_good(count: int) -> None:
    for scale in (1.0, 0.01, 100.0):
        found = judgement(Judged(rows(count, scale)))
        assert f"Too few rows for a verdict: {count}" in found.headline
        assert "good" not in {found.status, *(finding.status for finding in found.findings)}
        assert "About right" not in found.findings[0].text


@pytest.mark.parametrize("count", [8, 12, 20, 29, 34, 35, 36, 60])
def test_bars_a_hundred_times_too_wide_are_called_so_at_any_number_of_rows(count: int) -> None:
    found = size(rows(count, scale=0.01))
    assert found.status == "bad"
    assert found.text.startswith("Too wide. 90 % intervals hold 100.0 %")


@pytest.mark.parametrize("count", [1, 2, 12, 34, 35, 36, 100, 300, 2000, 100_000])
def test_what_chance_allows_is_the_binomial_distribution(count: int) -> None:
    for tail in (0.025, TAIL, 0.001):
        assert held_by_chance(count, tail) == tuple(stats.binom(count, 0.9).ppf([tail, 1 - tail]))


@pytest.mark.parametrize("count", [12, 34, 40])
def test_right_bars_are_called_wide_or_narrow_as_rarely_as_the_tails_say(count: int) -> None:
    said = [Held.of(rows(count, seed=seed).z, 0.025).side for seed in range(1000)]
    assert said.count("narrow") <= 42  # 25 expected at most, + 3.4 sigma
    assert said.count("wide") <= 42
    if count < 36:  # the sum of z² is continuous, so that its test is exact
        assert said.count("wide") >= 10


@pytest.mark.parametrize(
    ("grave", "words"),
    [
        (["they are not calibrated"], "with care: they are not calibrated."),
        (["one", "two", "three"], "with care: one, two and three."),
    ],
)
def test_grave_cautions_lower_the_verdict(grave: list[str], words: str) -> None:
    good = judgement(Judged(rows(2000)))
    assert (good.status, "can be trusted" in good.headline) == ("good", True)
    warned = [Caution("", why) for why in grave]
    found = judgement(Judged(rows(2000)), warned)
    assert found.status == "careful"
    assert words in found.headline
    assert "far too narrow" in judgement(Judged(rows(2000, 2.5)), warned).headline


def test_a_bad_ranking_lowers_the_verdict() -> None:
    judged = Judged(rows(2000))
    judged.__dict__["bars"] = {**judged.bars, "spearman": -0.5}
    found = judgement(judged)
    assert found.status == "careful"
    assert found.headline == "Use these bars with care: larger bars go with smaller errors."


def test_rows_that_are_biased_or_unlike_the_reference_are_not_called_trustworthy() -> None:
    mean, std, target = columns(4000)
    assert "can be trusted" in page(mean, std, target, reference=std).text
    for options, reason in (
        ({"mean": mean - 0.15 * std}, "with care: the predictions are too low on average."),
        ({"reference": std[std < 2]}, "with care: some rows are unlike those"),
    ):
        text = page(**{"mean": mean, "std": std, "target": target, **options}).text
        assert reason in text
        assert "can be trusted" not in text


def test_bars_times_the_needed_factor_hold_ninety_per_cent() -> None:
    for count in (37, 100, 1003):
        part = rows(count, scale=1.7)
        wider = part.std * Held.of(part.z).factor * (1 + 1e-12)
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
    failed = sum(bool(Held.of(rows(300, seed=seed).z, 0.025).side) for seed in range(400))
    assert 5 <= failed <= 40


def test_errors_of_zero_are_no_obstacle() -> None:
    mean, std, _ = columns(100)
    part = Rows(mean, std, mean.clone())
    assert "Every error is zero" in resolution(part).text
    assert "Do not trust" in page(mean, std, mean).text


# --- what is wrong, and for which predictions ---------------------------------------------------


@pytest.mark.parametrize("count", [200, 2000])
def test_right_bars_are_called_right(count: int) -> None:
    called = sum(called_right(verdict_on(right(count, seed))) for seed in range(12))
    assert called >= 11


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name: str) -> None:
    fault, words, strengths = FAULTS[name]
    for seed in range(2):
        found = verdict_on(fault(1500, list(strengths)[-1], seed))
        assert words in str(found)
        assert name == "duplicates" or not called_right(found)
        assert name in ("duplicates", "too wide", "too narrow") or "far too" not in found.headline
    assert words not in str(verdict_on(right(1500, 3)))


def test_bars_right_on_average_alone_are_not_trusted_and_the_part_is_named() -> None:
    found = verdict_on(FAULTS["uneven by prediction"][0](2000, 2.0, 0))
    assert found.status == "bad"
    assert found.headline.startswith("Do not trust these bars as they stand: right on average, but")
    assert "too narrow in the highest fifth of the predictions (above " in found.headline
    assert "In the lowest fifth of the predictions (below " in found.findings[1].text
    assert "where chance allows 85 to 94.2 %" in found.findings[1].text
    assert "noise='features'" in found.findings[1].text


def test_a_tiny_fault_of_many_rows_is_said_and_not_called_bad() -> None:
    mean, std, target = right(20_000, 0)
    found = report.verdict(mean, target, std=std / 1.0437)
    assert "A little too narrow" in found.findings[0].text
    assert found.status == "good"


def test_fifths_are_those_of_sorted_rows() -> None:
    part = rows(1003)
    for key, held in zip(
        (part.mean, part.std),
        (fifths(part.z, part.mean, part.std)[i : i + 5] for i in (0, 5)),
        strict=True,
    ):
        for one, index in zip(held, key.argsort().tensor_split(5), strict=True):
            assert one.inside == int((part.z[index].abs() <= 1.6448536269514722).sum())
            assert one.rows == len(index)
    assert fifths(part.z[:49], part.mean[:49], part.std[:49]) == []
    assert len(fifths(part.z, part.mean, torch.ones_like(part.z))) == 5


def test_bars_wrong_by_one_factor_are_even() -> None:
    found = judgement(Judged(rows(2000, 2.5)))
    assert found.findings[1].text.startswith("Even: ")


def test_a_remedy_in_use_is_not_named(net: Trained) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    columns = FAULTS["uneven by prediction"][0](500, 2.0, 0)
    mean, std, target = columns
    constant = uq.calibrate(net.valid, criterion="nll", noise="constant")
    assert "Try noise" not in str(constant) + str(replace(constant, at_edge="upper"))
    assert "noise='features'" in str(report.verdict(mean, target, std=std, calibration=constant))
    full = replace(constant, ladder={"paper": 1.0})  # auto has tried the full model in vain
    said = str(report.verdict(mean, target, std=std, calibration=full))
    assert "noise='features'" not in said
    assert "conformal=" in said


@pytest.mark.parametrize(
    ("law", "support"),
    [
        (StudentT(3.0), None),
        (Tilted(4.0, torch.tensor([0.8, 0, 0.3, 0, 0, 0, 0, 0])), None),
        (Gaussian(), (-0.5, None)),
    ],
)
def test_bars_are_judged_under_their_own_law(law, support) -> None:
    mean, std, _ = right(2000, 0)
    p = Prediction(mean, std**2 / 2, std**2 / 2, std, law=law, support=support)
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    score = normal_scores(p, y)
    assert stats.kstest(score.numpy(), "norm").pvalue > 1e-3
    inside = (score.abs() <= 1.6448536269514722)[y != -0.5]
    low, high = p.interval(0.9)
    assert torch.equal(inside, ((low <= y) & (y <= high))[y != -0.5])
    found = report.verdict(p, y)
    assert "can be trusted" in found.headline, str(found)
    wrong = report.verdict(replace(p, law=Gaussian(), support=None), y)
    assert not called_right(wrong)


def test_of_several_targets_the_worst_is_named() -> None:
    mean, std, target = (part.reshape(-1, 2) for part in right(1000, 0))
    found = report.verdict(mean, target, std=std / torch.tensor([1.0, 3.0]))
    assert (
        found.headline
        == "target 1: Do not trust these bars as they stand: they are far too narrow."
    )
    with pytest.raises(TypeError, match="Expected a Prediction and no std=, or means and std="):
        report.verdict(mean, target)


# --- the metrics -------------------------------------------------------------------------------


def test_every_metric_of_the_summary_is_explained() -> None:
    assert set(METRICS) >= set(metrics.summary(*columns()))
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
            "7 of 500 rows (1.4 %) err by more than 3 bars",
        ),
        (
            Rows(*(torch.cat([part, part[:50]]) for part in columns(500))),
            "50 of 550 rows (9.1 %) repeat",
        ),
    ],
)
def test_what_is_wrong_with_rows_is_said(part: Rows, words: str) -> None:
    assert any(words in one.text for one in cautions(part))


def test_bars_too_narrow_as_a_whole_are_no_heavy_tails() -> None:
    assert not any("heavy tails" in one.text for one in cautions(rows(2000, scale=4)))


def test_rows_with_bars_beyond_the_reference_are_counted() -> None:
    part = rows(1000)
    usual = torch.linspace(0.01, float(part.std.median()), 5000, dtype=torch.float64)
    (found,) = [s.text for s in cautions(part, reference=usual) if "reference" in s.text]
    beyond = int((part.std > usual.sort().values[4994]).sum())
    assert found.startswith(f"{beyond} of 1000 rows")
    assert not any("reference" in s.text for s in cautions(part, reference=part.std))


def test_rows_like_the_reference_are_hardly_ever_called_unlike_it() -> None:
    called = 0
    for seed in range(200):
        usual = rows(100 + 20 * seed, seed=2 * seed).std
        warned = cautions(rows(500, seed=2 * seed + 1), reference=usual)
        called += any("reference" in one.text for one in warned)
    assert called <= 3


def test_the_warnings_of_the_calibration_stand_on_the_page(net: Trained) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    found = replace(
        uq.calibrate(net.valid, criterion="nll"),
        duplicates=3,
        samples=200,
        at_edge="upper",
        stale=True,
    )
    text = page(*columns(), calibration=found).text
    assert "3 of 200 calibration rows stand in the training data" in text
    assert "upper end of its range" in text
    assert "since the calibration" in text
    assert "with care: they were calibrated for other data" in text
    assert "Effective rank" in text
    assert f"{found.ridge:#.4g}" in text
