"""Buffers that a pass of the model sets itself are no weights; those that a state dict held are."""

import copy

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import Net, calibrated, data
from tests.support.refusals import refused


def plain_forward(model, x):
    return model.head(torch.tanh(model.trunk(x)))


def mask_in_every_pass(model, x):
    model.mask = torch.ones(len(x), 8)
    return model.head(torch.tanh(model.trunk(x)) * model.mask)


def mask_for_a_new_size(model, x):
    if model.mask is None or len(model.mask) != len(x):
        model.mask = torch.ones(len(x), 8)
    return model.head(torch.tanh(model.trunk(x)) * model.mask)


def mask_registered_in_forward(model, x):
    model.register_buffer("table", torch.ones(len(x), 8))
    return model.head(torch.tanh(model.trunk(x)) * model.table)


def count_of_passes(model, x):
    model.mask = torch.ones(()) if model.mask is None else model.mask + 1
    return plain_forward(model, x)


FORWARDS = [
    mask_in_every_pass,
    mask_for_a_new_size,
    mask_registered_in_forward,
    count_of_passes,
]


def made(run):
    """A net with the same weights whatever its forward pass, and a buffer that is None."""
    torch.manual_seed(0)
    model = Net(run, trunk=nn.Linear(4, 8), head=nn.Linear(8, 1), mean=torch.zeros(4))
    model.register_buffer("mask", None)
    return model.eval()


def all_steps(model, path, between):
    """The predictions after each way to use a fit, with something done to the model between."""
    x = data(6, 1, 2)[0]
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    predictions = [uq.predict(x)]
    between(model)
    predictions.append(uq.predict(x))
    between(model)
    calibrated(uq.partial_fit(data(30, 1, 3)), data(50, 1, 1))
    predictions.append(uq.predict(x))
    between(model)
    uq.save(path)
    between(model)
    predictions.append(rg.LastLayerRigidity.load(path, model).predict(x))
    return predictions


def assert_same(predictions, expected):
    for prediction, other in zip(predictions, expected, strict=True):
        assert torch.equal(prediction.mean, other.mean)
        torch.testing.assert_close(prediction.std, other.std)


@pytest.mark.parametrize("called_first", [False, True])
@pytest.mark.parametrize("run", FORWARDS)
def test_calls_of_the_model_between_leave_a_fit_valid(run, called_first, tmp_path):
    sizes = iter(range(2, 20))
    model = made(run)
    if called_first:
        model(data(21, 1, 4)[0])
    predictions = all_steps(model, tmp_path / "uq", lambda m: m(data(next(sizes), 1, 4)[0]))
    assert_same(predictions, all_steps(made(plain_forward), tmp_path / "plain", lambda m: None))


@pytest.mark.parametrize("run", FORWARDS)
def test_a_fit_leaves_the_buffers_of_the_model_alone(run, tmp_path):
    model = made(run)
    before = copy.deepcopy(model.state_dict())
    all_steps(model, tmp_path / "uq", lambda m: None)
    assert model.mask is None
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("called_before_load", [False, True])
@pytest.mark.parametrize("called_before_fit", [False, True])
@pytest.mark.parametrize("run", FORWARDS)
def test_a_file_is_loaded_with_a_model_that_was_called_or_not(
    run, called_before_fit, called_before_load, tmp_path
):
    model, again = made(run), made(run)
    if called_before_fit:
        model(data(9, 1, 4)[0])
    if called_before_load:
        again(data(5, 1, 4)[0])
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    uq.save(tmp_path / "uq")
    x = data(6, 1, 2)[0]
    loaded = rg.LastLayerRigidity.load(tmp_path / "uq", again)
    assert_same([loaded.predict(x)], [uq.predict(x)])
    again(data(7, 1, 4)[0])
    assert_same([loaded.predict(x)], [uq.predict(x)])


@pytest.mark.parametrize("run", FORWARDS)
def test_a_state_dict_comes_back_into_a_model_that_was_called(run):
    model, again = made(run), made(run)
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    state = copy.deepcopy(uq.state_dict())
    restored = rg.LastLayerRigidity(again)
    restored.load_state_dict(state)
    again(data(7, 1, 4)[0])
    x = data(6, 1, 2)[0]
    assert_same([restored.predict(x)], [uq.predict(x)])


@pytest.mark.parametrize("run", FORWARDS)
def test_parts_fitted_with_models_that_were_called_or_not_are_merged(run):
    first, second = made(run), made(run)
    second(data(7, 1, 4)[0])
    parts = [
        rg.LastLayerRigidity(first).fit(data(50, 1, 0)),
        rg.LastLayerRigidity(second).fit(data(40, 1, 5)),
    ]
    parts[0].merge(parts[1])
    assert parts[0].gram.count == 90


def write_weight(model):
    model.trunk.weight.add_(1e-6)


def write_buffer(model):
    model.mean.add_(1.0)


def replace_buffer(model):
    model.mean = torch.ones(4)


def remove_buffer(model):
    model.mean = None


@pytest.mark.parametrize("change", [write_weight, write_buffer, replace_buffer, remove_buffer])
@pytest.mark.parametrize("run", FORWARDS)
def test_what_the_state_dict_held_at_the_fit_must_not_change(run, change, tmp_path):
    model = made(run)
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    uq.save(tmp_path / "uq")
    model(data(7, 1, 4)[0])
    with torch.no_grad():
        change(model)
    refused("weights have changed since the fit", uq.predict, data(6, 1, 2)[0])
    refused("weights have changed since the fit", uq.partial_fit, data(30, 1, 3))
    refused("weights differ", rg.LastLayerRigidity.load, tmp_path / "uq", model)


def test_a_buffer_that_is_not_saved_counts_by_what_it_does_to_predictions():
    def shifted(model, x):
        return plain_forward(model, x) + model.shift

    model = made(shifted)
    model.register_buffer("shift", torch.zeros(1), persistent=False)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    uq = calibrated(rg.LastLayerRigidity(model).fit(data(50, 1, 0)), data(50, 1, 1))
    x = data(6, 1, 2)[0]
    expected = uq.predict(x)
    model.cache = torch.ones(5)
    assert_same([uq.predict(x)], [expected])
    model.shift = torch.ones(1)
    refused(r"but its predictions are not.*was 'shift' set\?", uq.predict, x)
