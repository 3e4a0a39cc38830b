"""In and out of the domain: the rows, the bars on both sides, the summary and the page."""

import functools
import json
import math

import pytest
import torch
from experiments.frame.outcome import Outcome
from experiments.judging.error_bars import PAPER
from experiments.studies.california import page as pages
from experiments.studies.california import run as experiment
from experiments.studies.california import work

from experiments.data import california
from experiments.frame import report, wording
from experiments.judging import error_bars, floors
from experiments.training import kept
from rigidities import metrics
from tests.support.nets import Trained
from tests.support.numbers_on_pages import unsupported

pytestmark = [pytest.mark.xdist_group("california"), pytest.mark.usefixtures("synthetic")]

SMALL = {"count": 2, "seed": 0, "epochs": 2, "bin_size": 20, "digest": ""}


@functools.cache
def judged() -> dict:
    return work.networks(**SMALL)


# --- rows ---------------------------------------------------------------------------------------


def test_training_and_validation_stay_in_the_domain_and_the_test_does_not() -> None:
    found = california.drawn(3, 0, california.OUT_OF_DOMAIN, restricted=True)
    for x, _ in (found.train, found.valid):
        assert float(x[..., 7].min()) > california.THRESHOLD
    for (x, _), inside in zip(found.test, found.inside, strict=True):
        assert torch.equal(x[:, 7] > california.THRESHOLD, inside)
        assert 0 < int(inside.sum()) < len(inside)


def test_all_nets_have_as_many_rows_as_the_smallest_split() -> None:
    data = california.read()
    splits = [data.random(k, 0).within(data.in_domain) for k in range(4)]
    found = california.drawn(4, 0, california.OUT_OF_DOMAIN, restricted=True)
    assert found.train[0].shape == (4, min(len(s.train) for s in splits), 8)
    assert found.valid[1].shape == (4, min(len(s.valid) for s in splits), 1)
    first = torch.from_numpy(data.y[splits[2].train[:5]]).float()
    assert torch.equal(found.train[1][2, :5, 0], first)
    assert not torch.equal(found.train[0][0], found.train[0][1])


def test_inputs_are_standardised_on_the_whole_set_and_targets_left() -> None:
    found = california.drawn(1, 0, california.WIDTH)
    (train, valid, test), data = found.of(0), california.read()
    x, y = (torch.cat(parts).double() for parts in zip(train, valid, test, strict=True))
    assert len(x) == len(data.x)
    torch.testing.assert_close(x.mean(0), torch.zeros(8).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(8).double())
    assert float(y.mean()) == pytest.approx(data.y.mean(), rel=1e-6)


def test_a_quick_look_takes_the_first_rows_of_each_part() -> None:
    all_of_them, few = (california.drawn(2, 0, california.WIDTH, most=most) for most in (None, 30))
    assert torch.equal(few.train[0], all_of_them.train[0][:, :30])
    assert torch.equal(few.test[1][0], all_of_them.test[1][0][:30])


def test_the_histogram_counts_every_row_and_the_threshold_is_an_edge() -> None:
    found = work.histogram(bins=experiment.HISTOGRAM)
    total = len(california.read().y)
    assert sum(found["counts"]) == total == found["inside"] + found["outside"]
    edges = found["edges"]
    assert min(abs(edge - found["threshold"]) for edge in edges) < 1e-9
    beyond = sum(n for n, low in zip(found["counts"], edges, strict=False) if low > -0.3 - 1e-9)
    assert beyond == found["inside"]


# --- work ---------------------------------------------------------------------------------------


def test_scores_and_separation_are_of_the_rows_of_each_side() -> None:
    found = judged()
    samples = california.drawn(2, 0, california.OUT_OF_DOMAIN, restricted=True)
    assert found["inside"] == [int(mask.sum()) for mask in samples.inside]
    shown = found["shown"]["paper"]
    std = {d: shown[d]["points"]["std"] for d in work.DOMAINS}
    assert {d: len(std[d]) for d in std} == {d: found[d][0] for d in work.DOMAINS}
    one = found["each"][0]["paper"]
    assert one["auroc"] == pytest.approx(metrics.auroc(std["inside"], std["outside"]))
    zero = torch.zeros_like(std["outside"])
    covered = metrics.coverage(zero, std["outside"], shown["outside"]["points"]["error"])
    assert one["outside"]["scores"]["coverage"] == pytest.approx(covered)
    assert set(found["each"][0]) == set(work.CALIBRATIONS)
    assert "points" not in one["inside"]


