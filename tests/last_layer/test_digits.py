"""Features so ill-conditioned that their Gram loses digits, and fits that memory cannot hold."""

import torch
from torch import nn

import rigidities as rg
from rigidities.notices import NotFittedError
from rigidities.posterior import memory
from tests.support.nets import Net, calibrated
from tests.support.refusals import refused
from tests.support.tensors import normal


def steep(condition):
    """A readout on features whose singular values run over `condition`, with two targets."""
    turn = torch.linalg.qr(normal(8, 8, seed=5)).Q
    features = nn.Linear(8, 8, bias=False)
    features.weight.data = (condition ** -torch.linspace(0, 1, 8).double()[:, None] * turn).T
    head = nn.Linear(8, 2, bias=False)
    return Net(lambda m, x: m.head(m.features(x)), features=features.double(), head=head.double())


def test_a_ridge_that_float64_loses_is_refused_with_what_to_do():
    model, x = steep(1e8), normal(80, 8)
    uq = rg.LastLayerRigidity(model, layer="head").fit((x, normal(80, 2)))
    valid = normal(40, 8, seed=2), normal(40, 2, seed=3)
    refused("ridge above that, standardise", uq.calibrate, valid, method=rg.Paper(ridge=0.0))
    uq.calibrate(valid, method="paper")  # the search stays above what float64 can tell
    assert uq.freeze().rounding < 1e-3


def test_a_fit_that_will_not_fit_is_refused_at_its_first_batch(net, monkeypatch):
    uq, needed = rg.LastLayerRigidity(net.model), 5 * 8 * 25**2
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    message = r"25 wide need .* \(5 float64 matrices 25 x 25\), and .* narrower readout"
    refused(message, uq.fit, net.train, error=MemoryError)
    refused("fit", lambda: uq.gram, error=NotFittedError)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    calibrated(uq.fit(net.train), net.valid)(net.test[0])
