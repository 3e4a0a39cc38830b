"""Verdict, metrics and cautions of a report: no more sure than the rows allow."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from benchmarks.verdict import FAULTS, called_right, right, verdict_on
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import rigidities as rg
from rigidities import metrics, report
from rigidities.calibration.coverage import (
    FIFTHS_TAIL,
    HALF_WIDTH,
    TAIL,
    Coverage,
    ScoredRows,
    covered_by_chance,
)
from rigidities.prediction.distribution import Distribution, Gaussian, StudentT
from rigidities.prediction.mixture import Mixture
from rigidities.prediction.prediction import Prediction
from rigidities.report.cautions import FEW, Caution, cautions
from rigidities.report.judgement import (
    Judgements,
    by_fifths,
    gain_and_error,
    judgement,
    resolution,
    size,
)
from rigidities.report.rows import TargetRows, target_rows
from rigidities.report.scores import METRICS, TargetScores
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
    found = judgement(TargetScores(rows(2000, scale)))
    assert headline in found.headline
    assert re.search(words, found.findings[0].text)


def test_bars_that_tell_nothing_are_no_better_than_a_constant_one() -> None:
    mean, std, target = columns(2000)
    alike = std.square().mean().sqrt().expand_as(std)
    found = judgement(TargetScores(TargetRows(mean, alike, target)))
    assert "same size" in found.findings[2].text
    shuffled = TargetRows(
        mean, std[torch.randperm(2000, generator=torch.Generator().manual_seed(1))], target
    )
    found = judgement(TargetScores(shuffled))
    assert found.status == "bad"
    assert "Worse than one constant bar" in found.findings[2].text
    assert "do not mark larger errors" in found.findings[3].text


def test_bars_upside_down_are_called_so() -> None:
    mean, std, target = columns(1000)
    found = judgement(TargetScores(TargetRows(mean, 1 / std, target)))
    assert "lower" not in found.findings[3].text
    assert "Larger bars go with smaller errors" in found.findings[3].text


@pytest.mark.parametrize("count", [3, 12, FEW - 1])
def test_from_few_rows_there_is_no_verdict_and_nothing_is_good(count: int) -> None:
    for scale in (1.0, 0.01, 100.0):
        found = judgement(TargetScores(rows(count, scale)))
        assert f"Too few rows for a verdict: {count}" in found.headline
        assert "good" not in {found.status, *(finding.status for finding in found.findings)}
        assert "About right" not in found.findings[0].text


@pytest.mark.parametrize("count", [8, 12, 20, 29, 34, 35, 36, 60])
def test_bars_a_hundred_times_too_wide_are_called_so_at_any_number_of_rows(count: int) -> None:
    found = size(rows(count, scale=0.01))
    assert found.status == "bad"
    assert found.text.startswith("Too wide. 90 % intervals cover 100.0 %")


@pytest.mark.parametrize("count", [1, 2, 12, 34, 35, 36, 100, 300, 2000, 100_000])
def test_what_chance_allows_is_the_binomial_distribution(count: int) -> None:
    for tail in (0.025, TAIL, 0.001):
        assert covered_by_chance(count, tail) == tuple(
            stats.binom(count, 0.9).ppf([tail, 1 - tail])
        )


@pytest.mark.parametrize("count", [12, 34, 40])
def test_right_bars_are_called_wide_or_narrow_as_rarely_as_the_tails_say(count: int) -> None:
    said = [Coverage.of(rows(count, seed=seed).scored.columns, 0.025).side for seed in range(1000)]
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
    good = judgement(TargetScores(rows(2000)))
    assert (good.status, "can be trusted" in good.headline) == ("good", True)
    warned = [Caution("", why) for why in grave]
    found = judgement(TargetScores(rows(2000)), warned)
    assert found.status == "careful"
    assert words in found.headline
    assert "far too narrow" in judgement(TargetScores(rows(2000, 2.5)), warned).headline


def test_a_bad_ranking_lowers_the_verdict() -> None:
    judged = TargetScores(rows(2000))
    judged.__dict__["spearman"] = -0.5
    found = judgement(judged)
    assert found.status == "careful"
    assert found.headline == "Use these bars with care: larger bars go with smaller errors."


def test_grave_cautions_stand_in_the_headline_of_bars_to_be_used_with_care() -> None:
    mean, std, target = columns(2000)
    bar = std.square().mean().sqrt().expand_as(std)
    shifted = mean + bar * ((target - mean) / std + 0.3)
    said = report.verdict(mean, shifted, std=bar).headline
    assert "with care: the predictions are too low on average and they are no better" in said
    found = judgement(TargetScores(rows(2000, 1.25)), [Caution("", "they are not calibrated")])
    assert "with care: they are too narrow and they are not calibrated." in found.headline


def test_each_look_at_many_targets_has_a_smaller_tail() -> None:
    wide = rows(400, 1.0)
    assert wide.scored.coverage[2:4] == covered_by_chance(400, TAIL)
    many = replace(wide, target_count=50)
    assert many.scored.coverage[2:4] == covered_by_chance(400, TAIL / 50)
    assert many.scored.fifths[0][2:4] == covered_by_chance(80, FIFTHS_TAIL / 50)
    mean, std, target = (part.reshape(-1, 4) for part in columns(400))
    (part, *others) = target_rows(mean, target, std=std)
    assert part.target_count == 4 == 1 + len(others)


@pytest.mark.thorough
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
        wider = part.std * part.scored.coverage.factor * (1 + 1e-12)
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
    failed = sum(
        bool(Coverage.of(rows(300, seed=seed).scored.columns, 0.025).side) for seed in range(400)
    )
    assert 5 <= failed <= 40


def test_errors_of_zero_are_no_obstacle() -> None:
    mean, std, _ = columns(100)
    part = TargetRows(mean, std, mean.clone())
    assert "Every error is zero" in resolution(TargetScores(part)).text
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
    start = "Do not trust these bars as they stand: they are right on average, but too narrow in"
    assert found.headline.startswith(start)
    assert "too narrow in the highest fifth of the predictions (from " in found.headline
    assert "In the lowest fifth of the predictions (up to " in found.findings[1].text
    assert "(chance allows 85 to 94.2 %)" in found.findings[1].text
    assert "method=rg.Full()) the bars follow the inputs" in found.findings[1].text


def test_a_tiny_fault_of_many_rows_is_said_and_not_called_bad() -> None:
    mean, std, target = right(20_000, 0)
    found = report.verdict(mean, target, std=std / 1.0437)
    assert "A little too narrow" in found.findings[0].text
    assert found.status == "good"


def test_fifths_are_those_of_sorted_rows() -> None:
    part = rows(1003)
    for key, held in zip(
        (part.mean, part.std), (part.scored.fifths[i : i + 5] for i in (0, 5)), strict=True
    ):
        for one, index in zip(held, key.argsort().tensor_split(5), strict=True):
            assert one.inside == int((part.z[index].abs() <= HALF_WIDTH).sum())
            assert one.rows == len(index)
    assert rows(49).scored.fifths == []
    unchecked = by_fifths(rows(49))
    assert (unchecked.status, unchecked.status_word) == ("good", "not checked")
    alike = TargetRows(part.mean, torch.ones_like(part.std), part.target)
    assert len(alike.scored.fifths) == 5


@pytest.mark.parametrize("kinds", [1, 3])
def test_the_order_of_rows_with_equal_keys_does_not_matter(kinds: int) -> None:
    called = 0
    for seed in range(8):
        mean, std, target = right(600, seed)
        which = torch.randint(3, (600,), generator=torch.Generator().manual_seed(seed))
        values = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[which]
        means = values if kinds == 3 else 0.3 * mean
        z, bars = (target - mean) / std, values if kinds == 3 else values.clamp(min=1.0)
        y, order = means + bars * z, (means + bars * z).argsort()
        called += report.verdict(means[order], y[order], std=bars[order]).status == "good"
    assert called >= 7


def test_a_fifth_is_named_by_its_own_values() -> None:
    mean = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).repeat_interleave(200)
    named = [one.where for one in TargetRows(mean, 1 + mean, mean).scored.fifths[:5]]
    values = [where.partition("(")[2][:-1] for where in named]
    assert values == ["1", "1 to 2", "2", "2 to 3", "3"]


def test_bars_wrong_by_one_factor_are_even() -> None:
    found = judgement(TargetScores(rows(2000, 2.5)))
    assert re.fullmatch(
        r"Even\. .* % in each fifth .* One factor would correct all of them\.",
        found.findings[1].text,
    )


def test_a_remedy_in_use_is_not_named(net: Trained) -> None:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    columns = FAULTS["uneven by prediction"][0](500, 2.0, 0)
    mean, std, target = columns
    constant = uq.calibrate(net.valid, method=rg.Paper(noise="constant")).calibration_report
    assert "Try noise" not in str(constant) + str(replace(constant, at_edge="upper"))
    said = str(report.verdict(mean, target, std=std, calibration=constant))
    assert "method=rg.Full()) the bars follow the inputs" in said
    unknown = str(report.verdict(mean, target, std=std))
    assert "Unless you already use it: With calibrate(x, y, method=rg.Full())" in unknown
    other = replace(constant, advice="Mend f.")  # of an object that refuses what this one has
    said = str(report.verdict(mean, target, std=std, calibration=other))
    assert "Mend f." in said
    assert not re.search("the bars follow|can be skewed|guaranteed", said)
    full = replace(constant, method="full", steps=[0])  # tried in vain
    said = str(report.verdict(mean, target, std=std, calibration=full))
    assert "the bars follow" not in said
    assert "conformalize(" in said


SKEWED = Mixture(
    logit=torch.tensor([1.0, 0.0]),
    offset=torch.tensor([-0.5, 1.0]),
    log_width=torch.tensor([-0.7, 0.0]),
)


def predicted(
    distribution: Distribution, support: Any = None, factor: float = 1.0, kind: Any = torch.float64
):
    """Predictions, and true values from the distribution with bars of the right size."""
    mean, std, _ = (part.to(kind) for part in right(2000, 0))
    p = Prediction(mean, std**2 / 2, std**2 / 2, std, distribution=distribution, support=support)
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    return replace(p, epistemic=factor**2 * std**2 / 2, noise=factor**2 * std**2 / 2), y


@pytest.mark.parametrize("distribution", [StudentT(3.0), SKEWED])
def test_bars_are_judged_under_their_own_distribution(distribution: Distribution) -> None:
    p, y = predicted(distribution)
    score = ScoredRows.of(p, y).z
    assert stats.kstest(score.numpy(), "norm").pvalue > 1e-3
    low, high = p.interval(0.9)
    assert torch.equal(score.abs() <= HALF_WIDTH, (low <= y) & (y <= high))
    found = report.verdict(p, y)
    assert "can be trusted" in found.headline, str(found)
    assert not called_right(report.verdict(replace(p, distribution=Gaussian()), y))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "support", [(-0.5, None), (0.0, None), (0.3, None), (None, 0.0), (None, 0.7), (-0.3, 0.6)]
)
def test_targets_at_bounds_are_judged_by_the_lump_there(support: Any, kind: torch.dtype) -> None:
    p, y = predicted(Gaussian(), support, kind=kind)
    assert stats.kstest(ScoredRows.of(p, y).z.numpy(), "norm").pvalue > 1e-3
    for target in (y, y.float(), y.double().numpy()):  # whatever the precision
        assert "can be trusted" in report.verdict(p, target).headline
    assert not called_right(report.verdict(replace(p, support=None), y))
    narrow = replace(p, epistemic=p.epistemic / 8, noise=p.noise / 8)
    assert report.verdict(narrow, y).status == "bad"


def test_a_prediction_with_a_distribution_that_leans_and_bounds_is_judged_right() -> None:
    p, y = predicted(SKEWED, (-0.4, 0.9))
    assert stats.kstest(ScoredRows.of(p, y).z.numpy(), "norm").pvalue > 1e-3
    assert "can be trusted" in report.verdict(p, y).headline


def test_true_values_beyond_a_bound_are_never_held() -> None:
    p, y = predicted(Gaussian(), (0.0, None))
    found = report.verdict(p, torch.where(torch.arange(2000) % 3 == 0, -1e-3, y))
    assert found.status == "bad"
    assert "impossible under their distribution" in found.findings[2].text


@pytest.mark.parametrize("distribution", [Gaussian(), StudentT(3.0), SKEWED])
def test_bars_times_the_factor_hold_ninety_per_cent_under_their_distribution(
    distribution: Distribution,
) -> None:
    p, y = predicted(distribution, factor=0.4)
    held = ScoredRows.of(p, y).coverage
    assert held.factor == pytest.approx(2.5, rel=0.1)
    assert held.rms == pytest.approx(float(((y - p.mean) / p.std).square().mean().sqrt()))
    low, high = replace(
        p, epistemic=p.epistemic * held.factor**2, noise=p.noise * held.factor**2
    ).interval(0.9)
    assert float(((low <= y) & (y <= high)).double().mean()) == pytest.approx(0.9, abs=1.5e-3)
    assert report.verdict(p, y).status == "bad"
    assert not any("heavy tails" in one.text for one in report.verdict(p, y).cautions)


def test_outliers_are_counted_by_the_intervals_of_the_distribution() -> None:
    p, y = predicted(StudentT(5.0))
    wrong = torch.where(torch.arange(2000) % 50 == 0, p.mean + 20 * p.std, y)
    low, high = p.interval(math.erf(3 / math.sqrt(2)))
    (said,) = [one.text for one in report.verdict(p, wrong).cautions if "tails" in one.text]
    beyond = int(((wrong < low) | (wrong > high)).sum())
    assert beyond - 6 <= int(said.split()[0]) <= beyond
    assert "lie outside 99.7 % intervals" in said
    assert "student-t" not in said


def test_what_right_bars_would_score_is_drawn_from_the_distribution() -> None:
    p, y = predicted(Gaussian(), (0.0, None))
    (part,) = target_rows(p, y)
    judged = TargetScores(part)
    for key in ("spearman", "rmse", "coverage", "nll", "nll_gain"):
        expected, scatter = judged.right[key]
        assert judged.bars[key] == pytest.approx(expected, abs=5 * scatter + 1e-3)


def test_a_constant_bar_within_bounds_gains_nothing_over_itself() -> None:
    mean, one, _ = right(2000, 0)
    one = torch.ones_like(one)
    p = Prediction(mean, 0 * one, one, one, support=(0.0, None))
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    assert abs(gain_and_error(target_rows(p, y)[0])[0]) < 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("distribution", [StudentT(5.0), Gaussian()])
def test_targets_come_in_any_form(distribution: Distribution) -> None:
    p, y = predicted(distribution, (-1.0, None))
    said = str(report.verdict(p, y))
    shuffled = pandas.Series(y.numpy(), index=range(5000, 3000, -1))
    for target in (y.numpy(), y.tolist(), y[:, None], shuffled, shuffled.to_frame()):
        assert str(report.verdict(p, target)) == said
    whole = y.round().long()
    assert str(report.verdict(p, whole)) == str(report.verdict(p, whole.double()))
    assert "<h1>" in report.html(p, whole)
    with pytest.raises(TypeError, match=r"html\(\) got an unexpected keyword argument 'titel'"):
        report.html(p, y, titel="a")


class Bare(Distribution):
    """A distribution of one's own without probabilities."""

    name, symmetric = "bare", True

    def quantile(self, level: torch.Tensor) -> torch.Tensor:
        return Gaussian().quantile(level)

    def log_density(self, z: torch.Tensor) -> torch.Tensor:
        return Gaussian().log_density(z)


