"""Fit over a Ray Data set: by the workers of Ray Train, and by tasks whose fits are merged.

Run: python examples/ray_fit.py [file to write]      (needs the extra `ray`)

A cluster of two workers on this machine stands in for a large one. Ray Train starts the workers as
one job of torch.distributed, so they make one fit together: each worker passes the rows that Ray
Data gives it, and all workers end with the same object. The first worker saves it, and the driver
loads the file. Ray tasks do not communicate: each task fits its block of rows, and the driver
merges the fits. The script compares both fits with that of one process.
"""

import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

import rigidities as rg

try:
    import pandas as pd
    import ray
    import ray.data
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/ray_fit.py needs Ray, and {error.name} is not installed: "
        'pip install "rigidities[ray]" (in a checkout: pip install ".[ray]").'
    ) from error

WORKERS = 2


def measurements(rows, seed):
    """A table of two inputs and a target. The second input sets the size of the noise."""
    first, second, noise = np.random.default_rng(seed).normal(size=(3, rows))
    target = np.sin(2 * first) + 0.2 * np.abs(second) * noise
    return pd.DataFrame({"first": first, "second": second, "target": target})


def blocks(frame, number):
    """The rows of a frame, cut into `number` frames. In practice these are files."""
    edges = np.linspace(0, len(frame), number + 1).astype(int)
    return [frame[start:end] for start, end in pairwise(edges)]


def tensors(columns):
    """Inputs (rows, 2) and targets (rows, 1) of a frame, or of a batch as Ray Data gives it."""
    values = np.stack([columns[name] for name in ("first", "second", "target")], axis=1)
    return torch.tensor(values[:, :2]), torch.tensor(values[:, 2:])


def trained_model(x, y):
    """Any trained model will do. Here: a random hidden layer with the best readout, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    return rg.LastLayerRigidity(model).fit(x, y).refit().model


class EveryRow(ray.train.DataConfig):
    """Shards with every row once. Ray Train makes equal shards, and drops the surplus rows."""

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **_):
        shards = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            for rank, shard in enumerate(dataset.streaming_split(world_size, equal=False)):
                shards[rank][name] = shard
        return shards


def fit_in_worker(config):
    """Every worker runs this: fit to its share of the rows. The first worker saves the result."""

    def batches(name):
        shard = ray.train.get_dataset_shard(name)
        return map(tensors, shard.iter_batches(batch_size=512, batch_format="numpy"))

    uq = rg.LastLayerRigidity(config["model"])
    uq.fit(batches("train"))
    uq.calibrate(batches("valid"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            uq.save(Path(folder) / "uq.safetensors")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"rows": uq.gram.count}, checkpoint=checkpoint)


def fitted_by_workers(model, train, valid):
    """Error bars from the workers of Ray Train, loaded from the first worker's file."""
    with tempfile.TemporaryDirectory() as storage:  # in practice: storage that all nodes can reach
        trainer = TorchTrainer(
            fit_in_worker,
            train_loop_config={"model": model},
            datasets={
                "train": ray.data.from_pandas(blocks(train, 8)),  # ray.data.read_parquet(folder)
                "valid": ray.data.from_pandas(blocks(valid, 4)),
            },
            dataset_config=EveryRow(),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        with trainer.fit().checkpoint.as_directory() as folder:
            return rg.LastLayerRigidity.load(Path(folder) / "uq.safetensors", model)


@ray.remote
def fit_of(block, model):
    """The fit to the rows of one block."""
    return rg.LastLayerRigidity(model).fit(*tensors(block))


def fitted_by_tasks(model, train, valid):
    """Error bars from fits of single blocks, which the driver merges and calibrates."""
    model = ray.put(model)  # sent once to every node, not with every task
    first, *others = ray.get([fit_of.remote(block, model) for block in blocks(train, 8)])
    uq = first.merge(*others)
    uq.calibrate(*tensors(valid))
    return uq


def differences(uq, reference, x):
    """Largest relative differences of the Gram matrices, and of the error bars at `x`."""
    gram = reference.gram.matrix
    gram_difference = (uq.gram.matrix - gram).abs().max() / gram.abs().max()
    bar_difference = (uq.predict(x).std / reference.predict(x).std - 1).abs().max()
    return gram_difference, bar_difference


def main(path=None):
    """Fit in three ways, compare, and save the workers' error bars if a path is given."""
    train = measurements(4001, seed=1)
    valid = measurements(1001, seed=2)
    test = measurements(1001, seed=3)
    model = trained_model(*tensors(train))

    # A small cluster on this machine. In practice: ray.init(address=...).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        by_workers = fitted_by_workers(model, train, valid)
        by_tasks = fitted_by_tasks(model, train, valid)
    finally:
        ray.shutdown()

    # The same in one process, for comparison.
    reference = rg.LastLayerRigidity(model).fit(*tensors(train))
    reference.calibrate(*tensors(valid))
    x, y = tensors(test)
    for name, uq in (("workers", by_workers), ("tasks", by_tasks)):
        gram, bars = differences(uq, reference, x)
        calibrated = uq.calibration_report.rows
        print(f"{name}: {uq.gram.count} rows in the fit, {calibrated} in the calibration")
        print(f"  relative difference from one process: Gram {gram:.0e}, bars {bars:.0e}")
    low, high = by_workers.predict(x).interval(0.9)
    covered = ((low < y) & (y < high)).double().mean()
    print(f"90 % intervals cover {covered:.0%} of {len(y)} test rows")
    if path is not None:
        by_workers.save(path)
    return by_workers, by_tasks, reference


if __name__ == "__main__":
    main(*sys.argv[1:2])
