"""The rows that each process of a job reads, so that every row is read once.

Loaders for training give every process the same number of rows. To do so they repeat some rows,
which a Gram would count twice, or leave some out. `unpadded` and `in_order` copy such a loader so
that it does neither.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed
from torch.utils import data as loading


def unpadded(data: Any) -> Any:
    """A copy of a job's loader whose sampler neither repeats nor drops rows; other data unchanged.

    The wrappers that Accelerate and Fabric put around a loader may wait for other processes; they
    are taken off.

    Raises:
        TypeError: Accelerate hands out the rows from one process, or repeats some.
    """
    loader = _inner_loader(data)
    if not isinstance(loader, loading.DataLoader):
        return data
    dispatched = hasattr(data, "_fetch_batches") and data.state.num_processes > 1
    if dispatched or hasattr(loader.dataset, "split_batches"):
        raise TypeError(
            "Accelerate distributes these rows from one process, or repeats some of them; "
            "expected a loader that reads its own share. Pass a loader that was not prepared by "
            "Accelerate: one of torch.utils.data.Subset(data, range(rank, len(data), ranks)), or "
            "one of a stream that gives each process its own rows."
        )
    sampler = _exact(loader.sampler)
    batch_sampler = _exact(loader.batch_sampler)
    if sampler == loader.sampler and batch_sampler == loader.batch_sampler:
        return loader
    return _altered(
        loader, sampler=sampler, batch_sampler=batch_sampler, drop_last=False, _iterator=None
    )


def in_order(data: Any) -> Any:
    """A copy of a loader that reads its data set in order, every row once; in a job, its share.

    A loader whose sampler does not cover the whole data set is treated as by `unpadded`.
    """
    loader = _inner_loader(data)
    batch_sampler = getattr(loader, "batch_sampler", None)
    # In a job, Accelerate puts its own batch sampler around the loader's.
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is loading.BatchSampler and _reads_whole(sampler, loader):
        share = _share(len(loader.dataset))
        batch_sampler = _altered(batch_sampler, sampler=share, drop_last=False)
        return _altered(
            loader,
            sampler=share,
            drop_last=False,
            batch_sampler=batch_sampler,
            generator=torch.Generator(),
            _iterator=None,
        )
    exact = unpadded(data)
    batch_sampler = getattr(exact, "batch_sampler", None)
    if type(batch_sampler) is not loading.BatchSampler:
        return exact
    batch_sampler = _altered(batch_sampler, drop_last=False)
    return _altered(exact, drop_last=False, batch_sampler=batch_sampler, _iterator=None)


def _share(rows: int) -> range:
    """The rows of this process, contiguous; outside a job all rows.

    The shares of two processes differ by one row at most.
    """
    rank, ranks = 0, 1
    if distributed.is_available() and distributed.is_initialized():
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return range(rank * rows // ranks, (rank + 1) * rows // ranks)


def _reads_whole(sampler: Any, loader: Any) -> bool:
    """Whether a sampler is one of torch's own, and covers the loader's whole data set."""
    standard = type(sampler) in (loading.SequentialSampler, loading.DistributedSampler)
    if not standard and not isinstance(sampler, loading.RandomSampler):
        return False
    rows = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    return rows is loader.dataset


def _inner_loader(data: Any) -> Any:
    """The loader inside a wrapper of Accelerate or Fabric; other data unchanged."""
    inner = getattr(data, "base_dataloader", getattr(data, "_dataloader", None))
    return inner if isinstance(inner, loading.DataLoader) else data


def _exact(sampler: Any) -> Any:
    """A version of a sampler that neither repeats nor drops rows.

    The sampler itself is returned where it does neither already, or where it is of an unknown kind.
    """
    if isinstance(sampler, loading.DistributedSampler):
        return _every_row(sampler)
    if hasattr(sampler, "even_batches"):  # Accelerate deals out the batches of another sampler
        return _exact_for_accelerate(sampler)
    inner = getattr(sampler, "sampler", None)
    exact = None if inner is None else _exact(inner)
    if exact is inner:
        return sampler
    return _altered(sampler, sampler=exact, drop_last=False)


def _exact_for_accelerate(sampler: Any) -> Any:
    """Accelerate's batch sampler, no longer forced to give all processes equally many batches."""
    order = _exact(getattr(sampler.batch_sampler, "sampler", None))
    if is_shuffle(order):
        # Each process would shuffle by itself, and some rows would be lost and others repeated.
        order = range(len(order.data_source))
    batches = _altered(sampler.batch_sampler, sampler=order, drop_last=False)
    return _altered(sampler, batch_sampler=batches, even_batches=False, drop_last=False)


def _every_row(sampler: Any) -> list[int]:
    """The rows of a `DistributedSampler`, without those it repeats and with those it drops."""
    size = len(sampler.dataset)
    padded_rows = list(sampler)
    alone = _altered(
        sampler, rank=0, num_replicas=1, num_samples=size, total_size=size, drop_last=False
    )
    rows = list(alone)[sampler.rank :: sampler.num_replicas]
    # A subclass may deal out its rows in another way: then they are left as they are.
    common = min(len(rows), len(padded_rows))
    return rows if rows[:common] == padded_rows[:common] else padded_rows


def is_shuffle(sampler: Any) -> bool:
    """Whether a sampler gives every row once, in random order."""
    if not isinstance(sampler, loading.RandomSampler) or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def _altered(original: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes, set directly because a DataLoader refuses setattr."""
    twin = copy.copy(original)
    vars(twin).update(attributes)
    return twin