def test_a_distribution_without_probabilities_is_judged_as_gaussian_and_it_is_said() -> None:
    p, y = predicted(Bare())
    found, plain = report.verdict(p, y), report.verdict(replace(p, distribution=Gaussian()), y)
    assert found.findings == plain.findings
    assert "The distribution 'bare' has no probabilities" in found.cautions[0].text


def test_of_several_targets_the_worst_is_named() -> None:
    mean, std, target = (part.reshape(-1, 2) for part in right(1000, 0))
    found = report.verdict(mean, target, std=std / torch.tensor([1.0, 3.0]))
    assert (
        found.headline
        == "target 1, the worst of 2 targets: Do not trust these bars as they stand: they are far "
        "too narrow."
    )
    assert [one.subject for one in found.findings][:2] == ["Size of target 1", "Fifths of target 1"]
    alike = report.verdict(mean, target, std=std)
    assert alike.headline == "Both targets: These bars can be trusted on rows like these."
    with pytest.raises(TypeError, match="Expected a Prediction without std=, or means with std="):
        report.verdict(mean, target)


@pytest.mark.thorough
def test_of_several_targets_names_and_grave_cautions_of_the_others_are_told() -> None:
    mean, std, target = (part.reshape(-1, 3) for part in right(1500, 0))
    target = target.clone()
    target[17, 0] = mean[17, 0] + 57 * std[17, 0]
    bars = std / torch.tensor([1.0, 1.0, 3.0])
    found = report.verdict(mean, target, std=bars, names=["energy", "gap", "dipole"])
    assert found.headline.startswith("dipole, the worst of 3 targets: Do not trust")
    (named,) = [one.text for one in found.cautions if one.text.startswith("energy: ")]
    assert "Far outside: row 17 by 57.0 bars." in named
    text = page(mean, bars, target, names=["energy", "gap", "dipole"]).text
    assert text.index(found.headline) < text.index(named) < text.index("All targets")
    assert page(mean, bars, target).text.index("target 2, the worst of 3") < 400


