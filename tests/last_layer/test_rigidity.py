"""The façade: fit, calibrate, predict, as a user meets them."""

import copy
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import rigidities as rg
from rigidities.calibration.evidence import evidence
from rigidities.calibration.paper import most_evident_ridge
from rigidities.data.sources import raw_batches
from rigidities.posterior.quadratic import rounding_bound
from tests.support.nets import Net, Rows, calibrated, fitted, trained
from tests.support.refusals import refused

F64 = torch.float64


def features(model, x):
    """The last layer's input and a one, in float64."""
    with torch.no_grad():
        h = model.double()[:-1](x.double())
    return torch.cat([h, torch.ones(len(h), 1, dtype=F64)], dim=1)


@pytest.fixture
def fit(net):
    return rg.LastLayerRigidity(net.model).fit(net.train)


@pytest.fixture
def uq(fit, net):
    return calibrated(fit, net.valid)


# --- what it computes ---------------------------------------------------------------------------


def test_variance_is_the_papers_formula(net, uq):
    x = net.test[0]
    mean, std = uq(x)
    assert torch.equal(mean, net.model(x))
    f, g = features(copy.deepcopy(net.model), x), features(copy.deepcopy(net.model), net.train[0])
    matrix = g.T @ g + uq.ridge * torch.eye(25, dtype=F64)
    expected = uq.scale.square() * (f * torch.linalg.solve(matrix, f.T).T).sum(1, keepdim=True)
    torch.testing.assert_close(std.double().square(), expected, rtol=1e-4, atol=0)


def test_predict_and_call_agree(net3):
    uq = fitted(net3)
    x = net3.test[0]
    uq.batch_size = 37
    p = uq.predict(x)
    mean, std = uq(x)
    assert p.mean.shape == p.std.shape == p.rigidity.shape == (200, 3)
    torch.testing.assert_close(p.mean, mean)
    torch.testing.assert_close(p.std, std)
    torch.testing.assert_close(p.epistemic, uq.scale.square().float() / p.rigidity)


def test_each_target_has_its_own_scale(net3):
    uq = fitted(net3)
    assert uq.scale.shape == (3,)
    alone = calibrated(rg.LastLayerRigidity(net3.model).fit(net3.train), net3.valid, ridge=uq.ridge)
    torch.testing.assert_close(alone.scale, uq.scale)
    std = fitted(net3).predict(net3.test[0]).std
    torch.testing.assert_close(
        std[:, 1] / std[:, 0], (uq.scale[1] / uq.scale[0]).float().expand(200)
    )


def test_targets_cost_no_square_of_their_number():
    model = nn.Linear(5, 400)
    x = torch.randn(50, 5)
    uq = rg.LastLayerRigidity(model).fit((x, torch.randn(50, 400)))
    assert uq.gram.matrix.shape == (6, 6)
    assert uq.gram.square.shape == (400,)


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_noise_floor_is_added_and_divided_by_the_sample_weight(net, fit):
    x, y = net.valid
    much_noise = y + torch.randn_like(y)  # all alike
    fit.calibrate((x, much_noise), method=rg.Paper(noise="constant"))
    report = fit.calibration_report
    p = fit.predict(x)
    assert float(report.noise_level) > 0
    torch.testing.assert_close(p.noise, report.noise_level.float().expand(200, 1))
    torch.testing.assert_close(p.variance, p.epistemic + p.noise)
    heavy = fit.predict(x, sample_weight=lambda batch: torch.full((len(batch),), 4.0))
    torch.testing.assert_close(heavy.noise, p.noise / 4)
    torch.testing.assert_close(heavy.epistemic, p.epistemic)


def test_noise_floor_is_no_worse_than_none(net, fit):
    without = fit.calibrate(net.valid, method="paper").calibration_report
    floor = fit.calibrate(net.valid, method=rg.Paper(noise="constant")).calibration_report
    assert floor.value <= without.value + 1e-12


def test_error_bars_grow_away_from_the_data(net, uq):
    _, inside = uq(net.test[0])
    _, outside = uq(10 * net.test[0])
    assert float(outside.median()) > 3 * float(inside.median())


def test_calibrated_error_bars_cover_as_promised(net):
    p = fitted(net).predict(net.test[0])
    low, high = p.interval(0.9)
    inside = (net.test[1] >= low) & (net.test[1] <= high)
    assert 0.83 < float(inside.float().mean()) < 0.97


def test_partial_fit_equals_one_fit_and_forget_undoes_it(net):
    x, y = net.train
    whole = rg.LastLayerRigidity(net.model).fit((x, y))
    parts = rg.LastLayerRigidity(net.model).fit((x[:100], y[:100])).partial_fit((x[100:], y[100:]))
    torch.testing.assert_close(parts.gram.matrix, whole.gram.matrix)
    first = rg.LastLayerRigidity(net.model).fit((x[:100], y[:100]))
    parts.forget((x[100:], y[100:]))
    torch.testing.assert_close(parts.gram.matrix, first.gram.matrix, rtol=1e-9, atol=1e-9)
    assert parts.gram.count == 100


