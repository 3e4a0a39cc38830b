"""Data sets that are only gone through: rows, whole batches, workers, no length."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import rigidities as rg

X = torch.randn(101, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * 2


class Rows(IterableDataset):
    """One row after the other, shared among workers."""

    def __iter__(self):
        worker = get_worker_info()
        part = slice(None) if worker is None else slice(worker.id, None, worker.num_workers)
        yield from zip(X[part], Y[part], strict=True)


class Batches(IterableDataset):
    """Whole batches; the last has one row."""

    def __iter__(self):
        yield from zip(X.split(10), Y[:, 0].split(10), strict=True)


class Even(IterableDataset):
    """Whole batches of one size."""

    def __iter__(self):
        yield from zip(X[:100].split(10), Y[:100].split(10), strict=True)


GIVEN = {
    "rows": (lambda: Rows(), 101),
    "rows by a loader": (lambda: DataLoader(Rows(), batch_size=16), 101),
    "rows by workers": (lambda: DataLoader(Rows(), batch_size=16, num_workers=2), 101),
    "batches by a loader": (lambda: DataLoader(Batches(), batch_size=None), 101),
    "batches of one size": (lambda: Even(), 100),
    "a generator": (lambda: zip(X.split(7), Y.split(7), strict=True), 101),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_data_set_without_length_gives_the_gram_of_its_rows(given):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    made, rows = GIVEN[given]
    uq = rg.LastLayerRigidity(net).fit(made())
    with torch.no_grad():
        features = torch.cat([net[:-1](X[:rows]), torch.ones(rows, 1)], 1).double()
    assert uq.gram.count == rows
    torch.testing.assert_close(uq.gram.matrix, features.mT @ features, rtol=1e-6, atol=1e-6)
