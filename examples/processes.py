"""Train, fit, calibrate and predict with several processes.

Run: torchrun --standalone --nproc-per-node 2 examples/processes.py [file to write]

Every process reads its own rows. The library adds up the results through torch.distributed, so all
processes end with the same error bars. Without torchrun the same script runs in one process.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import rigidities as rg


def measurements(n, seed):
    """Inputs (n, 2) and targets (n, 1). The second input sets the size of the noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    noise = torch.randn(n, 1, generator=generator)
    return x, torch.sin(2 * x[:, :1]) + 0.2 * x[:, 1:].abs() * noise


def training_loader(data):
    """Batches for training, which needs equally many rows on every process.

    With several processes, DistributedSampler repeats rows until that is so.
    """
    dataset = TensorDataset(*data)
    if dist.is_initialized():
        sampler = DistributedSampler(dataset)
    else:
        sampler = RandomSampler(dataset)
    return DataLoader(dataset, batch_size=64, sampler=sampler)


def own_rows(data):
    """The rows of this process: a contiguous part of every tensor, no row twice, none missing."""
    if not dist.is_initialized():
        return data
    x, y = data
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]


def trained_model(batches):
    """Any trained model will do. Here it is trained with DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(12):
        if dist.is_initialized():
            batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


def main(path=None):
    """Run everything. The first process prints, and saves the error bars if a path is given."""
    if "RANK" in os.environ and not dist.is_initialized():  # torchrun sets it
        dist.init_process_group("gloo")
    train = measurements(4001, seed=1)
    valid = measurements(1001, seed=2)
    test = measurements(1001, seed=3)

    training_batches = training_loader(train)
    model = trained_model(training_batches)

    # Error bars need every row once. The training loader works too: the library counts rows that
    # the sampler repeats only once. Each process reads its own rows, and all processes end with
    # the same object.
    uq = rg.LastLayerRigidity(model).fit(training_batches)
    uq.calibrate(own_rows(valid))

    # With `gather`, every process gets the predictions for all rows, in the order of ranks.
    p = uq.predict(own_rows(test), gather=True)

    is_first_process = not dist.is_initialized() or dist.get_rank() == 0
    if is_first_process:
        _, y = test
        low, high = p.interval(0.9)
        covered = ((y > low) & (y < high)).float().mean()
        print(f"{uq.gram.count} rows in the fit, {uq.calibration_report.rows} in the calibration")
        print(f"90 % intervals cover {covered:.0%} of {len(p)} test rows")
        if path is not None:
            uq.save(path)
    return uq, p


if __name__ == "__main__":
    main(*sys.argv[1:2])
    if dist.is_initialized():
        dist.destroy_process_group()
