"""`calibrate(valid)` with data as users have them: few, odd, wild, masked, weighted, many."""

import contextlib
import math

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.random_features import Sets, draw, normal_noise, sets
from tests.support.refusals import refused
from tests.support.tensors import alike, close

F64 = torch.float64


@pytest.fixture(scope="module")
def one() -> Sets:
    return sets()


@pytest.fixture(scope="module")
def whole(one):
    return calibrated(one, one.valid)


def calibrated(one, valid, method="full", keep_rows=8192) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=keep_rows)
    return uq.calibrate(valid, method=method)


def rows(data, count):
    return tuple(t[:count] for t in data)


def ratio(a, b, one) -> torch.Tensor:
    """Widths of 90 % intervals, of one beside another."""
    (low, high), (least, most) = (uq.predict(one.test[0]).interval(0.9) for uq in (a, b))
    return (high - low) / (most - least)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_few_validation_rows_give_bars_like_those_of_many(one, whole, count):
    said = contextlib.nullcontext()
    if count < 10:
        said = pytest.warns(UserWarning, match=f"calibrated on only {count} held-out rows")
    with said:
        few = calibrated(one, rows(one.valid, count))
    assert 0.5 < float(ratio(few, whole, one).median()) < 2
    assert f"Calibrated on {count} validation rows and 240 training rows (leave-one-out)" in str(
        few.calibration_report
    )


@pytest.mark.parametrize("given", [False, True], ids=["kept", "given"])
def test_training_rows_alone_give_bars_and_a_remark(one, whole, given):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    report = uq.calibrate(train=one.train if given else None).calibration_report
    assert 0.5 < float(ratio(uq, whole, one).median()) < 2
    assert "There were no validation rows" in str(report)
    assert "Calibrated on 240 training rows (leave-one-out)" in str(report)
    assert math.isfinite(report.gain) and report.value == report.nll  # left-out rows judge


def test_bars_without_validation_rows_are_saved_and_loaded(one, tmp_path):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    uq.calibrate()
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", one.model)
    alike(again.predict(one.test[0]), uq.predict(one.test[0]), 1e-12)
    assert str(again.calibration_report) == str(uq.calibration_report)


def test_nothing_to_calibrate_with_is_refused(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=0)
    refused(r"nothing to calibrate on.*Call calibrate\(x, y\)", uq.calibrate)
    refused("at least two rows, got 1", uq.calibrate, rows(one.valid, 1))
    refused("at least two rows, got 0", uq.calibrate, rows(one.valid, 0))


def test_a_fit_without_kept_rows_is_calibrated_on_validation_rows_alone(one, whole):
    uq = calibrated(one, one.valid, keep_rows=0)
    assert uq.calibration_report.seen == 0
    assert "only the validation rows were used" in str(uq.calibration_report)
    assert 0.6 < float(ratio(uq, whole, one).median()) < 1.6


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_targets_that_are_all_equal_are_calibrated(one):
    x = one.valid[0]
    uq = calibrated(one, (x, torch.full((len(x), 1), 0.3, dtype=F64)))
    assert bool(uq.predict(one.test[0]).std.isfinite().all())


def covered(uq, x, y) -> float:
    """The share of targets in 90 % intervals."""
    low, high = uq.predict(x).interval(0.9)
    return float(((y >= low) & (y <= high)).double().mean())


def test_targets_on_a_grid_are_covered_and_the_report_says_so():
    data = sets(rows=(400, 300, 2000))
    halves = [(x, (2 * y).round() / 2) for x, y in data[1:]]
    uq = rg.LastLayerRigidity(data.model).fit(halves[0])
    uq.calibrate(halves[1])
    assert "The targets lie on a grid" in str(uq.calibration_report)
    assert 0.85 < covered(uq, *halves[2]) < 0.97
    fine = rg.LastLayerRigidity(data.model).fit(data.train)
    assert "grid" not in str(fine.calibrate(data.valid).calibration_report)