def test_cautions_of_every_target_have_its_name_and_shared_ones_stand_once() -> None:
    mean, std, target = (part.reshape(-1, 2) for part in right(400, 0))
    p = Prediction(mean, std.square(), torch.zeros_like(mean), torch.ones_like(mean))
    scores = [TargetScores(part) for part in target_rows(p, target, names=["a", "b"])]
    judged = Judgements(targets=scores)
    both = Caution("Rows are few.")
    own = {
        "a": [both, Caution("The centre is better.")],
        "b": [Caution("A detail."), both, Caution("A grave one.", grave="it is grave")],
    }
    verdicts = [
        replace(verdict, cautions=tuple(own[name]), status="careful")
        for name, verdict in zip("ab", judged.verdicts, strict=True)
    ]
    # What the properties have computed lies in the object's dictionary.
    vars(judged).update(verdicts=verdicts, worst_target=0)
    texts = [caution.text for caution in judged.verdict.cautions]
    assert texts == ["Rows are few.", "a: The centre is better.", "b: A grave one.", "b: A detail."]


# --- one truth ---------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", [Gaussian(), StudentT(3.0), SKEWED])
@pytest.mark.parametrize("level", [0.9, 0.5])
def test_the_figures_are_those_of_the_predictions_own_distribution(
    distribution: Distribution, level: float
) -> None:
    p, y = predicted(distribution)
    (part,) = target_rows(p, y)
    judged = TargetScores(replace(part, calibrated_bar=0.7), level=level)
    low, high = p.interval(level)
    expected = {
        "crps": float(p.crps(y).mean()),
        "nll": -float(p.log_prob(y).mean()),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "interval_width": float((high - low).mean()),
    }
    assert {key: judged.bars[key] for key in expected} == pytest.approx(expected)
    plain = stats.norm(p.mean.numpy(), 0.7)
    inside = abs(y - p.mean) <= 0.7 * stats.norm.ppf(0.5 + level / 2)
    assert judged.constant["nll"] == pytest.approx(-plain.logpdf(y.numpy()).mean())
    assert judged.constant["coverage"] == pytest.approx(float(inside.double().mean()))
    gain = judged.constant["nll"] - judged.bars["nll"]
    assert judged.bars["nll_gain"] == pytest.approx(gain) == gain_and_error(judged.rows)[0]


