"""The rows that each process of a job reads: every row once.

Loaders for training give all processes equally many rows: they repeat some, which a Gram would
count twice, or leave some out. `unpadded` reads them without either.
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


class ShardSampler(loading.DistributedSampler[Any]):
    """This process's rows of a data set, contiguous or shuffled, without padding.

    Args:
        data: anything with a length.
        rank: of this process; by default that of torch.distributed where it runs, else 0.
        ranks: how many processes there are; by default likewise, else 1.
        shuffle: deal out the rows in random order, another one after each `set_epoch`.
        seed: of that order, the same for all processes.
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
            rank, ranks = rank or 0, ranks or 1
        super().__init__(data, ranks, rank, shuffle, seed)
        self.rows = len(data)
        start, stop = (one * self.rows // self.num_replicas for one in (self.rank, self.rank + 1))
        self.part, self.num_samples = slice(start, stop), stop - start

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.part.start, self.part.stop))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.rows, generator=generator)[self.part].tolist())


def shard(data: Any, rank: int | None = None, ranks: int | None = None) -> Any:
    """The rows of a `ShardSampler` as data: a `Subset`, or tensors in a tuple or dictionary."""
    lengths = {len(member) for member in tree_leaves(data)}
    if len(lengths) != 1:
        raise ValueError(f"All tensors of a data set must have one length, got {sorted(lengths)}.")
    own = ShardSampler(range(lengths.pop()), rank, ranks)
    if isinstance(data, loading.Dataset):
        return loading.Subset(data, list(own))
    return tree_map(itemgetter(own.part), data)


def unpadded(data: Any) -> Any:
    """A loader of a job without padding and dropping, the given one unchanged; else the data.

    What Accelerate and Fabric put around it may wait for other processes, and is left out.
    """
    loader = _inside(data)
    if not isinstance(loader, loading.DataLoader):
        return data
    handed_out = hasattr(data, "_fetch_batches") and data.state.num_processes > 1
    if handed_out or hasattr(loader.dataset, "split_batches"):
        raise TypeError(
            "Accelerate hands out these rows from one process, or repeats some, expected a loader "
            "that reads its own share. Pass one with sampler=ShardSampler(data), or of a stream "
            "that gives each process its rows, that was not prepared by Accelerate."
        )
    old = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    new = {name: _exact(sampler) for name, sampler in old.items()}
    return loader if new == old else _altered(loader, **new, drop_last=False, _iterator=None)


def in_order(data: Any) -> Any:
    """A loader's data set in order, every row once, in a job its share; else as `unpadded`."""
    loader = _inside(data)
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of Accelerate in a job
    sampler = getattr(batches, "sampler", None)
    rows = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    every = type(sampler) in (loading.SequentialSampler, loading.DistributedSampler)
    every = (every or isinstance(sampler, loading.RandomSampler)) and rows is loader.dataset
    if not every or type(batches) is not loading.BatchSampler:
        exact = unpadded(data)
        batches = getattr(exact, "batch_sampler", None)
        if type(batches) is not loading.BatchSampler:
            return exact
        new = {"drop_last": False, "batch_sampler": _altered(batches, drop_last=False)}
        return _altered(exact, **new, _iterator=None)
    new = {"sampler": ShardSampler(rows), "drop_last": False}
    batches, others = _altered(batches, **new), {"generator": torch.Generator(), "_iterator": None}
    return _altered(loader, **new, batch_sampler=batches, **others)


def _inside(data: Any) -> Any:
    """The loader that Accelerate or Fabric has wrapped; else the data."""
    inner = getattr(data, "base_dataloader", getattr(data, "_dataloader", None))
    return inner if isinstance(inner, loading.DataLoader) else data


def _exact(sampler: Any) -> Any:
    """One that neither repeats nor drops; itself where it does neither, or is not understood."""
    if isinstance(sampler, loading.DistributedSampler):
        return sampler if isinstance(sampler, ShardSampler) else _every_row(sampler)
    if hasattr(sampler, "even_batches"):  # some of a sampler's batches for each, by Accelerate
        order = _exact(getattr(sampler.batch_sampler, "sampler", None))
        if is_shuffle(order):  # anew on each process, without an exchange
            order = range(len(order.data_source))
        batches = _altered(sampler.batch_sampler, sampler=order, drop_last=False)
        return _altered(sampler, batch_sampler=batches, even_batches=False, drop_last=False)
    inner = getattr(sampler, "sampler", None)
    exact = inner if inner is None else _exact(inner)
    dropping = isinstance(inner, ShardSampler) and sampler.drop_last
    if exact is inner and not dropping:
        return sampler
    return _altered(sampler, sampler=exact, drop_last=False)


def _every_row(sampler: Any) -> list[int]:
    """The rows of a `DistributedSampler` less those it repeats, and with those it drops."""
    size, given = len(sampler.dataset), list(sampler)
    alone = {"rank": 0, "num_replicas": 1, "num_samples": size, "total_size": size}
    rows = list(_altered(sampler, **alone, drop_last=False))[sampler.rank :: sampler.num_replicas]
    # a subclass may deal them out in another way
    return rows if rows[: len(given)] == given[: len(rows)] else given


def is_shuffle(sampler: Any) -> bool:
    """Whether a sampler gives every row once, in random order."""
    once = isinstance(sampler, loading.RandomSampler) and not sampler.replacement
    return once and sampler.num_samples == len(sampler.data_source)


def _altered(thing: Any, **changes: Any) -> Any:
    twin = copy.copy(thing)
    vars(twin).update(changes)  # a DataLoader refuses to be set
    return twin
