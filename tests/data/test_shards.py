"""Each process's rows: of subsets, and of the loaders that training jobs are given."""

import copy
import itertools

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.wrappers import _FabricDataLoader
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from rigidities.data.sources import in_order, raw_batches, unpadded

LENGTHS, WORLDS, SIZES = range(1, 14), range(1, 6), range(1, 5)
CASES = list(itertools.product(LENGTHS, WORLDS, SIZES))
FLAGS = list(itertools.product([False, True], repeat=2))


class Numbers(Dataset):
    """Rows that are their own numbers, of no type that is sliced."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return torch.tensor([row])


def read(data, **options):
    """Row numbers of all batches, as the library reads them."""
    batches = raw_batches(unpadded(data), **options)[0]
    batches = [batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches]
    return [int(row) for batch in batches for row in batch]


def distributed(data, world, rank, size, *, shuffle=False, drop=False, **options):
    sampler = DistributedSampler(data, world, rank, shuffle=shuffle, drop_last=drop)
    return DataLoader(data, size, sampler=sampler, **options)


def accelerated(data, world, rank, size, *, shuffle=False, drop=False, split=False, wrap=None):
    order = (wrap or (RandomSampler if shuffle else SequentialSampler))(data)
    batches = BatchSampler(order, size * world if split else size, drop)
    shard = BatchSamplerShard(batches, world, rank, split_batches=split)
    return DataLoaderShard(data, batch_sampler=shard, rng_types=["generator"])


def subset(data, world, rank):
    """The rows of a process, as docs/processes.md cuts them."""
    return Subset(data, range(rank, len(data), world))


def test_subsets_of_all_processes_are_read_as_they_are_every_row_once():
    for rows, world, size in CASES:
        for data in (Numbers(rows), TensorDataset(torch.arange(rows))):
            parts = [subset(data, world, rank) for rank in range(world)]
            shares = [read(DataLoader(part, size)) for part in parts]
            assert shares == [list(range(rank, rows, world)) for rank in range(world)]


@pytest.mark.parametrize(("shuffle", "drop"), FLAGS)
def test_a_distributed_loader_gives_every_row_once(shuffle, drop):
    for rows, world, size in CASES:
        for data in (Numbers(rows), TensorDataset(torch.arange(rows))):
            options = {"shuffle": shuffle, "drop": drop}
            shares = [read(distributed(data, world, r, size, **options)) for r in range(world)]
            assert sorted(itertools.chain(*shares)) == list(range(rows))


@pytest.mark.parametrize(("shuffle", "drop"), FLAGS)
def test_a_rank_keeps_its_own_rows_in_their_order(shuffle, drop):
    data = Numbers(11)
    for rank in range(4):
        loader = distributed(data, 4, rank, 2, shuffle=shuffle, drop=drop)
        loader.sampler.set_epoch(3)
        own, given = list(loader.sampler), read(loader)
        common = min(len(own), len(given))
        assert common >= 2 and given[:common] == own[:common]
        assert list(loader.sampler) == own and loader.sampler.epoch == 3


def test_a_loader_keeps_what_else_it_does():
    data = Numbers(9)
    loader = DataLoader(
        data,
        batch_sampler=BatchSampler(DistributedSampler(data, 2, 1, shuffle=False), 2, True),
        collate_fn=lambda rows: torch.cat(rows) + 100,
        num_workers=1,
        persistent_workers=True,
    )
    epoch = iter(loader)  # in the middle of which it is read
    assert next(epoch).tolist() == [101, 103]
    before = dict(vars(loader))
    batches = list(raw_batches(unpadded(loader))[0])
    assert [batch.tolist() for batch in batches] == [[101, 103], [105, 107]]
    assert next(epoch).tolist() == [105, 107]
    assert vars(loader) == before and loader.batch_sampler.drop_last
    assert isinstance(loader.batch_sampler.sampler, DistributedSampler)


def test_tensors_of_a_job_are_sliced():
    data = TensorDataset(torch.arange(9))
    for loader in (distributed(data, 2, 1, 3), DataLoader(subset(data, 2, 1), 3)):
        assert (
            raw_batches(unpadded(loader)).sliced
            and not raw_batches(unpadded(distributed(Numbers(9), 2, 1, 3))).sliced
        )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("shuffle", "drop"), FLAGS)
def test_a_loader_of_accelerate_gives_every_row_once(shuffle, drop, split):
    options = {"shuffle": shuffle, "drop": drop, "split": split}
    for rows, world, size in CASES:
        data = Numbers(rows)
        shares = [read(accelerated(data, world, r, size, **options)) for r in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(rows))


def test_accelerate_is_not_asked_to_communicate_nor_changed():
    loader = accelerated(Numbers(5), 2, 1, 2, shuffle=True)
    shard = loader.batch_sampler
    before = [copy.copy(vars(one)) for one in (loader, shard, shard.batch_sampler)]
    loader.__dict__["synchronized_generator"] = NotImplemented  # iterating it would fail
    assert len(read(loader)) == 2
    before[0]["synchronized_generator"] = NotImplemented
    assert [vars(one) for one in (loader, shard, shard.batch_sampler)] == before


def test_a_loader_of_fabric_gives_every_row_once_and_counts_no_epoch():
    loaders = [_FabricDataLoader(distributed(Numbers(5), 2, r, 2, shuffle=True)) for r in (0, 1)]
    assert sorted(read(loaders[0]) + read(loaders[1])) == list(range(5))
    assert all(loader._num_iter_calls == 0 for loader in loaders)


@pytest.mark.parametrize("shuffle", [False, True])
def test_samplers_of_lightning_give_every_row_once(shuffle):
    data = Numbers(7)
    picked = [6, 4, 2, 0, 1]
    for kind, source, rows in (
        (UnrepeatedDistributedSampler, data, list(range(7))),
        (DistributedSamplerWrapper, picked, sorted(picked)),
    ):
        samplers = [kind(source, num_replicas=3, rank=r, shuffle=shuffle) for r in range(3)]
        shares = [read(DataLoader(data, 2, sampler=sampler)) for sampler in samplers]
        assert sorted(itertools.chain(*shares)) == rows


def test_an_order_of_its_own_is_left_alone():
    class Blocks(DistributedSampler):
        def __iter__(self):
            return iter([5, 6] if self.rank else [0, 1])

    data = Numbers(7)
    weighted = WeightedRandomSampler([1.0] * 7, 7)
    assert read(DataLoader(data, 2, sampler=Blocks(data, 2, 1))) == [5, 6]
    assert len(read(DataLoader(data, 2, sampler=weighted))) == 7
    custom = accelerated(data, 2, 0, 2, wrap=lambda _: [3, 3, 4])
    assert read(custom) == [3, 3]


def test_a_stream_dealt_out_by_accelerate_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    dealt = IterableDatasetShard(Stream(), 2, num_processes=2, process_index=0)
    for loader in (DataLoader(dealt, 2), DataLoaderShard(dealt, batch_size=2)):
        with pytest.raises(TypeError, match="not prepared"):
            raw_batches(unpadded(loader))


def rows_in_order(loader):
    return [int(row) for batch in in_order(loader) for row in batch]


def test_a_training_loader_is_read_in_order_without_a_random_number():
    data, order = Numbers(23), torch.Generator().manual_seed(3)
    shuffled = DataLoader(data, 4, shuffle=True, drop_last=True, generator=order)
    before, own = torch.random.get_rng_state(), order.get_state()
    assert rows_in_order(shuffled) == list(range(23))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(order.get_state(), own) and shuffled.drop_last
    assert rows_in_order(distributed(data, 2, 1, 4, shuffle=True)) == list(range(23))  # no job
    assert rows_in_order(accelerated(data, 2, 1, 4, shuffle=True, drop=True)) == list(range(23))
    assert len(next(iter(in_order(shuffled)))) == 4


def test_a_sampler_that_may_leave_out_rows_is_left_to_choose():
    data = Numbers(9)
    some = SubsetRandomSampler([2, 5])
    wrapped = DistributedSamplerWrapper(some, 1, 0, shuffle=False)
    for sampler in (some, wrapped, RandomSampler(range(2))):
        rows = rows_in_order(DataLoader(data, 4, sampler=sampler))
        assert len(rows) == 2 and (sampler not in (some, wrapped) or set(rows) == {2, 5})
    assert in_order([1, 2]) == [1, 2] and in_order(None) is None


def test_no_sampler_of_plain_batches_drops_rows():
    loader = DataLoader(Numbers(9), 4, sampler=SubsetRandomSampler(range(6)), drop_last=True)
    assert sorted(rows_in_order(loader)) == list(range(6)) and loader.drop_last
    assert len(list(loader)) == 1


def test_reading_in_order_draws_no_random_number_of_a_loader_without_a_generator():
    before = torch.random.get_rng_state()
    rows_in_order(DataLoader(Numbers(9), 4))
    assert torch.equal(torch.random.get_rng_state(), before)