def test_page_and_verdict_compare_with_the_constant_bar_that_was_given() -> None:
    mean, std, target = columns(2000)
    found = report.verdict(mean, target, std=std, constant=[1.25])
    named = "one constant bar (1.25, the RMS error of the calibration rows, Gaussian)"
    assert named in found.findings[2].text
    own = page(mean, std, target, constant=[1.25])
    assert found.findings[2].text in own.text
    crps = metrics.crps(mean, torch.full_like(std, 1.25), target)
    assert float(own.row("CRPS")[2]) == pytest.approx(crps, rel=5e-3)
    fitted = report.verdict(mean, target, std=std).findings[2].text
    assert "the RMS error of these rows" in fitted
    for wrong in ([1.0, 2.0], [0.0], [math.inf]):
        with pytest.raises(ValueError, match="Expected constant= as 1 finite bars above zero"):
            report.verdict(mean, target, std=std, constant=wrong)


def test_a_constant_bar_that_outliers_have_blown_up_flatters_nobody() -> None:
    mean, std, target = columns(2000)
    shuffled = std[torch.randperm(2000, generator=torch.Generator().manual_seed(1))]
    said = report.verdict(mean, target, std=shuffled, constant=[50.0]).findings[2]
    assert said.status == "bad"
    assert "Worse than one constant bar (" in said.text
    assert "The RMS error of the calibration rows, 50.0, is " in said.text
    good = report.verdict(mean, target, std=std, constant=[50.0]).findings[2]
    assert good.status == "good"
    fair = gain_and_error(TargetRows(mean, std, target))
    assert f"these rows, Gaussian) by {fair[0]:.3f} ± {fair[1]:.3f} nats" in good.text