@pytest.mark.parametrize(("count", "most"), [(100, 1.35), (10, 1.8)])
def test_one_wild_target_changes_intervals_little(one, count, most):
    x, y = rows(one.valid, count)
    wild = y.clone()
    wild[3] += 50 * (y - one.model(x)).detach().std()
    calm, shaken = calibrated(one, (x, y)), calibrated(one, (x, wild))
    assert 0.75 < float(ratio(shaken, calm, one).median()) < most
    paper = [calibrated(one, (x, t), "paper") for t in (wild, y)]
    assert float(ratio(*paper, one).median()) > 3


def test_some_residuals_of_zero_leave_bars_finite(one):
    x, y = one.valid[0], one.valid[1].clone()
    y[:40] = one.model(x[:40]).detach()
    p = calibrated(one, (x, y)).predict(one.test[0])
    assert bool((p.std > 0.01).all() & (p.std < 10).all())


def test_residuals_that_are_all_zero_are_refused(one):
    x = one.valid[0]
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    refused("All residuals are zero", uq.calibrate, (x, one.model(x).detach()))
    assert uq.calibration_report is None


def linear() -> Sets:
    """A linear model, whose q grows without bound."""
    parts = [draw(n, normal_noise, i) for i, n in enumerate((240, 120, 100))]
    x, y = parts[0]
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        f = torch.cat([x, torch.ones(len(x), 1)], 1)
        w = torch.linalg.lstsq(f, y).solution
        model.weight.copy_(w[:-1].T)
        model.bias.copy_(w[-1])
    return Sets(model, *parts)


def test_far_from_the_training_rows_bars_are_finite_and_wide():
    data = linear()
    uq = calibrated(data, data.valid)
    usual = uq.predict(data.test[0]).std.median()
    sizes = [uq.predict(far * data.test[0]).std.median() / usual for far in (10, 1e3, 1e6)]
    assert sizes[0] > 1.2
    assert sizes[1] > 10
    assert 1e3 < sizes[2] < math.inf
    bare = calibrated(data, data.valid, rg.Full(guard=False))
    assert bare.calibration.guard is None
    refused("guard must be True or False, got 'rho'", rg.Full, guard="rho")
    far = 10 * data.test[0]
    assert float((uq.predict(far).unit / bare.predict(far).unit).median()) > 1.1


def test_nan_is_refused_but_by_a_frozen_module_whose_other_rows_it_leaves(one, whole):
    x = one.test[0][:4].clone()
    x[1, 0] = torch.nan
    for call in (whole, whole.predict):
        refused(r"1 of 4 rows \(1\): the inputs contain NaN", call, x)
    for found in whole.freeze()(x):
        assert found.isnan().flatten().tolist() == [False, True, False, False]


