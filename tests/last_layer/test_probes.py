"""A model that is no longer that of the fit, though its weights are."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import Net, calibrated, data
from tests.support.refusals import refused


def scaled(model, x):
    return model.head(model.act(model.trunk(x - model.mean))) * model.factor


def made(options=None, rows=50, run=scaled):
    torch.manual_seed(0)
    model = Net(run, trunk=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 1))
    model.factor, model.table = 2.0, [1.0]
    object.__setattr__(model, "mean", torch.zeros(4))
    uq = rg.LastLayerRigidity(model, **(options or {})).fit(data(rows, 1, 0))
    return model, calibrated(uq, data(50, 1, 1))


def set_factor(model):
    model.factor = 5.0


def set_activation(model):
    model.act = nn.ReLU()


def set_mean(model):
    model.mean = torch.ones(4)


def write_mean(model):
    model.mean += 1


CHANGES = [set_factor, set_activation, set_mean, write_mean]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"features": lambda m, x: m.act(m.trunk(x - m.mean))}])
def test_a_change_beside_the_weights_is_noticed_in_every_call(change, options, tmp_path):
    model, uq = made(options)
    x, ens = data(6, 1, 2)[0], uq.ensemble(4)
    uq.save(tmp_path / "uq")
    change(model)
    for call in (uq, uq.predict, uq.gradient, ens):
        refused("but its predictions are not", call, x)
    for call in (uq.calibrate, uq.partial_fit):
        refused("but its predictions are not", call, data(20, 1, 3))
    refused("but its predictions are not", uq.save, tmp_path / "other")
    load = rg.LastLayerRigidity.load
    refused("but its predictions are not", load, tmp_path / "uq", model, **options)


def test_the_message_names_what_was_set():
    model, uq = made()
    set_factor(model)
    refused(r"differ by up to .* \(was 'factor' set\?\)", uq, data(6, 1, 2)[0])


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_write_that_leaves_no_trace_shows_in_the_mean_and_before_anything_is_learnt(write):
    model, uq = made()
    x = data(6, 1, 2)[0]
    if write == "data":
        model.head.weight.data.mul_(2)
    else:
        model.head.weight.detach().numpy()[...] *= 2
    assert torch.equal(uq(x)[0], model(x))
    refused("weights have changed", uq.calibrate, data(20, 1, 3))


def test_an_undone_change_is_accepted():
    model, uq = made()
    x = data(6, 1, 2)[0]
    before = uq(x)
    set_factor(model)
    refused("predictions are not", uq, x)
    model.factor = 2.0
    assert all(torch.equal(*pair) for pair in zip(uq(x), before, strict=True))


def test_what_leaves_the_predictions_alone_is_accepted():
    model, uq = made()
    x = data(6, 1, 2)[0]
    before = uq(x)[1]
    model.note, model.factor, model.act = "new", torch.tensor(2.0), nn.Tanh()
    model.train()
    assert torch.equal(uq(x)[1], before)
    model.double().float().eval()
    assert torch.equal(uq(x)[1], before)


def test_a_model_that_keeps_results_in_attributes_is_not_looked_at_again_and_again():
    def run(model, x):
        rows.append(len(x))
        model.hidden = model.act(model.trunk(x))
        return model.head(model.hidden)

    rows = []
    model, uq = made(run=run)
    x = data(6, 1, 2)[0]
    for _ in range(4):
        model(x)
        rows.clear()
        uq(x)
        assert rows == [6]


def test_without_probes_the_mean_is_that_of_the_model_as_it_is(tmp_path):
    model, uq = made()
    x = data(6, 1, 2)[0]
    uq.save(tmp_path / "with")
    uq.save(tmp_path / "without", probes=False)
    rows = data(50, 1, 0)[0][:2].numpy().tobytes()
    assert rows in (tmp_path / "with").read_bytes()
    assert rows not in (tmp_path / "without").read_bytes()
    again = rg.LastLayerRigidity.load(tmp_path / "without", model)
    for factor in (5.0, 7.0):
        model.factor = factor
        assert torch.equal(again(x)[0], model(x))


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, lambda x, y: (x, y)),
        ({"forward": lambda m, b: m(b["x"])}, lambda x, y: {"x": x, "y": y}),
        ({"forward": lambda m, b: m(b[0])}, lambda x, y: [(x, y)]),
        ({"forward": lambda m, b: m(b[0][0]), "target": lambda b: b[1]}, lambda x, y: [([x], y)]),
    ],
)
def test_probes_of_any_batch_of_tensors_stand_in_the_file(options, given, tmp_path):
    torch.manual_seed(0)
    model = Net(scaled, trunk=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 1))
    model.factor, model.mean = 2.0, torch.zeros(4)
    calibrated(
        rg.LastLayerRigidity(model, **options).fit(given(*data(50, 1, 0))), given(*data(50, 1, 1))
    ).save(tmp_path / "uq")
    rg.LastLayerRigidity.load(tmp_path / "uq", model, **options)
    set_factor(model)
    load = rg.LastLayerRigidity.load
    refused("but its predictions are not", load, tmp_path / "uq", model, **options)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda uq: pickle.loads(pickle.dumps(uq))])
def test_a_copy_knows_its_own_model(copied):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    again, x = copied(uq), data(6, 1, 2)[0]
    assert torch.equal(again(x)[1], uq(x)[1])
    again.model[1] = nn.ReLU()
    refused("but its predictions are not", again, x)
    uq(x)


@pytest.mark.parametrize(
    "random", [lambda m, x: nn.functional.dropout(x, 0.5), lambda m, x: m.more(x)]
)
def test_a_random_pass_is_told(random):
    def more(x):
        model.count = model.count + 1
        return x + model.count

    model = Net(lambda m, x: m.head(random(m, x)), head=nn.Linear(4, 1))
    model.count, model.more = 0, more
    with pytest.warns(UserWarning, match="Two passes of the model over the same inputs differ"):
        rg.LastLayerRigidity(model).fit(data(50, 1, 0))


def test_a_model_in_half_precision_is_not_taken_for_another(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
    x, y = (t.bfloat16() for t in data(50, 1, 0))
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.save(tmp_path / "uq")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rg.LastLayerRigidity.load(tmp_path / "uq", model.float())(x.float())


def test_numpy_rows_of_a_large_batch_cost_a_small_file(tmp_path):
    model = nn.Linear(1000, 1)
    x = np.random.default_rng(0).normal(size=(3000, 1000))
    uq = rg.LastLayerRigidity(model, features=lambda m, x: x[:, :3]).fit((x, x[:, 0]))
    uq.save(tmp_path / "uq")
    assert (tmp_path / "uq").stat().st_size < 100_000


def replace_entry(model):
    model.table[0] = 5.0


def write_entry(model):
    model.notes["shift"].add_(1)


def add_hook(model):
    model.act.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("change", [replace_entry, write_entry, add_hook])
def test_entries_of_containers_and_hooks_are_noticed(change):
    def run(model, x):
        shifted = x + model.notes["shift"]
        return model.head(model.act(model.trunk(shifted))) * model.table[0]

    model = Net(run, trunk=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 1))
    model.table, model.notes = [2.0], {"shift": torch.zeros(4)}
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    change(model)
    refused("but its predictions are not", uq, data(6, 1, 2)[0])


def test_an_attribute_set_to_the_same_value_is_watched_on():
    model, uq = made()
    x = data(6, 1, 2)[0]
    model.factor = torch.tensor(2.0)
    uq(x)
    model.factor = torch.tensor(10.0)
    refused("but its predictions are not", uq, x)


def test_a_state_dict_holds_no_rows_and_inputs_that_share_memory_can_be_saved(tmp_path):
    _, uq = made()
    assert not any("probes" in name for name in uq.state_dict()["_extra_state"]["tensors"])
    x, y = data(50, 1, 0)
    sums = Net(lambda m, a, b, c: m.head(a + b + c), head=nn.Linear(4, 1))
    uq = rg.LastLayerRigidity(sums).fit([{"a": x, "b": x, "c": torch.tensor(1.0), "y": y}])
    uq.save(tmp_path / "uq")
    rg.LastLayerRigidity.load(tmp_path / "uq", sums)


@pytest.mark.filterwarnings("ignore:The calibration rows have an RMS error:UserWarning")
def test_a_random_pass_that_shows_late_is_no_changed_model():
    model = Net(lambda m, x: m.head(x) + m.rare.pop(0), head=nn.Linear(4, 1))
    model.rare = [0.0]
    object.__setattr__(model, "rare", Late())
    uq = rg.LastLayerRigidity(model).fit(data(50, 1, 0))
    Late.random = True
    with pytest.warns(UserWarning, match="Two passes of the model"):
        uq.calibrate(data(50, 1, 1), method="paper")
    Late.random = False


class Late:
    """Random from some time on."""

    random = False

    def pop(self, _):
        return torch.rand(()) * Late.random * 100