def test_one_row_that_makes_the_difference_is_named() -> None:
    mean, std, target = right(400, 3)
    assert "One row makes the difference" not in str(report.verdict(mean, target, std=std))
    target = target.clone()
    row = int(std.argmin())
    target[row] = mean[row] + 30 * std[row]
    said = report.verdict(mean, target, std=std, constant=[1.3], first_row=1).findings[2]
    assert said.status == "careful"
    assert f"One row makes the difference: without row {row + 1}, whose error is 30.0 bars" in (
        said.text
    )
    kept = torch.arange(400) != row
    left = TargetRows(mean[kept], std[kept], target[kept], calibrated_bar=1.3)
    assert f"better by {gain_and_error(left)[0]:.2f}" in said.text


def test_rows_far_outside_are_named_first() -> None:
    mean, std, target = right(1000, 0)
    assert not any(
        "Far outside" in one.text for one in report.verdict(mean, target, std=std).cautions
    )
    target = target.clone()
    target[[3, 500]] = (mean + 57 * std)[[3, 500]]
    found = report.verdict(mean, target, std=std)
    assert found.headline.startswith("Use these bars with care: 2 rows lie far outside")
    assert found.cautions[0].text.startswith("Far outside: row ")
    for named in ("row 3 by 57.0 bars", "row 500 by 57.0 bars"):
        assert named in found.cautions[0].text
    narrow = report.verdict(mean, mean + 5 * (target - mean), std=std)  # as a whole
    assert narrow.status == "bad"
    heavy, y = predicted(StudentT(2.5))
    assert not any("Far outside" in one.text for one in report.verdict(heavy, y).cautions)


