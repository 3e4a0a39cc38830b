"""Features so ill-conditioned that their Gram loses digits, and fits that memory cannot hold."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.notices import NotFittedError
from rigidities.posterior import memory
from tests.support.nets import Net, calibrated
from tests.support.refusals import refused
from tests.support.tensors import normal

CPU = torch.device("cpu")


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


@pytest.mark.skipif(memory.free_memory(CPU) is None, reason="free memory is known on Linux alone")
@pytest.mark.parametrize("cache_name", ["inactive_file", "total_inactive_file"])
@pytest.mark.parametrize(
    ("limit", "used", "cache", "free"),
    [("3000", 1000, 0, 2000), ("3000", 2990, 990, 1000), ("max", 1000, 0, None)],
)
def test_the_limit_of_a_container_counts_without_its_cache_of_files(
    limit, used, cache, free, cache_name, monkeypatch, tmp_path
):
    monkeypatch.setattr(memory, "_CGROUPS", ())
    of_machine = memory.free_memory(CPU)
    texts = {"max": limit, "current": str(used), "stat": f"anon 5\n{cache_name} {cache}\n"}
    paths = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        paths.append(str(tmp_path / name))
    missing = tuple(str(tmp_path / "missing") for _ in range(3))
    monkeypatch.setattr(memory, "_CGROUPS", (tuple(paths), missing))
    of_container = memory.free_memory(CPU)
    if free is None:
        assert of_container == pytest.approx(of_machine, rel=0.2)
    else:
        assert of_container == free
    assert memory.free_memory_or_guess(CPU) > 0


def test_a_fit_that_will_not_fit_is_refused_at_its_first_batch(net, monkeypatch):
    uq, needed = rg.LastLayerRigidity(net.model), 5 * 8 * 25**2
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    message = r"25 wide need .* \(5 float64 matrices 25 x 25\), and .* narrower readout"
    refused(message, uq.fit, net.train, error=MemoryError)
    refused("fit", lambda: uq.gram, error=NotFittedError)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    calibrated(uq.fit(net.train), net.valid)(net.test[0])
