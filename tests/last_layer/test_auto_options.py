"""Options of `Full`: noise, guard, bounds; conformal rows, files, and the report."""

import copy
import math

import pytest
import torch

import rigidities as rg
from rigidities.prediction.distribution import StudentT
from rigidities.prediction.noise import ConstantNoise, GivenNoise
from tests.support.random_features import Sets, draw, normal_noise, sets
from tests.support.refusals import refused
from tests.support.tensors import alike, close

F64 = torch.float64


def inputs_of(batch) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else batch[0]


def known_noise(batch) -> torch.Tensor:
    """The world's own, a hundredfold."""
    return 100 * (0.2 * torch.exp(1.15 * inputs_of(batch)[:, 0].clamp(-1, 1))) ** 2


def side(batch) -> torch.Tensor:
    return (inputs_of(batch)[:, 0] > 0).long()


@pytest.fixture(scope="module")
def one() -> Sets:
    return sets()


@pytest.fixture(scope="module")
def fresh():
    """Rows that fit nothing else."""
    return draw(200, normal_noise, 77)


def calibrated(one, **options) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    return uq.calibrate(one.valid, method=rg.Full(**options))


def reloaded(uq, one, path, **options) -> rg.LastLayerRigidity:
    uq.save(path / "uq.safetensors")
    return rg.LastLayerRigidity.load(path / "uq.safetensors", one.model, **options)


def the_same(a, b, x) -> None:
    """Means, bars, distributions, bounds and conformal intervals."""
    p, whole = a.predict(x), b.predict(x)
    alike(p, whole, 1e-12)
    close(p.quantile(0.03), whole.quantile(0.03), 1e-12)
    assert p.support == whole.support
    assert (p.conformal is None) == (whole.conformal is None)
    if p.conformal is not None:
        for one, other in zip(
            p.interval(0.8, conformal=True), whole.interval(0.8, conformal=True), strict=True
        ):
            close(one, other, 1e-12)


@pytest.mark.parametrize("guard", [True, False], ids=["guard", "no guard"])
@pytest.mark.parametrize("noise", ["features", "constant", known_noise])
def test_the_noise_is_that_asked_for_and_survives_a_file(one, guard, noise, tmp_path):
    uq = calibrated(one, noise=noise, guard=guard)
    assert uq.calibration.distribution.name == "mixture"
    given = callable(noise)
    assert uq.calibration.noise.name == ("given" if given else noise)
    assert (uq.calibration.guard is None) == (not guard)
    p = uq.predict(one.test[0])
    low, high = p.interval(0.9)
    assert 0.8 < float(((one.test[1] >= low) & (one.test[1] <= high)).double().mean()) < 0.98
    the_same(reloaded(uq, one, tmp_path, noise=noise if given else None), uq, one.test[0])


def second_moment(uq) -> float:
    """Of the one distribution of all rows, in units of its scale."""
    return float(uq.calibration.distribution.second)


def test_a_constant_noise_is_the_same_everywhere(one):
    uq = calibrated(one, noise="constant", guard=False)
    p = uq.predict(one.test[0])
    rest = p.variance - uq.calibration.head.scale2 * second_moment(uq) / p.rigidity
    close(rest, rest.mean().expand_as(rest), 1e-8)
    close(rest.mean(), uq.calibration.noise.level[0], 1e-8)
    shape = p.distribution.offset
    close(shape, shape[:1].expand_as(shape), 1e-12)


def test_a_noise_that_is_known_is_followed_up_to_one_factor(one):
    uq = calibrated(one, noise=known_noise, guard=False)
    p = uq.predict(one.test[0])
    rest = (p.variance - uq.calibration.head.scale2 * second_moment(uq) / p.rigidity)[:, 0]
    close(rest, uq.calibration.noise.level * known_noise(one.test[0]), 1e-8)
    assert 0.1 < float(100 * uq.calibration.noise.level) < 2
    assert "The noise of training rows is not known" in str(uq.calibration_report)
    assert uq.calibration_report.steps == [0]  # the function says how noise follows the inputs
    close(uq(one.test[0])[1], p.std, 1e-12)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_units_of_a_known_noise_do_not_matter(one, factor):
    uq = calibrated(one, noise=known_noise)
    other = calibrated(one, noise=lambda b: factor * known_noise(b))
    alike(other.predict(one.test[0]), uq.predict(one.test[0]), 1e-6)
    close(factor * other.calibration.noise.level, uq.calibration.noise.level, 1e-6)


