"""A statistic is one class: the fit adds it up, merges, saves, resumes, forgets and shares it."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.data import schema
from rigidities.last_layer.statistics import statistics
from rigidities.last_layer.statistics.statistic import Statistic
from tests.support import jobs
from tests.support.jobs import share


class TargetSum(Statistic):
    """A toy: the number of rows and the sum of each target."""

    def __init__(self, count, total):
        self.count, self.total = count, total

    @classmethod
    def begin(cls, block, plan):
        targets = block.reading.output_layout.targets
        return cls(torch.zeros(()), torch.zeros(targets, dtype=torch.float64))

    def update(self, block):
        self.count = self.count + block.rows
        self.total = self.total + block.reading.output_layout.rows(block.target).double().sum(0)

    def merge(self, other):
        self.count = self.count + other.count
        self.total = self.total + other.total

    def without(self, removed):
        return TargetSum(self.count - removed.count, self.total - removed.total)

    def state(self):
        return {"count": self.count, "total": self.total}

    @classmethod
    def from_state(cls, state):
        return cls(state["count"], state["total"])


def add_statistic():
    count, total = schema.Array("float32", ""), schema.Array("float64", "K")
    statistics.register("targets", TargetSum, {"count": count, "total": total})


@pytest.fixture(autouse=True)
def _registered():
    add_statistic()
    yield
    del statistics.REGISTRY["targets"], schema.KINDS["fit"].parts["targets"]


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.randn(900, 3), torch.randn(900, 2)


def sums(uq):
    total = uq._fit.state.statistics.by_name["targets"]
    return torch.cat([total.count.reshape(1).double(), total.total])


def dense(y):
    return torch.cat([torch.tensor([float(len(y))]).double(), y.double().sum(0)])


@pytest.mark.parametrize("size", [7, 300, 900])
def test_it_sees_every_row_once_whatever_the_batches(size):
    model, x, y = made()
    uq = rg.LastLayerRigidity(model, batch_size=size).fit((x, y))
    torch.testing.assert_close(sums(uq), dense(y))


def test_it_is_added_to_taken_from_and_merged():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit((x[:500], y[:500]))
    uq.partial_fit((x[500:700], y[500:700]))
    torch.testing.assert_close(sums(uq), dense(y[:700]))
    uq.forget((x[:100], y[:100]))
    torch.testing.assert_close(sums(uq), dense(y[100:700]))
    uq.merge(rg.LastLayerRigidity(model).fit((x[700:], y[700:])))
    torch.testing.assert_close(sums(uq), dense(y[100:]))


def test_it_is_saved_and_loaded(tmp_path):
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit((x, y))
    uq.save(tmp_path / "uq.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", model)
    assert torch.equal(sums(again), sums(uq))


def test_a_fit_from_a_file_goes_on_with_it(tmp_path):
    model, x, y = made()
    rg.LastLayerRigidity(model).fit(x[:700], y[:700]).save(tmp_path / "fit", rows=True)
    uq = rg.LastLayerRigidity.load(tmp_path / "fit", model).partial_fit(x[700:], y[700:])
    torch.testing.assert_close(sums(uq), dense(y))


def shared(rank, size):
    add_statistic()  # in this process
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit(share((x, y), rank, size))
    return sums(uq)


@pytest.mark.thorough
def test_it_is_reduced_over_the_processes_of_a_job():
    _, _, y = made()
    first, *others = jobs.values(shared, 3)
    torch.testing.assert_close(first, dense(y))
    assert all(torch.equal(one, first) for one in others)