def test_where_the_distributions_centre_predicts_better_it_is_said_with_the_bias() -> None:
    mean, std, target = right(2000, 0)
    leaning = Mixture(torch.zeros(2), torch.tensor([0.2, 3.0]), torch.tensor([-1.0, 0.5]))
    p = Prediction(mean, 0 * std, std**2, std, distribution=leaning)
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    found = report.verdict(p, y)
    (said,) = [one.text for one in found.cautions if "centre" in one.text]
    ours, theirs = metrics.rmse(p.mean, y), metrics.rmse(p.centre, y)
    assert theirs < 0.9 * ours
    assert f"its RMSE is {theirs:#.3g} instead of {ours:#.3g}" in said
    bias, error = (y - mean).mean(), (y - mean).std() / 2000**0.5
    side = "low" if bias > 0 else "high"
    assert f"too {side} by {abs(float(bias)):.3f} ± {float(error):.3f}" in said
    assert "p.centre" in said and "refit()" in said
    assert not any("centre" in one.text for one in report.verdict(mean, target, std=std).cautions)


@pytest.mark.parametrize("count", [30, 50, 100])
def test_right_bars_of_few_rows_are_not_called_no_better(count: int) -> None:
    said = [verdict_on(right(count, seed)) for seed in range(20)]
    assert sum(map(called_right, said)) >= 18
    unshown = [one for one in said if one.status == "careful"]
    assert all("not shown to be better" in one.headline for one in unshown if called_right(one))


