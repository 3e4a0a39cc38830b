"""fit(method="qr"): the same error bars by a root of the Gram, and some that the Gram has lost."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.notices import NotFittedError
from rigidities.posterior import memory
from rigidities.posterior.root import RootGram
from tests.support import oracle
from tests.support.nets import Net, calibrated
from tests.support.refusals import refused
from tests.support.tensors import close, normal


def bars(uq, x):
    mean, std = uq(x)
    return torch.stack([mean, std]).double()


def pair(net, **options):
    """The fit by a root and the one by a Gram, both calibrated."""
    fits = [
        rg.LastLayerRigidity(net.model, batch_size=64).fit(net.train, method=method, **options)
        for method in ("qr", "gram")
    ]
    return [calibrated(uq, net.valid) for uq in fits]


@pytest.fixture
def net64(net):
    return type(net)(net.model.double(), *((x.double(), y.double()) for x, y in net[1:]))


@pytest.mark.parametrize("method", [rg.Paper(), rg.Paper(criterion="evidence"), rg.Full()])
def test_both_methods_give_the_same_error_bars(net64, method):
    ours, theirs = pair(net64)
    for uq in (ours, theirs):
        uq.calibrate(net64.valid, method=method)
    assert isinstance(ours.gram, RootGram) and not isinstance(theirs.gram, RootGram)
    assert ours.ridge == pytest.approx(theirs.ridge, rel=1e-4)
    close(bars(ours, net64.test[0]), bars(theirs, net64.test[0]), 1e-4)


def test_each_target_of_a_masked_loss_has_its_root(net3):
    ours, theirs = pair(net3, loss=rg.losses.Huber(0.1))
    assert ours.gram.targets == 3
    close(bars(ours, net3.test[0]), bars(theirs, net3.test[0]), 1e-4)


def test_added_and_forgotten_rows_keep_the_method(net64):
    (x, y), uq = net64.train, rg.LastLayerRigidity(net64.model)
    uq.fit((x[:200], y[:200]), method="qr")
    before = uq.gram.clone()
    uq.batch_size = 13
    uq.partial_fit((x[200:], y[200:]))
    whole = rg.LastLayerRigidity(net64.model).fit((x, y))
    close(uq.gram.matrix, whole.gram.matrix)
    uq.batch_size = 9
    uq.forget((x[200:], y[200:]))
    close(uq.gram.matrix, before.matrix)
    assert isinstance(uq.gram, RootGram) and uq.gram.count == 200
    refused("never in the fit", uq.forget, (x[200:], y[200:]))


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_the_root_survives(net, tmp_path, way):
    ours, _ = pair(net)
    if way == "file":
        ours.save(tmp_path / "uq.safetensors")
        again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", net.model)
    else:
        again = rg.LastLayerRigidity(net.model)
        again.load_state_dict(ours.state_dict())
    assert isinstance(again.gram, RootGram) and torch.equal(again.gram.root, ours.gram.root)
    assert torch.equal(bars(again, net.test[0]), bars(ours, net.test[0]))
    assert again.rounding == ours.rounding


@pytest.mark.parametrize("add", [False, True])
def test_a_refit_keeps_the_method(net64, add):
    ours, theirs = (uq.refit(net64.valid, add=add) for uq in pair(net64))
    assert isinstance(ours.gram, RootGram)
    assert ours.refitted.ridge == pytest.approx(theirs.refitted.ridge, rel=1e-6)
    close(ours.gram.square, theirs.gram.square, 1e-6)
    close(*(uq.model(net64.test[0]).detach() for uq in (ours, theirs)), 1e-6)


# --- features that their Gram loses -------------------------------------------------------------


def steep(condition):
    """A readout on features whose singular values run over `condition`, with two targets."""
    turn = torch.linalg.qr(normal(8, 8, seed=5)).Q
    features = nn.Linear(8, 8, bias=False)
    features.weight.data = (condition ** -torch.linspace(0, 1, 8).double()[:, None] * turn).T
    head = nn.Linear(8, 2, bias=False)
    return Net(lambda m, x: m.head(m.features(x)), features=features.double(), head=head.double())


@pytest.mark.parametrize("ridge", [0.0, 1e-13])
def test_error_bars_keep_eight_digits_where_the_condition_number_is_a_million(ridge):
    model, x, f = steep(1e6), normal(80, 8), normal(10, 8, seed=1)
    uq = rg.LastLayerRigidity(model, layer="head").fit((x, normal(80, 2)), method="qr")
    uq.calibrate((normal(40, 8, seed=2), normal(40, 2, seed=3)), method=rg.Paper(ridge=ridge))
    with torch.no_grad():
        train, test = model.features(x), model.features(f)
    exact = oracle.exact_quadratic(train, test, ridge)
    found = uq.predict(f).epistemic / uq.scale.square()
    torch.testing.assert_close(found, exact[:, None].expand(-1, 2), rtol=1e-8, atol=0)
    assert uq.rounding < 1e-8


def test_a_ridge_that_float64_loses_is_refused_and_the_other_method_named():
    model, x = steep(1e8), normal(80, 8)
    uq = rg.LastLayerRigidity(model, layer="head").fit((x, normal(80, 2)))
    valid = normal(40, 8, seed=2), normal(40, 2, seed=3)
    refused(r"method='qr'", uq.calibrate, valid, method=rg.Paper(ridge=0.0))
    uq.calibrate(valid, method="paper")  # the search stays above what float64 can tell
    assert uq.rounding < 1e-3
    uq.fit((x, normal(80, 2)), method="qr").calibrate(valid, method=rg.Paper(ridge=0.0))
    assert uq.rounding < 1e-6


# --- refusals -----------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_before_the_data_are_read(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    before = uq.gram
    refused("method must be 'gram' or 'qr', got 'svd'", uq.fit, iter([]), method="svd")
    refused(
        "precision='mixed' needs method='gram'", uq.fit, iter([]), method="qr", precision="mixed"
    )
    assert uq.gram is before


@pytest.mark.parametrize(("method", "copies"), [("gram", 5), ("qr", 8)])
def test_a_fit_that_will_not_fit_is_refused_at_its_first_batch(net, monkeypatch, method, copies):
    uq, needed = rg.LastLayerRigidity(net.model), copies * 8 * 25**2
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    message = rf"25 wide need .* \({copies} float64 matrices 25 x 25\), and .* narrower readout"
    refused(message, uq.fit, net.train, method=method, error=MemoryError)
    refused("fit", lambda: uq.gram, error=NotFittedError)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    calibrated(uq.fit(net.train, method=method), net.valid)(net.test[0])
