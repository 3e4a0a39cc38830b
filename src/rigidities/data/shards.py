"""The rows that each process of a job reads, so that every row is read once.

Loaders for training give every process the same number of rows. To do so they repeat some rows,
which a Gram would count twice, or leave some out. `unpadded` and `in_order` copy such a loader so
that it does neither; `ShardSampler` and `shard` give each process its share of a data set.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import distributed
from torch.utils import data as loading
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["ShardSampler", "shard"]


class ShardSampler(loading.DistributedSampler[Any]):
    """This process's rows of a data set, contiguous or shuffled, without padding.

    Args:
        data: Anything with a length.
        rank: The number of this process; by default that of torch.distributed if it runs, else 0.
        ranks: How many processes there are; by default that of torch.distributed if it runs, else
            1.
        shuffle: Whether to distribute the rows in random order, a new one after each `set_epoch`.
        seed: The seed of that order, the same for all processes.
    """

    def __init__(
        self,
        data: Any,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            rank = rank or 0
            ranks = ranks or 1
        super().__init__(data, ranks, rank, shuffle, seed)
        self.rows = len(data)
        # The shares differ by one row at most.
        start = self.rank * self.rows // self.num_replicas
        stop = (self.rank + 1) * self.rows // self.num_replicas
        self.share = slice(start, stop)
        self.num_samples = stop - start

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.share.start, self.share.stop))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.rows, generator=generator)[self.share].tolist())


def shard(data: Any, rank: int | None = None, ranks: int | None = None) -> Any:
    """The rows of a `ShardSampler` as data.

    Args:
        data: A data set, or tensors in a tuple or dictionary.
        rank: As in `ShardSampler`.
        ranks: As in `ShardSampler`.

    Returns:
        A `Subset` of a data set; tensors in the same tuple or dictionary otherwise.

    Raises:
        ValueError: The tensors have different lengths.
    """
    lengths = {len(member) for member in tree_leaves(data)}
    if len(lengths) != 1:
        raise ValueError(
            f"All tensors of a data set must have the same length, got {sorted(lengths)}."
        )
    (rows,) = lengths
    sampler = ShardSampler(range(rows), rank, ranks)
    if isinstance(data, loading.Dataset):
        return loading.Subset(data, list(sampler))
    return tree_map(itemgetter(sampler.share), data)


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
            "Accelerate: one with sampler=ShardSampler(data), or one of a stream that gives each "
            "process its own rows."
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
        shard_sampler = ShardSampler(loader.dataset)
        batch_sampler = _altered(batch_sampler, sampler=shard_sampler, drop_last=False)
        return _altered(
            loader,
            sampler=shard_sampler,
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
    if isinstance(sampler, ShardSampler):
        return sampler
    if isinstance(sampler, loading.DistributedSampler):
        return _every_row(sampler)
    if hasattr(sampler, "even_batches"):  # Accelerate deals out the batches of another sampler
        return _exact_for_accelerate(sampler)
    inner = getattr(sampler, "sampler", None)
    exact = None if inner is None else _exact(inner)
    dropping = isinstance(inner, ShardSampler) and sampler.drop_last
    if exact is inner and not dropping:
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