def test_bars_that_many_rows_show_to_be_no_better_are_called_so() -> None:
    mean, std, target = right(400, 0)
    constant = mean + (target - mean) / std  # of errors of one size
    mild = 1 + 0.1 * (std - std.mean())
    found = report.verdict(mean, constant, std=mild)
    assert not called_right(found) or "not shown" in found.headline


# --- the metrics -------------------------------------------------------------------------------


def test_every_metric_of_the_summary_is_explained() -> None:
    assert set(METRICS) >= set(metrics.summary(*columns()))
    assert all(metric.sentence.endswith(".") and metric.ideal for metric in METRICS.values())


@pytest.mark.thorough
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
    expected = TargetScores(part).right
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
    page(*columns(100))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.thorough
def test_the_same_rows_give_the_same_page() -> None:
    mean, std, target = columns(5100)
    first = report.html(mean, target, std=std)
    assert first == report.html(mean, target, std=std)


# --- cautions ----------------------------------------------------------------------------------


def test_good_rows_raise_no_caution() -> None:
    mean, _, z = columns(500)
    assert cautions(TargetRows(mean, torch.ones_like(mean) * 2, mean + 0.1 * (z - mean))) == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (rows(20), "20 rows: every figure"),
        (changed(std=lambda s: torch.where(s == s.max(), 50.0, s)), "more than 5 times the median"),
        (changed(target=lambda t: t + 3), "too low on average"),
        (changed(target=lambda t: t - 3), "too high on average"),
        (
            changed(target=lambda t: torch.where(torch.arange(500) < 6, t + 1e3, t)),
            "7 of 500 rows (1.4 %) have errors beyond 3 bars",
        ),
        (
            TargetRows(*(torch.cat([part, part[:50]]) for part in columns(500))),
            "50 of 550 rows (9.09 %) repeat",
        ),
    ],
)
def test_what_is_wrong_with_rows_is_said(part: TargetRows, words: str) -> None:
    assert any(words in one.text for one in cautions(part))


def test_rows_that_are_alike_since_values_are_few_are_no_copies() -> None:
    mean, std, target = columns(2000)
    leaf = mean.round().clamp(-4, 4)
    for values in (target.round(), target):
        assert not any(
            "repeat" in one.text for one in cautions(TargetRows(leaf, 1 + leaf.abs(), values))
        )
    copied = TargetRows(*(torch.cat([part, part[:200]]) for part in (leaf, 1 + leaf.abs(), target)))
    assert any("200 of 2200 rows" in one.text for one in cautions(copied))
    threefold = TargetRows(*(part.repeat(3) for part in (mean, std, target)))
    assert any("4000 of 6000 rows" in one.text for one in cautions(threefold))


def test_a_verdict_speaks_of_no_page_nor_plots() -> None:
    mean, std, target = columns(20)
    said = [
        *cautions(rows(20)),
        *cautions(TargetRows(mean, torch.where(std == std.max(), 99, std), target)),
    ]
    said += cautions(TargetRows(*(part.repeat(2) for part in columns(100))))
    assert len(said) >= 3
    assert not any(word in one.text for one in said for word in ("page", "plot"))


