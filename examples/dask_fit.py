"""Fit the partitions of a Dask data frame one by one, and merge the fits.

Run: python examples/dask_fit.py [file to write]      (needs the extra `dask`)

A fit is a sum over rows, so the fits to partitions add up to the fit to the whole table, in any
order. Nothing here is special to Dask. Any tool works that maps a function over partitions and
returns the results: Ray tasks, `mapPartitions` of Spark, a pool of processes.
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


def measurements(rows, seed):
    """A table of two inputs and a target. The second input sets the size of the noise."""
    first, second, noise = np.random.default_rng(seed).normal(size=(3, rows))
    target = np.sin(2 * first) + 0.2 * np.abs(second) * noise
    return pd.DataFrame({"first": first, "second": second, "target": target})


def tensors(frame):
    """Inputs (rows, 2) and targets (rows, 1) of a data frame."""
    values = torch.tensor(frame[["first", "second", "target"]].to_numpy())
    return values[:, :2], values[:, 2:]


def trained_model(x, y):
    """Any trained model will do. Here: a random hidden layer with the best readout, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    return rg.LastLayerRigidity(model).fit(x, y).refit().model


def fit_of(partition, model):
    """The fit to the rows of one partition. Dask maps this function."""
    return rg.LastLayerRigidity(model).fit(*tensors(partition))


def fitted_by_dask(model, frame):
    """The fit to all rows, made by two processes, and the number of rows in each partition."""
    model = dask.delayed(model)
    fits = [dask.delayed(fit_of)(partition, model) for partition in frame.to_delayed()]
    first, *others = dask.compute(*fits, scheduler="processes", num_workers=2)
    rows = [fit.gram.count for fit in (first, *others)]
    return first.merge(*others), rows


def differences(uq, reference, x):
    """Largest relative differences of the Gram matrices, and of the error bars at `x`."""
    gram = reference.gram.matrix
    gram_difference = (uq.gram.matrix - gram).abs().max() / gram.abs().max()
    bar_difference = (uq.predict(x).std / reference.predict(x).std - 1).abs().max()
    return gram_difference, bar_difference


def main(path=None):
    """Fit with Dask and in one process, compare, and save Dask's fit if a path is given."""
    train = measurements(4001, seed=1)
    valid = measurements(1001, seed=2)
    test = measurements(1001, seed=3)
    model = trained_model(*tensors(train))

    frame = dask.dataframe.from_pandas(train, npartitions=4)  # in practice: read_parquet(folder)
    uq, rows = fitted_by_dask(model, frame)
    uq.calibrate(*tensors(valid))
    print(f"{len(rows)} partitions of {rows} rows: {uq.gram.count} in the fit")

    # The same in one process, for comparison.
    reference = rg.LastLayerRigidity(model).fit(*tensors(train))
    reference.calibrate(*tensors(valid))
    x, y = tensors(test)
    gram, bars = differences(uq, reference, x)
    print(f"relative difference from one process: Gram {gram:.0e}, bars {bars:.0e}")

    low, high = uq.predict(x).interval(0.9)
    covered = ((low < y) & (y < high)).double().mean()
    print(f"90 % intervals cover {covered:.0%} of {len(y)} test rows")
    if path is not None:
        uq.save(path)
    return uq, reference


if __name__ == "__main__":
    main(*sys.argv[1:2])