def test_the_default_is_scored_by_its_own_distribution() -> None:
    samples = california.drawn(2, 0, california.OUT_OF_DOMAIN, restricted=True)
    stack = kept.nets("california", work.NETS, count=2, seed=0, epochs=2).stack
    (x, y), inside = samples.test[0], samples.inside[0]
    uq = error_bars.fitted(stack.module(0), samples.of(0)[0])
    error_bars.calibrated(uq, samples.of(0)[1], error_bars.FULL)
    p = uq.predict(x)
    found = judged()["each"][0]["auto"]
    low, high = p.interval(0.9)
    within = ((low <= y) & (y <= high))[~inside]
    own = found["outside"]["scores"]
    assert own["coverage"] == pytest.approx(float(within.double().mean()))
    assert own["nll"] == pytest.approx(float(-p.log_prob(y)[~inside].mean()), rel=1e-4)
    assert own["crps"] == pytest.approx(float(p.crps(y)[~inside].mean()), rel=1e-4)
    constant = found["outside"]["constant"]["scores"]["nll"]
    assert own["gain"] == pytest.approx(constant - own["nll"])
    outside = (p.mean[~inside], p.std[~inside], y[~inside])
    assert own["nll"] != pytest.approx(metrics.nll(*outside), rel=1e-3)
    soft = 1 / p.rigidity.flatten()
    told = metrics.auroc(soft[inside], soft[~inside])
    assert found["auroc_of_rigidity"] == pytest.approx(told, abs=1e-3)


