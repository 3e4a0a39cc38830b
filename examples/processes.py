"""Train, fit, calibrate and predict with several processes.

Run: torchrun --standalone --nproc-per-node 2 examples/processes.py [file to write]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import rigidities as rg


def rows(n, seed):
    """Two inputs; the second one makes the noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    noise = torch.randn(n, 1, generator=generator)
    return x, torch.sin(2 * x[:, :1]) + 0.2 * x[:, 1:].abs() * noise


def loader(data, sampler):
    """This process's rows."""
    dataset = TensorDataset(*data)
    return DataLoader(dataset, batch_size=64, sampler=sampler(dataset))


def trained(batches):
    """Any model trained in any way; here by DistributedDataParallel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(net) if dist.is_initialized() else net
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
    if "RANK" in os.environ and not dist.is_initialized():  # set by torchrun
        dist.init_process_group("gloo")
    train, valid, test = rows(4001, 1), rows(1001, 2), rows(1001, 3)

    # Training wants as many rows on every process: this sampler repeats some.
    batches = loader(train, DistributedSampler if dist.is_initialized() else RandomSampler)
    model = trained(batches)

    # Error bars want every row once. The loader of the training will do: no row is read twice.
    uq = rg.LastLayerRigidity(model).fit(batches)  # each process reads its own rows,
    uq.calibrate(loader(valid, rg.ShardSampler))  # and all end with the same object
    p = uq.predict(loader(test, rg.ShardSampler), gather=True)  # here the rows of all of them

    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        low, high = p.interval(0.9)
        inside = ((test[1] > low) & (test[1] < high)).float().mean()
        print(f"{uq.gram.count} rows in the fit, {uq.calibration_report.rows} in the calibration")
        print(f"90 % intervals hold {inside:.0%} of {len(p)} test rows")
        if path is not None:
            uq.save(path)
    return uq, p


if __name__ == "__main__":
    main(*sys.argv[1:2])
    if dist.is_initialized():
        dist.destroy_process_group()