def test_changed_data_make_the_calibration_stale(net, uq):
    uq.partial_fit(net.test)
    assert uq.calibration_report.stale
    with pytest.warns(UserWarning, match="after the calibration"):
        uq(net.test[0])
    uq.calibrate(net.valid, method="paper")
    uq(net.test[0])


def test_uncalibrated_error_bars_warn_once(net, fit):
    with pytest.warns(UserWarning, match="not calibrated"):
        fit(net.test[0])
    fit(net.test[0])
    assert torch.equal(fit.scale, torch.ones(1, dtype=F64))


def test_default_ridge_is_relative_to_the_gram(net, fit):
    twice = rg.LastLayerRigidity(net.model).fit(
        net.train, sample_weight=lambda b: 2 * torch.ones(len(b[0]))
    )
    assert twice.ridge == pytest.approx(2 * fit.ridge)


def test_huber_tails_are_counted_and_reported(net):
    uq = rg.LastLayerRigidity(net.model)
    uq.fit(net.train, loss=rg.losses.Huber(0.1))
    outside = (net.model(net.train[0]) - net.train[1]).abs() > 0.1
    assert int(uq.gram.zeros) == int(outside.sum()) > 0
    assert any(
        "zero curvature" in warning
        for warning in uq.calibrate(net.valid, method="paper").calibration_report.warnings
    )


def test_losses_that_differ_between_targets_get_a_gram_each(net3):
    uq = rg.LastLayerRigidity(net3.model).fit(net3.train, loss=rg.losses.Huber(0.2))
    assert uq.gram.matrix.shape == (3, 25, 25)
    uq.calibrate(net3.valid, method="paper")
    assert uq.predict(net3.test[0]).std.shape == (200, 3)


def test_masked_targets_are_left_out_target_by_target(net3):
    def masked(prediction, target):
        known = torch.isfinite(target)
        return torch.where(known, 0.5 * (prediction - target.nan_to_num()) ** 2, 0.0)

    x, y = net3.train
    holes = y.clone()
    holes[:150, 1] = torch.nan
    uq = rg.LastLayerRigidity(net3.model).fit((x, holes), loss=masked)
    half = rg.LastLayerRigidity(net3.model).fit((x[150:], y[150:]))
    torch.testing.assert_close(uq.gram.matrix[1], half.gram.matrix)
    valid = net3.valid[1].clone()
    valid[::2, 1] = torch.nan
    report = uq.calibrate((net3.valid[0], valid), method="paper").calibration_report
    assert bool(torch.isfinite(report.scale).all()) and report.gain == report.gain


@pytest.mark.parametrize("noise", ["none", "constant"])
def test_targets_masked_by_their_weight_are_left_out_whatever_they_hold(net3, noise):
    def known(batch):
        return (batch[1] < 500).double()

    def holes(data, value):
        y = data[1].clone()
        y[::2, 1] = value
        return data[0], y

    def report_of(value):
        uq = rg.LastLayerRigidity(net3.model).fit(holes(net3.train, value), sample_weight=known)
        return uq.calibrate(
            holes(net3.valid, value), method=rg.Paper(noise=noise)
        ).calibration_report

    report, other = report_of(1e3), report_of(2e5)
    assert report.nll == pytest.approx(other.nll) and report.nll < 10
    torch.testing.assert_close(report.scale, other.scale)


@pytest.mark.parametrize("criterion", ["nll", "bins"])
def test_the_unit_of_one_target_does_not_move_the_ridge(net3, criterion):
    unit = torch.tensor([1.0, 1.0, 1000.0])
    method = rg.Paper(criterion=criterion)
    plain = rg.LastLayerRigidity(net3.model).fit(net3.train)
    one = plain.calibrate(net3.valid, method=method)
    with torch.no_grad():
        net3.model[-1].weight.mul_(unit[:, None])
        net3.model[-1].bias.mul_(unit)
    scaled = rg.LastLayerRigidity(net3.model).fit((net3.train[0], net3.train[1] * unit))
    two = scaled.calibrate((net3.valid[0], net3.valid[1] * unit), method=method)
    assert two.ridge == pytest.approx(one.ridge, rel=1e-2)
    torch.testing.assert_close(two.scale, one.scale * unit, rtol=1e-2, atol=0)


def test_evidence_ignores_rows_of_zero_weight(net):
    x, y = net.train
    plain = rg.LastLayerRigidity(net.model).fit((x, y))
    padded = (torch.cat([x, x + 1]), torch.cat([y, y]))
    weight = lambda b: (torch.arange(600) < 300).double()  # noqa: E731
    zeros = rg.LastLayerRigidity(net.model).fit([padded], sample_weight=weight)
    plain.calibrate(net.valid, method=rg.Paper(criterion="evidence"))
    assert plain.calibration_report.at_edge is None
    ridges = torch.tensor([0.1, 1.0, 10.0], dtype=F64)
    weights = torch.cat([net.model[-1].weight, net.model[-1].bias[:, None]], 1).T.detach()
    torch.testing.assert_close(
        evidence(zeros.gram, zeros.posterior, weights)(ridges),
        evidence(plain.gram, plain.posterior, weights)(ridges),
    )


