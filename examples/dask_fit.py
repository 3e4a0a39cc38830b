"""Fit the partitions of a Dask data frame one by one, and merge the fits.

Run: python examples/dask_fit.py [file to write]      (needs the extra `dask`)

A fit is a sum over rows: the fits of partitions add up to that of the whole table, in any order.
Nothing here is special to Dask. Whatever maps a function over partitions and brings the results
back will do: tasks of Ray, `mapPartitions` of Spark, a pool of processes.
"""

import sys

import numpy as np
import torch
from torch import nn

import rigidities as rg

try:
    import dask
    import dask.dataframe
    import pandas as pd
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/dask_fit.py needs Dask, and {error.name} is not installed: "
        'pip install "rigidities[dask]" (in a checkout: pip install ".[dask]").'
    ) from error


def table(rows, seed):
    """Two inputs and a target; the second input makes the noise."""
    first, second, noise = np.random.default_rng(seed).normal(size=(3, rows))
    target = np.sin(2 * first) + 0.2 * np.abs(second) * noise
    return pd.DataFrame({"first": first, "second": second, "target": target})


def tensors(frame):
    """Inputs (rows, 2) and targets (rows, 1) of a data frame."""
    values = torch.tensor(frame[["first", "second", "target"]].to_numpy())
    return values[:, :2], values[:, 2:]


def trained(x, y):
    """Any trained model; here a random hidden layer under the best readout, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    return rg.LastLayerRigidity(model).fit(x, y).refit().model


def fit_of(partition, model):
    """The fit to the rows of one partition: what is mapped."""
    return rg.LastLayerRigidity(model).fit(*tensors(partition))


def fitted_by_dask(model, frame):
    """The fit to all rows, made by two processes, and the number of rows in each partition."""
    model = dask.delayed(model)
    fits = [dask.delayed(fit_of)(partition, model) for partition in frame.to_delayed()]
    first, *others = dask.compute(*fits, scheduler="processes", num_workers=2)
    rows = [fit.gram.count for fit in (first, *others)]
    return first.merge(*others), rows


def main(path=None):
    train, valid, test = table(4001, 1), table(1001, 2), table(1001, 3)
    model = trained(*tensors(train))
    frame = dask.dataframe.from_pandas(train, npartitions=4)  # in earnest: read_parquet(folder)
    uq, rows = fitted_by_dask(model, frame)
    uq.calibrate(*tensors(valid))
    print(f"{len(rows)} partitions of {rows} rows: {uq.gram.count} in the fit")

    alone = rg.LastLayerRigidity(model).fit(*tensors(train))
    alone.calibrate(*tensors(valid))
    x, y = tensors(test)
    gram = (uq.gram.matrix - alone.gram.matrix).abs().max() / alone.gram.matrix.abs().max()
    bars = (uq.predict(x).std / alone.predict(x).std - 1).abs().max()
    print(f"relative difference from one process: Gram {gram:.0e}, bars {bars:.0e}")
    low, high = uq.predict(x).interval(0.9)
    inside = ((low < y) & (y < high)).double().mean()
    print(f"90 % intervals hold {inside:.0%} of {len(y)} test rows")
    if path is not None:
        uq.save(path)
    return uq, alone


if __name__ == "__main__":
    main(*sys.argv[1:2])