def test_training_rows_help_where_they_are_given_with_the_noise(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    report = uq.calibrate(
        one.valid, train=one.train, method=rg.Full(noise=known_noise)
    ).calibration_report
    assert report.seen == 240
    assert "not known" not in str(report)


def test_objects_and_classes_are_taken_too(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    by_class = rg.Paper(noise=ConstantNoise, distribution=StudentT)
    by_name = rg.Paper(noise="constant", distribution="student-t")
    a, b = (
        uq.calibrate(one.valid, method=each).predict(one.test[0]) for each in (by_class, by_name)
    )
    alike(a, b, 1e-12)


REFUSED = {
    "no_noise": (lambda: rg.Full(noise="none"), "noise of Full must be.*got 'none'.*Paper"),
    "bayes": (lambda: rg.Full(noise="bayes"), "noise of Full must be.*got 'bayes'.*Paper"),
    "mixture": (lambda: rg.Paper(distribution="mixture"), r"fitted by Full.*method=.*Full\(\)"),
    "features_paper": (lambda: rg.Paper(noise="features"), r"fitted by Full.*method=.*Full\(\)"),
    "unknown_noise": (lambda: rg.Full(noise="pink"), "noise of Full must be.*got 'pink'"),
    "unknown_noise_paper": (lambda: rg.Paper(noise="pink"), "Unknown noise 'pink'"),
    "unknown_distribution": (lambda: rg.Paper(distribution="cauchy"), "'cauchy'"),
    "given_by_name": (lambda: rg.Paper(noise="given"), "noise=lambda batch: variances"),
    "given_class": (lambda: rg.Paper(noise=GivenNoise), "noise=lambda batch: variances"),
    "negative": (lambda: rg.Full(noise=lambda b: -known_noise(b)), "must be finite and not neg"),
    "zero": (lambda: rg.Full(noise=lambda b: 0 * known_noise(b)), "variances must be above zero"),
    "none": (lambda: rg.Full(noise=lambda b: None), "noise_variance returned None"),
    "misshapen": (lambda: rg.Full(noise=lambda b: torch.ones(3)), "noise_variance returned"),
    "ridge": (lambda: rg.Full(ridge="large"), "ridge must be a finite number.*got 'large'"),
}


@pytest.mark.parametrize("id", REFUSED)
def test_what_makes_no_sense_is_refused_and_changes_nothing(one, id):
    method, message = REFUSED[id]
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    refused(message, lambda: uq.calibrate(one.valid, method=method()))
    assert uq.calibration_report is None


WRONG_GROUPS = {
    "name": ("colour", "groups must be 'bar' or callable"),
    "labels": (lambda batch: torch.rand(3), "one whole number per row"),
}


@pytest.mark.parametrize("id", WRONG_GROUPS)
def test_groups_that_make_no_sense_are_refused_and_change_nothing(one, fresh, id):
    groups, message = WRONG_GROUPS[id]
    uq = calibrated(one)
    report = uq.calibration_report
    refused(message, uq.conformalize, fresh, groups=groups)
    assert uq.calibration_report is report


def test_bars_by_groups_need_training_rows(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=0)
    uq.calibrate(one.valid)
    refused("the fit kept no training rows", uq.conformalize, one.test, groups="bar")


@pytest.mark.parametrize("groups", [None, "bar", side], ids=["all", "bar", "function"])
def test_conformal_rows_guarantee_intervals_and_survive_a_file(one, fresh, groups, tmp_path):
    uq = calibrated(one, support=(-9.0, None)).conformalize(fresh, groups=groups)
    p, (x, y) = uq.predict(one.test[0]), fresh
    own = uq.predict(x)
    low, high = own.interval(0.9, conformal=True)
    assert 0.9 <= float(((y >= low) & (y <= high)).double().mean()) < 0.94  # of the very rows
    assert bool(p.interval(0.9, conformal=True)[0].isfinite().all())
    assert "Conformal intervals from 200 rows" in str(uq.calibration_report)
    own_function = groups if callable(groups) else None
    the_same(reloaded(uq, one, tmp_path, groups=own_function), uq, one.test[0])


def six_and_others(batch):
    """Group 3 for the first six of 200 rows, 0 for all others."""
    return torch.where(torch.arange(len(inputs_of(batch))) < 6, 3, 0)


def test_a_group_that_is_too_small_is_infinite_here_in_files_and_in_tables(one, fresh, tmp_path):
    uq = calibrated(one).conformalize(fresh, groups=six_and_others)
    assert "need 9 rows: 3 with 6 rows" in str(uq.calibration_report)
    again = reloaded(uq, one, tmp_path, groups=six_and_others)
    assert str(again.calibration_report) == str(uq.calibration_report)
    for fitted in (uq, again):
        p = fitted.predict(one.test[0])
        with pytest.warns(UserWarning, match="needs 9 rows: 3 with 6 rows"):
            low, high = p.interval(0.9, conformal=True)
        assert low[:6].eq(-math.inf).all() and high[:6].eq(math.inf).all()
        assert low[6:].isfinite().all() and high[6:].isfinite().all()
        with pytest.warns(UserWarning, match="3 with 6 rows"):
            table = p.to_numpy(conformal=True)
        assert (table["high"][:6] == math.inf).all()


def test_conformal_rows_fit_nothing_and_are_replaced_by_the_next(one, fresh):
    uq = calibrated(one)
    bars = uq.predict(one.test[0])
    uq.conformalize(*one.test).conformalize(fresh)
    alike(uq.predict(one.test[0]), bars, 0)
    text = str(uq.calibration_report)
    assert "Calibrated on 120 validation rows and 240 training rows (" in text
    assert text.count("Conformal intervals from") == 1
    assert "Conformal intervals from 200 rows" in text
    uq.calibrate(one.valid)
    assert uq.calibration.conformal is None
    assert "Conformal" not in str(uq.calibration_report)


def test_without_conformal_rows_there_is_no_guarantee(one):
    p = calibrated(one).predict(one.test[0])
    refused("rows that were used for nothing else", p.interval, 0.9, conformal=True)


def test_functions_that_a_file_lacks_are_asked_for_and_taken_only_where_they_belong(
    one, fresh, tmp_path
):
    given = calibrated(one, noise=known_noise)
    bare = reloaded(given, one, tmp_path)
    refused(r"load\(path, model, noise=function\)", bare.predict, one.test[0])
    refused(r"load\(path, model, noise=function\)", bare, one.test[0])
    refused("no groups that come from a function", reloaded, given, one, tmp_path, groups=side)
    plain = calibrated(one)
    refused("is 'features', not a function", reloaded, plain, one, tmp_path, noise=known_noise)
    unfitted = rg.LastLayerRigidity(one.model).fit(one.train)
    refused("not calibrated", reloaded, unfitted, one, tmp_path, noise=known_noise)
    grouped = reloaded(calibrated(one).conformalize(fresh, groups=side), one, tmp_path)
    with pytest.warns(UserWarning, match="no group"):
        grouped.predict(one.test[0]).interval(0.9, conformal=True)


def test_a_state_dict_and_copies_keep_the_whole_calibration(one, fresh):
    uq = calibrated(one, support=(-9.0, 9.0)).conformalize(fresh, groups="bar")
    other = rg.LastLayerRigidity(copy.deepcopy(one.model))
    other.load_state_dict(uq.state_dict())
    the_same(other, uq, one.test[0])
    the_same(copy.deepcopy(uq), uq, one.test[0])
    assert str(other.calibration_report) == str(uq.calibration_report)
    moved = calibrated(one, noise=known_noise).to("cpu")
    assert bool(moved.predict(one.test[0]).std.isfinite().all())


def test_several_targets_survive_a_file(tmp_path):
    data = sets(targets=2)
    uq = calibrated(data).conformalize(data.test)
    the_same(reloaded(uq, data, tmp_path), uq, data.test[0])


def test_weights_survive_a_file(one, tmp_path):
    uq = rg.LastLayerRigidity(one.model).fit(one.train, sample_weight=lambda b: 3 + side(b))
    uq.calibrate(one.valid)
    typical = 1 / (1 / (3 + side(one.valid)).double()).mean()
    close(uq.calibration.weight[0], typical)
    again = reloaded(uq, one, tmp_path)
    for c in (None, lambda b: 2.0 + side(b)):
        a, b = (each.predict(one.test[0], sample_weight=c) for each in (uq, again))
        alike(a, b, 1e-12)
    assert f"for a weight of {float(typical):.4g}" in str(uq.calibration_report)


def test_the_report_says_in_plain_words_what_was_chosen(one):
    text = str(calibrated(one).calibration_report)
    for phrase in (
        "120 validation rows and 240 training rows (leave-one-out), ",
        "(cross-validated NLL ",
        "on rows that were left out",
        "distribution    mixture of 2 Student-t",
        "follows         the inputs, after ",
        " steps (chosen on left-out rows)",
        "Unfamiliar inputs get wider bars, up to the spread of the targets and beyond. A typical",
        "Did these validation rows choose the checkpoint (early stopping)?",
    ):
        assert phrase in text
    bare = str(calibrated(one, noise="constant", guard=False).calibration_report)
    assert "follows         q alone" in bare
    for phrase in ("after", "guard", "Unfamiliar inputs"):
        assert phrase not in bare


def noise_alone(seed=1):
    """A net and rows whose targets it knows nothing of: the evidence wants an infinite ridge."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(60, 4, generator=generator), torch.randn(60, 1, generator=generator)
    first, last = torch.randn(4, 32, generator=generator), torch.full((1, 32), 1e-3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight.copy_(first.T / 2)
        model[2].weight.copy_(last)
    return rg.LastLayerRigidity(model).fit(x[:40], y[:40]), (x[40:], y[40:])


@pytest.mark.thorough
def test_the_default_refuses_a_ridge_that_swamps_every_direction():
    for seed in range(6):
        uq, valid = noise_alone(seed)
        report = uq.calibrate(*valid).calibration_report
        assert report.effective_rank > 0.99
        if report.effective_rank < 1.01:
            assert "where the data determine one direction" in str(report)
    uq.calibrate(*valid, method=rg.Full(ridge=1e8))  # as the user wants it
    swamped = uq.calibration_report
    assert swamped.ridge == 1e8
    assert "swamps every direction that the data determine" in str(swamped)


def test_a_handful_of_calibration_rows_gets_a_warning():
    uq, (x, y) = noise_alone()
    with pytest.warns(UserWarning, match="calibrated on only 5 held-out rows: .* than on"):
        report = uq.calibrate(x[:5], y[:5]).calibration_report
    assert "calibrated on only 5 held-out rows" in str(report)
    with pytest.warns(UserWarning, match="the size of the bars is uncertain by 32 %"):
        uq.calibrate(x[:5], y[:5], method="paper")
    assert not uq.calibrate(x, y).calibration_report.few


@pytest.mark.parametrize("conformal", [False, True])
def test_early_stopping_is_asked_once_and_can_be_answered(conformal):
    uq, (x, y) = noise_alone()

    def report(early_stopped=None):
        uq.calibrate(x[:10], y[:10], early_stopped=early_stopped)
        if conformal:
            uq.conformalize(x[10:], y[10:])
        return str(uq.calibration_report)

    asked = report()
    assert asked.count("early stopping") == 1
    assert "early_stopped=False" in asked
    assert "early stopping" not in report(early_stopped=False)
    told = report(early_stopped=True)
    assert told.count("These validation rows chose the checkpoint (early stopping)") == 1
    assert "?" not in told.partition("early stopping")[2]