def test_the_most_evident_ridge_tells_the_edge_it_lies_at():
    assert most_evident_ridge(lambda ridges: ridges.log(), 1.0)[2] == "lower"
    assert most_evident_ridge(lambda ridges: -ridges.log(), 1.0)[2] == "upper"
    assert most_evident_ridge(lambda ridges: ridges.log().square(), 1.0)[2] is None


def test_two_heads_side_by_side_have_a_scale_each():
    side_by_side = lambda m, x: torch.cat([m.a(x), m.b(x)], 1)  # noqa: E731
    model, x = Net(side_by_side, a=nn.Linear(3, 1), b=nn.Linear(3, 1)), torch.randn(400, 3)
    y = model(x).detach() + torch.randn(400, 2) * torch.tensor([1.0, 100.0])
    uq = calibrated(rg.LastLayerRigidity(model).fit((x[:200], y[:200])), (x[200:], y[200:]))
    first, second = uq.predict(x).epistemic.sqrt().median(0).values.tolist()
    assert uq.scale.shape == (2,) and 50 < second / first < 200


def test_inputs_that_index_each_other_are_not_cut_apart():
    model = Net(lambda m, x, index: m.head(x + x[index]), head=nn.Linear(3, 1))
    x, index, y = torch.randn(100, 3), torch.arange(100).flip(0), torch.randn(100, 1)
    assert rg.LastLayerRigidity(model).fit([(x, index, y)]).gram.count == 100


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_keep_small_error_bars(net, dtype):
    model = net.model.to(dtype)
    x, y = net.train[0].to(dtype), (1e-4 * net.train[1]).to(dtype)
    with torch.no_grad():
        model[-1].weight.mul_(1e-4)
        model[-1].bias.mul_(1e-4)
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.calibrate((net.valid[0].to(dtype), (1e-4 * net.valid[1]).to(dtype)), method="paper")
    mean, std = uq(net.test[0].to(dtype))
    assert mean.dtype == std.dtype == dtype
    assert bool((std > 0).all())


def test_another_number_of_targets_than_in_the_fit_is_refused():
    model = Net(lambda m, x, copies=1: m.head(x).repeat(1, copies), head=nn.Linear(3, 1))
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    uq = rg.LastLayerRigidity(model, features=lambda m, x, copies=1: x).fit((x[:20], y[:20]))
    uq.calibrate((x[20:], y[20:]), method="paper")
    refused("gives 2 targets here, but gave 1 in the fit", uq, x, copies=2)


def test_outputs_of_different_length_are_predicted_batch_by_batch():
    model = nn.Linear(3, 1)
    x = torch.randn(40, 3)
    uq = rg.LastLayerRigidity(model).fit((x[:20], torch.randn(20, 1)))
    uq.calibrate((x[20:], torch.randn(20, 1)), method="paper")
    refused("Predict batch by batch", uq.predict, [torch.randn(2, 5, 3), torch.randn(2, 4, 3)])
    assert uq(torch.randn(2, 5, 3))[1].shape == (2, 5, 1)


def test_unscaled_invariance_y_to_a_y_plus_b(net):
    plain = fitted(net).predict(net.test[0])
    model = Net(lambda m, x: 7 * m.inner(x) - 3, inner=net.model)
    scaled = rg.LastLayerRigidity(model).fit((net.train[0], 7 * net.train[1] - 3))
    scaled.calibrate((net.valid[0], 7 * net.valid[1] - 3), method="paper")
    torch.testing.assert_close(scaled.predict(net.test[0]).std, 7 * plain.std, rtol=2e-3, atol=0)


# --- data in every form -------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Shifted(Subset):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 1, y

    def __getitems__(self, indices):
        return [self[i] for i in indices]