def test_a_small_fifth_with_errors_too_small_does_not_contradict_itself() -> None:
    mean, std, target = columns(60)
    part = TargetRows(
        mean, std, mean + torch.where(mean > mean.median(), 1e-3, 1.0) * (target - mean)
    )
    wide = [one.sentence for one in part.scored.uneven if one.side == "wide"]
    assert wide
    assert all(
        "chance allows" not in said and "bars (RMS): the bars are too wide" in said for said in wide
    )


def test_errors_of_zero_need_no_factor() -> None:
    mean, std, target = columns(400)
    said = size(TargetRows(mean, std, torch.where(torch.arange(400) < 380, mean, target))).text
    assert "times as wide" not in said
    assert "At least 90 % of the errors are zero." in said


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
        uq.calibrate(net.valid, method="paper").calibration_report,
        duplicates=3,
        samples=200,
        at_edge="upper",
        stale=True,
    )
    text = page(*columns(), calibration=found).text
    assert "3 of 200 calibration rows are also in the training data" in text
    assert "upper end of its range" in text
    assert "after the calibration" in text
    assert "with care: they were calibrated for other data" in text
    assert "Effective rank" in text
    assert f"{found.ridge:#.4g}" in text


# --- true values in labelled data --------------------------------------------------------------


def labelled(size: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (N, 2), means (N, 1) and true values (N, 1) whose bars are 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 2, generator=generator)
    mean = x.sum(1, keepdim=True)
    return x, mean, mean + torch.randn(size, 1, generator=generator)


HOLDERS: dict[str, Any] = {
    "a tuple": lambda x, y: (x, y),
    "a data set": lambda x, y: TensorDataset(x, y),
    "a loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32),
    "a list of batches": lambda x, y: list(DataLoader(TensorDataset(x, y), batch_size=32)),
    "a list of single rows": lambda x, y: list(DataLoader(TensorDataset(x, y), batch_size=1)),
    "an iterator of batches": lambda x, y: zip(x.split(30), y.split(30), strict=True),
    "mappings": lambda x, y: [{"x": x[:50], "labels": y[:50]}, {"x": x[50:], "labels": y[50:]}],
    "rows in a tuple": lambda x, y: tuple(y),
    "rows in a list": lambda x, y: list(y),
    "numbers": lambda x, y: y.flatten().tolist(),
    "a column": lambda x, y: pandas.Series(y.flatten().numpy()),
}


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_true_values_are_taken_from_labelled_data_in_order(holder: str) -> None:
    x, mean, y = labelled()
    std = torch.ones_like(mean)
    expected = report.verdict(mean, y, std=std)
    found = report.verdict(mean, HOLDERS[holder](x, y), std=std)
    assert str(found) == str(expected)
    prediction = Prediction(mean=mean, epistemic=0 * std, noise=std, rigidity=std)
    assert str(report.verdict(prediction, HOLDERS[holder](x, y))) == str(expected)


def test_data_that_cannot_give_true_values_in_order_are_refused_with_what_to_pass() -> None:
    x, mean, y = labelled()
    std = torch.ones_like(mean)
    data = TensorDataset(x, y)

    def refuse(message: str, target: Any, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=message):
            report.verdict(mean, target, std=std)

    shuffled = DataLoader(data, batch_size=32, shuffle=True)
    refuse(r"shuffles \(RandomSampler\).*shuffle=False", shuffled)
    sampler = WeightedRandomSampler([1.0] * 200, 200)
    refuse(r"WeightedRandomSampler", DataLoader(data, batch_size=32, sampler=sampler))
    refuse("batches without a target.*true values", DataLoader(TensorDataset(x), batch_size=32))
    short = DataLoader(data, batch_size=64, drop_last=True)
    refuse(r"the same shape, got \(200, 1\).* and \(192, 1\)", short)
    objects = [SimpleNamespace(y=rows) for rows in y.split(50)]
    refuse(r"torch\.cat\(\[batch\.y for batch in loader\]\)", objects, TypeError)
    followed = report.verdict(mean, torch.cat([batch.y for batch in objects]), std=std)
    assert str(followed) == str(report.verdict(mean, y, std=std))
