"""The rows that each process of a job reads: every row once.

Loaders made for training give all processes equally many rows: they repeat some, which a Gram would
count twice, or leave some out. `unpadded` reads them without either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from operator import itemgetter
from typing import Any

import torch
from torch import distributed
from torch.utils import data as loading
from torch.utils._pytree import tree_leaves, tree_map


class ShardSampler(loading.Sampler[int]):
    """This process's rows of a data set: contiguous, in the order of the ranks, or shuffled.

    Args:
        data: anything with a length.
        rank: of this process; by default that of torch.distributed where it runs, else 0.
        ranks: how many processes there are; by default likewise, else 1.
        shuffle: deal out the rows in random order, another one after each `set_epoch`.
        seed: of that order, the same for all processes.

    Examples:
        >>> [list(ShardSampler(range(5), rank, 2)) for rank in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """

    def __init__(
        self, data: Sized, rank: Any = None, ranks: Any = None, shuffle: bool = False, seed: int = 0
    ) -> None:
        job = distributed.is_available() and distributed.is_initialized()
        self.ranks: int = (distributed.get_world_size() if job else 1) if ranks is None else ranks
        self.rank: int = (distributed.get_rank() if job else 0) if rank is None else rank
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {self.rank}.")
        self.data, self.shuffle, self.seed, self.epoch = data, shuffle, seed, 0

    @property
    def part(self) -> slice:
        """Of the rows in the order in which they are dealt out."""
        bounds = (rank * len(self.data) // self.ranks for rank in (self.rank, self.rank + 1))
        return slice(*bounds)

    def set_epoch(self, epoch: int) -> None:
        """Another order, as of torch's `DistributedSampler`."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.part.stop - self.part.start

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(len(self.data))[self.part])
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.data), generator=generator)[self.part].tolist())


def shard(data: Any, rank: int | None = None, ranks: int | None = None) -> Any:
    """This process's rows of tensors (alone, in a tuple or a dictionary) or of a `Dataset`.

    Those of a `ShardSampler` with the same `rank` and `ranks`.
    """
    lengths = {len(member) for member in tree_leaves(data)}
    if len(lengths) != 1:
        raise ValueError(f"All tensors of a data set must have one length, got {sorted(lengths)}.")
    own = ShardSampler(range(lengths.pop()), rank, ranks)
    if isinstance(data, loading.Dataset):
        return loading.Subset(data, list(own))
    return tree_map(itemgetter(own.part), data)


def unpadded(data: Any) -> Any:
    """A loader of a job as one without padding and dropped rows; anything else as it is.

    What a wrapper adds (a device, one seed for all) is left out, since it may wait for processes
    that have no batches left.
    """
    inner = getattr(data, "base_dataloader", getattr(data, "_dataloader", None))
    loader = inner if isinstance(inner, loading.DataLoader) else data  # Accelerate, Fabric
    if not isinstance(loader, loading.DataLoader):
        return data
    if hasattr(data, "_fetch_batches") or hasattr(loader.dataset, "process_index"):
        raise TypeError(
            "Accelerate hands out these rows from one process, or repeats some, expected a loader "
            "that reads its own share. Pass one with sampler=ShardSampler(data), or of a stream "
            "that gives each process its rows, that was not prepared by Accelerate."
        )
    names = ("sampler", "batch_sampler")
    exact = {name: _exact(getattr(loader, name)) for name in names}
    if all(exact[name] is getattr(loader, name) for name in names):
        return loader
    return _altered(loader, **exact, drop_last=False, persistent_workers=False, _iterator=None)


def _exact(sampler: Any) -> Any:
    """The same without padding and dropping; itself where it has neither, or is not understood."""
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, loading.DistributedSampler):
        return _every_row(sampler)
    if isinstance(inner, loading.DistributedSampler):
        return _altered(sampler, sampler=_every_row(inner), drop_last=False)
    if not hasattr(sampler, "even_batches"):
        return sampler
    batches = sampler.batch_sampler  # of which Accelerate's BatchSamplerShard gives each process some
    if is_shuffle(inner := getattr(batches, "sampler", None)):  # in an order they must agree on
        batches = _altered(batches, sampler=range(len(inner.data_source)))
    exact = {"even_batches": False, "drop_last": False}
    return _altered(sampler, batch_sampler=_altered(_exact(batches), drop_last=False), **exact)


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