FORMS = {
    "tensors": lambda x, y: (x, y),
    "named_tuple": Pair,
    "mapping": lambda x, y: {"input": x, "labels": y},
    "loader_over_a_tuple_of_rows": lambda x, y: DataLoader(tuple(zip(x, y, strict=True))),
    "arrays": lambda x, y: (x.numpy().astype("float64"), y.numpy()),
    "tensor_dataset": TensorDataset,
    "subset": lambda x, y: Subset(TensorDataset(x, y), range(len(x))),
    "dataset": Rows,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7),
    "shuffled_loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
    "loader_of_rows": lambda x, y: DataLoader(Rows(x, y), batch_size=7),
    "list_of_batches": lambda x, y: list(zip(x.split(50), y.split(50), strict=True)),
    "generator": lambda x, y: (pair for pair in zip(x.split(50), y.split(50), strict=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_gram(net, form):
    expected = rg.LastLayerRigidity(net.model).fit(net.train).gram
    gram = rg.LastLayerRigidity(net.model).fit(FORMS[form](*net.train)).gram
    torch.testing.assert_close(gram.matrix, expected.matrix, rtol=1e-5, atol=1e-5)
    assert gram.count == 300


def test_a_subset_that_transforms_its_rows_is_taken_at_its_word(net):
    x, y = net.train
    shifted = rg.LastLayerRigidity(net.model).fit(Shifted(TensorDataset(x, y), range(300)))
    expected = rg.LastLayerRigidity(net.model).fit((x + 1, y))
    torch.testing.assert_close(shifted.gram.matrix, expected.gram.matrix, rtol=1e-5, atol=1e-5)


def test_a_loaders_own_batch_size_is_kept(net):
    loader = DataLoader(TensorDataset(*net.train), batch_size=7)
    raw, count, *_ = raw_batches(loader)
    assert count == 43 and len(next(iter(raw))[0]) == 7
    assert raw_batches(loader, 100)[1] == 3


def test_a_loader_that_drops_or_repeats_rows_is_taken_at_its_word(net):
    data = TensorDataset(*net.train)
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(300), 40)
    assert rg.LastLayerRigidity(net.model).fit(DataLoader(data, sampler=sampler)).gram.count == 40
    loader = DataLoader(data, batch_size=64, drop_last=True)
    with pytest.warns(UserWarning, match="given to fit has drop_last=True and leaves out 44 of"):
        uq = rg.LastLayerRigidity(net.model).fit(loader)
    assert uq.gram.count == 256
    rg.LastLayerRigidity(net.model).fit(DataLoader(data, batch_size=100, drop_last=True))
    valid = DataLoader(TensorDataset(*net.valid), batch_size=64, drop_last=True)
    with pytest.warns(UserWarning, match="given to calibrate has drop_last=True"):
        uq.calibrate(valid, method="paper")


def test_predictions_keep_the_order_of_a_shuffled_loader(net):
    uq, x = fitted(net), net.test[0]
    loader = DataLoader(
        TensorDataset(x), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    order = torch.cat([batch for (batch,) in loader])
    loader.generator.manual_seed(3)
    assert not torch.equal(order, x)
    torch.testing.assert_close(uq.predict(loader).mean, net.model(order).detach())


def test_predict_ignores_targets_and_knows_two_inputs_from_one():
    model = Net(lambda m, a, b: m.head(torch.sin(a) + b), head=nn.Linear(3, 1))
    a, b = torch.randn(40, 3), torch.randn(40, 3)
    uq = rg.LastLayerRigidity(model).fit((a, b, torch.randn(40, 1)))
    uq.calibrate((a + 1, b, torch.randn(40, 1)), method="paper")
    assert torch.equal(uq.predict((a, b)).mean, uq.predict((a, b, torch.zeros(40))).mean)


def test_fit_without_targets_is_enough_for_the_gram(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train[0])
    torch.testing.assert_close(
        uq.gram.matrix, rg.LastLayerRigidity(net.model).fit(net.train).gram.matrix
    )
    by_evidence = rg.Paper(criterion="evidence")
    refused("needs the residuals of the fit", uq.calibrate, net.valid, method=by_evidence)


# --- the model is left alone --------------------------------------------------------------------


def test_uq_train_leaves_the_models_flag(net, uq):
    net.model.eval()
    uq.train()
    assert uq.training and not net.model.training


def test_moving_to_float32_keeps_the_statistics_in_float64(net):
    net.model.double()
    x = tuple(t.double() for t in net.train)
    uq = calibrated(rg.LastLayerRigidity(net.model).fit(x), tuple(t.double() for t in net.valid))
    uq.to(torch.float32)
    assert uq.gram.matrix.dtype == uq.posterior.eigenvalues.dtype == uq.scale.dtype == F64


def test_a_model_made_float64_after_the_fit_still_predicts(net, uq):
    before = uq.predict(net.test[0])
    net.model.double()
    after = uq.predict(net.test[0].double())
    assert after.std.dtype == F64
    torch.testing.assert_close(after.std, before.std.double(), rtol=1e-3, atol=0)


def test_a_retrained_model_is_refused_and_a_restored_one_accepted(net, uq):
    before = uq(net.test[0])[1]
    weights = copy.deepcopy(net.model.state_dict())
    with torch.no_grad():
        net.model[0].weight.add_(0.1)
    refused("weights have changed since the fit", uq, net.test[0])
    net.model.load_state_dict(weights)
    assert torch.equal(uq(net.test[0])[1], before)


@pytest.mark.parametrize(
    ("change", "leaves_a_trace"),
    [
        (lambda model: model.bfloat16(), True),
        (lambda model: model.__setitem__(2, nn.Linear(24, 24)), True),
        (lambda model: model[0].weight.data.add_(0.1), False),  # but the values
    ],
    ids=["rounded to bfloat16", "a replaced layer", "a write through data"],
)
def test_changed_weights_are_noticed_before_anything_is_learnt(net, uq, change, leaves_a_trace):
    change(net.model)
    x, y = (t.to(net.model[0].weight.dtype) for t in net.valid)
    for call in (uq, uq.predict) * leaves_a_trace:
        refused("weights have changed since the fit", call, x)
    for call in (uq.calibrate, uq.partial_fit):
        refused("weights have changed", call, (x, y))


# --- calibration ------------------------------------------------------------------------------


def test_the_report_says_what_was_chosen(net, fit):
    report = fit.calibrate(net.valid, method="paper").calibration_report
    assert report.ridge == fit.ridge and torch.equal(report.scale, fit.scale)
    assert report.rows == 200 and report.width == 25 and 0 < report.effective_rank < 25
    assert report.condition == pytest.approx(fit.posterior.condition)
    assert report.nll == pytest.approx(report.value)
    p = fit.predict(net.valid[0])
    assert report.nll == pytest.approx(rg.metrics.nll(p.mean, p.std, net.valid[1]), abs=1e-4)
    in_sample = rg.metrics.nll_gain(p.mean, p.std, net.valid[1])
    assert report.nll_constant - report.nll == pytest.approx(in_sample, abs=1e-4)
    assert report.gain == pytest.approx(in_sample, abs=2 * report.gain_error)
    for word in ("ridge", "scale", "NLL", "effective rank"):
        assert word in str(report)


def test_validation_rows_from_the_training_data_are_found(net, fit):
    mixed = tuple(torch.cat([a, b[:30]]) for a, b in zip(net.valid, net.train, strict=True))
    with pytest.warns(UserWarning, match="30 of 230 calibration rows are also in the training"):
        report = fit.calibrate(mixed, method="paper").calibration_report
    assert report.duplicates == 30
    assert fit.calibrate(net.valid, method="paper").calibration_report.duplicates == 0


def test_rows_of_batches_that_are_objects_cannot_be_judged(net):
    def graphs(data):
        parts = zip(data[0].split(9), data[1].split(9), strict=True)
        return [SimpleNamespace(x=x, y=y) for x, y in parts]

    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b.x), target=lambda b: b.y)
    uq.fit(graphs(net.train))
    report = uq.calibrate(graphs(net.valid), method="paper").calibration_report
    assert report.samples == report.duplicates == 0
    assert any("not possible to check" in remark for remark in report.remarks)
    assert "not possible to check" in str(report)


