"""The rows that a fit keeps: those it has seen, with their features, residuals and weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.statistics import row_sketch
from tests.support import zoo
from tests.support.nets import Net
from tests.support.refusals import refused
from tests.support.zoo_fits import fitted_to


def sample_of(uq):
    sample = uq._fit.require_state().statistics.kept_rows
    if sample is not None:
        sample.settle()
    return sample


def fitted(net, train=None, batch_size=None, **options):
    uq = rg.LastLayerRigidity(net.model, batch_size=batch_size)
    return uq.fit(net.train if train is None else train, **options)


def same(one, other, **tolerance):
    assert one.limit == other.limit and one.size == other.size
    assert torch.equal(one.hashes, other.hashes) and torch.equal(one.counts, other.counts)
    torch.testing.assert_close(one.columns, other.columns, equal_nan=True, **tolerance)


def by_value(*columns):
    """Rows of several columns, in an order that only their values give."""
    table = torch.cat([column.double() for column in columns], 1)
    return table[table[:, 0].argsort()]


def table_of(sample):
    rows = sample.rows
    return by_value(rows["mean"], rows["features"], rows["residual"], rows["weight"])


def test_few_rows_are_all_kept_as_the_model_gives_them(net3):
    sample = sample_of(fitted(net3, batch_size=50))
    (x, y), model = net3.train, net3.model
    with torch.no_grad():
        features = torch.cat([model[:-1](x), torch.ones(len(x), 1)], 1)
        mean = model(x)
    expected = by_value(mean, features, y.double() - mean, torch.ones(len(x), 3))
    torch.testing.assert_close(table_of(sample), expected, rtol=1e-4, atol=1e-5)
    assert sample.rows["features"].dtype == torch.float32
    assert "sample_weight" not in sample.rows and sample.rows["residual"].dtype == torch.float64


@pytest.mark.parametrize("batch_size", [7, 64])
def test_order_and_batches_do_not_change_what_a_fit_keeps(net, batch_size):
    x, y = net.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    one = sample_of(fitted(net, keep_rows=40))
    other = sample_of(fitted(net, (x[order], y[order]), keep_rows=40, batch_size=batch_size))
    assert len(one.hashes) == 40
    same(one, other, rtol=1e-4, atol=1e-5)


def test_kept_rows_have_the_same_bits_in_any_order_and_batches():
    """Whole numbers make the features exact, so that batches cannot round differently."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator).float())
    x = torch.randint(-99, 100, (1000, 4), generator=generator).float()
    y = torch.randint(-99, 100, (1000, 1), generator=generator).float()
    order = torch.randperm(1000, generator=generator)

    def batches(size):
        """Batches whose number no one knows."""
        yield from zip(x[order].split(size), y[order].split(size), strict=True)

    expected = sample_of(rg.LastLayerRigidity(model).fit((x, y), keep_rows=300)).rows
    assert len(expected["features"]) == 300
    for train in ((x[order], y[order]), list(batches(77)), batches(13), batches(1000)):
        rows = sample_of(rg.LastLayerRigidity(model).fit(train, keep_rows=300)).rows
        assert rows.keys() == expected.keys()
        for name, column in expected.items():
            assert torch.equal(rows[name], column), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_rows_take_no_more_memory_than_they_may(monkeypatch, dtype):
    monkeypatch.setattr(row_sketch, "MOST_BYTES", 1 << 18)
    model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 2)).to(dtype)
    x, y = torch.randn(5000, 3, dtype=dtype), torch.randn(5000, 2, dtype=dtype)

    def taken(sample):
        tensors = [sample.hashes, sample.counts, *sample.columns.values()]
        for hashes, columns in sample._waiting:
            tensors += [hashes, *columns.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    uq = rg.LastLayerRigidity(model).fit((x, y))
    sample = uq._fit.require_state().statistics.kept_rows
    assert taken(sample) <= 1 << 18
    sample.settle()
    assert 0.8 * (1 << 18) < taken(sample) <= 1 << 18


def test_threads_read_the_rows_of_a_new_fit_at_once(net):
    sample = fitted(net)._fit.require_state().statistics.kept_rows
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(lambda _: sample.rows["features"], range(32)))
    for table in tables:
        assert len(table) == len(net.train[0]) and torch.equal(table, tables[0])