def test_a_support_that_targets_leave_is_refused_with_counts(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    low = int((one.valid[1] < 0).sum())
    refused(
        rf"{low} targets lie outside support=\(0.0, None\)",
        uq.calibrate,
        one.valid,
        method=rg.Full(support=(0, None)),
    )
    refused("low below high", rg.Full, support=(1, 0))
    refused("low below high", rg.Full, support=3)


def test_intervals_stay_within_a_support(one, whole):
    edge = float(one.valid[1].min()) - 1e-3  # no target lies at it: the fit is the same
    uq = calibrated(one, one.valid, rg.Full(support=(edge, None)))
    p = uq.predict(one.test[0])
    assert float(p.interval(0.999)[0].min()) == edge
    alike(p, whole.predict(one.test[0]), 1e-12)
    assert float(p.sample(20, torch.Generator().manual_seed(0)).min()) == edge


def weights_of(batch) -> torch.Tensor:
    x = batch if isinstance(batch, torch.Tensor) else batch[0]
    return 1 + (x[:, 1] > 0) * 3.0


def test_noise_is_divided_by_the_sample_weight(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train, sample_weight=weights_of)
    uq.calibrate(one.valid)
    x, inverse = one.test[0], (1 / weights_of(one.valid)).mean()  # of the typical weight
    bare, light, heavy = (
        uq.predict(x, sample_weight=None if c is None else lambda b, c=c: torch.full((100,), c))
        for c in (None, 1.0, 2.0)
    )
    noise = 2 * (light.unit.square() - heavy.unit.square())
    inside = 1 / bare.rigidity < uq.calibration.guard.reference  # the guard has no part in it
    assert int(inside.sum()) > 50
    added = light.unit.square() - bare.unit.square()
    close(added[inside], (noise * (1 - inverse))[inside], 1e-6)
    assert bool((noise[inside] > 0).all())


def test_weights_of_rows_set_their_noise(one):
    """Rows of weight four have a quarter of the noise: as the weights say, so the fit finds."""
    x, y = (torch.cat(parts) for parts in zip(one.valid, one.test, strict=True))
    error = y - one.model(x).detach()
    sharp = (x, one.model(x).detach() + error / weights_of(x)[:, None].sqrt())
    said = rg.LastLayerRigidity(one.model).fit(one.train, sample_weight=weights_of, keep_rows=0)
    unsaid = rg.LastLayerRigidity(one.model).fit(one.train, keep_rows=0)
    values = [
        uq.calibrate(sharp, method=rg.Full(noise="constant")).calibration_report.nll
        for uq in (said, unsaid)
    ]
    assert values[0] < values[1] - 0.02


def masked_loss(p, t):
    return torch.where(t.isnan(), 0.0, (p - t.nan_to_num()).square() / 2)


@pytest.mark.thorough
def test_masked_targets_have_bars_by_the_rows_they_have():
    data = sets(targets=2)
    train, valid = (tuple(t.clone() for t in part) for part in (data.train, data.valid))
    train[1][::3, 1] = torch.nan
    valid[1][::2, 1] = torch.nan
    uq = rg.LastLayerRigidity(data.model).fit(train, loss=masked_loss)
    uq.calibrate(valid)
    p = uq.predict(data.test[0])
    assert bool(p.std.isfinite().all())
    known = rg.LastLayerRigidity(data.model).fit(data.train)
    known.calibrate(data.valid)
    both = known.predict(data.test[0]).std
    assert 0.6 < float((p.std[:, 1] / both[:, 1]).median()) < 1.6
    assert 0.9 < float((p.std[:, 0] / both[:, 0]).median()) < 1.1


def test_features_of_the_users_choice_do_without_evidence(one, whole):
    def tap(model, x):
        return torch.cat([model[1](model[0](x)), torch.ones(len(x), 1, dtype=F64)], 1)

    uq = rg.LastLayerRigidity(one.model, features=tap).fit(one.train)
    uq.calibrate(one.valid)
    assert 0.6 < float(ratio(uq, whole, one).median()) < 1.6
    refused("needs the evidence of the training rows", uq.calibrate)


class Summed(nn.Module):
    """Atoms' energies, summed without a bias column of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.tanh()).sum(1)


def test_sums_over_atoms_have_bars_that_know_their_number():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Summed()
        x = torch.randn(300, 5, 4, dtype=F64)
        y = model(x).detach() + 0.3 * torch.randn(300, 1, dtype=F64)
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]))
    uq.calibrate((x[200:], y[200:]))
    std = uq.predict(x[200:]).std
    assert 0.2 < float(std.median()) < 0.45


def test_very_many_rows_are_thinned_and_the_report_says_so():
    data = sets(rows=(400, 100_000, 50), width=4)
    uq = rg.LastLayerRigidity(data.model).fit(data.train)
    report = uq.calibrate(data.valid, method=rg.Full(noise="constant")).calibration_report
    assert report.rows == 100_000
    assert 10_000 < report.used <= 1 << 15
    assert f"Calibrated on 100000 validation rows ({report.used} of them used)" in str(report)


def test_rows_that_stand_in_the_training_data_are_pointed_out(one):
    uq = rg.LastLayerRigidity(one.model).fit(one.train)
    with pytest.warns(UserWarning, match="120 of 120 calibration rows are also in the training"):
        uq.calibrate(rows(one.train, 120))


def test_an_error_leaves_the_calibration_as_it_was(one, whole):
    before = whole.predict(one.test[0])
    bad = (one.valid[0], torch.full_like(one.valid[1], torch.nan))
    refused("NaN or infinity", whole.calibrate, bad)
    alike(whole.predict(one.test[0]), before, 1e-15)