def test_no_gain_over_a_constant_bar_is_said_plainly():
    x, y = torch.randn(400, 3) ** 3, torch.randn(400, 1)  # bars of all sizes for errors of one
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    uq = rg.LastLayerRigidity(model).fit((x[:200], y[:200]))
    report = uq.calibrate((x[200:], y[200:]), method=rg.Paper(ridge=1e-3)).calibration_report
    assert report.gain < 0
    assert any("worse than one constant bar" in warning for warning in report.warnings)


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_an_optimum_at_the_edge_is_reported(net, fit):
    x = net.valid[0]
    with torch.no_grad():
        h = net.model[:-1](x)
        norm = (1 + h.square().sum(1, keepdim=True)).sqrt()
        signs = torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0)[:, None]
        report = fit.calibrate((x, net.model(x) + norm * signs), method="paper").calibration_report
    assert report.at_edge == "upper"
    assert any("upper end of its range" in warning for warning in report.warnings)


def test_leave_one_out_needs_only_the_training_data(net, fit):
    report = fit.calibrate(train=net.train, method=rg.Paper(criterion="loo")).calibration_report
    assert report.criterion == "loo" and report.rows == 300 and report.duplicates == 0
    for wrong in ({"x": net.valid}, {"x": net.valid, "train": net.train}, {}):
        with pytest.raises(ValueError, match=r"uses the training data and no validation data"):
            fit.calibrate(**wrong, method=rg.Paper(criterion="loo"))
    refused(
        r"train= is for Full and for Paper\(criterion='loo'\)",
        fit.calibrate,
        net.valid,
        train=net.train,
        method="paper",
    )


@pytest.mark.parametrize("noise", ["none", "constant"])
@pytest.mark.parametrize("criterion", ["nll", "bins", "evidence"])
def test_every_criterion_calibrates_several_targets(net3, criterion, noise):
    uq = rg.LastLayerRigidity(net3.model).fit(net3.train)
    uq.calibrate(net3.valid, method=rg.Paper(criterion=criterion, noise=noise))
    report = uq.calibration_report
    p = uq.predict(net3.test[0])
    for k in range(3):
        cover = rg.metrics.coverage(p.mean[:, k], p.std[:, k], net3.test[1][:, k])
        assert 0.75 < cover < 0.99
    assert report.scale.shape == report.noise_level.shape == (3,)