def test_what_is_kept_does_not_hang_on_the_size_of_the_target(net):
    x, y = torch.randn(4000, 4), torch.randn(4000, 1)
    kept = sample_of(fitted(net, (x, y), keep_rows=1000)).rows
    target = kept["mean"] + kept["residual"]
    share = torch.isin(y, target.float()).double().reshape(-1)
    for half in (y > 0, y.abs() > 0.67, torch.arange(4000) < 2000):
        half = half.reshape(-1)
        assert abs(share[half].mean() - share[~half].mean()) < 5 * (2 * 0.25 * 0.75 / 2000) ** 0.5


def test_data_that_are_added_are_as_those_of_the_fit(net):
    x, y = net.train
    whole = sample_of(fitted(net, keep_rows=60))
    uq = fitted(net, (x[:100], y[:100]), keep_rows=60)
    before, copy = sample_of(uq), sample_of(uq).clone()
    uq.partial_fit((x[100:], y[100:]))
    same(sample_of(uq), whole, rtol=1e-4, atol=1e-5)
    same(before, copy)


def test_forgotten_rows_leave_the_sample(net):
    x, y = net.train
    uq = fitted(net, (torch.cat([x, x[:50]]), torch.cat([y, y[:50]])), keep_rows=60)
    before = sample_of(uq)
    uq.batch_size = 11
    uq.forget((x[:150], y[:150]))
    left = sample_of(fitted(net, (torch.cat([x[150:], x[:50]]), torch.cat([y[150:], y[:50]]))))
    below, some = sample_of(uq), left.hashes < before.limit
    assert below.limit == before.limit and 0 < int(some.sum()) < 60
    assert torch.equal(below.hashes, left.hashes[some]) and bool((below.counts == 1).all())
    residual = left.rows["residual"][some]
    torch.testing.assert_close(below.rows["residual"], residual, rtol=1e-4, atol=1e-5)
    uq.partial_fit((x[:150], y[:150]))
    same(sample_of(uq), before, rtol=1e-4, atol=1e-5)


def masked(batch):
    hidden = batch[1].isnan() | (batch[1] > 0.9)
    return torch.where(hidden, 0.0, batch[0][:, :1].abs() + 0.5)