def test_the_farthest_rows_are_judged_by_numbers_that_they_did_not_choose(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    error_bars.calibrated(uq, net.valid, PAPER)
    x, y = net.valid
    order = uq.predict(x).std.flatten().argsort()
    cut = len(x) - len(x) // 5
    error_bars.calibrated(uq, (x[order[:cut]], y[order[:cut]]), PAPER)
    p = uq.predict(x[order[cut:]])
    found = work.farthest(uq, net.valid, PAPER)
    assert found["coverage"] == metrics.coverage(p.mean, p.std, y[order[cut:]])
    assert found["nll"] == pytest.approx(metrics.nll(p.mean, p.std, y[order[cut:]]), rel=1e-5)


# --- floors -------------------------------------------------------------------------------------


def test_the_kurtosis_is_that_of_scipy() -> None:
    from scipy import stats

    error = torch.randn(500, generator=torch.Generator().manual_seed(0)).double() ** 3 + 2
    assert floors.kurtosis(error) == pytest.approx(stats.kurtosis(error.numpy(), fisher=False))


def test_gaussian_errors_score_what_chi_squared_says() -> None:
    from scipy import stats

    std = torch.full((20000,), 0.3, dtype=torch.float64)
    found = floors.floors(std, std, 50, seed=0)
    distribution = stats.chi2(50)
    expected = distribution.expect(lambda s: abs(math.log10(s / 50)))
    assert found["gaussian"] == pytest.approx(expected, rel=0.02)


def test_shuffled_errors_keep_their_shape_and_lose_their_size() -> None:
    generator = torch.Generator().manual_seed(0)
    std = torch.rand(4000, generator=generator, dtype=torch.float64) + 0.1
    sign = torch.randn(4000, generator=generator, dtype=torch.float64).sign()
    # errors of exactly one bar, whatever its size: no scatter, wherever they are dealt to
    assert floors.floors(7 * sign * std, std, 100, seed=1)["shuffled"] == pytest.approx(0, abs=1e-9)
    z = torch.randn(4000, generator=generator, dtype=torch.float64)
    plain, pointed = (floors.floors(e * std, std, 100, seed=1) for e in (z, z**3))
    assert plain["shuffled"] == pytest.approx(plain["gaussian"], rel=0.1)
    assert pointed["shuffled"] > 2 * plain["shuffled"]
    larger = floors.floors(5 * z**3 * std, std, 100, seed=1)
    assert larger["shuffled"] == pytest.approx(pointed["shuffled"])


def test_hindsight_is_the_best_of_all_ridges_and_scales(net: Trained) -> None:
    uq = error_bars.fitted(net.model, net.train)
    error_bars.calibrated(uq, net.valid, PAPER)
    x, y = net.test
    p = uq.predict(x)
    error = (y - p.mean).double().flatten()
    found = floors.hindsight(uq, x, error, 5)
    features, gram = uq.features(x).double(), uq.gram.matrix.double()
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    best = math.inf
    for k in range(floors.RIDGES):
        ridge = largest * 10 ** (-10 + 14 * k / (floors.RIDGES - 1))
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram)))
        order = (q := ((features @ inverse) * features).sum(1)).argsort()
        whole = order[: len(order) // 5 * 5].view(-1, 5)
        logs = (error[whole].square().mean(1) / q[whole].mean(1)).log10()
        scales = torch.linspace(float(logs.min()), float(logs.max()), 401, dtype=torch.float64)
        best = min(best, float((logs - scales[:, None]).abs().mean(1).min()))
    assert found["binned_log_ratio"] == pytest.approx(best, abs=2e-3)
    assert found["binned_log_ratio"] <= best + 1e-9
    own = metrics.binned_log_ratio(p.mean, p.std, y, 5)
    assert found["binned_log_ratio"] <= own


def test_limits_are_of_the_rows_inside() -> None:
    found = judged()
    shown = found["shown"]["paper"]["inside"]["points"]
    one = found["limits"][0]
    std = torch.as_tensor(shown["std"])
    assert one["floors"]["paper"]["gaussian"] == pytest.approx(
        floors.floors(std, std, 20, seed=0)["gaussian"]
    )
    assert set(one["floors"]) == {*work.CALIBRATIONS, "constant"}
    whole = experiment.limits(found["limits"])
    first, second = (each["kurtosis"] for each in found["limits"])
    assert whole["kurtosis"][0] == pytest.approx((first + second) / 2)
    ratios = [each["hindsight"]["binned_log_ratio"] for each in found["limits"]]
    assert whole["hindsight"]["binned_log_ratio"][0] == pytest.approx(sum(ratios) / 2)
    for each, limit in zip(found["each"], ratios, strict=True):
        assert limit <= 1.1 * each["paper"]["inside"]["scores"]["binned_log_ratio"]


# --- summary and page ---------------------------------------------------------------------------


def test_means_and_differences_are_over_the_nets() -> None:
    each = judged()["each"]
    found = experiment.summary(each)
    first, second = (one["nll"]["inside"]["scores"]["nll"] for one in each)
    mean, error = found["calibrations"]["nll"]["inside"]["scores"]["nll"]
    assert mean == pytest.approx((first + second) / 2)
    assert error == pytest.approx(abs(first - second) / 2)
    ours = [one["nll"]["auroc"] - one["paper"]["auroc"] for one in each]
    assert found["differences"]["nll"]["auroc"][0] == pytest.approx(sum(ours) / 2)
    assert "paper" not in found["differences"]


def test_words_follow_the_numbers() -> None:
    found = {"differences": {"bayes": {"outside": {"coverage": [-0.3, 0.05]}}}}
    assert "covers less than" in pages._bayes(found)
    found["differences"]["bayes"]["outside"]["coverage"] = [0.3, 0.05]
    assert "covers more than" in pages._bayes(found)
    found["differences"]["bayes"]["outside"]["coverage"] = [0.3, 0.2]
    assert "does not clearly differ" in pages._bayes(found)


def test_the_page_names_the_longitude_and_shows_all_bars(outcome: Outcome) -> None:
    keys = ("command", "date", "cpu", "cores", "threads", "torch", "python")
    page = report.rendered_page("california", outcome, dict.fromkeys(keys, "-") | {"minutes": 1.0})
    assert "**longitude**" in page
    assert wording.SHARED_ROWS in page
    assert "except through the scale of the inputs" in page
    for label in [*pages.LABELS.values(), "constant", "chosen in hindsight"]:
        assert f"| {label} |" in page
    numbers = json.loads(report.rendered_numbers(outcome))
    assert unsupported(page, numbers) == []
    one = numbers["calibrations"]["auto"]["outside"]["scores"]
    assert f"{one['coverage'][0]:.3f} ± {one['coverage'][1]:.3f} with *default*" in page
    kurtosis = numbers["limits"]["kurtosis"]
    assert f"kurtosis of\n{kurtosis[0]:.1f} (" in page
    assert [picture.name for picture in outcome.pictures] == ["longitude", "paper", "auto", "nets"]
    for picture in outcome.pictures:
        report.checked_png(picture)


def test_the_histogram_is_cut_to_the_bins_that_hold_rows() -> None:
    assert pages._occupied([0, 2, 0, 1, 0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 4.0)