def test_calibration_thins_rows_by_their_hashes_when_they_would_fill_the_memory(
    net, monkeypatch, fit
):
    fit.batch_size = 16
    whole = fit.calibrate(net.valid, method="paper").calibration_report
    monkeypatch.setattr("rigidities.calibration.rows.LARGEST", 40 * 110)
    thinned = fit.calibrate(net.valid, method="paper").calibration_report
    assert thinned.rows == whole.rows == 200
    assert 60 < thinned.used < 140
    assert thinned.ridge != whole.ridge
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    fit.batch_size = 7
    again = fit.calibrate(tuple(t[order] for t in net.valid), method="paper").calibration_report
    assert again.used == thinned.used
    assert again.ridge == pytest.approx(thinned.ridge, rel=1e-4)


# --- bad input ----------------------------------------------------------------------------------


def check_refused(uq, call, match=None, error=ValueError):
    """The call fails with the message and leaves ridge, scale, Gram and report as they were."""
    before = (uq.calibration_report, uq.ridge, uq.gram.count, uq.gram.matrix)
    refused(match, call, error=error)
    assert before[:3] == (uq.calibration_report, uq.ridge, uq.gram.count)
    assert torch.equal(before[3], uq.gram.matrix)


@pytest.mark.parametrize(
    "empty", [[], (torch.empty(0, 4), torch.empty(0, 1))], ids=["list", "rows"]
)
def test_no_data_is_refused(uq, empty):
    check_refused(uq, lambda: uq.fit(empty), "no data")
    check_refused(uq, lambda: uq.partial_fit(empty), "no data")
    check_refused(
        uq,
        lambda: uq.calibrate(empty, method="paper"),
        "at least two rows, got 0",
    )
    check_refused(uq, lambda: uq.predict(empty), "nothing to predict")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["features", "targets"])
def test_nan_or_infinity_is_refused_with_the_batch(net, value, where, uq):
    x, y = net.train[0].clone(), net.train[1].clone()
    (x if where == "features" else y)[137] = value
    uq.batch_size = 50
    for call in (uq.fit, uq.calibrate):
        check_refused(uq, lambda call=call: call(x, y), "Batch 2: NaN or infinity in the")


def test_nan_in_a_late_batch_is_named(net):
    x, y = (t.repeat(3, 1) for t in net.train)
    x[700] = torch.nan
    refused("Batch 70: NaN", rg.LastLayerRigidity(net.model, batch_size=10).fit, (x, y))


def test_calling_before_the_fit_is_refused(net):
    uq = rg.LastLayerRigidity(net.model)
    for call in (
        lambda: uq(net.test[0]),
        lambda: uq.predict(net.test[0]),
        lambda: uq.calibrate(net.valid, method="paper"),
        lambda: uq.gram,
        lambda: uq.forget(net.train),
        lambda: uq.save("never.safetensors"),
    ):
        refused(r"no fit yet. Call fit\(x, y\) first", call)


def with_constant_features(level, **options):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1, **options))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, level)
    return model


def test_constant_features_give_a_constant_error_bar():
    x, y = torch.randn(60, 3), torch.randn(60, 1)
    uq = rg.LastLayerRigidity(with_constant_features(1.0)).fit((x[:30], y[:30]))
    report = uq.calibrate((x[30:], y[30:]), method="paper").calibration_report
    std = uq.predict(x).std
    torch.testing.assert_close(std, std[:1].expand_as(std))
    assert abs(report.gain) < 1e-6
    assert any("not shown to be better" in warning for warning in report.warnings)


def test_zero_features_are_refused():
    model = with_constant_features(-1.0, bias=False)
    refused(
        "Gram matrix is zero",
        rg.LastLayerRigidity(model).fit,
        (torch.randn(5, 3), torch.randn(5, 1)),
    )


def test_duplicate_training_rows_need_no_special_care(net):
    twice = tuple(torch.cat([t[:10]] * 20) for t in net.train)
    uq = rg.LastLayerRigidity(net.model).fit(twice)
    report = uq.calibrate(net.valid, method="paper").calibration_report
    assert bool(torch.isfinite(uq.predict(net.test[0]).std).all()) and report.condition < 1e13


def test_fewer_rows_than_features_is_fine_with_a_ridge_and_refused_without(net):
    few = tuple(t[:8] for t in net.train)
    uq = rg.LastLayerRigidity(net.model).fit(few)
    refused("singular in float64 at ridge=0", uq.calibrate, net.valid, method=rg.Full(ridge=0.0))
    uq.calibrate(net.valid, method="paper")
    assert bool((uq.predict(net.test[0]).std > 0).all())