def test_masked_targets_have_no_residual_and_rows_without_any_are_left_out(net3):
    x, y = net3.train[0], net3.train[1].clone()
    y[::3, 1], y[::4] = torch.nan, torch.nan
    rows = sample_of(fitted(net3, (x, y), sample_weight=masked)).rows
    weights = masked((x, y))
    some = (weights > 0).any(1)
    with torch.no_grad():
        mean = net3.model(x)
    residual = torch.where(weights > 0, y.double() - mean, torch.nan)
    columns = [t[some] for t in (mean, residual, weights, weights)]
    found = by_value(rows["mean"], rows["residual"], rows["weight"], rows["sample_weight"])
    torch.testing.assert_close(found, by_value(*columns), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_rows_without_curvature_keep_their_residual(net):
    x, y = net.train
    far = torch.where(torch.arange(300)[:, None] < 6, y + 100, y)
    rows = sample_of(fitted(net, (x, far), loss="huber")).rows
    assert len(rows["mean"]) == 300
    assert (
        int((rows["residual"] > 90).sum())
        == 6
        == int((rows["weight"][rows["residual"] > 90] == 0).sum())
    )


def test_equal_rows_of_other_weight_are_kept_apart(net):
    x, y = net.train[0].repeat(2, 1), net.train[1].repeat(2, 1)
    weight = torch.arange(600.0) // 300 + 1
    uq = rg.LastLayerRigidity(net.model, forward=lambda m, b: m(b["x"]))
    data = [{"x": x, "y": y, "w": weight}]
    rows = sample_of(uq.fit(data, sample_weight=lambda b: b["w"])).rows
    assert (
        len(rows["mean"]) == 600
        and sorted(rows["sample_weight"].reshape(-1).tolist()) == weight.tolist()
    )
    last = {name: column[300:] for name, column in data[0].items()}
    left = sample_of(uq.forget([last])).rows
    assert len(left["mean"]) == 300 and bool((left["sample_weight"] == 1).all())


def test_several_outputs_of_an_input_are_rows_of_their_own():
    torch.manual_seed(0)
    model = Net(lambda m, x: m.head(torch.tanh(x)), head=nn.Linear(3, 2))
    x, y = torch.randn(40, 5, 3), torch.randn(40, 5, 2)
    sample = sample_of(rg.LastLayerRigidity(model, batch_size=9).fit((x, y), keep_rows=90))
    rows = sample.rows
    assert len(rows["mean"]) == 90 and rows["features"].shape == (90, 4)
    with torch.no_grad():
        mean = model(x)
        features = torch.cat([torch.tanh(x), torch.ones(40, 5, 1)], -1)
    for f, m, r in zip(rows["features"], rows["mean"], rows["residual"], strict=True):
        (near,) = ((features.reshape(-1, 4) - f).abs().sum(1) < 1e-5).nonzero()
        torch.testing.assert_close(mean.reshape(-1, 2)[near[0]], m)
        torch.testing.assert_close((y.double() - mean).reshape(-1, 2)[near[0]], r)
    steps = torch.isin(y[..., 0].double(), (rows["mean"] + rows["residual"])[:, 0].float()).sum(0)
    assert int(steps.min()) > 0


JOINT = ["sum_over_two_readouts_of_which_one_is_nonlinear", "one_head_for_each_species"]


@pytest.mark.parametrize("id", JOINT)
def test_rows_of_any_readout_are_laid_out_as_its_features(id):
    case = zoo.build(id)
    uq = fitted_to(case, [case.data])
    sample, gram = sample_of(uq), uq.gram
    rows = sample.rows
    features = (
        rows["weight"].sqrt()[..., None] * rows["features"].reshape(*rows["mean"].shape, -1)
    ).double()
    assert bool((sample.counts == 1).all())
    features = features.flatten(0, 1)
    torch.testing.assert_close(features.T @ features, gram.matrix, rtol=1e-5, atol=1e-5)


def test_the_sample_of_structures_is_known_by_the_bits_of_features_and_target():
    case = zoo.build("one_head_for_each_species")
    uq = rg.LastLayerRigidity(case.model, layer=list(zoo.SPECIES), **case.options)
    first = sample_of(uq.fit([case.data]))
    assert len(first.rows["mean"]) == case.data.molecules
    twice = sample_of(uq.partial_fit([case.data]))
    assert torch.equal(twice.hashes, first.hashes) and bool((twice.counts == 2).all())
    few = sample_of(uq.fit([case.data], keep_rows=5))
    assert torch.equal(few.hashes, first.hashes[:5])


def test_no_sample_is_kept_without_targets_or_where_none_is_wanted(net):
    x, y = net.train
    assert sample_of(fitted(net, x)) is None
    assert sample_of(fitted(net, keep_rows=0)) is None
    uq = fitted(net)
    assert sample_of(uq.partial_fit([(x[:9], y[:9])])) is not None
    refused("whole number of rows", fitted, net, keep_rows=-1)


def test_a_data_set_that_changes_its_number_of_targets_keeps_no_sample():
    model = Net(lambda m, x: m.head(x).cumsum(1), head=nn.Linear(3, 1))
    batches = [(torch.randn(20, n, 3), torch.randn(20, n, 1)) for n in (2, 3)]
    uq = rg.LastLayerRigidity(model).fit(batches[:1])
    assert sample_of(uq).rows["mean"].shape == (20, 2)
    assert sample_of(uq.partial_fit(batches[1:])) is None


def test_derivatives_of_the_loss_bring_no_rows():
    model = Net(lambda m, x: m.head(torch.tanh(x)).sum(1), head=nn.Linear(3, 1))
    x = torch.randn(30, 2, 3)
    gradients = rg.GradientLoss(0)
    uq = rg.LastLayerRigidity(model).fit((x, torch.randn(30, 1)), gradient_loss=gradients)
    assert uq.gram.count > 30 and len(sample_of(uq).rows["mean"]) == 30


def test_rows_stand_in_a_file_where_asked_for_and_never_in_a_state_dict(net, tmp_path):
    uq, load = fitted(net, keep_rows=60), rg.LastLayerRigidity.load
    uq.save(tmp_path / "without")
    uq.save(tmp_path / "with", rows=True)
    assert not any(name.startswith("rows") for name in uq.get_extra_state()["tensors"])
    again = load(tmp_path / "without", net.model)
    assert sample_of(again) is None and sample_of(again.partial_fit(net.test)) is None
    missing = "kept no training rows (keep_rows=0, or a file saved without rows=True)"
    assert missing in str(again.calibrate(net.valid).calibration_report)
    refused("keeps no rows", again.save, tmp_path / "again", rows=True)
    again = load(tmp_path / "with", net.model)
    same(sample_of(again), sample_of(uq), rtol=0, atol=0)
    same(sample_of(again.partial_fit(net.test)), sample_of(uq.partial_fit(net.test)))
    uq.calibrate(net.valid)
    refused("no training rows", uq.ensemble(4).save, tmp_path / "ensemble", rows=True)
