"""Options of `calibrate(method=Full(...))`: noise, distribution, conformal rows, files, and the
report."""

import copy
import math

import pytest
import torch

import rigidities as rg
from rigidities.calibration import full
from rigidities.calibration.methods import Full, Paper
from rigidities.prediction.noise import GivenNoise
from tests.support.random_features import Sets, draw, normal_noise, sets
from tests.support.refusals import refused
from tests.support.tensors import alike, close

F64 = torch.float64


@pytest.fixture(autouse=True)
def _full(monkeypatch):
    """The full model, whatever the draw says of a constant noise."""
    monkeypatch.setattr(full.Ladder, "allowed", 1e9)


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


def calibrated(one, valid=None, conformal=None, groups=None, **options) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid if valid is None else valid, method=Full(**options))
    if conformal is not None:
        uq.conformalize(conformal, groups=groups)
    return uq


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


DISTRIBUTIONS = {"tilted": "Tilted", "student-t": "StudentT", "gaussian": "Gaussian"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("noise", ["features", "constant", known_noise])
def test_noise_and_distribution_are_those_asked_for_and_survive_a_file(
    one, distribution, noise, tmp_path
):
    uq = calibrated(one, noise=noise, distribution=distribution)
    assert type(uq.calibration.distribution).__name__ == DISTRIBUTIONS[distribution]
    given = callable(noise)
    assert uq.calibration.noise.name == ("given" if given else noise)
    p = uq.predict(one.test[0])
    low, high = p.interval(0.9)
    assert 0.8 < float(((one.test[1] >= low) & (one.test[1] <= high)).double().mean()) < 0.98
    the_same(reloaded(uq, one, tmp_path, noise=noise if given else None), uq, one.test[0])


def test_a_constant_noise_is_the_same_everywhere(one):
    uq = calibrated(one, noise="constant", distribution="gaussian", guard=False)
    p = uq.predict(one.test[0])
    s2 = p.variance - uq.calibration.head.scale2 / p.rigidity
    close(s2, s2.mean().expand_as(s2), 1e-8)
    close(s2.mean(), uq.calibration.noise.level[0], 1e-8)


def test_a_noise_that_is_known_is_followed_up_to_one_factor(one):
    uq = calibrated(one, noise=known_noise, distribution="gaussian", guard=False)
    p = uq.predict(one.test[0])
    rest = (p.variance - uq.calibration.head.scale2 / p.rigidity)[:, 0]
    close(rest, uq.calibration.noise.level * known_noise(one.test[0]), 1e-8)
    assert 0.1 < float(100 * uq.calibration.noise.level) < 2
    assert "The noise of training rows is not known" in str(uq.calibration_report)
    assert "after adding the given noise" in str(uq.calibration_report)
    close(uq(one.test[0])[1], p.std, 1e-12)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_units_of_a_known_noise_do_not_matter(one, factor):
    uq = calibrated(one, noise=known_noise)
    other = calibrated(one, noise=lambda b: factor * known_noise(b))
    alike(other.predict(one.test[0]), uq.predict(one.test[0]), 1e-6)
    close(factor * other.calibration.noise.level, uq.calibration.noise.level, 1e-6)


def test_training_rows_help_where_they_are_given_with_the_noise(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate(one.valid, train=one.train, method=Full(noise=known_noise))
    report = uq.calibration_report
    assert report.seen == 240
    assert "not known" not in str(report)


NO_METHOD = {
    "no_noise": (Full, {"noise": "none"}, "noise of Full must be 'features'.*belong to Paper"),
    "bayes": (Full, {"noise": "bayes"}, "got 'bayes'"),
    "unknown_noise": (Full, {"noise": "pink"}, "got 'pink'"),
    "unknown_distribution": (Full, {"distribution": "cauchy"}, "cauchy"),
    "given_by_name": (Full, {"noise": "given"}, "got 'given'"),
    "ridge": (Full, {"ridge": "large"}, "ridge must be a finite number"),
    "tilted_paper": (Paper, {"distribution": "tilted"}, "are fitted by Full"),
    "features_paper": (Paper, {"noise": "features"}, "are fitted by Full"),
    "unknown_noise_of_paper": (Paper, {"noise": "pink"}, "Unknown noise 'pink'"),
    "given_by_name_to_paper": (Paper, {"noise": "given"}, "noise=lambda batch: variances"),
    "given_class": (Paper, {"noise": GivenNoise}, "noise=lambda batch: variances"),
}


@pytest.mark.parametrize("id", NO_METHOD)
def test_a_method_refuses_options_that_make_no_sense(id):
    kind, options, message = NO_METHOD[id]
    refused(message, kind, **options)


REFUSED = {
    "negative": (lambda b: -known_noise(b), "variances must be finite and not neg"),
    "zero": (lambda b: 0 * known_noise(b), "noise variances must be above zero"),
    "none": (lambda b: None, "noise_variance returned None"),
    "misshapen": (lambda b: torch.ones(3), "noise_variance returned"),
}


@pytest.mark.parametrize("id", REFUSED)
def test_noises_that_make_no_sense_are_refused_and_change_nothing(one, id):
    noise, message = REFUSED[id]
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    refused(message, uq.calibrate, one.valid, method=Full(noise=noise))
    assert uq.calibration_report is None


def test_conformalize_comes_after_a_calibration_that_holds(one, fresh):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    message = "There is no calibration yet: call calibrate.*used for neither"
    refused(message, uq.conformalize, fresh)
    uq.calibrate(one.valid, method="paper")
    refused("groups must be 'bar' or callable", uq.conformalize, fresh, groups="colour")
    labels = lambda b: torch.rand(3)  # noqa: E731
    refused("one whole number per row", uq.conformalize, fresh, groups=labels)
    assert uq.calibration.conformal is None
    uq.conformalize(fresh)
    assert "Conformal intervals from 200 rows" in str(uq.calibration_report)
    uq.partial_fit(fresh)
    refused("Data were added or removed", uq.conformalize, fresh)
    assert "the guarantee is void" in uq.summary()
    uq.calibrate(one.valid, method="paper")
    assert uq.calibration.conformal is None


def test_other_conformal_rows_replace_the_former_ones_and_seen_ones_are_told(one, fresh):
    uq = calibrated(one, conformal=fresh)
    first = uq.calibration_report
    uq.conformalize(one.test, groups="bar")
    text = str(uq.calibration_report)
    assert "Conformal intervals from 200 rows" not in text and "groups by the bar" in text
    assert len(uq.calibration_report.remarks) == len(first.remarks)
    with pytest.warns(UserWarning, match="conformal rows are also in the training data"):
        uq.conformalize(one.train)
    assert "240 of 240 conformal rows are also in the training data" in str(uq.calibration_report)


def test_bars_by_groups_need_training_rows(one, fresh):
    uq = rg.LastLayerRigidity(one.model).fit(one.train, sample=0).calibrate(one.valid)
    refused("the fit kept no training rows", uq.conformalize, fresh, groups="bar")


@pytest.mark.parametrize("groups", [None, "bar", side], ids=["all", "bar", "function"])
def test_conformal_rows_guarantee_intervals_and_survive_a_file(one, fresh, groups, tmp_path):
    uq = calibrated(one, conformal=fresh, groups=groups, support=(-9.0, None))
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
    uq = calibrated(one, conformal=fresh, groups=six_and_others)
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


def test_without_conformal_rows_there_is_no_guarantee(one):
    p = calibrated(one).predict(one.test[0])
    refused(r"conformal=rows", p.interval, 0.9, conformal=True)


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
    grouped = reloaded(calibrated(one, conformal=fresh, groups=side), one, tmp_path)
    with pytest.warns(UserWarning, match="no group"):
        grouped.predict(one.test[0]).interval(0.9, conformal=True)


def test_a_state_dict_and_copies_keep_the_whole_calibration(one, fresh):
    uq = calibrated(one, conformal=fresh, groups="bar", support=(-9.0, 9.0))
    other = rg.LastLayerRigidity(copy.deepcopy(one.model))
    other.load_state_dict(uq.state_dict())
    the_same(other, uq, one.test[0])
    the_same(copy.deepcopy(uq), uq, one.test[0])
    assert str(other.calibration_report) == str(uq.calibration_report)
    moved = calibrated(one, noise=known_noise).to("cpu")
    assert bool(moved.predict(one.test[0]).std.isfinite().all())


def test_several_targets_survive_a_file(tmp_path):
    data = sets(targets=2)
    uq = calibrated(data, conformal=data.test)
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
        '120 validation rows and 240 training rows (leave-one-out), method "full" (',
        "distribution    tilted, ",
        "degrees of freedom",
        "chosen: the full model. Cross-validated NLL per row (lower is better):",
        "for one constant bar, which widens only for unfamiliar inputs",
        "for the paper's form",
        "after adding constant noise",
        "after adding heavy tails",
        "after adding noise that follows the inputs",
        "after adding the shape of the distribution",
        "Unfamiliar inputs get wider bars, up to the spread of the targets and beyond. A typical",
        "Did these validation rows choose the checkpoint (early stopping)?",
    ):
        assert phrase in text
    bare = str(
        calibrated(one, noise="constant", distribution="gaussian", guard=False).calibration_report
    )
    for phrase in (
        "heavy tails",
        "noise that follows",
        "shape of the distribution",
        "guard",
        "Unfamiliar inputs",
    ):
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
    uq.calibrate(*valid, method=Full(ridge=1e8))  # as the user wants it
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


@pytest.mark.parametrize(
    ("method", "conformal"), [("full", False), ("full", True), ("paper", True)]
)
def test_early_stopping_is_asked_once_and_can_be_answered(method, conformal):
    uq, (x, y) = noise_alone()

    def said(early_stopped: bool | None) -> str:
        uq.calibrate(x[:10], y[:10], method=method, early_stopped=early_stopped)
        if conformal:
            uq.conformalize(x[10:], y[10:])
        return str(uq.calibration_report)

    asked = said(None)
    assert asked.count("early stopping") == 1
    assert "early_stopped=False" in asked
    assert "early stopping" not in said(False)
    told = said(True)
    assert told.count("These validation rows chose the checkpoint (early stopping)") == 1
    assert "?" not in told.partition("early stopping")[2]