def test_an_interrupted_fit_leaves_the_object_as_it_was(net):
    def interrupted():
        yield net.train
        raise KeyboardInterrupt

    uq = fitted(net)
    check_refused(uq, lambda: uq.fit(interrupted()), error=KeyboardInterrupt)
    check_refused(uq, lambda: uq.partial_fit(interrupted()), error=KeyboardInterrupt)
    check_refused(
        uq,
        lambda: uq.calibrate(interrupted(), method="paper"),
        error=KeyboardInterrupt,
    )
    uq(net.test[0])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda uq, x, y: uq.fit((x, y[:-1])), "same length"),
        (lambda uq, x, y: uq.fit((x, y.repeat(1, 2))), r"target's shape \(200, 2\) does not match"),
        (
            lambda uq, x, y: uq.fit([(x, y[:50])]),
            r"\(50, 1\) does not match the output's shape \(200, 1\)",
        ),
        (
            lambda uq, x, y: uq.calibrate((x[:1], y[:1]), method="paper"),
            "at least two rows, got 1",
        ),
        (
            lambda uq, x, y: uq.calibrate((x, uq.model(x).detach()), method="paper"),
            "All residuals are zero",
        ),
        (lambda uq, x, y: uq.calibrate(x, method="paper"), "there is no target"),
        (lambda uq, x, y: uq.calibrate(method="paper"), "needs validation data"),
        (
            lambda uq, x, y: uq.calibrate((x, y), method=rg.Paper(criterion="likelihood")),
            "criterion must be one of 'nll', 'bins', 'evidence', 'loo', got 'likelihood'",
        ),
        (
            lambda uq, x, y: uq.calibrate((x, y), method=rg.Paper(noise="loud")),
            "Unknown noise 'loud'. Known: none, constant",
        ),
        (
            lambda uq, x, y: uq.calibrate((x, y), method=rg.Paper(ridge=-1.0)),
            r"ridge must be a finite number that is not negative.*got -1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_and_choices_that_do_not_fit_are_refused(net, call, match, uq):
    check_refused(uq, lambda: call(uq, *net.valid), match)


def test_evidence_needs_a_readouts_weights(net):
    uq = rg.LastLayerRigidity(net.model, features=lambda m, x: m[:-1](x)).fit(net.train)
    by_evidence = rg.Paper(criterion="evidence")
    refused(r"needs the readout's weights.*layer=", uq.calibrate, net.valid, method=by_evidence)


wrapped, ONES = rg.LastLayerRigidity, torch.ones(2, 4)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda m: wrapped("model"), TypeError, "torch.nn.Module, got str"),
        (lambda m: wrapped(m, layer="4", features=m), ValueError, "not both"),
        (lambda m: wrapped(m, layer="5").fit(ONES), ValueError, "Its linear"),
        (lambda m: wrapped(m, layer=m[4]).fit(ONES), TypeError, "the name"),
        (lambda m: wrapped(m).fit(3), TypeError, "got int"),
        (lambda m: wrapped(m).fit([object()]), TypeError, "pass forward="),
        (lambda m: wrapped(m).fit(("a", "b")), TypeError, "Pass a list for batches"),
        (lambda m: wrapped(m, batch_size=0).fit(ONES), ValueError, "batch_s"),
        (lambda m: wrapped(m).fit(ONES, loss="l1"), ValueError, "Unknown loss"),
        (lambda m: wrapped(m).fit(ONES, loss=3), TypeError, "a name or a call"),
        (lambda m: wrapped(m).fit(ONES, loss="huber"), ValueError, "needs targets"),
        (
            lambda m: wrapped(m).fit(ONES, sample_weight=lambda b: torch.ones(3)),
            ValueError,
            "expected one value per sample",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused(net, make, error, match):
    refused(match, make, net.model, error=error)


# --- progress -----------------------------------------------------------------------------------


def test_progress_is_silent_unless_asked(net, capfd):
    rg.LastLayerRigidity(net.model).fit(net.train)
    assert capfd.readouterr().err == ""
    rg.LastLayerRigidity(net.model, progress=True).fit(net.train)
    assert "fit" in capfd.readouterr().err


@pytest.mark.thorough
def test_importing_the_library_imports_no_extras_nor_the_compiler():
    # torch 2.4 imports onnx by itself
    extras = {"matplotlib", "sklearn", "scipy", "pandas", "torch._dynamo"}
    code = f"import rigidities, sys; print(sorted({extras} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_training_after_the_fit_does_not_disturb_gradients(net, uq):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq(net.test[0])
    assert all(p.grad is None and p.requires_grad for p in net.model.parameters())


def test_error_bars_are_reproducible():
    first, second = (fitted(trained(seed=3)) for _ in range(2))
    x = torch.randn(5, 4)
    assert torch.equal(first(x)[1], second(x)[1])


@pytest.mark.parametrize("criterion", ["nll", "evidence"])
def test_bayesian_noise_is_the_scale_squared_and_the_likeliest(net, criterion, fit):
    fit.calibrate(net.valid, method=rg.Paper(criterion=criterion, noise="bayes"))
    report = fit.calibration_report
    torch.testing.assert_close(report.noise_level, report.scale.square())
    x, y = net.valid
    p = fit.predict(x)
    q, r = 1 / p.rigidity.double(), (y - p.mean).double()
    torch.testing.assert_close(
        report.scale.square(), (r.square() / (1 + q)).mean(0), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(p.noise, report.noise_level.float().expand_as(p.noise))
    if criterion == "nll":  # a floor of its own can only do better on the same rows
        fit.calibrate(net.valid, method=rg.Paper(noise="constant"))
        assert fit.calibration_report.nll <= report.nll + 1e-3


def test_structures_are_calibrated_with_a_word_that_copies_cannot_be_judged():
    model = Net(lambda m, atoms: m.head(atoms).sum(0), head=nn.Linear(2, 1))
    generator = torch.Generator().manual_seed(0)
    alike = [1 + 1e-4 * torch.rand(5, 2, generator=generator) for _ in range(40)]
    data = [(atoms, torch.randn(1, generator=generator)) for atoms in alike]
    uq = rg.LastLayerRigidity(model).fit(data[:20])
    report = uq.calibrate([*data[20:], *data[:3]], method="paper").calibration_report
    assert report.duplicates == 0
    assert any("not possible to check" in remark for remark in report.remarks)


def test_a_target_function_is_not_asked_where_targets_are_of_no_interest():
    model = nn.Linear(3, 1)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    options = {"forward": lambda m, item: m(item.x), "target": lambda item: item.energy}
    uq = rg.LastLayerRigidity(model, **options)
    uq.fit([SimpleNamespace(x=x[:20], energy=y[:20])])
    uq.calibrate([SimpleNamespace(x=x[20:], energy=y[20:])], method="paper")
    bare = [SimpleNamespace(x=x[:5])]
    torch.testing.assert_close(uq.predict(bare).mean, model(x[:5]).detach())
    assert uq.features(bare).shape == (5, 4)
    assert uq.ensemble(4).propagate(lambda out: out.sum(), bare).mean.ndim == 0
    refused("energy", uq.calibrate, bare, error=AttributeError)


def test_another_model_has_no_fit_until_it_is_fitted(net, uq):
    other = trained(seed=5).model
    uq.model = other
    refused("no fit yet", uq, net.test[0])
    uq.fit(net.train).calibrate(net.valid, method="paper")
    torch.testing.assert_close(uq(net.test[0])[0], other(net.test[0]))


# --- autocast ---------------------------------------------------------------------------------


def test_under_autocast_the_model_alone_is_rounded(net, uq):
    x, half = net.test[0], torch.bfloat16
    exact, own = uq.predict(x).epistemic, uq.freeze().rounding
    stated = own + rounding_bound(uq.posterior, half)
    with torch.autocast("cpu", half):
        coarse, f = uq.predict(x).epistemic, uq.features(x)
    assert f.dtype == half and own < 1e-3 < stated
    dense = uq.posterior.variance(f.double())
    torch.testing.assert_close(coarse.double(), dense, rtol=1e-4, atol=0)
    assert 1e-4 < float((coarse / exact - 1).abs().max()) < stated


def test_under_autocast_members_keep_their_deviations(net, uq):
    x, ens = net.test[0], uq.ensemble(generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        spread = ens.propagate(lambda y: y, x).std
        features = uq.features(x).double()
    expected = torch.einsum("md,nkd->nmk", features, ens.deviations).std(0)
    torch.testing.assert_close(spread.double(), expected, rtol=1e-6, atol=0)


def test_functions_of_users_may_differentiate_under_no_grad(net):
    def weight(batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.square().sum(), x)
        return slope.abs().sum(1) + 1

    def group(batch):
        x = batch[0] if isinstance(batch, tuple) else batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.square().sum(), x)
        return (slope[:, 0] > 0).long()

    def stds():
        uq = rg.LastLayerRigidity(net.model).fit(net.train, sample_weight=weight)
        uq.calibrate(net.valid, method="paper").conformalize(net.test, groups=group)
        low, high = uq.predict(net.test[0]).interval(0.9)
        loss = rg.GradientLoss(
            0, weight=weight, target=lambda batch: batch[0] * weight(batch)[:, None]
        )
        derivatives = rg.LastLayerRigidity(net.model).fit(net.train, gradient_loss=loss)
        return torch.cat([uq(net.test[0])[1], high - low, derivatives.gram.matrix[:, :1]])

    expected = stds()
    with torch.no_grad():
        torch.testing.assert_close(stds(), expected, rtol=0, atol=0)


def test_data_may_differentiate_as_they_are_read_under_no_grad(net):
    def batches(data):
        x, y = data
        for rows, targets in zip(x.split(50), y.split(50), strict=True):
            leaf = rows.clone().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
            yield slope / 2, targets

    expected = rg.LastLayerRigidity(net.model).fit(net.train).gram.matrix
    with torch.no_grad():
        uq = rg.LastLayerRigidity(net.model).fit(batches(net.train))
        uq.partial_fit(batches(net.valid)).forget(batches(net.valid))
        uq.calibrate(batches(net.valid))
        p = uq.predict(batches(net.test))
    torch.testing.assert_close(uq.gram.matrix, expected)
    torch.testing.assert_close(p.std, uq.predict(net.test[0]).std)
